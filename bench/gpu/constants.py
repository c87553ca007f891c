"""Other constants for the CUDA attention kernel, so that a benchmark can compare them in turn.

    tile      keys of a team at a time                 stages   tiles of a team in shared memory
    warps_n   teams over the keys                      blocks   CTAs of an SM
    warps_m   warps of 16 rows (prefill)

The code's own choice is made in pagedkv/kernels/cuda/specialisation.py (CLASSES and _FITS). This file knows no time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from pagedkv.bench.gpu.timing import Step
from pagedkv.errors import InvalidRequest
from pagedkv.kernels.cuda import attention
from pagedkv.kernels.cuda.specialisation import _FITS, CLASSES, RESERVED

CLASS_OF: Final = {"decode": CLASSES[0], "prefill": CLASSES[-1]}


@contextmanager
def own() -> Iterator[None]:
    """Give the code its own constants back at the end."""
    try:
        yield
    finally:
        attention.specialise = _real


_real = attention.specialise


def use(kernel: str, fields: dict[str, int]) -> None:
    """Make all launches of one class take these fields from now on; {} for the code's own. CTAs and stages that
    `fields` does not name are as many as fit. A launch raises InvalidRequest if nothing fits."""

    def specialise(kinds: Any, dims: Any, row_class: Any, keys: Any, shared: tuple[int, int]) -> Any:
        found = _real(kinds, dims, row_class, keys, shared)
        if row_class != CLASS_OF[kernel]:
            return found
        for blocks, stages in ((found.blocks, found.stages), *_FITS):
            changed = replace(found, **{"blocks": blocks, "stages": stages} | fields)
            if changed.shared_bytes <= shared[0] and changed.blocks * (changed.shared_bytes + RESERVED) <= shared[1]:
                return changed
        raise InvalidRequest(f"{fields} needs {changed.blocks} x {changed.shared_bytes} bytes of shared memory")

    attention.specialise = specialise if fields else _real  # type: ignore[assignment]


def with_constants(kernel: str, fields: dict[str, int], steps: list[Step]) -> list[Step]:
    """Return `steps`, the first of which also makes the launches take `fields`."""

    def first() -> None:
        use(kernel, fields)
        steps[0]()

    return [first, *steps[1:]]
