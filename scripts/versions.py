"""`make test-versions`: run the core of the tests with each Python and torch, and write docs/reference/versions.md.

    scripts/versions.py [ONLY ...]      the corners whose name is in ONLY; the page keeps the rows of the others

A corner is one choice of versions. .venv-versions has a copy of the checkout, and for each Python one environment,
which every corner makes again. The C++ extension is compiled once for each Python. A corner that cannot be installed
gets a row with the reason.

Many releases of torch exist on the package index only as builds for CUDA. The CPU code of such a build needs no CUDA,
but the loader asks for CUDA's libraries. `_stand_in` makes libraries that have the names and do nothing, which saves
3 GB a corner.
"""

from __future__ import annotations

import datetime
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
WORK: Final = ROOT / ".venv-versions"
PAGE: Final = ROOT / "docs/reference/versions.md"
COLUMNS: Final = ("corner", "Python", "torch", "numpy", "numba", "host", "result", "date")
CORE: Final = (
    *"tests/core/test_laws.py tests/core/prefix tests/core/tables tests/core/states tests/cache/test_paged.py".split(),
    *("tests/cache/test_storage.py", "tests/cache/test_states.py", "tests/kernels/test_conformance.py"),
    "tests/integrations/test_torch_varlen.py",  # skipped before torch 2.12
    *("-k", "not conformance or cpu-cpu or numba-cpu"),
)
HOST: Final = ("tests/integrations/transformers",)
TOOLS: Final = ("setuptools>=77", "pytest", "pytest-xdist", "hypothesis")
HEAD: Final = """# Versions

pagedkv runs with the versions in this table. `make test-versions` installs each corner, runs the core of the tests in
it (manager, cache, the kernels of the backends `cpu` and `numba`, torch's `varlen_attn`) and writes this page.
`ONLY=python-3.14` runs one corner and keeps the other rows.

"""
FOOT: Final = """
- *corner*: the environment. `oldest` has the lowest versions that `pyproject.toml` allows.
- *torch*: `+cpu` is a build for CPUs. `+cu` is a build for CUDA, whose functions for CPUs were tested. A star marks an
  environment without CUDA's packages: empty libraries stand in for them, because the machine has no GPU.
- *result*: counts of tests. In each corner that has counts, but for vLLM's, `python -W error -c "import pagedkv"`
  prints nothing, and a deprecation warning that comes from pagedkv fails its test. A corner that finds no compiled
  extension compiles one for the instruction set of the machine alone, and has fewer tests.

[Install and run](../start/install.md) says how to choose a version.
"""


@dataclass(frozen=True)
class Corner:
    """One choice of versions: pip installs `torch` first, then `packages`, then pagedkv.

    host: the package that the column "host" names    tests: arguments of pytest
    cuda: install CUDA's packages, too    target: the make target that tests this corner in an environment of its own
    """

    name: str
    python: str = "3.11"
    torch: str = "2.13.0"
    packages: tuple[str, ...] = ()
    host: str = ""
    tests: tuple[str, ...] = CORE
    cuda: bool = False
    target: tuple[str, ...] = ()


_HF: Final = "transformers"
_VLLM: Final = "VLLM_TESTS=tests/integrations/vllm/test_entry_points.py"
CORNERS: Final = (
    Corner("oldest", torch="2.8.0", packages=("numpy==1.26.0", "numba==0.63.0", "xxhash==3.4.1")),
    *(
        Corner(f"torch-{torch.rpartition('.')[0]}", torch=torch)
        for torch in "2.9.1 2.10.0 2.11.0 2.12.1 2.13.0".split()
    ),
    Corner("torch-2.14", torch="2.14.1", cuda=True),
    Corner("torch-2.15", torch="2.15.0"),
    *(Corner(f"python-{python}", python, "2.15.0") for python in ("3.12", "3.13", "3.14")),
    Corner("transformers-5", packages=(f"{_HF}==5.24.0", "accelerate", "peft", "psutil"), host=_HF, tests=HOST),
    Corner("transformers-4", packages=(f"{_HF}==4.57.6",), host=_HF, tests=()),
    Corner("vllm-0.32", target=("test-vllm", _VLLM)),
    Corner("vllm-0.33", target=("test-vllm-next", _VLLM)),
)


class NotHere(Exception):
    """The corner cannot be installed on this machine; the message is the reason."""


