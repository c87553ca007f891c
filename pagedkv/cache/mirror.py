"""DeviceMirror: a copy of the page tables on the device, at a fixed address. A step sends the changed entries.

    host    int32 [A, P]   the page tables of the memory manager; they change at plan, commit, fork, ...
    sent    int32 [A, P]   host memory: the entries that the device has
    table   int32 [A, P]   device memory; its address, which CUDA graphs hold, changes only when the host table grows

A step compares the rows it will read with `sent`, and sends one packed list of (place, frame). O(pages of the batch) on
the host, O(changes) on the bus. Entries of pages that no step has read yet are -1 on the device.
"""

from __future__ import annotations

import numpy as np
import torch

from pagedkv.core.state import I32


class DeviceMirror:
    """The copy of the page tables on `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device: torch.device = device
        self.sent: I32 = np.empty((0, 0), np.int32)
        self.table: torch.Tensor = torch.empty((0, 0), dtype=torch.int32, device=device)

    def update(self, host: I32, rows: I32, num_pages: int) -> torch.Tensor:
        """Send changed entries among the first `num_pages` pages of `rows`; return the device's table, int32 [A, P].

        Shapes: host int32 [A, P], rows int32 [B]
        """
        if self.sent.shape != host.shape:
            self.sent = np.full_like(host, -1)
            self.table = torch.full(host.shape, -1, dtype=torch.int32, device=self.device)
        wanted = host[rows, :num_pages]
        row, page = np.nonzero(wanted != self.sent[rows, :num_pages])
        if len(row):
            frames = wanted[row, page]
            self.sent[rows[row], page] = frames
            places = rows[row].astype(np.int64) * host.shape[1] + page
            packed = torch.from_numpy(np.stack([places, frames.astype(np.int64)])).to(self.device, non_blocking=True)
            self.table.view(-1).index_copy_(0, packed[0], packed[1].to(torch.int32))
        return self.table
