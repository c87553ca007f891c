"""Rows: the memory that a link reads from or writes into, for frames on their way.

For a pool in host memory these are the frames themselves: no byte is copied. Frames of a GPU go through a ring of
pinned rows, one for each frame that may be under way.
"""

from __future__ import annotations

import threading

import numpy as np
import torch

from pagedkv.tiers.checksum import Bytes
from pagedkv.tiers.pool_view import PoolView


class Rows:
    """Rows of host memory for the frames of `pool`, at most `most` at a time.

    is_staged: whether they are a ring; None: if the pool is on a GPU.
    """

    def __init__(self, pool: PoolView, most: int, *, is_staged: bool | None = None) -> None:
        self.pool: PoolView = pool
        self.frames: torch.Tensor = pool.frames
        self.is_staged: bool = pool.is_cuda if is_staged is None else is_staged
        self.memory: torch.Tensor = pool.frames
        self._held: dict[int, int] = {}  # number: row
        self._free = list(range(most))
        self._changing = threading.Lock()
        if self.is_staged:
            self.memory = torch.empty(most, pool.frame_bytes, dtype=torch.uint8, pin_memory=pool.is_cuda)
        self._bytes = self.memory.numpy()

    def row(self, number: int, frame: int) -> torch.Tensor:
        """Return uint8 [frame_bytes]: a row for `frame`, whose bytes are going to be under way as `number`."""
        if self.is_staged:
            with self._changing:
                self._held[number] = self._free.pop()
        return self.row_of(number, frame)

    def row_of(self, number: int, frame: int) -> torch.Tensor:
        """Return the row that `row` has given out."""
        return self.memory[self._held[number]] if self.is_staged else self.frames[frame]

    def bytes_of(self, number: int, frame: int) -> Bytes:
        """Return the bytes of the row that `row` has given out."""
        content: Bytes = self._bytes[self._held[number] if self.is_staged else frame]
        return content

    def fill(self, number: int, frame: int, fence: torch.cuda.Event | None) -> torch.Tensor:
        """Return the row for `frame` with its bytes."""
        row = self.row(number, frame)
        if self.is_staged:
            self.pool.read(np.array([frame]), self.memory, np.array([self._held[number]]), fence)
        return row

    def empty(self, number: int, frame: int, fence: torch.cuda.Event | None) -> None:
        """Copy the row of `number` to `frame`, if it is not the frame itself."""
        if self.is_staged:
            self.pool.write(np.array([frame]), self.memory, np.array([self._held[number]]), fence)

    def free(self, number: int) -> None:
        """Give up the row of `number`, if it has one."""
        with self._changing:
            row = self._held.pop(number, None)
            if row is not None:
                self._free.append(row)

    def free_all(self) -> None:
        """Give up all rows: nothing is under way."""
        with self._changing:
            self._free.extend(self._held.values())
            self._held.clear()
