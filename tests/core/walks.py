"""Random walks through the manager: what an engine may do, drawn from a seed, with only numpy and the manager. Fast enough for millions.

Unlike the state machine they believe nothing: they are for what shows in numbers (equal arrays, flat memory), and check() judges them.
"""

from __future__ import annotations

import hashlib
import itertools

import numpy as np

from pagedkv.core import AddressSpace, MemoryManager, Pin, Plan
from pagedkv.core import state as st
from pagedkv.errors import OutOfFrames

WORDS, TENANTS = 3, (b"", b"a", b"b")
KEY = 0x5EED  # of the hash: else drawn for each process


class Walk:
    """One manager, and a random engine on it. `step` does one thing; nothing grows without bound."""

    def __init__(self, seed: int, *, num_frames: int = 96, block_size: int = 4, max_spaces: int = 12, policy: str = "lru") -> None:
        self.mm = MemoryManager(num_frames, block_size, policy=policy, match="token" if seed % 2 else "page")
        self.mm.state.reg[st.KEY] = KEY
        self.random = np.random.default_rng(seed)
        self.max_spaces, self.epoch, self.refused = max_spaces, 0, 0
        self.spaces: list[AddressSpace] = []
        self.plans: list[tuple[Plan, list[AddressSpace]]] = []
        self.pins: list[Pin] = []
        self.steps = itertools.count()

    def below(self, end: int) -> int:
        return int(self.random.integers(end))

    def ids(self, count: int) -> np.ndarray:
        return self.random.integers(0, WORDS, count).astype(np.int32)

    def step(self) -> str:
        """Do one thing, and name it."""
        moves = (
            self.open,
            self.decode,
            self.decode,
            self.prefill,
            self.plan,
            self.settle,
            self.fork,
            self.truncate,
            self.release,
            self.tidy,
        )
        move = moves[self.below(len(moves))]
        try:
            move()
        except OutOfFrames:
            self.refused += 1
            self.make_room()
        return move.__name__

    def busy(self, space: AddressSpace) -> bool:
        return any(space is owner for _, owners in self.plans for owner in owners)

    def idle(self) -> AddressSpace | None:
        free = [space for space in self.spaces if not self.busy(space)]
        return free[self.below(len(free))] if free else None

    def open(self) -> None:
        if len(self.spaces) < self.max_spaces:
            self.spaces.append(self.mm.open(self.ids(self.below(40)), tenant=TENANTS[self.below(3)]))

    def prefill(self) -> None:
        self.open()
        if space := self.idle():
            self.run([space], [1 + self.below(20)])

    def decode(self) -> None:
        batch = [space for space in self.spaces if not self.busy(space) and self.below(2)]
        if batch:
            self.run(batch, [1] * len(batch))

    def run(self, batch: list[AddressSpace], counts: list[int]) -> None:
        plan = self.mm.plan(batch, counts)
        accepted = [count if self.below(4) else self.below(count + 1) for count in counts]
        self.mm.commit(plan, self.ids(sum(accepted)), accepted)

    def plan(self) -> None:
        """To be settled later, or never run at all."""
        if len(self.plans) < 3 and (space := self.idle()):
            self.plans.append((self.mm.plan([space], [self.below(9)]), [space]))

    def settle(self) -> None:
        if self.plans:
            plan, _ = self.plans.pop(self.below(len(self.plans)))
            if self.below(3):
                self.mm.commit(plan, self.ids(int(plan.cu_seqlens_q[-1])))
            else:
                self.mm.abort(plan, copied=bool(self.below(2)))

    def fork(self) -> None:
        if len(self.spaces) < self.max_spaces and (space := self.idle()):
            self.spaces.append(space.fork())

    def truncate(self) -> None:
        if space := self.idle():
            full = len(space) // self.mm.block_size
            if self.below(3) or not full:
                whole = self.below(full + 1) * self.mm.block_size  # never into a hole
                space.truncate(whole)
            else:
                first = self.below(full)
                space.punch(first, first + 1 + self.below(full - first))

    def release(self) -> None:
        if len(self.spaces) > 3:
            self.spaces.pop(self.below(len(self.spaces))).release()

    def tidy(self) -> None:
        """What happens now and then: pins, epochs, advice, eviction."""
        choice = self.below(5)
        if choice == 0 and self.spaces and len(self.pins) < 3:
            space = self.spaces[self.below(len(self.spaces))]
            if int(self.mm.stats().pinned) + len(space) // self.mm.block_size <= self.mm.max_pinned:
                self.pins.append(self.mm.pin(space))
        elif choice == 1 and self.pins:
            self.mm.unpin(self.pins.pop(self.below(len(self.pins))))
        elif choice == 2:
            self.epoch += 1
            self.mm.retire(self.epoch)
        elif choice == 3:
            self.mm.advance(max(0, self.epoch - self.below(3)) if self.epoch else -1)
        else:
            self.mm.evict(self.below(4))
            if self.spaces:
                self.mm.advise(self.spaces[self.below(len(self.spaces))], ("WILLNEED", "DONTNEED", "COLD")[self.below(3)])

    def make_room(self) -> None:
        """What an engine does when there are no frames left: it lets the youngest go, and waits for what is under way."""
        while self.plans:
            self.settle()
        while self.pins:
            self.mm.unpin(self.pins.pop())
        self.mm.advance(self.epoch if self.epoch else -1)
        for _ in range(min(2, len(self.spaces))):
            self.spaces.pop().release()

    def digest(self) -> str:
        """Of every number that the manager knows."""
        s = self.mm.state
        content = hashlib.blake2b(digest_size=16)
        for records, names in ((s.frames, st.FRAME.names), (s.spaces, st.SPACE.names)):
            for name in names or ():  # by field: padding is not data
                content.update(records[name].tobytes())
        for name, array in s._asdict().items():
            if name not in ("frames", "spaces", "table"):
                content.update(array.tobytes())
        for asid, pages in enumerate(s.spaces["num_pages"]):
            content.update(s.table[asid, :pages].tobytes())
        return content.hexdigest()


def main(seed: int, steps: int, policy: str) -> None:
    """Print what was done and the digest after each step."""
    walk = Walk(seed, policy=policy)
    for _ in range(steps):
        print(walk.step(), walk.digest())
    walk.mm.check()
    print("refused", walk.refused)
