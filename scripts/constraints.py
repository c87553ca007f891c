"""scripts/constraints.txt: the versions of the packages that the tests and the docs need, and that `make` installs.

    make constraints; make test-all; git commit -am 'build: test with the newest packages'

A package that is released today does not change what was tested yesterday. Users install what pyproject.toml allows.

    constraints.py write TORCH      write the file anew, with the newest version of each package
    constraints.py beside-torch     print its lines without the packages that the installed torch needs: torch names
                                    their versions itself, and builds of torch for CPUs and for CUDA name others
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Final

FILE: Final = Path(__file__).with_name("constraints.txt")
OURS: Final = {"pagedkv", "torch"}


def newest(torch: str) -> list[str]:
    """Return NAME==VERSION of each package that pip would install into an empty environment."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        options = ["-qqq", "--dry-run", "--ignore-installed", "--no-build-isolation", "--report", str(report)]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, torch, ".[dev,docs]"], check=True)
        found = [entry["metadata"] for entry in json.loads(report.read_text())["install"]]
    return sorted(
        (f"{package['name']}=={package['version']}" for package in found if package["name"] not in OURS), key=str.lower
    )


def needed_by(package: str) -> set[str]:
    """Return the normalised names of `package` and of all installed packages that it needs."""
    found, left = set[str](), [package]
    while left:
        name = normalised(left.pop())
        if name not in found:
            try:
                lines = requires(name) or ()
            except PackageNotFoundError:  # needed on another system
                continue
            found.add(name)
            left += (re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines if "extra ==" not in line)
    return found


def normalised(name: str) -> str:
    """Return the name of a package as PEP 503 writes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def beside(lines: Iterable[str], names: set[str]) -> list[str]:
    """Return the lines NAME==VERSION whose package is not in `names`."""
    return [line for line in lines if normalised(line.partition("==")[0]) not in names]


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["write", torch]:
            lines = ["# Written by `make constraints`: what `make test` installs.", *newest(torch)]
            FILE.write_text("\n".join([*lines, ""]))
            print(f"{FILE.name}: {len(lines) - 1} packages")
        case ["beside-torch"]:
            print("\n".join(beside(FILE.read_text().splitlines(), needed_by("torch"))))
        case _:
            sys.exit(__doc__)
