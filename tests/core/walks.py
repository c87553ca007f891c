"""Random walks through the manager: the calls of an engine, drawn from a seed. Only numpy is needed; they are fast.

Unlike the state machine, a walk keeps no model: it shows what numbers show (equal arrays, flat memory), and check()
judges it. A walk also makes calls that may be refused at that moment: a plan that is not the oldest, a pool that cannot
shrink now.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pagedkv.core import AddressSpace, Group, MemoryManager, Pin, Plan
from pagedkv.core import state as st
from pagedkv.errors import EventsLost, InvalidRequest, OutOfFrames, PlanConflict

ACTIONS = ("retain", "retain", "retain", "pin", "demote", "prefetch", "release")
WORDS, TENANTS = 3, (b"", b"a", b"b")
SALTS: tuple[dict[int, bytes], ...] = ({}, {}, {}, {}, {5: b"cat"}, {5: b"dog", 21: b"cat"})
KEY = 0x5EED  # of the hash; without it every process would draw its own
FIRST_EPOCH = 2**31 - 4  # epochs are kept modulo 2**31


@dataclass(frozen=True)
class World:
    """The options of the manager and the limits of a walk."""

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
    "groups": World(num_frames=224, groups=(Group(), Group(window=7, sinks=3, keep=6)), quotas=True),
    "three": World(num_frames=288, block_size=3, groups=(Group(), Group(window=1), Group())),
}


class Walk:
    """One manager, and a random engine on it. `step` makes one move; nothing grows without bound."""

    def __init__(self, seed: int, world: World = WORLDS["plain"]) -> None:
        self.world, self.random = world, np.random.default_rng(seed)
        self.mm = MemoryManager(
            world.num_frames, world.block_size, policy=world.policy, groups=world.groups, events=16, hints=0.25
        )
        self.mm.state.reg[st.KEY] = KEY
        self.epoch, self.refused, self.conflicts = FIRST_EPOCH, 0, 0
        self.last_event = 0  # the newest one that was read
        self.mm.retire(self.epoch)
        self.now, self.answers = 0.0, Counter[tuple[str, str]]()
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
        """Make one move, and return its name."""
        move = MOVES[self.below(len(MOVES))]
        try:
            if self.spaces or move in (Walk.open, Walk.prefill):
                move(self)
        except OutOfFrames:
            self.refused += 1
            self.relieve_pool()
        return move.__name__

    def tolerate(self, refusal: type[Exception] | tuple[type[Exception], ...], call: Callable[[], object]) -> bool:
        """Make `call`, and return whether it succeeded; an error of type `refusal` is counted and tolerated."""
        try:
            call()
        except refusal:
            self.conflicts += 1
            return False
        return True

    # -- the most frequent moves --------------------------------------------------------------------------------------

    def busy(self, space: AddressSpace) -> bool:
        return any(space is owner for _, owners in self.plans for owner in owners)

    def prompt(self) -> np.ndarray:
        """Return new words, often after the tokens of an open space; once in a while more than the pool can hold."""
        draw = self.below(64)
        if draw == 0:
            return self.ids((self.mm.num_frames + 1) * self.mm.block_size + self.below(40))
        if draw > 24 or not self.spaces:
            return self.ids(self.below(40))
        tokens = self.any().token_ids
        more = self.ids(self.below(80 if draw == 1 else 9))
        return np.concatenate([tokens[: len(tokens) - self.below(3)], more]).astype(np.int32)

    def open(self) -> None:
        if len(self.spaces) < self.world.max_spaces:
            prompt, tenant = self.prompt(), TENANTS[self.below(3)]
            salt = SALTS[self.below(len(SALTS))]
            known = self.mm.lookup(prompt, tenant=tenant, salt=salt)
            self.spaces.append(self.mm.open(prompt, tenant=tenant, salt=salt))
            assert len(self.spaces[-1]) == known

    def open_batch(self) -> None:
        rows = [self.prompt() for _ in range(min(3, self.world.max_spaces - len(self.spaces)))]
        pads = [self.below(9) for _ in rows] if self.below(2) else None
        known = [self.mm.lookup(row, tenant=TENANTS[1]) for row in rows]
        opened = self.mm.open_batch(rows, pads=pads, tenant=TENANTS[1])
        lengths = [len(space) for space in opened.spaces]
        if pads is None:
            assert (lengths, opened.skip) == (known, min(known, default=0))
        else:
            assert lengths == [max(0, opened.skip - pad) for pad in pads]
            assert all(length <= most for length, most in zip(lengths, known, strict=True))
        self.spaces += opened.spaces

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
        self.mm.commit(plan, self.ids(sum(accepted)) if self.below(16) else None, accepted)

    # -- overlapping plans --------------------------------------------------------------------------------------------

    def plan(self) -> None:
        """Plan for spaces that may have a plan already; the plan is settled later, or cancelled."""
        if len(self.plans) < 4:
            owners = [self.any()] if self.below(2) else self.spaces[:2]
            self.plans.append((self.mm.plan(owners, [self.below(9) for _ in owners]), owners))

    def settle(self) -> None:
        """Commit (all or a part) or abort any plan, even if it is not its turn."""
        if self.plans:
            at = self.below(len(self.plans))
            plan, _ = self.plans[at]
            counts = np.diff(plan.cu_seqlens_q).astype(np.int64)
            if self.below(3) == 0:
                counts = np.array([self.below(int(count) + 1) for count in counts], np.int64)
            keep = self.below(4) == 0
            if self.below(3):
                ids, counts = self.ids(int(counts.sum())), np.minimum(counts, plan.remaining)
                done = self.tolerate(
                    PlanConflict, lambda: self.mm.commit(plan, ids[: counts.sum()], counts, keep_planned=keep)
                )
            else:
                done = self.tolerate(PlanConflict, lambda: self.mm.abort(plan, copied=bool(self.below(2))))
            if done and not plan.is_outstanding:
                self.settled = self.plans.pop(at)[0]

    def complete_again(self) -> None:
        """Settle a plan a second time, which must be refused."""
        if (plan := self.settled) is not None:
            tokens = int(plan.cu_seqlens_q[-1])
            again = (lambda: self.mm.commit(plan, self.ids(tokens))) if self.below(2) else (lambda: self.mm.abort(plan))
            assert not self.tolerate(PlanConflict, again)

    def cancel(self) -> None:
        """A client goes away: release its space and abort its plans, newest first, if they can be aborted."""
        if self.plans:
            owner = self.plans[self.below(len(self.plans))][1][0]
            if owner in self.spaces:
                self.spaces.remove(owner)
                owner.release()
            for plan, owners in [(plan, owners) for plan, owners in reversed(self.plans) if owner in owners]:
                if self.tolerate(PlanConflict, lambda plan=plan: self.mm.abort(plan, copied=bool(self.below(2)))):
                    self.plans.remove((plan, owners))
                    self.settled = plan

    # -- spaces -------------------------------------------------------------------------------------------------------

    def fork(self) -> None:
        if len(self.spaces) < self.world.max_spaces:
            space = self.any()
            self.tolerate(PlanConflict, lambda: self.spaces.append(space.fork()))

    def reorder(self) -> None:
        """Beams go on: one space twice, another once, the third ends."""
        if len(self.spaces) > 3:
            beams = self.spaces[:3]
            index = [self.below(3) for _ in beams]
            if self.tolerate(PlanConflict, lambda: beams.extend(self.mm.reorder(beams, index))):
                self.spaces[:3] = beams[3:]

    def truncate(self) -> None:
        """Truncate to any length; refused where a window would see a page that was given back."""
        space = self.any()
        self.tolerate((PlanConflict, InvalidRequest), lambda: space.truncate(self.below(len(space) + 1)))

    def release(self) -> None:
        if len(self.spaces) > 3:
            self.spaces.pop(self.below(len(self.spaces))).release()

    # -- pins, epochs and the cache -----------------------------------------------------------------------------------

    def pin(self) -> None:
        """Pin a space, or a frame and its prefix; refused beyond the cap, or if no prompt could find the frame."""
        if len(self.pins) < 3:
            target = self.any() if self.below(2) else np.array([self.below(self.mm.num_frames)], np.int32)
            self.tolerate(InvalidRequest, lambda: self.pins.append(self.mm.pin(target)))

    def unpin(self) -> None:
        if self.pins:
            self.mm.unpin(self.pins.pop(self.below(len(self.pins))))

    def retire(self) -> None:
        """A step is launched, and perhaps a space is released with it."""
        self.epoch += 1 + self.below(2)
        leaving = [self.spaces.pop()] if len(self.spaces) > 3 and self.below(2) else []
        self.mm.retire(self.epoch, leaving)

    def advance(self) -> None:
        """Steps finish: late, several at once, or reported again."""
        self.mm.advance(self.epoch - self.below(3))

    def advise(self) -> None:
        """Give a hint, often one that ends soon, or one that ends never."""
        action = ACTIONS[self.below(len(ACTIONS))]
        until = self.now + (1, 3, 9, 1e9)[self.below(4)] if action in ("retain", "pin") else None
        self.answers[action, self.mm.advise(self.any(), action, until=until, now=self.now)] += 1
        self.now += self.below(2)

    def evict(self) -> None:
        self.mm.evict(self.below(4))

    def forget(self) -> None:
        """Forget everything computed, as after a rare update of the weights; refused while anything is pinned."""
        if self.affords() and self.below(8) == 0:
            self.tolerate(InvalidRequest, self.mm.forget)

    def affords(self) -> bool:
        """Return whether to make a move that costs O(frames): the larger the pool, the rarer."""
        return self.below(self.world.num_frames) < 128

    def read_events(self) -> None:
        """A router reads the events, or takes a snapshot if some are lost."""
        if self.affords():
            try:
                self.last_event = max([self.last_event, *(event.sequence for event in self.mm.events(self.last_event))])
            except EventsLost:
                self.last_event = self.mm.events_snapshot().sequence

    # -- the pool -----------------------------------------------------------------------------------------------------

    def set_quota(self) -> None:
        """Set other quotas for a tenant; refused if too much would be protected."""
        if self.world.quotas:
            hard, soft, protected = (self.below(self.mm.num_frames) for _ in range(3))
            limits = {"hard": hard if self.below(2) else None, "soft": soft if self.below(2) else None}
            self.tolerate(
                InvalidRequest,
                lambda: self.mm.set_quota(TENANTS[1 + self.below(2)], protected=protected // 4, **limits),
            )

    def resize(self) -> None:
        """Resize to 50 % to 150 % of the frames; refused if frames in use would move or do not fit."""
        if not self.affords():
            return
        if self.below(2):
            self.finish_work()
        wanted = self.world.num_frames // 2 + self.below(self.world.num_frames)
        self.tolerate((OutOfFrames, PlanConflict, InvalidRequest), lambda: self.mm.resize(wanted))

    def finish_work(self) -> None:
        """Commit all outstanding plans, and let the newest epoch pass."""
        while self.plans:
            plan, _ = self.plans.pop(0)
            self.mm.commit(plan, self.ids(int(plan.remaining.sum())))
        self.mm.advance(self.epoch)

    def relieve_pool(self) -> None:
        """Finish the work under way, end the pins and release the youngest spaces, as an engine out of frames does."""
        self.finish_work()
        while self.pins:
            self.mm.unpin(self.pins.pop())
        self.now += 9
        self.mm.advise(None, "release", now=self.now)
        for _ in range(min(2, len(self.spaces))):
            self.spaces.pop().release()

    def digest(self) -> str:
        """Return a hash of every number of the manager."""
        s = self.mm.state
        content = hashlib.blake2b(digest_size=16)
        for records in (s.frames, s.spaces, s.chunks):
            for name in records.dtype.names:  # by field, as padding is not data
                content.update(records[name].tobytes())
        for name, array in s._asdict().items():
            if name not in ("frames", "spaces", "chunks", "table"):
                content.update(array.tobytes())
        for asid, pages in enumerate(s.spaces["num_pages"]):
            content.update(s.table[asid, :pages].tobytes())
        return content.hexdigest()


OFTEN = (Walk.open, *[Walk.decode] * 3, *[Walk.prefill] * 2, Walk.plan, *[Walk.settle] * 2, Walk.release)
SOMETIMES = (Walk.fork, Walk.reorder, Walk.truncate, Walk.cancel, Walk.complete_again, Walk.pin, Walk.unpin)
RARELY = (Walk.open_batch, Walk.retire, Walk.advance, *[Walk.advise] * 4, Walk.evict)
OF_THE_POOL = (Walk.set_quota, Walk.resize, Walk.forget, Walk.read_events)
MOVES = (*OFTEN, *OFTEN, *SOMETIMES, *RARELY, *OF_THE_POOL, Walk.fork, Walk.truncate, Walk.advance)


def main(seed: int, steps: int, world: World) -> None:
    """Print each move and the digest after it."""
    walk = Walk(seed, world)
    for _ in range(steps):
        print(walk.step(), walk.digest())
    walk.mm.check()
    print("refused", walk.refused, walk.conflicts)
