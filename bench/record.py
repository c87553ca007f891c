"""What every benchmark row says beside its figure: on which machine, of which commit, with which versions, when. And where rows go.

It knows no benchmark. Rows are appended to `results/` of a checkout; an installed package has no such folder, and keeps nothing
unless it is told where.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import pagedkv

HERE: Final = Path(__file__).resolve().parent
VERSIONED: Final = ("numpy", "numba", "torch")


def provenance() -> dict[str, Any]:
    """machine, commit, versions, when: the same for all rows of one run."""
    return {
        "machine": f"{processor()}, {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} CPUs",
        "commit": commit(),
        "versions": {"python": platform.python_version()}
        | {name: found for name in VERSIONED if (found := version_of(name))},
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def processor() -> str:
    """The name that the processor gives itself, or its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def commit() -> str:
    """The commit of the checkout, "-dirty" if files differ from it; of an installed package its version."""
    if results() is None:
        return f"pagedkv {pagedkv.__version__}"
    # rows of earlier runs are no change to what is measured
    asked = {
        "describe": ["describe", "--always", "--tags", "--abbrev=10"],
        "changed": ["status", "--porcelain", "--", ":/", ":/!bench/results"],
    }
    said = {}
    for what, words in asked.items():
        try:
            run = subprocess.run(["git", "-C", str(HERE), *words], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return f"pagedkv {pagedkv.__version__}"
        said[what] = run.stdout.strip()
    return said["describe"] + ("-dirty" if said["changed"] else "")


def version_of(name: str) -> str | None:
    """What is installed under that name; None if nothing is."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def results() -> Path | None:
    """The folder of a checkout that keeps rows; None in an installed package."""
    folder = HERE / "results"
    return folder if folder.is_dir() else None


def append(rows: Iterable[dict[str, Any]], path: Path | None) -> None:
    """Add a line of JSON for each row; to nowhere if `path` is None, which is said."""
    if path is None:
        print("these rows are not kept: this is no checkout; --record FILE says where to", file=sys.stderr)
        return
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
