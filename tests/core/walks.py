"""Random walks through the manager: what an engine may do, drawn from a seed, with only numpy and the manager. Fast enough for millions.

Unlike the state machine they believe nothing: they are for what shows in numbers (equal arrays, flat memory), and check() judges them.
What may be refused for its moment (a plan whose turn has not come, a pool that cannot shrink now) is tried all the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pagedkv.core import AddressSpace, Group, MemoryManager, Observe, Pin, Plan
from pagedkv.core import state as st
from pagedkv.errors import EventsLost, InvalidRequest, OutOfFrames, PlanConflict

WORDS, TENANTS = 3, (b"", b"a", b"b")
KEY = 0x5EED  # of the hash: else drawn for each process
FIRST_EPOCH = 2**31 - 4  # marks are kept modulo 2**31


@dataclass(frozen=True)
class World:
    """What a walk happens in."""

    num_frames: int = 96
    block_size: int = 4
    max_spaces: int = 12
    policy: str = "lru"
    groups: tuple[Group, ...] = (Group(),)
    quotas: bool = False


WORLDS = {
    "plain": World(),
    "quotas": World(quotas=True),
    "window": World(groups=(Group(window=9, sinks=2),), quotas=True),
    "groups": World(num_frames=224, groups=(Group(), Group(window=7, sinks=3)), quotas=True),
    "three": World(num_frames=288, block_size=3, groups=(Group(), Group(window=1), Group())),
}


class Walk:
    """One manager, and a random engine on it. `step` does one thing; nothing grows without bound."""

    def __init__(self, seed: int, world: World = WORLDS["plain"]) -> None:
        self.world, self.random = world, np.random.default_rng(seed)
        by_token = len(world.groups) == 1 and seed % 2
        self.mm = MemoryManager(
            world.num_frames,
            world.block_size,
            policy=world.policy,
            match="token" if by_token else "page",
            groups=world.groups,
            observe=Observe(events=16, reuse=32),
        )
        self.mm.state.reg[st.KEY] = KEY
        self.epoch, self.refused, self.conflicts = FIRST_EPOCH, 0, 0
        self.heard = 0  # of the events
        self.mm.retire(self.epoch)
        self.spaces: list[AddressSpace] = []
        self.plans: list[tuple[Plan, list[AddressSpace]]] = []
        self.pins: list[Pin] = []
        self.settled: Plan | None = None
        for tenant in TENANTS[1:] if world.quotas else ():
            self.mm.set_quota(tenant)

    def below(self, end: int) -> int:
        return int(self.random.integers(end))

    def ids(self, count: int) -> np.ndarray:
        return self.random.integers(0, WORDS, count).astype(np.int32)

    def any(self) -> AddressSpace:
        return self.spaces[self.below(len(self.spaces))]

    def step(self) -> str:
        """Do one thing, and name it."""
        move = MOVES[self.below(len(MOVES))]
        try:
            if self.spaces or move in (Walk.open, Walk.prefill):
                move(self)
        except OutOfFrames:
            self.refused += 1
            self.make_room()
        return move.__name__

    def unless(self, refusal: type[Exception] | tuple[type[Exception], ...], call: Callable[[], object]) -> bool:
        """Whether `call` was not refused for one of these reasons."""
        try:
            call()
        except refusal:
            self.conflicts += 1
            return False
        return True

    # -- what an engine does most -----------------------------------------------------------------------------------------------------

    def busy(self, space: AddressSpace) -> bool:
        return any(space is owner for _, owners in self.plans for owner in owners)

    def prompt(self) -> np.ndarray:
        """New words, or what somebody has computed and then new words; once in a while more than the pool can hold."""
        kind = self.below(64)
        if kind == 0:
            return self.ids((self.mm.num_frames + 1) * self.mm.block_size + self.below(40))
        if kind > 24 or not self.spaces:
            return self.ids(self.below(40))
        known = self.any().token_ids
        return np.concatenate(
            [known[: len(known) - self.below(3)], self.ids(self.below(80 if kind == 1 else 9))]
        ).astype(np.int32)

    def open(self) -> None:
        if len(self.spaces) < self.world.max_spaces:
            priority = 1.0 + self.below(3) if self.world.policy == "priority" else 1.0
            self.spaces.append(self.mm.open(self.prompt(), tenant=TENANTS[self.below(3)], priority=priority))

    def prefill(self) -> None:
        self.open()
        if not self.busy(space := self.spaces[-1]):
            self.run([space], [1 + self.below(20 if self.below(16) else 120)])

    def decode(self) -> None:
        batch = [space for space in self.spaces if not self.busy(space) and self.below(2)]
        if batch:
            self.run(batch, [1] * len(batch))

    def run(self, batch: list[AddressSpace], counts: list[int]) -> None:
        plan = self.mm.plan(batch, counts)
        accepted = [count if self.below(4) else self.below(count + 1) for count in counts]
        self.mm.commit(plan, self.ids(sum(accepted)), accepted)

    # -- plans that overlap, and what becomes of them ---------------------------------------------------------------------------------

    def plan(self) -> None:
        """To be settled later, or never run at all; perhaps the second one of a space."""
        if len(self.plans) < 4:
            owners = [self.any()] if self.below(2) else self.spaces[:2]
            self.plans.append((self.mm.plan(owners, [self.below(9) for _ in owners]), owners))

    def settle(self) -> None:
        """Any plan, its turn or not: all of it, a part, or nothing."""
        if self.plans:
            at = self.below(len(self.plans))
            plan, _ = self.plans[at]
            counts = np.diff(plan.cu_seqlens_q).astype(np.int64)
            if self.below(3) == 0:
                counts = np.array([self.below(int(count) + 1) for count in counts], np.int64)
            if self.below(3):
                done = self.unless(PlanConflict, lambda: self.mm.commit(plan, self.ids(int(counts.sum())), counts))
            else:
                done = self.unless(PlanConflict, lambda: self.mm.abort(plan, copied=bool(self.below(2))))
            if done:
                self.settled = self.plans.pop(at)[0]

    def complete_again(self) -> None:
        """A completion that comes twice, however late, is refused."""
        if (plan := self.settled) is not None:
            tokens = int(plan.cu_seqlens_q[-1])
            again = (lambda: self.mm.commit(plan, self.ids(tokens))) if self.below(2) else (lambda: self.mm.abort(plan))
            assert not self.unless(PlanConflict, again)

    def cancel(self) -> None:
        """A client goes away while its plans are under way: they are given up, newest first, where that can be."""
        if self.plans:
            owner = self.plans[self.below(len(self.plans))][1][0]
            if owner in self.spaces:
                self.spaces.remove(owner)
                owner.release()
            for plan, owners in [held for held in reversed(self.plans) if owner in held[1]]:
                if self.unless(PlanConflict, lambda plan=plan: self.mm.abort(plan, copied=bool(self.below(2)))):
                    self.plans.remove((plan, owners))
                    self.settled = plan

    # -- spaces -----------------------------------------------------------------------------------------------------------------------

    def fork(self) -> None:
        if len(self.spaces) < self.world.max_spaces:
            space = self.any()
            self.unless(PlanConflict, lambda: self.spaces.append(space.fork()))

    def truncate(self) -> None:
        """To anywhere: where a hole is, or a window would look into one, it is refused."""
        space = self.any()
        self.unless((PlanConflict, InvalidRequest), lambda: space.truncate(self.below(len(space) + 1)))

    def punch(self) -> None:
        space = self.any()
        if full := len(space) // self.mm.block_size:
            first = self.below(full)
            self.unless(PlanConflict, lambda: space.punch(first, first + 1 + self.below(full - first)))

    def release(self) -> None:
        if len(self.spaces) > 3:
            self.spaces.pop(self.below(len(self.spaces))).release()

    # -- what is kept -----------------------------------------------------------------------------------------------------------------

    def pin(self) -> None:
        """A space, or a frame and what is before it; refused beyond the cap, or if no prompt could find it."""
        if len(self.pins) < 3:
            what = self.any() if self.below(2) else np.array([self.below(self.mm.num_frames)], np.int32)
            self.unless(InvalidRequest, lambda: self.pins.append(self.mm.pin(what)))

    def unpin(self) -> None:
        if self.pins:
            self.mm.unpin(self.pins.pop(self.below(len(self.pins))))

    def retire(self) -> None:
        """A step is launched, and perhaps a space goes with it."""
        self.epoch += 1 + self.below(2)
        leaving = [self.spaces.pop()] if len(self.spaces) > 3 and self.below(2) else []
        self.mm.retire(self.epoch, leaving)

    def advance(self) -> None:
        """Steps finish: late, several at once, or again."""
        self.mm.advance(self.epoch - self.below(3))

    def advise(self) -> None:
        advice = ("WILLNEED", "DONTNEED", "COLD")[self.below(3)]
        if self.world.policy == "priority" and self.below(2):
            self.mm.advise(self.any(), retain=(1.0 + self.below(8), 1.0 + self.below(100)))
        else:
            self.mm.advise(self.any(), advice)

    def evict(self) -> None:
        self.mm.evict(self.below(4))

    def forget(self) -> None:
        """The weights were updated, which is rare; refused while anything is pinned."""
        if self.affords() and self.below(8) == 0:
            self.unless(InvalidRequest, self.mm.forget)

    def affords(self) -> bool:
        """Whether to do what takes O(frames): the rarer, the larger the pool."""
        return self.below(self.world.num_frames) < 128

    def listen(self) -> None:
        """A router reads what happened, or begins again."""
        if self.affords():
            try:
                self.heard = max([self.heard, *(event.sequence for event in self.mm.events(self.heard))])
            except EventsLost:
                self.heard = self.mm.snapshot().sequence

    # -- the pool ---------------------------------------------------------------------------------------------------------------------

    def limit(self) -> None:
        """Other quotas for a tenant; refused if too much would be protected."""
        if self.world.quotas:
            hard, soft, protected = (self.below(self.mm.num_frames) for _ in range(3))
            limits = {"hard": hard if self.below(2) else None, "soft": soft if self.below(2) else None}
            self.unless(
                InvalidRequest,
                lambda: self.mm.set_quota(TENANTS[1 + self.below(2)], protected=protected // 4, **limits),
            )

    def resize(self) -> None:
        """To half as many frames or half as many again; refused where frames would move that somebody names, or do not fit."""
        if not self.affords():
            return
        if self.below(2):
            self.calm()
        wanted = self.world.num_frames // 2 + self.below(self.world.num_frames)
        self.unless((OutOfFrames, PlanConflict, InvalidRequest), lambda: self.mm.resize(wanted))

    def calm(self) -> None:
        """Whatever is under way comes to its end."""
        while self.plans:
            plan, _ = self.plans.pop(0)
            self.mm.commit(plan, self.ids(int(plan.cu_seqlens_q[-1])))
        self.mm.advance(self.epoch)

    def make_room(self) -> None:
        """What an engine does when there are no frames left: it waits for what is under way, and lets the youngest go."""
        self.calm()
        while self.pins:
            self.mm.unpin(self.pins.pop())
        for _ in range(min(2, len(self.spaces))):
            self.spaces.pop().release()

    def digest(self) -> str:
        """Of every number that the manager knows."""
        s, sample = self.mm.state, self.mm._reuse_sampler.sample
        content = hashlib.blake2b(digest_size=16)
        for records in (s.frames, s.spaces, s.chunks, sample.records):
            for name in records.dtype.names:  # by field: padding is not data
                content.update(records[name].tobytes())
        for name, array in (s._asdict() | {f"reuse {name}": array for name, array in sample._asdict().items()}).items():
            if name not in ("frames", "spaces", "chunks", "table", "reuse records"):
                content.update(array.tobytes())
        for asid, pages in enumerate(s.spaces["num_pages"]):
            content.update(s.table[asid, :pages].tobytes())
        return content.hexdigest()


OFTEN = (
    Walk.open,
    Walk.decode,
    Walk.decode,
    Walk.decode,
    Walk.prefill,
    Walk.prefill,
    Walk.plan,
    Walk.settle,
    Walk.settle,
    Walk.release,
)
SOMETIMES = (Walk.fork, Walk.truncate, Walk.punch, Walk.cancel, Walk.complete_again, Walk.pin, Walk.unpin)
RARELY = (Walk.retire, Walk.advance, Walk.advise, Walk.evict, Walk.limit, Walk.resize, Walk.forget, Walk.listen)
MOVES = (*OFTEN, *OFTEN, *SOMETIMES, *RARELY, Walk.fork, Walk.truncate, Walk.advance)


def main(seed: int, steps: int, world: World) -> None:
    """Print what was done and the digest after each step."""
    walk = Walk(seed, world)
    for _ in range(steps):
        print(walk.step(), walk.digest())
    walk.mm.check()
    print("refused", walk.refused, walk.conflicts)
