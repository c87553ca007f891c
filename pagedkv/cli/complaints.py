"""Errors on stderr, one line each. Their text may be from a file that is not trusted."""

from __future__ import annotations

import sys
from typing import Final

MOST_WORDS: Final = 4000
"""Characters of an error on stderr."""


def complain(text: str) -> None:
    """Print an error as one line: lines are joined, control characters are escaped, and a long text is cut."""
    first, *rest = [part.strip() for part in text.splitlines() if part.strip()] or [""]
    line = " ".join([first, "; ".join(rest)]).strip()
    if len(line) > MOST_WORDS:
        line = f"{line[: MOST_WORDS // 2]} ... {line[-MOST_WORDS // 2 :]}"
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    print("pagedkv: error:", shown, file=sys.stderr, flush=True)
