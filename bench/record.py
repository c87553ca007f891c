"""Rows of benchmarks: their provenance (machine, commit, versions, time, command), and the files that keep them.

This file knows no benchmark. Rows are appended to `results/` of a checkout, each by one write, so that an interrupted
run leaves whole rows. An installed package has no such folder, and a folder may be read-only: a run that was told no
file then goes on and keeps no rows. A cell is all that a row measures but for the variant: a case and its axes.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import pagedkv
from pagedkv import debug
from pagedkv.cli import machine
from pagedkv.engine.checkpoint import regular_files
from pagedkv.errors import InvalidRequest

Row = dict[str, Any]

HERE: Final = Path(__file__).resolve().parent
VERSIONED: Final = ("numpy", "numba", "torch")
NOT_AXES: Final = ("bench", "case", "variant")
MOST_BYTES: Final = 2**26
COPIED: Final = "commit"
"""A file beside this one, in a copy of a checkout that has no git (scripts/on_gpu/tree.py): the commit."""

_NUMBERS: Final = {"family": "cpu family", "model": "model"}


def provenance() -> dict[str, Any]:
    """Return machine, commit, versions, time, command and a forced instruction set: the same for all rows of a run."""
    return {
        "machine": f"{processor()}, {machine.cores()} CPUs",
        "commit": commit(),
        "versions": {"python": platform.python_version()}
        | {name: found for name in VERSIONED if (found := version_of(name))},
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": command(),
    } | ({"forced_isa": isa} if (isa := debug.forced_cpu_isa()) else {})


def command() -> str:
    """Return the command line of this process. Rows are published, so a path keeps no folder that is absolute."""
    python, first, *rest = [*sys.orig_argv, ""]
    words = ["pagedkv", *sys.argv[1:]] if _is_pagedkv(first, rest) else [python, first, *rest[:-1]]
    return shlex.join(Path(word).name if os.path.isabs(word) else word for word in words if word)


def _is_pagedkv(first: str, rest: list[str]) -> bool:
    return Path(first).name == "pagedkv" or (first == "-m" and rest[0] == "pagedkv")


def processor() -> str:
    """Return the processor's model name with its family and model, or its architecture if it has none.

    A virtual machine may name every generation of a vendor alike.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    name = fields.get("model name", platform.processor() or platform.machine())
    numbers = [f"{number} {fields[field]}" for number, field in _NUMBERS.items() if field in fields]
    return f"{name} ({', '.join(numbers)})" if numbers else name


def commit() -> str:
    """Return the commit of the checkout, with "-dirty" if files differ; of a copy, the text that was left in it; of an
    installed package, the version."""
    if (HERE / COPIED).is_file():
        return (HERE / COPIED).read_text(encoding="utf-8")
    if results() is None:
        return f"pagedkv {pagedkv.__version__}"
    # rows of earlier runs do not change the code that is measured
    commands = {
        "describe": ["describe", "--always", "--tags", "--abbrev=10"],
        "changed": ["status", "--porcelain", "--", ":/", ":/!bench/results"],
    }
    answers = {}
    for name, words in commands.items():
        try:
            run = subprocess.run(["git", "-C", str(HERE), *words], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return f"pagedkv {pagedkv.__version__}"
        answers[name] = run.stdout.strip()
    return answers["describe"] + ("-dirty" if answers["changed"] else "")


def version_of(name: str) -> str | None:
    """Return the installed version of the distribution `name`; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def results() -> Path | None:
    """Return the folder of a checkout that keeps rows; None in an installed package."""
    folder = HERE / "results"
    return folder if folder.is_dir() else None


def append(rows: Iterable[dict[str, Any]], path: Path | None, name: str) -> None:
    """Append a line of JSON for each row to `path`; without one, to `results/name.jsonl` of a checkout.

    Raises: InvalidRequest if `path` cannot be written to
    """
    folder = results()
    target = path or (folder and folder / f"{name}.jsonl")
    if target is None:
        return _note("pagedkv runs from an installed package, not from a checkout")
    try:
        file = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            for row in rows:
                os.write(file, f"{json.dumps(row)}\n".encode())
        finally:
            os.close(file)
    except OSError as why:
        if path:
            raise InvalidRequest(
                f"the rows cannot be written to {target}: {why.strerror}; --record FILE names another file"
            ) from None
        _note(str(why))


def read(path: Path) -> list[Row]:
    """Return the rows of a regular file of up to MOST_BYTES. Rows of older forms, without a variant, are left out.

    Raises: InvalidRequest for another file, or a line that is no row
    """
    rows = []
    try:
        lines = regular_files.read(path, MOST_BYTES).decode("utf-8").splitlines()
    except FileNotFoundError:
        raise InvalidRequest(f"there is no file '{path}'; give a file of rows") from None
    except (OSError, UnicodeDecodeError) as why:
        raise InvalidRequest(f"{path} cannot be read: {getattr(why, 'strerror', None) or why}") from None
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise InvalidRequest(f"{path}, line {number} is no row of a benchmark; give a file of JSON lines")
        if {"bench", "case", "variant", "unit", "median"} <= set(row):
            rows.append(row)
    return rows


def axes_of(row: Row) -> Row:
    """Return the axes of a row: its fields before `unit` but for the benchmark, the case and the variant."""
    return {name: row[name] for name in list(row)[: list(row).index("unit")] if name not in NOT_AXES}


def shallow(row: Row, layers: int) -> Row:
    """Return a row of a model with fewer layers: it says so, and promises nothing."""
    return {"layers": layers} | row | {"must": None}


def of_layers(row: Row) -> str:
    """Return ", N layers" for a row of a model with fewer layers, else ""."""
    return f", {row['layers']} layers" if "layers" in row else ""


_noted: set[str] = set()


def _note(why: str) -> None:
    """Say once that rows are not kept."""
    if why not in _noted:
        print(f"these rows are not kept: {why}; give --record FILE", file=sys.stderr)
        _noted.add(why)
