"""cli/bench: the commands `pagedkv bench ...`. Only pagedkv.bench knows how to measure."""

from __future__ import annotations
