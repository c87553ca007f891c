"""Pins: the methods of MemoryManager that keep frames, for a transfer or by an owner's wish, until they are unpinned.

A pin is a row of the page table without a space (status HELD). It maps the frames it keeps, so a pinned frame is
neither evicted nor moved nor written (I7). The pages that a space has committed are published when the space is pinned,
so that a prompt finds the frames which the pin holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pagedkv.core import state as st
from pagedkv.core.arguments import frame_row, real
from pagedkv.core.handles import AddressSpace, Pin
from pagedkv.core.recovery import RecoveryMixin
from pagedkv.core.tables import page_tables
from pagedkv.core.thread_guard import exclusive
from pagedkv.errors import DoubleRelease, InvalidRequest


class PinMixin(RecoveryMixin):
    """The methods of MemoryManager that make pins and give them back."""

    block_size: int
    _most_pinned: float

    if TYPE_CHECKING:

        def _asid(self, space: AddressSpace) -> int: ...
        def _grow_tables(self, pages: int = 0) -> None: ...

    @property
    def max_pinned(self) -> int:
        """int, frames: how many pins may hold."""
        return int(self._most_pinned * self.num_frames)

    @exclusive
    def pin(self, what: AddressSpace | npt.NDArray[np.int32], *, owner: str = "", deadline: float | None = None) -> Pin:
        """Keep frames until `unpin`: the committed full pages of a space, or published frames and their whole prefixes.

        A write to a pinned frame copies the frame first. O(pages). A frame of several pins counts under the cap once
        for each.
        Raises: InvalidRequest beyond `max_pinned`, or for frames that no prompt can find; StaleHandle
        """
        self._report_lost()
        deadline = None if deadline is None else real(deadline, "deadline")
        if isinstance(what, AddressSpace):
            asid = self._asid(what)
            pages = int(self.state.spaces["length"][asid]) // self.block_size
            num_frames = int(page_tables.frames_in(self.state, asid, pages))
        else:
            wanted = frame_row(what, self.num_frames)
            if not len(wanted):
                raise InvalidRequest("pin of no frames; name at least one, or pin the space that maps them")
            unfindable, closure = page_tables.prefix_closure(self.state, wanted)
            if unfindable >= 0:
                raise InvalidRequest(
                    f"pin of frame {unfindable}: it is not published under a whole prefix; pin the space that maps it"
                )
            pages = num_frames = len(closure)
        pinned = int(self.state.reg[st.PINNED])
        if pinned + num_frames > self.max_pinned:
            raise InvalidRequest(
                f"pin of {num_frames} frames: pins hold {pinned} of at most {self.max_pinned}; "
                "unpin some, or raise max_pinned"
            )
        self._grow_tables(pages=pages)
        row = (
            page_tables.pin_space(self.state, asid)
            if isinstance(what, AddressSpace)
            else page_tables.pin_frames(self.state, closure)
        )
        pin = Pin(row, int(self.state.spaces["generation"][row]), num_frames, owner, deadline)
        self._pins[row] = self._watch(pin)
        return pin

    @exclusive
    def unpin(self, pin: Pin) -> None:
        """Unpin the frames of `pin`. Raises: DoubleRelease the second time."""
        if not isinstance(pin, Pin):
            raise InvalidRequest(f"unpin of {pin!r}; give the handle that pin() returned")
        if not self.holds(pin):
            raise DoubleRelease(
                f"pin {pin.asid} of {pin.owner or 'an unnamed owner'} was given back already, or made by another "
                "manager; give each to the manager that made it, and drop the handle after unpin()"
            )
        page_tables.unpin_row(self.state, pin.asid)
        del self._pins[pin.asid]
