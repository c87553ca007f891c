"""A random walk over a manager with recurrent states, beside simulated memory.

The memory says of each KV slot and of each state frame which prefix it holds. A step reads what a kernel would read,
and writes what a kernel would write. So a wrong, lost or overwritten state shows at the next step that reads it.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagedkv.core import AddressSpace, MemoryManager, Places, Plan, StatePool
from pagedkv.core.tables.layer_groups import Group
from pagedkv.errors import InvalidRequest, OutOfFrames

SIZE, WORDS = 4, 9
WHAT = {"open": 20, "step": 50, "fork": 6, "truncate": 6, "release": 8, "evict": 3, "pin": 3, "resize": 2, "forget": 1}
WHAT["advise"] = 6


@dataclass(eq=False)
class Row:
    """One sequence: what it holds, and the text that it is to hold."""

    space: AddressSpace
    text: list[int]


@dataclass
class Walk:
    """One walk. seed: of its choices."""

    seed: int
    window: int | None = None
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.frames, self.states = self.rng.choice((32, 64, 128)), self.rng.choice((8, 16, 32))
        places = self.rng.choice((Places(), Places((3,)), Places(distances=(1, 8, 24)), Places(grid=2 * SIZE)))
        pool = StatePool(self.states, places, self.rng.choice(("cost", "lru", "2q")))
        groups = (Group(), Group(self.window)) if self.window else (Group(),)
        policy = self.rng.choice(("lru", "2q", "cost"))
        self.mm = MemoryManager(self.frames, SIZE, policy=policy, groups=groups, states=pool, hints=0.25)
        self.tenants = (b"",)
        if self.rng.random() < 0.4:
            self.tenants = (b"", b"limited", b"protected")
            self.mm.set_quota(b"limited", hard=self.frames // 2)
            self.mm.set_quota(b"protected", protected=self.frames // 4)
        self.kv: dict[int, Any] = {}
        self.memory: dict[int, Any] = {}
        self.live: list[Row] = []
        self.pins: list[Any] = []
        self.epoch, self.now = 0, 0.0
        self.stems = [[self.rng.randrange(WORDS) for _ in range(48)] for _ in range(2)]

    def run(self, operations: int) -> Counter[str]:
        """Make so many random operations; all laws are checked after each of them."""
        for _ in range(operations):
            what = self.rng.choices(list(WHAT), list(WHAT.values()))[0]
            try:
                getattr(self, f"_{what}")()
                self.seen[what] += 1
            except OutOfFrames as short:  # nothing was changed; make room
                self.seen[f"short of {short.pool}"] += 1
                self.seen[f"{type(short).__name__} of {short.pool}"] += 1
                self._make_room()
            self.mm.check()
            self._check_states()
        return self.seen

    def _make_room(self) -> None:
        if self.live:
            self.live.pop(self.rng.randrange(len(self.live))).space.release()
        elif self.pins:
            self.mm.unpin(self.pins.pop())

    def _check_states(self) -> None:
        for row in self.live:
            ready = row.space.ready
            assert ready <= len(row.space)
            if ready:
                frame = int(self.mm.states.held.rows["state"][row.space.asid])
                assert self.memory[frame] == tuple(row.text[:ready]), "the state of a space"

    # -- operations ----------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        if len(self.live) < 5:
            stem = self.rng.choice(self.stems)[: self.rng.randrange(1, 48)]
            prompt = stem + [self.rng.randrange(WORDS) for _ in range(self.rng.randrange(6))]
            space = self.mm.open(prompt, tenant=self.rng.choice(self.tenants))
            known = [token for token in space.token_ids.tolist() if token >= 0]
            assert known == prompt[len(space) - len(known) : len(space)]
            assert space.ready <= len(space) < len(prompt)
            self.seen["hits"] += space.ready > 0
            self.seen["tokens known"] += len(space)
            self.seen["tokens ready"] += space.ready
            self.live.append(Row(space, prompt))

    def _step(self) -> None:
        if not self.live:
            return
        batch = self.rng.sample(self.live, self.rng.randrange(1, len(self.live) + 1))
        inside, ids, sure = self.rng.random() < 0.7, [], []
        for row in batch:
            rest = row.text[row.space.ready :]
            sure.append(self.rng.randrange(len(rest) + 1) if self.rng.random() < 0.3 else len(rest))
            if not inside and sure[-1]:
                sure[-1] = row.space.stops(row.space.ready + sure[-1])[0] - row.space.ready
            drafts = self.rng.randrange(4) if sure[-1] == len(rest) else 0
            ids.append(rest[: sure[-1]] + [self.rng.randrange(WORDS) for _ in range(drafts)])
        spaces, certain = [row.space for row in batch], sure if self.rng.random() < 0.6 and inside else None
        skipped = self.mm.stats().states.skipped
        plan = self.mm.plan(spaces, [len(one) for one in ids], certain=certain, saves_inside=inside)
        self._compute(plan, batch, ids)
        if self.rng.random() < 0.15:
            self.mm.abort(plan, copied=True)
            self.seen["aborts"] += 1
            return
        gone = self.rng.choice(batch) if self.rng.random() < 0.05 else None
        if gone:
            gone.space.release()
            self.live.remove(gone)
        kept = [self.rng.randrange(n, len(one) + 1) for n, one in zip(sure, ids, strict=True)]
        before = [-1 if row is gone else row.space.ready for row in batch]
        self.mm.commit(plan, [token for one, k in zip(ids, kept, strict=True) for token in one[:k]], kept)
        saved = certain is not None and self.mm.stats().states.skipped == skipped
        for row, k, one, n, was in zip(batch, kept, ids, sure, before, strict=True):
            if row is gone:
                continue
            row.text += one[n:k]
            self.seen["drafts rejected"] += k < len(one)
            assert len(row.space) >= was + k
            assert row.space.ready >= was
            assert row.space.ready >= was + n or (len(one) > n and not saved), "a certain token has no state"
            if len(row.space) == len(row.text) == row.space.ready:
                row.text.append(self.rng.randrange(WORDS))

    def _compute(self, plan: Plan, batch: list[Row], ids: list[list[int]]) -> None:
        """Read every KV slot that is seen and the state of each sequence; then write both."""
        states, written = plan.states, dict[int, Any]()
        for group in range(len(self.mm.groups)):
            for source, target in plan.group(group).copies.tolist():
                for offset in range(SIZE):
                    self.kv[target * SIZE + offset] = self.kv.get(source * SIZE + offset)
        for i, row in enumerate(batch):
            whole = row.text[: row.space.ready] + ids[i]
            ready, begins = row.space.ready, int(states.state_in[i])
            assert (begins == -1) == (ready == 0)
            assert not ids[i] or plan.seq_lens[i] == ready + len(ids[i])
            assert ready == 0 or self.memory[begins] == tuple(whole[:ready]), "state_in"
            first = int(plan.cu_seqlens_q[i])
            for group in range(len(self.mm.groups)):
                self._compute_kv(plan, group, (row, first), whole)
            saves = slice(*states.save_indptr[i : i + 2].tolist())
            after = dict(zip(states.save_offsets[saves].tolist(), states.save_frames[saves].tolist(), strict=True))
            assert list(after) == sorted(after)
            assert len(ids[i]) not in after
            if ids[i]:
                after[len(ids[i])] = int(states.state_out[i])
            assert (states.state_out[i] == -1) == (not ids[i])
            for offset, frame in after.items():
                assert frame not in [*written, *states.state_in], "a state frame is written once"
                written[frame] = tuple(whole[: ready + offset])
        self.memory |= written

    def _compute_kv(self, plan: Plan, group: int, where: tuple[Row, int], whole: list[int]) -> None:
        row, first = where
        pages = row.space.pages_in(group).tolist()
        window = self.mm.groups[group].window or len(whole)
        for at in range(max(0, row.space.ready - window + 1), min(len(row.space), len(whole))):
            slot = pages[at // SIZE] * SIZE + at % SIZE
            assert self.kv.get(slot) == (group, *whole[: at + 1]), "KV of a known token"
        for j in range(len(whole) - row.space.ready):
            slot, at = int(plan.group_slots[group, first + j]), row.space.ready + j
            assert plan.positions[first + j] == at
            assert (slot < 0) == (at < len(row.space)), "a known token is not written"
            if slot >= 0:
                self.kv[slot] = (group, *whole[: at + 1])

    def _fork(self) -> None:
        if self.live and len(self.live) < 5:
            row = self.rng.choice(self.live)
            if self.rng.random() < 0.7:
                self.live.append(Row(row.space.fork(), list(row.text)))
            else:
                index = [self.rng.randrange(len(self.live)) for _ in range(len(self.live))]
                spaces = self.mm.reorder([one.space for one in self.live], index)
                texts = [list(self.live[at].text) for at in index]
                self.live = [Row(space, text) for space, text in zip(spaces, texts, strict=True)]

    def _truncate(self) -> None:
        if self.live:
            row = self.rng.choice(self.live)
            length = self.rng.randrange(len(row.space) + 1)
            try:
                row.space.truncate(length)
            except InvalidRequest:  # its pages are behind a window
                assert self.window
                return
            row.text[:] = [*row.text[:length], self.rng.randrange(WORDS)]

    def _release(self) -> None:
        if not self.live:
            return
        row = self.live.pop(self.rng.randrange(len(self.live)))
        if self.rng.random() < 0.5:
            self.epoch += 1
            self.mm.retire(self.epoch, [row.space])
            self.mm.check()
            self.mm.advance(self.epoch)
        else:
            row.space.release()

    def _evict(self) -> None:
        self.mm.evict(self.rng.randrange(8))

    def _pin(self) -> None:
        if self.pins and self.rng.random() < 0.6:
            self.mm.unpin(self.pins.pop())
        elif self.live:
            space = self.rng.choice(self.live).space
            if len(space.pages) + self.mm.stats().pinned <= self.mm.max_pinned // 2:
                self.pins.append(self.mm.pin(space))

    def _advise(self) -> None:
        self.now += self.rng.randrange(2)
        if self.live:
            action = self.rng.choice(("retain", "retain", "retain", "demote", "release"))
            until = self.now + self.rng.choice((1.0, 3.0, 1e9)) if action == "retain" else None
            self.seen[self.mm.advise(self.rng.choice(self.live).space, action, until=until, now=self.now)] += 1

    def _resize(self) -> None:
        if self.rng.random() < 0.5:
            for source, target in self.mm.resize_states(self.rng.choice((8, 16, 32))).tolist():
                self.memory[target] = self.memory.get(source)
            return
        if self.pins:
            return
        frames = self.rng.choice((32, 64, 128))
        for source, target in self.mm.resize(frames).tolist():
            for offset in range(SIZE):
                self.kv[target * SIZE + offset] = self.kv.get(source * SIZE + offset)

    def _forget(self) -> None:
        if not self.pins:
            self.mm.forget()


def total_of(seeds: range, operations: int, window: int | None = None) -> Counter[str]:
    """Walk from each seed, and return what was seen in all."""
    seen = Counter[str]()
    for seed in seeds:
        seen += Walk(seed, window).run(operations)
    return seen


def rows_of(mm: MemoryManager) -> np.recarray[Any, Any]:
    """Return the rows of the spaces of a manager with states."""
    assert mm.states is not None
    return mm.states.held.rows
