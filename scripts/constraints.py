"""scripts/constraints.txt: the versions of the packages that `make test` installs.

    make constraints; make test-all; git commit -am 'build: test with the newest packages'

A package that is released today does not change what was tested yesterday. Users install what pyproject.toml allows.

    constraints.py write TORCH      write the file anew, with the newest version of each package
    constraints.py beside-torch     print its lines for the installed torch: a torch for CUDA names the versions of
                                    triton and of NVIDIA's packages itself
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import requires
from pathlib import Path
from typing import Final

FILE: Final = Path(__file__).with_name("constraints.txt")
OURS: Final = {"pagedkv", "torch"}
OF_CUDA: Final = ("cuda-", "nvidia-", "triton")


def newest(torch: str) -> list[str]:
    """Return NAME==VERSION of each package that pip would install into an empty environment."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        options = ["-qqq", "--dry-run", "--ignore-installed", "--no-build-isolation", "--report", str(report)]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, torch, ".[dev,docs]"], check=True)
        found = [entry["metadata"] for entry in json.loads(report.read_text())["install"]]
    return sorted((pin(package) for package in found if package["name"] not in OURS), key=str.lower)


def pin(package: dict[str, str]) -> str:
    """Return NAME==VERSION. A package that needs a late release of a Python is pinned from that release on."""
    late = re.match(r">=\s*(\d+\.\d+\.\d+)", package.get("requires_python", ""))
    marker = f'; python_full_version >= "{late[1]}"' if late else ""
    return f"{package['name']}=={package['version']}{marker}"


def beside_torch(lines: Iterable[str], needed: Iterable[str]) -> list[str]:
    """Return the lines NAME==VERSION, without the packages of CUDA if torch needs some. needed: what torch requires."""
    if not any(requirement.startswith(OF_CUDA) for requirement in needed):
        return list(lines)
    return [line for line in lines if not line.startswith(OF_CUDA)]


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["write", torch]:
            lines = ["# Written by `make constraints`: what `make test` installs.", *newest(torch)]
            FILE.write_text("\n".join([*lines, ""]))
            print(f"{FILE.name}: {len(lines) - 1} packages")
        case ["beside-torch"]:
            print("\n".join(beside_torch(FILE.read_text().splitlines(), requires("torch") or ())))
        case _:
            sys.exit(__doc__)
