"""cli: the command `pagedkv`. It reads arguments and shows results; the Engine and the public names do the work."""

from __future__ import annotations
