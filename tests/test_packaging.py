"""Wheels and installs, built offline from the sdist as a user would build them, with a compiler and without one.

The builds run in copies of the tree, so they see only the files of the sdist and leave no files in the checkout.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

import pagedkv
from pagedkv.__main__ import _need_engine

ROOT = Path(__file__).parents[1]

DUMMY = """
#include <pybind11/pybind11.h>
PYBIND11_MODULE(_cpu, m) { m.def("answer", [] { return 42; }); }
"""


def build(kind: str, tree: Path, out: Path, *, hide: str = "nothing", **env: str) -> tuple[Path, str]:
    """Build an "sdist", "wheel" or "editable" of `tree` through PEP 517. Return the file and the whole output.

    hide: a module that the build must not find.
    """
    out.mkdir(parents=True, exist_ok=True)
    call = f"print('built', build_{kind}({str(out)!r}))"
    program = f"import sys; sys.modules[{hide!r}] = None; from setuptools.build_meta import build_{kind}; {call}"
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tree,
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.returncode == 0, run.stdout
    return out / run.stdout.rsplit("built ", 1)[1].strip(), run.stdout


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def unpacked(sdist: Path, to: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(to, filter="data")
    return next(to.iterdir())


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the sources of the sdist."""
    work = tmp_path_factory.mktemp("packaging")
    copy = work / "checkout"
    shutil.copytree(
        ROOT, copy, ignore=shutil.ignore_patterns(".*", "build", "dist", "site", "*.egg-info", "__pycache__", "*.so")
    )
    return unpacked(build("sdist", copy, work / "sdist")[0], work / "from_sdist")


@pytest.fixture
def fresh(tree: Path, tmp_path: Path) -> Path:
    """Return a copy of the sources that a test may change."""
    # `build` holds files that were compiled for another test.
    return shutil.copytree(tree, tmp_path / "fresh", ignore=shutil.ignore_patterns("build"))


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel without the extension, which takes minutes; `make wheel` builds and uses a whole one."""
    return build("wheel", tree, tmp_path_factory.mktemp("wheel"), hide="pybind11")[0]


def kept() -> list[str]:
    """Return the files of the checkout that git does not ignore; skips the test outside of a checkout."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is no checkout")
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_the_sdist_holds_all_that_git_keeps_and_no_more(tree):
    packed = {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}
    made = {name for name in packed if name in ("PKG-INFO", "setup.cfg") or ".egg-info/" in name}
    built = {name for name in packed if name.startswith("build/")}  # by tests that ran before
    hidden = {name for name in kept() if name.startswith(".")}  # for git, the formatter and the continuous run
    assert packed - made - built == set(kept()) - hidden


def test_the_version_stands_in_one_place():
    named = [name for name in kept() if Path(name).suffix in (".py", ".toml", ".cfg", ".yml")]
    assert [name for name in named if f'"{pagedkv.__version__}"' in (ROOT / name).read_text()] == [
        "pagedkv/__init__.py"
    ]
    headings = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    assert headings[0].removeprefix("## ").split(",")[0] == pagedkv.__version__
    assert importlib.metadata.version("pagedkv") == pagedkv.__version__


def test_the_wheel_owns_one_top_level_name_and_leaves_rows_of_benchmarks_out(wheel):
    names = names_in(wheel)
    assert {name.split("/")[0] for name in names} == {"pagedkv", f"pagedkv-{pagedkv.__version__}.dist-info"}
    assert not [name for name in names if name.endswith(".jsonl")]


def test_the_wheel_carries_all_of_the_package(wheel):
    tracked = [path for path in (ROOT / "pagedkv").rglob("*.py") if "__pycache__" not in path.parts]
    expected = {path.relative_to(ROOT).as_posix() for path in tracked}
    expected |= {f"pagedkv/kernels/triton/{path.name}" for path in (ROOT / "triton_kernels").glob("*.py")}
    expected |= {f"pagedkv/bench/{path.name}" for path in (ROOT / "bench").glob("*.py")}
    expected |= {f"pagedkv/kernels/cuda_sources/{path.name}" for path in (ROOT / "csrc/cuda").iterdir()}
    expected |= {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "pagedkv/engine/checkpoint/bundled").rglob("*")
        if path.is_file()
    }
    expected |= {f"pagedkv/kv_texts/{name}.txt" for name in ("measure", "calibrate")}
    expected |= {"pagedkv/py.typed", f"pagedkv-{pagedkv.__version__}.dist-info/licenses/LICENSE"}
    assert sorted(expected - names_in(wheel)) == []


def test_links_of_the_readme_are_addresses_on_an_index(fresh, tmp_path):
    project = fresh / "pyproject.toml"
    project.write_text(project.read_text() + '\n[project.urls]\nRepository = "https://example.org/pagedkv"\n')
    with zipfile.ZipFile(build("wheel", fresh, tmp_path / "out", hide="pybind11")[0]) as archive:
        text = archive.read(f"pagedkv-{pagedkv.__version__}.dist-info/METADATA").decode()
    assert "](https://example.org/pagedkv/blob/HEAD/docs/start/tutorial.md)" in text
    assert "](https://example.org/pagedkv/raw/HEAD/docs/img/fork.svg)" in text
    assert not re.findall(r"\]\((?!https?:|#)", text)


def test_the_command_is_declared(wheel):
    with zipfile.ZipFile(wheel) as archive:
        entry = archive.read(f"pagedkv-{pagedkv.__version__}.dist-info/entry_points.txt").decode()
    assert "pagedkv = pagedkv.__main__:main" in entry


