"""A state machine compares the manager with the oracle: any order of calls, plans outstanding, pools too small."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedkv.core import AddressSpace, Group, MemoryManager
from pagedkv.core import state as st
from pagedkv.core.policies import POLICIES
from pagedkv.errors import DoubleRelease, InvalidRequest, OutOfFrames, PlanConflict, StaleHandle
from tests.core.oracle import Believed, Follower, Oracle, Outstanding, Salts, everything, names_by_frame, refused

TOKENS = some.sampled_from([0, 0, 0, 1])  # two words, one of them rare, so that prefixes meet
TENANTS = some.sampled_from([b"", b"acme", b"umbra"])
SALTS = some.sampled_from([(), (), (), ((0, b"adapter"),), ((3, b"cat"),), ((3, b"dog"),), ((2, b"cat"), (6, b"dog"))])
PROMPTS = some.lists(some.lists(TOKENS, max_size=14), max_size=3)
PADS = some.none() | some.lists(some.integers(0, 5), min_size=3, max_size=3)
LIMITS = some.sampled_from([None, None, 3, 6, 9])  # in tenths of the pool
POOLS = some.one_of(some.integers(4, 14), some.integers(4, 14), some.integers(15, 48))  # frames for each group
GROUPS = [
    (Group(),),
    (Group(),),
    (Group(window=4),),
    (Group(window=3, sinks=2),),
    (Group(), Group(window=5, sinks=2)),
    (Group(), Group(window=1), Group()),
    (Group(), Group(window=2, sinks=1, keep=5)),
    (Group(window=3, keep=2),),
    (Group(), Group(window=2, sinks=5), Group(window=9), Group(window=3)),
    (Group(window=3), Group()),
    (Group(window=6, sinks=1), Group(window=12)),
    (Group(window=12), Group(window=5), Group(window=9, sinks=2)),
]


def copied(parent: Believed, child: AddressSpace) -> Believed:
    """Return the beliefs about a fork."""
    return Believed(
        child,
        parent.tenant,
        list(parent.tokens),
        unnamed=set(parent.unnamed),
        behind=[set(behind) for behind in parent.behind],
        salts=parent.salts,
    )


class Machine(RuleBasedStateMachine):
    """A rule for each call that a caller may make; `oracle.verify` runs after each rule."""

    @initialize(
        block_size=some.sampled_from([1, 3, 4]),
        num_frames=POOLS,
        prefix_cache=some.sampled_from([True, True, False]),
        policy=some.sampled_from(sorted(POLICIES)),
        events=some.sampled_from([3, 50, 1000]),
        groups=some.sampled_from(GROUPS),
    )
    def build(
        self, block_size: int, num_frames: int, prefix_cache: bool, policy: str, events: int, groups: tuple[Group, ...]
    ) -> None:
        num_frames *= len(groups)
        self.first_size = num_frames
        self.mm = MemoryManager(
            num_frames, block_size, prefix_cache=prefix_cache, policy=policy, events=events, groups=groups
        )
        self.reader = Follower(self.mm, since=0)
        self.named: dict[tuple[int, int], bytes] = {}
        self.epoch = 2**31 - 4  # epochs are kept modulo 2**31
        self.oracle = Oracle(self.mm)
        self.prefix_cache = prefix_cache
        self.dead: list[Believed] = []

    def pick(self, data: some.DataObject, *, settled: bool = True) -> Believed:
        idle = [b for b in self.oracle.spaces if not settled or not any(b in p.owners for p in self.oracle.plans)]
        return data.draw(some.sampled_from(idle or self.oracle.spaces))

    def refused(self, error: type[Exception] | tuple[type[Exception], ...], call: object) -> None:
        with refused(self.mm, error):
            call()  # type: ignore[operator]

    def busy(self, believed: Believed) -> bool:
        return any(believed in p.owners for p in self.oracle.plans)

    @rule(tokens=some.lists(TOKENS, max_size=14), tenant=TENANTS, salts=SALTS)
    def open(self, tokens: list[int], tenant: bytes, salts: Salts = ()) -> None:
        expected = self.oracle.longest_match(tenant, tokens, salts)
        before = everything(self.mm)
        salt = dict(salts)
        missed = self.mm.why(tokens, tenant=tenant, salt=salt)
        assert missed.tokens_matched == expected
        assert self.mm.lookup(tokens, tenant=tenant, salt=salt) == expected
        assert everything(self.mm) == before
        space = self.mm.open(tokens, tenant=tenant, salt=salt)
        assert len(space) == expected
        assert len(space) == 0 or self.prefix_cache
        self.oracle.spaces.append(self.oracle.believed(space, tenant, tokens[: len(space)], salts))

    @rule(rows=PROMPTS, pads=PADS, tenant=TENANTS, salts=SALTS)
    def open_batch(self, rows: list[list[int]], pads: list[int] | None, tenant: bytes, salts: Salts) -> None:
        """Open some prompts at once. Opening maps frames and publishes none, so no row changes what another finds."""
        pads = pads and pads[: len(rows)]
        if pads is None:
            expected = [self.oracle.longest_match(tenant, tokens, salts) for tokens in rows]
        else:
            expected = self.oracle.common_lengths(tenant, rows, pads, salts)
        spaces, skip = self.mm.open_batch(rows, pads=pads, tenant=tenant, salt=dict(salts))
        assert [len(space) for space in spaces] == expected
        assert skip == min(map(sum, zip(pads or [0] * len(rows), expected, strict=True)), default=0)
        for space, tokens in zip(spaces, rows, strict=True):
            self.oracle.spaces.append(self.oracle.believed(space, tenant, tokens[: len(space)], salts))
        wrong: list[Any] = [*rows, "no row"]
        self.refused(InvalidRequest, lambda: self.mm.open_batch(wrong, tenant=tenant))

    @rule(tokens=some.lists(TOKENS, min_size=5, max_size=17), tenant=TENANTS, salts=SALTS)
    def prefill(self, tokens: list[int], tenant: bytes, salts: Salts = ()) -> None:
        """Compute the rest of a prompt in one step, which is what an engine does most."""
        self.open(tokens, tenant, salts)
        believed = self.oracle.spaces[-1]
        self.make_plan([believed], [tokens[len(believed.tokens) :]])
        self.settle_everything()

    @rule(length=some.integers(17, 80), rare=some.integers(0, 80), tenant=TENANTS)
    def prefill_a_long_prompt(self, length: int, rare: int, tenant: bytes) -> None:
        """Compute a prompt that is wider than the page table was, or longer than the pool."""
        self.prefill([int(at == rare) for at in range(length)], tenant)

    @precondition(lambda self: self.oracle.spaces)
    @rule(data=some.data(), more=some.integers(0, 4), tenant=TENANTS)
    def open_what_no_pool_could_hold(self, data: some.DataObject, more: int, tenant: bytes) -> None:
        """Open a prompt that begins with known tokens and would fill every frame and every column of the table."""
        tokens = self.pick(data, settled=False).tokens
        self.open(
            tokens + [1] * (max(self.mm.num_frames, self.mm.state.table.shape[1]) * self.mm.block_size + more), tenant
        )

    @precondition(lambda self: self.oracle.spaces)
    @rule(data=some.data(), length=some.integers(1, 3))
    def decode(self, data: some.DataObject, length: int) -> None:
        """Compute a few more tokens for each of some spaces."""
        owners = data.draw(some.lists(some.sampled_from(self.oracle.spaces), min_size=1, max_size=5, unique=True))
        self.make_plan(owners, [data.draw(some.lists(TOKENS, min_size=length, max_size=length)) for _ in owners])
        self.settle_everything()

    def settle_everything(self) -> None:
        """Commit all outstanding plans, oldest first."""
        self.oracle.run()
        for step in list(self.oracle.plans):
            self.mm.commit(step.plan, [token for new in step.tokens for token in new])
            self.oracle.plans.remove(step)
            for owner, tokens in zip(step.owners, step.tokens, strict=True):
                self.oracle.record_commit(owner, tokens)

    @precondition(lambda self: self.oracle.spaces)
    @rule(data=some.data(), late=some.booleans())
    def plan(self, data: some.DataObject, late: bool) -> None:
        owners = data.draw(some.lists(some.sampled_from(self.oracle.spaces), min_size=1, max_size=4, unique=True))
        self.make_plan(owners, [data.draw(some.lists(TOKENS, max_size=9)) for _ in owners])
        if not late:
            self.oracle.run()

    def make_plan(self, owners: list[Believed], tokens: list[list[int]]) -> None:
        """Plan, if the oracle allows it; else check that the plan is refused and nothing is changed."""
        counts = [len(new) for new in tokens]
        needed = self.oracle.frames_needed(owners, counts)
        refusal = self.oracle.refusal(needed)
        if refusal:
            with refused(self.mm, OutOfFrames) as short:
                self.mm.plan([b.space for b in owners], counts)
            assert type(short.value) is refusal
            assert short.value.shortfall > 0
            if refusal is OutOfFrames:
                assert short.value.needed == needed.total()
                assert short.value.shortfall >= needed.total() - self.mm.available
            return
        usage_before = self.oracle.account_usage()
        before_tokens = [self.tokens_planned(b) for b in owners]
        plan = self.mm.plan([b.space for b in owners], counts)
        self.oracle.verify_quotas(needed, usage_before)
        assert plan.seq_lens.tolist() == [len(b) + n for b, n in zip(before_tokens, counts, strict=True)]
        assert plan.positions.tolist() == [
            len(b) + i for b, n in zip(before_tokens, counts, strict=True) for i in range(n)
        ]
        self.oracle.plans.append(Outstanding(plan, owners, tokens, before_tokens))

    def tokens_planned(self, believed: Believed) -> list[int]:
        new = [
            t for p in self.oracle.plans for o, ts in zip(p.owners, p.tokens, strict=True) if o is believed for t in ts
        ]
        return [*believed.tokens, *new]

    def later_writers(self, step: Outstanding) -> set[Believed]:
        """Return the spaces that get tokens by plans newer than `step`."""
        return set().union(*(p.writers for p in self.oracle.plans[self.oracle.plans.index(step) + 1 :]))

    @precondition(lambda self: self.oracle.plans)
    @rule(data=some.data())
    def commit(self, data: some.DataObject) -> None:
        step = data.draw(some.sampled_from(self.oracle.plans))
        older = self.oracle.plans[: self.oracle.plans.index(step)]
        flat = [token for new in step.tokens for token in new]
        if any(step.writers & p.writers for p in older):  # a space without planned tokens can be settled at any time
            self.refused(PlanConflict, lambda: self.mm.commit(step.plan, flat))
            return
        self.oracle.run(step)
        later = self.later_writers(step)
        keep = data.draw(some.sampled_from([False, False, True]))
        kept = [
            len(t) if o in later and not keep else data.draw(some.integers(0, len(t)))
            for o, t in zip(step.owners, step.tokens, strict=True)
        ]
        named = data.draw(some.sampled_from([True, True, True, False]))
        ids = [token for t, k in zip(step.tokens, kept, strict=True) for token in t[:k]]
        self.mm.commit(step.plan, ids if named else None, kept, keep_planned=keep)
        for owner, tokens, count in zip(step.owners, step.tokens, kept, strict=True):
            self.oracle.record_commit(owner, tokens[:count], named=named)
        rest = [tokens[count:] for tokens, count in zip(step.tokens, kept, strict=True)]
        assert step.plan.is_outstanding == (keep and any(rest))
        if step.plan.is_outstanding:
            step.tokens = rest
            assert step.plan.remaining.tolist() == [len(tokens) for tokens in rest]
            return
        self.oracle.plans.remove(step)
        self.refused(PlanConflict, lambda: self.mm.commit(step.plan, flat))
        self.refused(PlanConflict, lambda: self.mm.abort(step.plan))

    @precondition(lambda self: self.oracle.plans)
    @rule()
    def cut_short_under_a_newer_plan(self) -> None:
        for at, step in enumerate(self.oracle.plans):
            earlier = [o for p in self.oracle.plans[:at] for o in p.owners]
            if step.writers & self.later_writers(step) and not any(o in earlier for o in step.owners):
                self.refused(PlanConflict, lambda plan=step.plan: self.mm.commit(plan, [], [0] * len(plan.rows)))
                return

    @precondition(lambda self: self.oracle.plans)
    @rule(data=some.data())
    def abort(self, data: some.DataObject) -> None:
        """Abort any plan that is the newest of its spaces, run or not. Other spaces may have had plans since."""
        step = data.draw(some.sampled_from(self.oracle.plans))
        if step.writers & self.later_writers(step):
            self.refused(PlanConflict, lambda: self.mm.abort(step.plan))
            return
        self.mm.abort(step.plan, copied=step.has_run)
        self.oracle.plans.remove(step)
        # a completion that comes twice, or after the cancellation
        self.refused(PlanConflict, lambda: self.mm.abort(step.plan))
        self.refused(PlanConflict, lambda: self.mm.commit(step.plan, [0] * int(step.plan.cu_seqlens_q[-1])))

    @precondition(lambda self: self.oracle.spaces)
    @rule(data=some.data())
    def fork(self, data: some.DataObject) -> None:
        parent = self.pick(data)
        if self.busy(parent):
            self.refused(PlanConflict, parent.space.fork)
            return
        child = parent.space.fork()
        assert child.pages.tolist() == parent.space.pages.tolist()
        self.oracle.spaces.append(copied(parent, child))

    @precondition(lambda self: self.oracle.spaces)
    @rule(data=some.data())
    def reorder(self, data: some.DataObject) -> None:
        """The beams of a search go on: some once, some several times, some not at all."""
        beams = data.draw(some.lists(some.sampled_from(self.oracle.spaces), min_size=1, max_size=3, unique=True))
        index = data.draw(some.lists(some.integers(0, len(beams) - 1), max_size=4))
        spaces = [believed.space for believed in beams]
        if any(self.busy(beams[at]) and index.count(at) > 1 for at in index):
            self.refused(PlanConflict, lambda: self.mm.reorder(spaces, index))
            return
        result = self.mm.reorder(spaces, index)
        for place, at in enumerate(index):
            if at in index[:place]:
                assert result[place].pages.tolist() == spaces[at].pages.tolist()
                self.oracle.spaces.append(copied(beams[at], result[place]))
            else:
                assert result[place] is spaces[at]
        for at, believed in enumerate(beams):
            if at not in index:
                self.oracle.spaces.remove(believed)
                self.dead.append(believed)

    @precondition(lambda self: self.oracle.spaces)
    @rule(data=some.data())
    def truncate(self, data: some.DataObject) -> None:
        believed = self.pick(data)
        length = data.draw(some.integers(0, len(believed.tokens)))
        if self.busy(believed):
            self.refused(PlanConflict, lambda: believed.space.truncate(length))
            return
        if length < len(believed.tokens) and self.oracle.lacks_visible_pages(believed, length):
            self.refused(InvalidRequest, lambda: believed.space.truncate(length))
            return
        believed.space.truncate(length)
        del believed.tokens[length:]
        believed.unnamed = {position for position in believed.unnamed if position < length}
        believed.behind = [
            {page for page in behind if page < -(-length // self.mm.block_size)} for behind in believed.behind
        ]

    @precondition(lambda self: self.oracle.plans)
    @rule(data=some.data())
    def cancel(self, data: some.DataObject) -> None:
        """A client goes away: release its space, and abort its plans, newest first, run or not."""
        believed = data.draw(some.sampled_from([owner for step in self.oracle.plans for owner in step.owners]))
        if believed in self.oracle.spaces:
            believed.space.release()
            self.oracle.spaces.remove(believed)
            self.dead.append(believed)
        for step in [step for step in reversed(self.oracle.plans) if believed in step.owners]:
            if not step.writers & self.later_writers(step):
                self.mm.abort(step.plan, copied=step.has_run)
                self.oracle.plans.remove(step)

    @precondition(lambda self: self.oracle.spaces)
    @rule(data=some.data())
    def release(self, data: some.DataObject) -> None:
        believed = self.pick(data, settled=False)
        believed.space.release()
        self.oracle.spaces.remove(believed)
        self.dead.append(believed)
        self.refused(DoubleRelease, believed.space.release)

    @precondition(lambda self: self.dead)
    @rule(data=some.data())
    def use_a_stale_handle(self, data: some.DataObject) -> None:
        dead = data.draw(some.sampled_from(self.dead)).space
        self.refused(StaleHandle, lambda: self.mm.plan([dead], [1]))
        self.refused(StaleHandle, dead.fork)
        self.refused(StaleHandle, lambda: dead.truncate(0))

    @precondition(lambda self: self.oracle.spaces)
    @rule(data=some.data())
    def ask_nonsense(self, data: some.DataObject) -> None:
        space = self.pick(data).space
        self.refused(InvalidRequest, lambda: self.mm.plan([space], [-1]))
        self.refused(InvalidRequest, lambda: self.mm.plan([space, space], [1, 1]))
        self.refused(InvalidRequest, lambda: self.mm.plan([space], [1, 2]))
        self.refused(InvalidRequest, lambda: self.mm.plan([space], [2**63 - 1]))
        self.refused(InvalidRequest, lambda: self.mm.plan(np.array([2**32 + int(space.asid)]), [1]))

    @rule(
        tenant=some.sampled_from([b"acme", b"umbra"]),
        hard=LIMITS,
        soft=LIMITS,
        protected=some.sampled_from([0, 0, 2, 4]),
    )
    def set_quota(self, tenant: bytes, hard: int | None, soft: int | None, protected: int) -> None:
        unit = max(1, self.mm.num_frames // 10)
        hard, soft, protected = hard and hard * unit, soft and soft * unit, protected * unit
        account = self.mm._accounts.get(tenant)
        roots = [root.number for name, root in self.mm._roots.every() if name == tenant]
        in_use = account is None and self.mm.state.roots[roots, st.IN_USE].any()
        others = sum(quota[2] for other, quota in self.oracle.quotas.items() if other != account)
        if in_use or (hard is not None and protected > hard) or protected + others > self.mm.num_frames:
            self.refused(InvalidRequest, lambda: self.mm.set_quota(tenant, hard=hard, soft=soft, protected=protected))
            return
        self.mm.set_quota(tenant, hard=hard, soft=soft, protected=protected)
        self.oracle.quotas[self.mm._accounts[tenant]] = hard, soft, protected

    @rule(count=some.sampled_from([0, 1, 2, 3, 4, 100]))
    def evict(self, count: int) -> None:
        evictable = self.mm.stats().evictable
        assert self.mm.evict(count) == min(count, evictable)

    @rule(seldom=some.sampled_from([False, False, False, True]))
    def forget(self, seldom: bool) -> None:
        """The weights were updated: forget what was computed."""
        if not seldom:
            return
        if self.oracle.pins:
            self.refused(InvalidRequest, self.mm.forget)
            return
        now = self.mm.stats()
        assert self.mm.forget() == now.evictable
        assert self.mm.stats().free == now.free + now.evictable
        assert not self.mm.state.frames["published"].any()

    @rule(eighths=some.integers(1, 12))
    def resize(self, eighths: int) -> None:
        """Resize: larger always; smaller if the rest fits and no frame of a plan, an epoch or a pin has to move."""
        num_frames = -(-self.first_size * eighths // 8)
        state = self.mm.state
        status, named = state.frames["status"], [frame for pinned in self.oracle.pins for frame in pinned.frames]
        used = np.flatnonzero(status != st.FREE)
        beyond = used[used >= num_frames]
        fixed = self.oracle.plans or self.oracle.epochs or any(frame >= num_frames for frame in named)
        protected = sum(quota[2] for quota in self.oracle.quotas.values())
        if protected > num_frames or (len(beyond) and (fixed or len(used) - self.mm.stats().evictable > num_frames)):
            self.refused((PlanConflict, InvalidRequest, OutOfFrames), lambda: self.mm.resize(num_frames))
            return
        findable, generations = self.findable_names(), state.frames["generation"]
        moves = self.mm.resize(num_frames).tolist()
        self.oracle.move(moves)
        for source, target in moves:
            if (name := self.named.get((source, int(generations[source])))) is not None:
                self.named[target, self.generation(target)] = name
        self.named = {(frame, at): name for (frame, at), name in self.named.items() if frame < num_frames}
        assert self.mm.num_frames == len(self.mm.state.frames) == num_frames
        assert set(self.findable_names()) <= set(findable)
        assert len(used) > num_frames or len(self.findable_names()) == len(findable)  # pages that fit stay findable

    def findable_names(self) -> list[bytes]:
        return list(names_by_frame(self.mm).values())

    @precondition(lambda self: self.oracle.spaces)
    @rule(data=some.data())
    def pin_a_space(self, data: some.DataObject) -> None:
        believed = self.pick(data, settled=False)
        full = len(believed.tokens) // self.mm.block_size
        frames = [
            frame
            for group in self.oracle.groups
            for frame in believed.space.pages_in(group)[:full].tolist()
            if frame >= 0
        ]
        if self.mm.stats().pinned + len(frames) > self.mm.max_pinned:
            self.refused(InvalidRequest, lambda: self.mm.pin(believed.space))
            return
        self.oracle.run()  # a pin is for a transfer, which reads stored KV
        deadline = data.draw(some.sampled_from([None, 1.0, 2.0]))
        self.oracle.record_pin(self.mm.pin(believed.space, owner="disk", deadline=deadline), frames)

    @rule(data=some.data())
    def pin_a_frame(self, data: some.DataObject) -> None:
        frame = data.draw(some.integers(0, self.mm.num_frames - 1))
        prefix = self.oracle.prefix_of(frame)
        if prefix is None or self.mm.stats().pinned + len(prefix) > self.mm.max_pinned:
            self.refused(InvalidRequest, lambda: self.mm.pin(np.array([frame])))
            return
        self.oracle.run()
        self.oracle.record_pin(self.mm.pin(np.array([frame])), prefix)

    @precondition(lambda self: self.oracle.pins)
    @rule(data=some.data())
    def unpin(self, data: some.DataObject) -> None:
        pinned = data.draw(some.sampled_from(self.oracle.pins))
        self.mm.unpin(pinned.pin)
        self.oracle.pins.remove(pinned)
        self.refused(DoubleRelease, lambda: self.mm.unpin(pinned.pin))

    @rule(data=some.data(), step=some.sampled_from([1, 1, 5]))
    def retire(self, data: some.DataObject, step: int) -> None:
        """A step is launched; some spaces may be released at the same time."""
        leaving = (
            data.draw(some.lists(some.sampled_from(self.oracle.spaces), max_size=2, unique=True))
            if self.oracle.spaces
            else []
        )
        self.epoch += step
        self.oracle.record_epoch(self.epoch)
        self.mm.retire(self.epoch, [b.space for b in leaving])
        self.oracle.spaces = [b for b in self.oracle.spaces if b not in leaving]
        self.dead += leaving
        self.refused(InvalidRequest, lambda: self.mm.retire(self.epoch))
        self.refused(InvalidRequest, lambda: self.mm.retire(self.epoch + 2**30))
        self.refused(InvalidRequest, lambda: self.mm.advance(self.epoch + 1))

    @precondition(lambda self: self.oracle.epochs)
    @rule(data=some.data())
    def advance(self, data: some.DataObject) -> None:
        """Steps finish: perhaps several at once, perhaps reported late or twice."""
        passed = data.draw(some.sampled_from(sorted(self.oracle.epochs)))
        self.mm.advance(passed)
        self.oracle.epochs = {epoch: frames for epoch, frames in self.oracle.epochs.items() if epoch > passed}
        assert self.mm.advance(passed) == 0

    @precondition(lambda self: self.oracle.spaces)
    @rule(data=some.data(), action=some.sampled_from(["demote", "release"]))
    def advise(self, data: some.DataObject, action: str) -> None:
        self.mm.advise(self.pick(data, settled=False).space, action)

    @rule()
    def read_events(self) -> None:
        """Read the events, seldom enough that the small log overflows in between."""
        self.reader.catch_up()
        found = names_by_frame(self.mm)
        published = self.mm.state.frames["published"]
        still_published = {
            name for (frame, at), name in self.named.items() if published[frame] and self.generation(frame) == at
        }
        # a page that lost its prefix is not removed before its frame is reused
        assert set(found.values()) <= self.reader.names <= still_published
        fresh = Follower(self.mm)
        assert (fresh.names, fresh.companions) == (self.reader.names, self.reader.companions)

    def generation(self, frame: int) -> int:
        return int(self.mm.state.frames["generation"][frame])

    @invariant()
    def manager_agrees_with_the_oracle(self) -> None:
        if hasattr(self, "oracle"):
            self.named |= names_by_frame(self.mm)
            self.oracle.verify()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@pytest.mark.slow
def test_the_machine_for_a_long_time() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(Machine, settings=settings(max_examples=1500, stateful_step_count=100, deadline=None))
