"""The laws of tenants: quotas, the order in which accounts give up frames, and accounts that add up."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

from pagedkv.core import Group, MemoryManager
from pagedkv.core import state as st
from pagedkv.core.policies import POLICIES
from pagedkv.errors import InvalidRequest, InvariantViolation, OutOfFrames, QuotaExceeded
from tests.core.oracle import grown, refused


def filled(mm: MemoryManager, tenant: bytes, frames: int, first: int = 0) -> None:
    """Make `frames` cached frames of `tenant`, each a prompt of its own."""
    for prompt in range(first, first + frames):
        grown(mm, [prompt] * 4, tenant=tenant).release()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_burst_of_one_tenant_does_not_evict_the_protected_share_of_another(policy: str) -> None:
    mm = MemoryManager(16, 4, policy=policy)
    mm.set_quota(b"calm", protected=6)
    filled(mm, b"calm", 10)
    for prompt in range(50):
        grown(mm, [prompt] * 8, tenant=b"burst").release()
    assert mm.usage(b"calm").cached >= 6
    assert policy != "lru" or mm.usage(b"calm").evictions == 4
    mm.check()


def test_a_plan_that_needs_what_is_protected_is_refused_and_nothing_is_changed(mm: MemoryManager) -> None:
    mm.set_quota(b"calm", protected=6)
    filled(mm, b"calm", 10)
    burst = mm.open(tenant=b"burst")
    with refused(mm, OutOfFrames, "needs 11 frames; 6 are free, 4 evictable") as short:
        mm.plan([burst], [11 * 4])
    assert short.value.shortfall == 1
    mm.plan([burst], [10 * 4])


def test_at_its_hard_quota_a_tenant_evicts_its_own_and_not_what_is_free(mm: MemoryManager) -> None:
    mm.set_quota(b"small", hard=4)
    filled(mm, b"other", 3)
    filled(mm, b"small", 9)
    assert mm.usage(b"small").used == 4
    assert mm.stats().free == 9
    assert mm.stats().cached == 7


def test_beyond_its_hard_quota_a_plan_is_refused_by_name_and_nothing_is_changed(mm: MemoryManager) -> None:
    mm.set_quota(b"small", hard=4)
    filled(mm, b"small", 1)
    running = grown(mm, [7] * 9, tenant=b"small")
    other = mm.open(tenant=b"other")
    told = "needs 2 frames for tenant b'small', which holds 4 of at most 4, 1 of them"
    with refused(mm, QuotaExceeded, told) as over:
        mm.plan([other, running], [4, 8])
    assert (over.value.tenant, over.value.quota, over.value.used, over.value.shortfall) == (b"small", 4, 4, 1)
    mm.plan([other, running], [4, 4])


@pytest.mark.parametrize("groups", [(Group(),), (Group(), Group(window=4))])
def test_a_hard_quota_counts_the_copies_and_the_pages_of_all_groups(groups: tuple[Group, ...]) -> None:
    mm = MemoryManager(num_frames=16, block_size=4, groups=groups)
    mm.set_quota(b"t", hard=len(groups))
    parent = grown(mm, [1, 2], tenant=b"t")
    child = parent.fork()
    for space, count in ((child, 1), (parent, 3)):  # a copy of the shared tail; a copy and one more page
        with refused(mm, QuotaExceeded) as over:
            mm.plan([space], [count])
        assert over.value.needed == len(groups) * (1 + (count > 2))
    mm.set_quota(b"t", hard=3 * len(groups))
    assert mm.plan([child], [3]).num_tokens == 3
    assert mm.usage(b"t").used == 3 * len(groups)
    mm.check()


def test_a_tenant_over_its_soft_quota_is_evicted_first(mm: MemoryManager) -> None:
    mm.set_quota(b"greedy", soft=4)
    mm.set_quota(b"modest", soft=8)
    filled(mm, b"modest", 8)
    filled(mm, b"greedy", 8)  # used later, but evicted first
    grown(mm, [99] * 16, tenant=b"new")
    assert (mm.usage(b"modest").cached, mm.usage(b"greedy").cached) == (8, 4)
    grown(mm, [98] * 8, tenant=b"new")
    assert (mm.usage(b"modest").cached, mm.usage(b"greedy").cached) == (6, 4)  # no tenant is over: the oldest frames go


def test_usage_counts_unique_and_shared_frames_and_what_was_asked(mm: MemoryManager) -> None:
    mm.set_quota(b"t", hard=9, soft=8, protected=2)
    space = grown(mm, [1] * 12, tenant=b"t")
    twin = space.fork()
    grown(mm, [2] * 8, tenant=b"t").release()
    alone = grown(mm, [3] * 3, tenant=b"t")
    now = mm.usage(b"t")
    assert (now.used, now.unique, now.shared, now.cached, now.evictable) == (6, 1, 3, 2, 2)
    assert (now.hard, now.soft, now.protected) == (9, 8, 2)
    for handle in (space, twin, alone):
        handle.release()
    mm.open([1] * 12, tenant=b"t").release()
    now = mm.stats().tenants[b"t"]
    assert (now.tokens_asked - 8 - 4 - 0, now.tokens_matched, now.unique + now.shared) == (8, 8, 0)
    assert mm.stats().tokens_asked == now.tokens_asked


@pytest.mark.parametrize(
    ("quota", "match"),
    [
        ({"hard": -1}, "hard is -1; give an int of 0 or more"),
        ({"soft": 1.5}, "soft is 1.5; give an int"),
        ({"protected": 17}, "protected is 17; give an int of 0 or more, below 17"),
        ({"hard": 3, "protected": 4}, "protect no more than is allowed"),
        ({"protected": 7}, "at most 6 are left"),
    ],
)
def test_quotas_that_make_no_sense_are_refused(mm: MemoryManager, quota: dict[str, Any], match: str) -> None:
    mm.set_quota(b"other", protected=10)
    with refused(mm, InvalidRequest, match):
        mm.set_quota(b"t", **quota)


def test_a_pin_of_frames_is_charged_to_the_tenant_of_the_frames(mm: MemoryManager) -> None:
    """The first tenant, which has root 0, is not charged."""
    filled(mm, b"first", 1)
    mm.evict(1)
    space = grown(mm, [1] * 8, tenant=b"second")
    pin = mm.pin(space.pages)
    mm.check()
    mm.set_quota(b"first", hard=3)
    with pytest.raises(InvalidRequest, match="before its first prompt"):
        mm.set_quota(b"second", hard=3)
    space.release()
    mm.unpin(pin)
    mm.evict(2)
    mm.set_quota(b"second", hard=3)


@pytest.mark.many_steps
def test_a_plan_of_a_tenant_can_take_exactly_the_frames_available_to_it() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        mm, spaces = MemoryManager(24, 1, watermark=0.1), []
        mm.set_quota(b"a", hard=int(rng.integers(4, 20)), protected=int(rng.integers(0, 5)))
        mm.set_quota(b"b", soft=3, protected=int(rng.integers(0, 9)))
        for turn in range(12):
            tenant = (b"a", b"b", b"", b"c")[int(rng.integers(4))]
            with contextlib.suppress(OutOfFrames):
                spaces.append(grown(mm, [turn] * int(rng.integers(1, 5)), tenant=tenant))
            if spaces and rng.integers(2):
                spaces.pop(0).release()
        for tenant in (b"a", b"b", b"", b"c"):
            most, space = mm.available_to(tenant), mm.open(tenant=tenant)
            with pytest.raises(OutOfFrames):
                mm.plan([space], [most + 1])
            plan = mm.plan([space], [most])
            mm.abort(plan)
            space.release()
            mm.check()


def test_admission_respects_quotas_and_protected_shares() -> None:
    mm = MemoryManager(20, 4, watermark=0.1)
    mm.set_quota(b"small", hard=4)
    mm.set_quota(b"calm", protected=6)
    filled(mm, b"calm", 6)
    assert (mm.available, mm.available_to(), mm.available_to(b"small"), mm.available_to(b"calm")) == (20, 14, 4, 20)
    assert mm.admits(4, tenant=b"small")
    assert not mm.admits(5, tenant=b"small")
    assert mm.admits(12)
    assert not mm.admits(13)
    assert mm.admits(18, tenant=b"calm")
    assert not mm.admits(19, tenant=b"calm")
    grown(mm, [7] * 16, tenant=b"small")
    assert mm.available_to(b"small") == 0


@pytest.mark.parametrize("figure", [st.USED, st.EVICTABLE, st.EVICTED, st.ASKED_BY, st.MATCHED_BY, st.PROTECTED])
def test_check_recounts_accounts(mm: MemoryManager, figure: int) -> None:
    mm.set_quota(b"t", protected=2)
    filled(mm, b"t", 2)
    filled(mm, b"other", 2)
    mm.check()
    for account in (0, 1):
        st.account_registers(mm.state.reg)[account, figure] += 15
        with pytest.raises(InvariantViolation, match="I1 broken"):
            mm.check()
        st.account_registers(mm.state.reg)[account, figure] -= 15
