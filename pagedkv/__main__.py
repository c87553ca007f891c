"""`python -m pagedkv` is `pagedkv`."""

from __future__ import annotations

from pagedkv.cli.app import main

if __name__ == "__main__":
    main()
