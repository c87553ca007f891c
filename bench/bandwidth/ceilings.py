"""The ceilings of memory: steps that only read or copy windows of a region of noise.

    read          loads and xors of 64 bytes; runs in order, or of 4 or 32 KiB in random order
    copy          by torch; the bytes read and the bytes written count

Each step takes another window of a region that is larger than the caches. A window has half of its bytes in each half
of the region, so that a copy never overlaps. This file knows no operation on a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from pagedkv.bench.clock import Step
from pagedkv.kernels import cpu
from pagedkv.kernels.threads import num_threads

KIB: Final = 1024
WINDOW: Final = 64 << 20
"""Bytes that a ceiling moves in one repetition."""
RUN: Final = 64 * KIB
"""Bytes of a run of the read in order."""


@dataclass(frozen=True)
class Bound:
    """A ceiling as operations are measured beside it."""

    name: str
    num_bytes: int
    step: Step


class Region:
    """A region of noise. Shapes: bytes uint8 [size]"""

    def __init__(self, region: torch.Tensor) -> None:
        self.bytes = region
        self.window = min(WINDOW, len(region) // 2 // RUN * RUN)

    def read(self, run: int = RUN, *, is_random: bool = False) -> Step:
        """Return a read of `window` bytes in runs of so many bytes."""
        runs, count = len(self.bytes) // run, self.window // run

        def prepare() -> Callable[[], object]:
            order = torch.randperm(runs)[:count] if is_random else torch.arange(count) + _lot(runs - count + 1)
            offsets = order * run
            args = (cpu.isa(), num_threads(), self.bytes.data_ptr(), offsets.data_ptr(), count, run)
            return lambda: (cpu.extension().read(*args), offsets)

        return prepare

    def copy(self) -> Step:
        """Return a copy of half a window."""

        def prepare() -> Callable[[], object]:
            source, target = self.pair()
            return lambda: target.copy_(source)

        return prepare

    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return half a window in the first half of the region, and one in the second half, drawn anew."""
        half, count = len(self.bytes) // 2 // RUN * RUN, self.window // 2
        starts = [first + _lot((half - count) // RUN + 1) * RUN for first in (0, half)]
        first, second = (self.bytes[at : at + count] for at in starts)
        return first, second

    def bounds(self) -> dict[str, Bound]:
        """Return the ceilings beside which operations are measured."""
        return {
            "read": Bound("read", self.window, self.read()),
            "copy": Bound("copy", self.window // 2 * 2, self.copy()),
        }


def _lot(count: int) -> int:
    return int(torch.randint(count, ()))
