"""`python -m pagedkv` runs the command line, as `pagedkv` does."""

from __future__ import annotations

from pagedkv.cli.app import main

if __name__ == "__main__":
    main()
