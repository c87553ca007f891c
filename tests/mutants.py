"""Seed faults: the tests of a wing can fail, for they catch each fault that `tests/<wing>/mutants.py` lists.

A table has FOLDER, the folder of the sources, and FAULTS: mistakes that the wing once had, or nearly. A fault replaces
a text that must occur exactly once; if a line is rewritten, seed the fault in the present line. It may set ENVIRONMENT
and OPTIONS of pytest, too.

Run one table, here that of tiers:

    python -m pytest -m slow tests/test_mutants.py -k tiers

This file is also the plugin of pytest that seeds: with PAGEDKV_FAULT=tiers:3, the import of the file of the third fault
finds the fault, and nothing is written. It reaches Python alone: Triton reads its kernels from the disk, and so does
numba unless NUMBA_DISABLE_JIT is set. Faults of the CUDA sources are in tests/kernels/cuda.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
VARIABLE = "PAGEDKV_FAULT"
WINGS = ("cli", "core", "engine", "integrations", "kernels", "tiers")


class Fault(NamedTuple):
    """`old` replaced by `new` in a file.

    law: the law, and how the fault breaks it. proof: tests of the wing that catch it, with options of pytest
    """

    law: str
    file: str
    old: str
    new: str
    proof: str


def table(wing: str) -> Any:
    return importlib.import_module(f"tests.{wing}.mutants")


def path_of(wing: str, fault: Fault) -> Path:
    folder: str = table(wing).FOLDER
    return (ROOT / folder / fault.file).resolve()


def seeded(wing: str, fault: Fault) -> str:
    """Return the text of the file with the fault in it."""
    text = path_of(wing, fault).read_text(encoding="utf-8")
    found = text.count(fault.old)
    assert found == 1, f"{fault.law}: {fault.old!r} is {found} times in {fault.file}; seed it in the present line"
    return text.replace(fault.old, fault.new)


def prove(wing: str, number: int | None, proof: str) -> subprocess.CompletedProcess[str]:
    """Run `proof` with a fault of the wing, or with none."""
    path, *options = proof.split()
    more = getattr(table(wing), "OPTIONS", [])
    lean = ["-x", "-q", "--tb=line", "-p", "no:xdist", "-p", "no:cacheprovider", "-p", "tests.mutants"]
    name = wing if number is None else f"{wing}:{number}"
    return subprocess.run(
        [sys.executable, "-m", "pytest", *lean, f"tests/{wing}/{path}", *(options or more)],
        cwd=ROOT, env=os.environ | getattr(table(wing), "ENVIRONMENT", {}) | {VARIABLE: name},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=900, check=False,
    )  # fmt: skip


class _Loader(SourceFileLoader):
    """Compiles the text with the fault. Bytecode that was kept is not read."""

    text = ""

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.text, self.path, "exec")


class _Finder(MetaPathFinder):
    def __init__(self, wing: str, fault: Fault) -> None:
        self.path, self.text = str(path_of(wing, fault)), seeded(wing, fault)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not fullname.startswith("pagedkv.") or (spec := PathFinder.find_spec(fullname, path)) is None:
            return None
        if spec.origin is None or os.path.realpath(spec.origin) != self.path:
            return None
        spec.loader = loader = _Loader(fullname, self.path)
        loader.text = self.text
        return spec


if VARIABLE in os.environ:
    _wing, _, _number = os.environ[VARIABLE].partition(":")
    if _number:
        sys.meta_path.insert(0, _Finder(_wing, table(_wing).FAULTS[int(_number)]))

    def pytest_configure() -> None:
        """Draw the same examples in each run; show the first one that fails."""
        from hypothesis import HealthCheck, Phase, settings

        settings.register_profile(
            "mutant", deadline=None, derandomize=True, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck), print_blob=False,
        )  # fmt: skip
        settings.load_profile("mutant")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
        """Fail a test that hangs, as broken code may: after 100 s of CPU time, or 800 s, as a busy machine is slow."""
        for number in (signal.SIGPROF, signal.SIGALRM):
            signal.signal(number, lambda *_: pytest.fail(f"{item.name} hangs"))
        signal.setitimer(signal.ITIMER_PROF, 100)
        signal.alarm(800)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.alarm(0)
