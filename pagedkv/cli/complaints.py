"""Errors on stderr, one line each. Their text may be from a file that is not trusted."""

from __future__ import annotations

import sys
from typing import Final

MOST_WORDS: Final = 4000
"""Characters of an error on stderr."""


def complain(text: str) -> None:
    """Print an error as one line on stderr: `pagedkv: error:` and `_line(text)`."""
    print("pagedkv: error:", _line(text), file=sys.stderr, flush=True)


def _line(text: str) -> str:
    """Return an error as one line: lines are joined, control characters are escaped, and a long text is cut."""
    first, *rest = [part.strip() for part in text.splitlines() if part.strip()] or [""]
    joined = " ".join([first, "; ".join(rest)]).strip()
    if len(joined) > MOST_WORDS:
        joined = f"{joined[: MOST_WORDS // 2]} ... {joined[-MOST_WORDS // 2 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in joined)
