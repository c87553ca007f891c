"""Write scripts/constraints.txt anew: the newest version of each package that the tests and the docs need.

    make constraints; make test-all; git commit -am 'build: test with the newest packages'

`make` installs these versions, so a package that is released today does not change what was tested yesterday. Users
install what pyproject.toml allows. torch is not in the file: the Makefile names it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
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


if __name__ == "__main__":
    lines = newest(sys.argv[1])
    FILE.write_text("\n".join(["# Written by `make constraints`: what `make test` installs.", *lines, ""]))
    print(f"{FILE.name}: {len(lines)} packages")
