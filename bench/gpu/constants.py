"""The constants of the CUDA kernels as tune.py searches them: other fields in a specialisation that is launched.

    tile      keys of a team at a time                 stages   tiles of a team in shared memory
    warps_n   teams over the keys                      blocks   CTAs of an SM
    warps_m   warps of 16 rows (prefill)

The choice that the code makes stands in pagedkv/kernels/cuda/specialisation.py (CLASSES and _FITS): no table overrules
it, so a search that finds a better one says what to change there. This file knows no time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from pagedkv.bench.gpu.timing import Step
from pagedkv.errors import InvalidRequest
from pagedkv.kernels.cuda import attention
from pagedkv.kernels.cuda.specialisation import _FITS, CLASSES, RESERVED, AttentionSpecialisation

AXES: Final[dict[str, dict[str, tuple[int, ...]]]] = {
    "decode": {"warps_n": (2, 4, 8), "tile": (16, 32), "blocks": (1, 2, 3), "stages": (2, 3, 4, 6)},
    "prefill": {"warps_m": (2, 4, 8), "tile": (16, 32, 64), "blocks": (1, 2), "stages": (2, 3)},
}
CLASS_OF: Final = {"decode": CLASSES[0], "prefill": CLASSES[-1]}
_real = attention.specialise


def changed(kernel: AttentionSpecialisation, fields: dict[str, int], shared: tuple[int, int]) -> Any:
    """Return `kernel` with other fields; CTAs and stages that `fields` does not name are as many as fit.

    shared: bytes of shared memory of a CTA, and of an SM
    Raises: InvalidRequest if nothing fits
    """
    for blocks, stages in ((kernel.blocks, kernel.stages), *_FITS):
        found = replace(kernel, **{"blocks": blocks, "stages": stages} | fields)
        if found.shared_bytes <= shared[0] and found.blocks * (found.shared_bytes + RESERVED) <= shared[1]:
            return found
    raise InvalidRequest(f"{fields} needs {found.blocks} x {found.shared_bytes} bytes of shared memory")


def use(kernel: str, fields: dict[str, int]) -> None:
    """Make all launches of one class take these fields from now on; {} for the code's own."""

    def specialise(kinds: Any, dims: Any, row_class: Any, keys: Any, shared: tuple[int, int]) -> Any:
        found = _real(kinds, dims, row_class, keys, shared)
        return changed(found, fields, shared) if row_class == CLASS_OF[kernel] else found

    attention.specialise = specialise if fields else _real  # type: ignore[assignment]


@contextmanager
def own() -> Iterator[None]:
    """Give the code its own constants back at the end."""
    try:
        yield
    finally:
        attention.specialise = _real


def with_constants(kernel: str, fields: dict[str, int], steps: list[Step]) -> list[Step]:
    """Return `steps`, the first of which also makes the launches take `fields`."""

    def first() -> None:
        use(kernel, fields)
        steps[0]()

    return [first, *steps[1:]]
