"""DeviceMirror: the page tables on the device, at one fixed address, kept true by sending what has changed.

    host table  int32 [A, P]   changes at plan, commit, fork, ...
    known       int32 [A, P]   what the device was told last (host memory)
    table       int32 [A, P]   on the device; its address changes only when the host table grows (captured graphs hold it)

A step compares the rows it will read with what the device knows, and sends one packed list of (place, frame). O(pages of the batch) on the
host, O(changes) on the bus.
"""

from __future__ import annotations

import numpy as np
import torch

from pagedkv.core.state import I32


class DeviceMirror:
    """A copy of the page tables on `device`. Entries of pages that no step has read yet are -1."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.known = np.empty((0, 0), np.int32)
        self.table = torch.empty((0, 0), dtype=torch.int32, device=device)

    def update(self, host: I32, rows: I32, num_pages: int) -> torch.Tensor:
        """Make the first `num_pages` pages of `rows` true on the device; returns the device's table, int32 [A, P].

        Shapes: host int32 [A, P], rows int32 [B]
        """
        if self.known.shape != host.shape:
            self.known = np.full_like(host, -1)
            self.table = torch.full(host.shape, -1, dtype=torch.int32, device=self.device)
        wanted = host[rows, :num_pages]
        row, page = np.nonzero(wanted != self.known[rows, :num_pages])
        if len(row):
            frames = wanted[row, page]
            self.known[rows[row], page] = frames
            places = rows[row].astype(np.int64) * host.shape[1] + page
            packed = torch.from_numpy(np.stack([places, frames.astype(np.int64)])).to(self.device, non_blocking=True)
            self.table.view(-1).index_copy_(0, packed[0], packed[1].to(torch.int32))
        return self.table
