"""The laws of `advise`: prefixes that are held until a time, and yield to plans; pins that end; hostile hints."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pagedkv.core import AddressSpace, Group, MemoryManager, StatePool
from pagedkv.errors import InvalidRequest, OutOfFrames
from tests.core.oracle import grown

S = 4


def prompted(mm: MemoryManager, first: int, pages: int, tenant: bytes = b"") -> AddressSpace:
    return grown(mm, [first, *[2] * (S * pages)], tenant=tenant)


def known(mm: MemoryManager, first: int, pages: int, tenant: bytes = b"") -> int:
    return mm.lookup([first, *[2] * (S * pages)], tenant=tenant) // S


def retained(mm: MemoryManager, first: int, pages: int, until: float, now: float = 0.0) -> str:
    space = prompted(mm, first, pages)
    answer = mm.advise(space, "retain", until=until, now=now)
    space.release()
    mm.check()
    return answer


def crowd(mm: MemoryManager, pages: int, first: int = 1000) -> None:
    """Compute and release other prompts: in LRU order they push everything out that is older."""
    for number in range(first, first + pages):
        prompted(mm, number, 1).release()
    mm.check()


@pytest.mark.parametrize("policy", ["lru", "2q", "lfu", "cost"])
def test_a_retained_prefix_survives_traffic_until_its_time(policy: str) -> None:
    mm = MemoryManager(32, S, policy=policy, hints=0.25)
    assert retained(mm, 1, 5, until=9.0) == "accepted"
    crowd(mm, 60)
    assert known(mm, 1, 5) == 5
    mm.advise(None, "release", now=9.0)
    assert mm.stats().pinned == 0
    crowd(mm, 60, first=2000)
    assert known(mm, 1, 5) == 0


def test_a_plan_takes_what_is_needed_last_and_only_as_much_as_it_lacks() -> None:
    mm = MemoryManager(32, S, hints=1.0)
    for first, until in ((1, 5.0), (2, 30.0), (3, 7.0)):
        assert retained(mm, first, 6, until) == "accepted"
    assert mm.available == 32
    big = mm.open([9])
    plan = mm.plan([big], [S * 16])  # 14 frames are free
    mm.check()
    assert mm.stats().pinned == 12
    assert (known(mm, 1, 6), known(mm, 3, 6)) == (6, 6)
    assert known(mm, 2, 6) == 4
    mm.abort(plan)


def test_a_plan_that_is_too_large_ends_no_hint() -> None:
    mm = MemoryManager(32, S, hints=1.0)
    retained(mm, 1, 6, 5.0)
    running = prompted(mm, 2, 4)
    with pytest.raises(OutOfFrames):
        mm.plan([running], [S * 40])
    assert mm.stats().pinned == 6


def test_beyond_the_share_the_prefix_that_is_needed_last_goes_and_the_newest_is_clipped() -> None:
    mm = MemoryManager(40, S, hints=0.25)
    assert retained(mm, 1, 6, 50.0) == "accepted"
    assert retained(mm, 2, 7, 20.0) == "accepted"  # 1 is needed later, and ends
    assert retained(mm, 3, 6, 90.0) == "clipped"
    assert mm.stats().pinned == 10
    assert retained(mm, 4, 6, 95.0) == "rejected"
    crowd(mm, 60)
    assert [known(mm, first, 6) for first in (1, 2, 3, 4)] == [0, 6, 3, 0]


def test_a_shared_prefix_counts_once_and_a_longer_one_replaces_a_shorter() -> None:
    mm = MemoryManager(64, S, hints=0.25)
    system = [8] * (S * 10)
    for user in range(3):
        space = grown(mm, [*system, *[user] * (S + 1)])
        assert mm.advise(space, "retain", until=5.0) == "accepted"
        space.release()
    space = grown(mm, [*system, *[0] * (2 * S + 1)])
    assert mm.advise(space, "retain", until=6.0) == "accepted"
    space.release()
    assert len(mm._hints.soft) == 3  # that of user 0 was replaced
    mm.check()
    assert mm.stats().mapped == 14


def test_release_ends_exactly_one_prefix_and_demote_lets_it_go_first() -> None:
    mm = MemoryManager(32, S, hints=0.5)
    retained(mm, 1, 3, 9.0)
    retained(mm, 1, 5, 9.0)
    space = mm.open([1, *[2] * (S * 3)])
    assert mm.advise(space, "release") == "missing"  # the longer one replaced it
    longer = mm.open([1, *[2] * (S * 5)])
    assert mm.advise(longer, "demote") == "accepted"
    space.release()
    longer.release()
    assert mm.stats().pinned == 0
    crowd(mm, 30)
    assert known(mm, 1, 5) < 3


def test_the_answers_say_what_happened() -> None:
    mm = MemoryManager(32, S)
    short = grown(mm, [1, 2])
    assert mm.advise(short, "retain", until=5.0) == "missing"
    assert mm.advise(short, "release") == "missing"
    space = prompted(mm, 1, 2)
    assert mm.advise(space, "retain", until=5.0, now=5.0) == "rejected"
    assert mm.advise(space, "pin", until=float("inf")) == "rejected"
    assert mm.advise(space, "prefetch") == "rejected"
    assert mm.advise(space, "retain", until=5.0) == "accepted"
    assert mm.advise(space, "retain", until=3.0) == "accepted"  # at least: it still lasts until 5
    mm.advise(None, "release", now=4.0)
    assert mm.advise(space, "release", now=4.0) == "accepted"
    assert mm.advise(None, "release") == "missing"


def test_a_pin_ends_at_its_time_and_not_for_a_plan() -> None:
    mm = MemoryManager(32, S, max_pinned=0.25)
    space = prompted(mm, 1, 10)
    assert mm.advise(space, "pin", until=5.0) == "clipped"
    space.release()
    big = mm.open([9])
    with pytest.raises(OutOfFrames):
        mm.plan([big], [S * 25])
    plan = mm.plan([big], [S * 24])
    mm.check()
    mm.abort(plan)
    with pytest.raises(InvalidRequest, match="advise"):
        mm.forget()
    mm.advise(None, "release", now=6.0)
    mm.abort(mm.plan([big], [S * 32]))
    mm.forget()


def test_a_tenant_at_its_quota_gives_its_own_hints_and_keeps_half_for_itself() -> None:
    mm = MemoryManager(64, S, hints=1.0)
    mm.set_quota(b"a", hard=10)
    retained(mm, 1, 8, 5.0)
    mine = prompted(mm, 1, 8, b"a")
    assert mm.advise(mine, "pin", until=9.0) == "clipped"  # of 10, pins may hold 5
    mine.release()
    second = prompted(mm, 2, 4, b"a")
    assert mm.advise(second, "retain", until=9.0) == "accepted"
    second.release()
    assert mm.available_to(b"a") == 5
    third = mm.open([3], tenant=b"a")
    mm.abort(mm.plan([third], [S * 5]))
    assert len(mm._hints.soft) == 1  # that of the other tenant
    mm.check()


def test_forget_and_a_smaller_pool_end_retained_prefixes() -> None:
    mm = MemoryManager(64, S, hints=1.0)
    for first in range(6):
        retained(mm, first, 8, 5.0 + first)
    assert mm.stats().pinned == 48
    mm.resize(32)
    mm.check()
    assert known(mm, 0, 8) == 8  # the one that is needed first
    mm.forget()
    assert (mm.stats().pinned, mm.stats().mapped) == (0, 0)
    mm.check()


def test_frames_that_an_open_epoch_may_read_are_pending_and_come_free() -> None:
    mm = MemoryManager(16, S, hints=1.0)
    retained(mm, 1, 10, 5.0)
    mm.retire(1)
    assert (mm.available, mm.pending) == (6, 10)
    big = mm.open([9])
    with pytest.raises(OutOfFrames) as raised:
        mm.plan([big], [S * 12])
    assert raised.value.pending == 10  # they were released, and wait for the epoch
    mm.advance(1)
    mm.abort(mm.plan([big], [S * 12]))


def test_a_recurrent_state_is_held_with_its_pages_and_yields_with_them() -> None:
    mm = MemoryManager(64, S, hints=0.5, states=StatePool(6))
    for first in (1, 2):
        space = prompted(mm, first, 3)
        assert mm.advise(space, "retain", until=5.0 + first) == "accepted"
        space.release()
    for number in range(100, 120):
        prompted(mm, number, 3).release()
    assert [mm.why([first, *[2] * (S * 3)]).ready for first in (1, 2)] == [12, 12]
    running = [mm.open([7 + i] * 9) for i in range(3)]
    mm.commit(mm.plan(running, [9, 9, 9]), [*[7] * 9, *[8] * 9, *[9] * 9])
    mm.commit(mm.plan(running, [1, 1, 1]), [1, 1, 1])  # all six states
    mm.check()


class Server:
    """Requests of an honest tenant that come back, and those of a hostile one, which gives hints."""

    def __init__(self, frames: int, seed: int, **options: float) -> None:
        self.mm, self.random = MemoryManager(frames, S, **options), random.Random(seed)
        self.computed, self.answers, self.now = 0, Counter[str](), 0.0
        self.running: list[AddressSpace] = []

    def serve(self, first: int, pages: int, tenant: bytes) -> AddressSpace:
        ids = [first, *[2] * (S * pages)]
        space = self.mm.open(ids, tenant=tenant)
        new = len(ids) - len(space)
        self.computed += new if tenant == b"honest" else 0
        self.mm.commit(self.mm.plan([space], [new]), ids[len(space) :])
        return space

    def step(self, *, is_hinting: bool) -> None:
        draw = self.random
        self.now += draw.random()
        user = int(draw.paretovariate(0.8)) % 60
        self.serve(user, 2 + user % 7, b"honest").release()
        self.running.append(self.serve(draw.randrange(40), 1 + draw.randrange(9), b"hostile"))
        action = draw.choice(["retain", "retain", "pin", "demote", "release"])
        end = self.now + draw.choice([-1.0, 1e-9, 1.0, 30.0, 1e9, float("inf")])
        target = draw.choice(self.running)
        if is_hinting:
            until = end if action in ("retain", "pin") else None
            self.answers[self.mm.advise(target, action, until=until, now=self.now)] += 1
        if len(self.running) > 2:
            self.running.pop(draw.randrange(3)).release()


@pytest.mark.many_steps
@pytest.mark.parametrize("hints", [2_000, pytest.param(10**6, marks=pytest.mark.slow)])
def test_hostile_hints_wedge_no_request_and_cost_no_more_than_their_share(hints: int) -> None:
    hinted = Server(200, 1, hints=0.1, max_pinned=0.0)
    smaller = Server(180, 1)
    pinned = Server(200, 2, hints=0.5, max_pinned=0.5)
    for number in range(hints):
        hinted.step(is_hinting=True)
        smaller.step(is_hinting=False)
        pinned.step(is_hinting=True)  # a plan that lacks frames would raise
        if number % (hints // 50) == 0:
            for server in (hinted, pinned):
                server.mm.check()
    assert set(pinned.answers) == set(hinted.answers) == {"accepted", "clipped", "rejected", "missing"}
    assert hinted.computed <= 1.05 * smaller.computed


def test_a_pool_full_of_pins_still_serves() -> None:
    mm = MemoryManager(64, S, groups=(Group(),), hints=0.5)
    for first in range(20):
        space = prompted(mm, first, 7)
        mm.advise(space, "pin" if first % 2 else "retain", until=1e9)
        space.release()
    assert mm.stats().pinned > 50
    big = mm.open([99])
    mm.commit(mm.plan([big], [S * 32]), [1] * (S * 32))
    mm.check()