def _run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> tuple[int, str]:
    """Run a command; return its exit status and its output."""
    run = subprocess.run(
        command, cwd=cwd, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return run.returncode, run.stdout.strip()


def _must(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command; return its output. Raise NotHere with the last error that it prints."""
    status, output = _run(*command, cwd=cwd)
    if status:
        lines = output.splitlines() or ["no output"]
        raise NotHere(next((line for line in lines if line.startswith("ERROR: ")), lines[-1]).removeprefix("ERROR: "))
    return output


def _interpreter(version: str) -> str:
    """Return the command of a Python: from the PATH, or from the newest release that pyenv has."""
    found = (Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python")
    newest = sorted(found, key=lambda path: [int(n) for n in re.findall(r"\d+", path.parts[-3])], reverse=True)
    for command in (shutil.which(f"python{version}"), *newest):
        if command and _run(command, "-c", "import sys; print(*sys.version_info[:2], sep='.')") == (0, version):
            return str(command)
    raise NotHere(f"there is no python{version}")


def _copy_checkout() -> Path:
    """Copy the files that git keeps, and the C++ extensions that are newer than all sources of them."""
    new, tree = WORK / "new", WORK / "tree"
    shutil.rmtree(new, ignore_errors=True)
    sources = max(path.stat().st_mtime for path in (ROOT / "csrc/cpu").rglob("*.*"))
    built = [path for folder in (tree, ROOT) for path in folder.glob("pagedkv/kernels/_cpu*.so")]
    files = [ROOT / name for name in _must("git", "ls-files", "-co", "--exclude-standard").splitlines()]
    for path in [*files, *(path for path in built if path.stat().st_mtime > sources)]:
        if path.is_file():
            to = new / path.relative_to(tree if path.is_relative_to(tree) else ROOT)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, to)
    shutil.rmtree(tree, ignore_errors=True)
    return new.rename(tree)


def _stand_in(libraries: Path) -> None:
    """Make libraries that stand in for CUDA's: they define all symbols that torch's libraries lack, and do nothing.

    Each function returns 100, which is cudaErrorNoDevice.
    """
    needed: set[str] = set()
    symbols: set[tuple[str, str]] = set()
    for path in libraries.glob("*.so"):
        needed.update(re.findall(r"NEEDED.*\[(lib(?:cu|nv|nccl)[\w.]+)\]", _must("readelf", "-dW", path)))
        for line in _must("nm", "-D", "--undefined-only", "--with-symbol-versions", path).splitlines():
            name, _, version = line.split()[-1].partition("@")
            if version.startswith("lib") or re.match("(__)?(cu|nccl|nv)", name):
                symbols.add((version, name))
    source, script = libraries / "stand_in.c", libraries / "stand_in.map"
    for library in needed - {path.name for path in libraries.iterdir()}:
        version = "NVSHMEM" if "nvshmem" in library else "" if "nccl" in library else library
        source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for of, name in symbols if of == version))
        script.write_text(f"{version} {{ global: *; }};\n")
        options = (f"-Wl,-soname,{library}", f"-Wl,--version-script={script}", "-o", libraries / library)
        _must("cc", "-shared", "-fPIC", "-w", *options, source)


def _pip(python: Path) -> tuple[str | Path, ...]:
    """Return the command that installs packages for a Python, which need not have pip."""
    options = ("--quiet", "--no-compile", "--disable-pip-version-check")
    return (sys.executable, "-m", "pip", "--python", python, "install", *options)


def _install(corner: Corner, tree: Path) -> Path:
    """Make the environment of a corner, without pagedkv; return its Python."""
    home = WORK / corner.python
    _must(_interpreter(corner.python), "-m", "venv", "--clear", "--without-pip", home)
    python = home / "bin/python"
    pip = _pip(python)
    _must(*pip, "--no-cache-dir", *[] if corner.cuda else ["--no-deps"], f"torch=={corner.torch}")
    torch = next(home.glob("lib/python*/site-packages/torch"))
    metadata = next(torch.parent.glob("torch-*.dist-info/METADATA"))
    lines = metadata.read_text().splitlines(keepends=True)
    kept = [line for line in lines if not re.match("Requires-Dist: (nvidia|cuda|triton)", line)]
    if kept != lines and not corner.cuda:
        metadata.write_text("".join(kept))  # else pip installs CUDA's packages with pagedkv
        _stand_in(torch / "lib")
    # setup.py compiles the extension if there is pybind11, and else leaves the one that is there.
    built = next(tree.glob(f"pagedkv/kernels/_cpu.cpython-{corner.python.replace('.', '')}-*.so"), None)
    _must(*pip, f"torch=={corner.torch}", *corner.packages, *TOOLS, *[] if built else ["pybind11>=2.13"])
    return python


def _versions(corner: Corner, python: Path) -> list[str]:
    """Return the columns from Python to host."""
    program = "import platform, sys; from importlib.metadata import version as v; print(platform.python_version())"
    names = ("torch", "numpy", "numba", *([corner.host] if corner.host else []))
    found = _must(python, "-c", f"{program}; print(*map(v, {names}), sep='\\n')").splitlines()
    build = _must(python, "-c", "import torch; print(torch.__version__)")
    star = "\\*" if "+cu" in build and not corner.cuda else ""
    return [found[0], build + star, *found[2:4], f"{corner.host} {found[4]}" if corner.host else "–"]


def _counts(output: str) -> str:
    """Return the counts that pytest prints last."""
    last = re.findall(r"^.*\d+ (?:passed|failed|errors?).* in \d.*$", output, re.M)[-1:]
    counts = re.findall(r"\d+ (?:passed|failed|skipped|errors?|xfailed|xpassed)", "".join(last))
    return ", ".join(counts) or "broken: " + output[-200:].replace("\n", " ")


def _tested(corner: Corner, python: Path, tree: Path) -> str:
    """Install pagedkv and run the tests of a corner; return the column "result"."""
    status, output = _run(*_pip(python), *corner.packages, "--no-build-isolation", "--editable", ".", cwd=tree)
    if status:
        return f"broken: pip cannot install pagedkv: {output.splitlines()[-1]}"
    for program in ("import pagedkv", "from pagedkv import *"):
        status, output = _run(python, "-W", "error", "-c", program, cwd=tree)
        if status or output:
            return f"broken: `{program}` is not silent: {output.splitlines()[-1]}"
    if not corner.tests:
        status, output = _run(python, "-c", "import pagedkv.integrations.transformers", cwd=tree)
        return f"refused: {output.splitlines()[-1]}" if status else "broken: the plug-in is not refused"
    options = ("--quiet", "--numprocesses=2", "--dist=worksteal", "-p", "no:cacheprovider")
    variables = {"OMP_NUM_THREADS": "1", "PAGEDKV_DEBUG": "3"}
    _, output = _run(python, "-m", "pytest", *options, *corner.tests, cwd=tree, **variables)
    (WORK / f"{corner.name}.log").write_text(output)
    built = any(tree.glob(f"pagedkv/kernels/_cpu.cpython-{corner.python.replace('.', '')}-*.so"))
    return _counts(output) + ("" if built else ", without the C++ kernels")


def _row(corner: Corner) -> list[str]:
    """Install and test a corner; return its row."""
    today = datetime.date.today().isoformat()
    try:
        if corner.target:
            _, output = _run("make", "--no-print-directory", *corner.target)
            if not (python := ROOT / ".venv-vllm/bin/python").exists():
                raise NotHere(output[-200:])
            found = _versions(corner, python)
            return [corner.name, *found[:4], corner.name.replace("-", " "), _counts(output), today]
        tree = _copy_checkout()
        python = _install(corner, tree)
        result = _tested(corner, python, tree)
        return [corner.name, *_versions(corner, python), result, today]
    except NotHere as why:
        return [corner.name, corner.python, corner.torch, "–", "–", "–", f"not installable here: {why}", today]


def main(only: list[str]) -> int:
    """Run the corners in `only`, or all; return 1 if one of them is broken."""
    if unknown := set(only) - {corner.name for corner in CORNERS}:
        sys.exit(f"no corner is named {', '.join(unknown)}; there are {', '.join(corner.name for corner in CORNERS)}")
    text = PAGE.read_text() if PAGE.exists() else ""
    rows = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if line.startswith("| ")}
    os.environ["PIP_CONSTRAINT"] = os.devnull  # a machine's constraints would replace the versions of a corner
    broken = False
    for corner in CORNERS:
        if only and corner.name not in only:
            continue
        cells = _row(corner)
        rows[corner.name] = f"| {' | '.join(cells)} |"
        print(rows[corner.name], flush=True)
        broken |= bool(re.match(r"broken|\d.*\b(failed|errors?)\b", cells[-2]))
        table = [rows[each.name] for each in CORNERS if each.name in rows]
        head = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
        PAGE.write_text(HEAD + "\n".join(head + table) + "\n" + FOOT)
    return broken


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
