"""A copy of the checkout in which pagedkv can be imported: no install, no compiler, no change of the checkout.

It is the layout that setup.py installs, without the C++ extension: no kernel of a GPU needs it.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path
from typing import Final

HOMES: Final = {
    "pagedkv": "pagedkv",
    "triton_kernels": "pagedkv/kernels/triton",
    "bench": "pagedkv/bench",
    "csrc": "csrc",
    "tests": "tests",
    "pyproject.toml": "pyproject.toml",
}
"""Path in the checkout -> path in the copy. ELSEWHERE in setup.py says the same of what it installs."""


def copy(root: Path, target: Path) -> None:
    """Copy the checkout `root` to `target`, without the rows of earlier benchmarks, and leave its commit there, in the
    file from which benchmarks take the commit of their rows."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", "results")
    for source, home in HOMES.items():
        if (root / source).is_dir():
            shutil.copytree(root / source, target / home, ignore=ignored, dirs_exist_ok=True)
        elif (root / source).exists():
            shutil.copy(root / source, target / home)
    (target / "pagedkv/bench/commit").write_text(commit(root))


def commit(root: Path) -> str:
    """Return the commit of a checkout, with "-dirty" if files differ; without git, the digest of its kernels."""
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--tags", "--abbrev=10", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return f"kernels {digest(root)}"


def digest(root: Path) -> str:
    """Return twelve digits that name the sources of the kernels."""
    found = hashlib.sha256()
    for folder in ("csrc/cuda", "triton_kernels", "pagedkv/kernels"):
        for file in sorted((root / folder).rglob("*")):
            if file.suffix in (".py", ".cuh", ".h", ".json"):
                found.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:12]
