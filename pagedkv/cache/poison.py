"""Poison: NaN in the frames that no sequence has written, so that a read before the first write shows.

It is on in a cache that is made at PAGEDKV_DEBUG >= 2. This file knows which frames are free and which were taken since
its last look. It must not know tables, sequences or layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from pagedkv import debug

if TYPE_CHECKING:
    import numpy.typing as npt

    from pagedkv.cache.storage import Storage
    from pagedkv.core import MemoryManager


class Poison:
    """The frames of a cache that hold NaN.

    is_on:       decided when the cache is made: later it is unknown which frames were written
    skips_fresh: whether a frame that was never taken is left alone, because it has no memory yet
    poisoned:    bool [F]: the frames that hold NaN; None if a resize was interrupted at its end
    """

    def __init__(self, manager: MemoryManager, *, skips_fresh: bool) -> None:
        self.is_on: bool = debug.level() >= 2
        self._skips_fresh = skips_fresh
        self.begin(manager)

    def begin(self, manager: MemoryManager) -> None:
        """Set the state that `fill` compares with: no frame is poisoned yet."""
        if self.is_on:
            self._generations = manager.frame_generations()
            self.poisoned: npt.NDArray[np.bool_] | None = np.zeros(manager.num_frames, bool)

    def fill(self, manager: MemoryManager, storage: Storage) -> None:
        """Fill with NaN every frame that is free, or was taken since the last call. Called before any write."""
        if not self.is_on:
            return
        if self.poisoned is None:
            return self.begin(manager)
        free, generations = manager.free_mask(), manager.frame_generations()
        stale = (free | (generations != self._generations)) & ~self.poisoned
        if self._skips_fresh:
            stale &= generations > 0
        storage.poison(torch.from_numpy(np.flatnonzero(stale)))
        self._generations, self.poisoned = generations, free
