"""`python -m pagedkv.bench`: the same as `pagedkv bench all`."""

from __future__ import annotations

import sys

from pagedkv.cli.app import main

main(["bench", "all", *sys.argv[1:]])
