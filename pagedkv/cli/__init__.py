"""cli: `pagedkv` at a shell. Thin: it reads arguments and shows results; the work is that of the model's Engine and the public names."""

from __future__ import annotations