def test_an_editable_install_maps_the_triton_sources(fresh, tmp_path):
    editable, _ = build("editable", fresh, tmp_path / "editable", hide="pybind11")
    site = tmp_path / "site"
    with zipfile.ZipFile(editable) as archive:
        archive.extractall(site)
    program = f"import site; site.addsitedir({str(site)!r}); "
    program += "import pagedkv.kernels.triton as t; print(t.__name__, t.__file__)"
    # -S leaves out the site-packages, where pagedkv may be installed already.
    command = [sys.executable, "-I", "-S", "-c", program]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    assert found == ["pagedkv.kernels.triton", str(fresh / "triton_kernels/__init__.py")]


@pytest.mark.parametrize(
    ("circumstance", "remedy"),
    [
        ({"CC": "/bin/false", "CXX": "/bin/false"}, "install a C++17 compiler"),
        ({"hide": "pybind11"}, "install pybind11"),
    ],
    ids=["no compiler", "no pybind11"],
)
def test_a_missing_tool_costs_the_extension_not_the_install(fresh, tmp_path, circumstance, remedy):
    (fresh / "csrc/cpu").mkdir(parents=True, exist_ok=True)
    (fresh / "csrc/cpu/dummy.cpp").write_text(DUMMY)
    wheel, printed = build("wheel", fresh, tmp_path / "wheel", **circumstance)
    assert not [name for name in names_in(wheel) if name.endswith(".so")]
    messages = {line for line in printed.splitlines() if line.startswith("pagedkv: ")}
    assert len(messages) == 1
    assert "the C++ kernels are not built" in min(messages)
    assert "numba kernels serve instead" in min(messages)
    assert remedy in min(messages)


@pytest.mark.slow  # the extension that the other tests run was built so, too
@pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler here")
def test_a_compiler_and_a_source_make_an_extension(fresh, tmp_path):
    for old in (fresh / "csrc/cpu").rglob("*.cpp"):
        old.unlink()
    (fresh / "csrc/cpu").mkdir(parents=True, exist_ok=True)
    (fresh / "csrc/cpu/dummy.cpp").write_text(DUMMY)
    wheel, _ = build("wheel", fresh, tmp_path / "wheel")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(f"pagedkv/kernels/_cpu{sysconfig.get_config_var('EXT_SUFFIX')}", tmp_path)
    program = "import _cpu; print(_cpu.answer())"
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path / "pagedkv/kernels", check=True, stdout=subprocess.PIPE, text=True
    )
    assert run.stdout == "42\n"


@pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler here")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="one instruction set on this machine")
def test_a_checkout_compiles_the_set_of_this_machine_and_later_only_what_changed(fresh):
    for old in (fresh / "csrc/cpu").rglob("*.cpp"):
        old.unlink()
    (fresh / "csrc/cpu/dummy.cpp").write_text(DUMMY)
    header = fresh / "csrc/cpu/isa/empty.inc"
    header.touch()
    for name in ("avx2", "avx2_vnni", "avx512", "avx512_bf16"):
        (header.parent / f"{name}.cpp").write_text('#include "isa/empty.inc"\n')

    def compiled(sets: str = "") -> tuple[int, set[str]]:
        """Return how many sources have flags of a set, and the objects that were made."""
        now = time.time_ns()
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(command, cwd=fresh, env=os.environ | {"PAGEDKV_BUILD_SETS": sets}, check=True)
        commands = [entry["command"] for entry in json.loads((fresh / "build/compile_commands.json").read_text())]
        made = {path.stem for path in (fresh / "build/objects").rglob("*.o") if path.stat().st_mtime_ns >= now}
        return sum("-mavx" in command for command in commands), made

    num_sets, made = compiled()
    assert num_sets <= 1
    assert made == {"dummy", "avx2", "avx2_vnni", "avx512", "avx512_bf16"}
    assert compiled() == (num_sets, set())
    num_sets, made = compiled("all")
    assert num_sets == 4
    assert "dummy" not in made
    header.touch()
    assert compiled("all") == (4, {"avx2", "avx2_vnni", "avx512", "avx512_bf16"})
    (fresh / "csrc/cpu/dummy.cpp").write_text("no C++")
    with pytest.raises(FileNotFoundError):  # the objects may have other flags now
        compiled()
    (fresh / "csrc/cpu/dummy.cpp").write_text(DUMMY)
    assert compiled("all") == (4, {"dummy", "avx2", "avx2_vnni", "avx512", "avx512_bf16"})


def test_constraints_name_what_the_tests_need():
    lines = (ROOT / "scripts" / "constraints.txt").read_text().splitlines()[1:]
    assert all(re.fullmatch(r'[\w.-]+==[\w.]+(; python_full_version >= "[\d.]+")?', line) for line in lines)
    extras = importlib.metadata.requires("pagedkv")
    needed = {re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in extras if re.search("extra == .(dev|docs)", line)}
    assert needed - {"pagedkv"} <= {re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in lines}


def test_a_base_install_names_the_missing_extra(monkeypatch, capsys):
    monkeypatch.setattr("pagedkv.__main__.ENGINE", ("rich", "no_such_package", "nor_this"))
    monkeypatch.setattr("os._exit", lambda status: pytest.fail(f"ended with {status}", pytrace=False))
    with pytest.raises(pytest.fail.Exception, match="ended with 1"):
        _need_engine()
    assert "needs no_such_package, nor_this; install them" in capsys.readouterr().err
