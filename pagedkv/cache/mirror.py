"""DeviceMirror: the page tables on the device, in one of two forms that kernels read alike.

A table of up to MOST_BYTES is copied whole. Its address, which CUDA graphs hold, changes only when the table grows.

    host    int32 [A, P]   the page tables of the memory manager; they change at plan, commit, fork, ...
    sent    int32 [A, W]   host memory: the entries that the device has
    table   int32 [A, W]   device memory; W is P, or less if the host's table is larger than MOST_BYTES

A step compares the rows it will read with `sent`, and sends one packed list of (place, frame). O(pages of the batch) on
the host, O(changes) on the bus. Entries of pages that no step has read yet are -1 on the device.

A host's table is larger once one long sequence has made it wide, and stays so. The device then gets its first W
columns: as many as it had, or as the longest row of a step asks for. A step with a row for which these columns would
take more than MOST_BYTES sends the pages of its own rows, one row behind the other, and leaves `table` as it is. It
gets a view whose rows overlap:

    entries   |row 0 ....|row 1|row 2 ........|-1 ...     each row begins at a multiple of UNIT
    table     int32 [units, widest row], strides (UNIT, 1): row `u` begins at entry u * UNIT

Entries behind the pages of a row are those of the next row. Kernels read no entry behind the pages of a row. The
address is another one in each step.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from pagedkv.core.recovery import assign_together
from pagedkv.core.state import I32

MOST_BYTES: Final = 2**26
UNIT: Final = 16


class DeviceMirror:
    """The copy of the page tables on `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device: torch.device = device
        self.sent: I32 = np.empty((0, 0), np.int32)
        self.table: torch.Tensor = torch.empty((0, 0), dtype=torch.int32, device=device)

    def update(self, host: I32, rows: I32, num_pages: I32) -> tuple[torch.Tensor, I32]:
        """Bring the first `num_pages[i]` pages of row `rows[i]` to the device.

        Shapes:  host int32 [A, P], rows int32 [B], num_pages int32 [B]
        Returns: the table on the device, int32, and the rows in it, int32 [B]
        """
        widest, width = int(num_pages.max(initial=0)), host.shape[1]
        if host.nbytes > MOST_BYTES:
            kept = self.sent.shape[1] if len(self.sent) == len(host) else 1
            width = min(width, max(kept, 1 << max(widest - 1, 0).bit_length()))  # doubled, as the host's
            if width * len(host) * host.itemsize > MOST_BYTES:
                return self._packed(host, rows, num_pages)
        return self._changed(host[:, :width], rows, widest), rows

    def _changed(self, host: I32, rows: I32, num_pages: int) -> torch.Tensor:
        if self.sent.shape != host.shape:
            table = torch.full(host.shape, -1, dtype=torch.int32, device=self.device)
            assign_together([(self, "sent", np.full_like(host, -1)), (self, "table", table)])
        wanted = host[rows, :num_pages]
        row, page = np.nonzero(wanted != self.sent[rows, :num_pages])
        if len(row):
            frames = wanted[row, page]
            places = rows[row].astype(np.int64) * host.shape[1] + page
            packed = torch.from_numpy(np.stack([places, frames.astype(np.int64)])).to(self.device, non_blocking=True)
            self.table.view(-1).index_copy_(0, packed[0], packed[1].to(torch.int32))
            self.sent[rows[row], page] = frames  # last: entries that did not arrive are sent again
        return self.table

    def _packed(self, host: I32, rows: I32, num_pages: I32) -> tuple[torch.Tensor, I32]:
        units = -(-num_pages.astype(np.int64) // UNIT)
        first, width = np.cumsum(units) - units, int(num_pages.max(initial=1))
        entries = np.full(int(units.sum()) * UNIT + width, -1, np.int32)
        for row, begin, count in zip(rows.tolist(), (first * UNIT).tolist(), num_pages.tolist(), strict=True):
            entries[begin : begin + count] = host[row, :count]
        sent = torch.from_numpy(entries).to(self.device, non_blocking=True)
        return sent.as_strided((int(units.sum()) + 1, width), (UNIT, 1)), first.astype(np.int32)
