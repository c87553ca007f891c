"""The laws of the memory manager, each as the shortest story that would break the law."""

from __future__ import annotations

import warnings

import pytest

from pagedkv.core import Group, MemoryManager
from pagedkv.core import state as st
from pagedkv.core.observe.misses import Miss
from pagedkv.core.policies import POLICIES, Cost
from pagedkv.errors import InvalidRequest, InvariantViolation, OutOfFrames
from tests.core.oracle import grown


def test_fork_shares_until_first_write(mm: MemoryManager) -> None:
    parent = grown(mm, [1, 2, 3, 4, 5])
    child = parent.fork()
    assert (child.pages == parent.pages).all()
    plan = mm.plan([child], [1])
    assert plan.copies.tolist() == [[parent.pages[-1], child.pages[-1]]]
    assert (child.pages[:-1] == parent.pages[:-1]).all()


def test_k_writers_of_a_tail_with_r_owners_cost_min_k_r_minus_1_copies(mm: MemoryManager) -> None:
    spaces = [grown(mm, [1, 2, 3, 4, 5])]
    spaces += [spaces[0].fork() for _ in range(3)]
    some = mm.plan(spaces[:2], [1, 1])
    assert len(some.copies) == 2
    mm.abort(some)
    assert len(mm.plan(spaces, [1, 1, 1, 1]).copies) == 3  # the last owner writes in place


def test_writers_of_a_published_tail_all_copy(mm: MemoryManager) -> None:
    space = grown(mm, [1, 2, 3, 4, 5, 6, 7, 8])
    twin = space.fork()
    for writer in (space, twin):
        writer.truncate(6)
    assert len(mm.plan([space, twin], [1, 1]).copies) == 2


def test_a_prefix_is_found_only_once_it_was_computed(mm: MemoryManager) -> None:
    first = mm.open([1, 2, 3, 4, 5])
    plan = mm.plan([first], [5])
    assert len(mm.open([1, 2, 3, 4, 5])) == 0
    mm.commit(plan, [1, 2, 3, 4, 5])
    assert len(mm.open([1, 2, 3, 4, 5])) == 4


def test_one_token_is_always_left_to_compute(mm: MemoryManager) -> None:
    grown(mm, [1, 2, 3, 4, 5, 6, 7, 8])
    assert len(mm.open([1, 2, 3, 4, 5, 6, 7, 8])) == 4


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_prompt_longer_than_the_pool_writes_into_no_other_row(prefix_cache: bool) -> None:
    """The prompt has more pages than the table is wide; the next rows belong to others; the memory ends behind them."""
    mm = MemoryManager(8, 1, prefix_cache=prefix_cache)
    first, second = grown(mm, [1, 2, 3]), grown(mm, [4, 5])
    before = [first.pages.tolist(), second.pages.tolist()]
    for _ in range(14):  # every row of the table
        longest = mm.open([1, 2, 3, *range(4, 200)])
        assert len(longest) == (3 if prefix_cache else 0)
        assert [first.pages.tolist(), second.pages.tolist()] == before
        assert (mm.state.table[longest.asid :] < mm.num_frames).all()
        assert (mm.state.table >= st.HOLE).all()
        mm.check()
    assert mm.why([1, 2, 3, *range(4, 200)]).reason == "never published"


def test_tenants_cannot_see_each_others_pages(mm: MemoryManager) -> None:
    grown(mm, [1, 2, 3, 4, 5], tenant=b"a")
    assert len(mm.open([1, 2, 3, 4, 5], tenant=b"b")) == 0
    assert len(mm.open([1, 2, 3, 4, 5], tenant=b"a")) == 4


@pytest.mark.many_steps
def test_a_thousand_tenants_leave_nothing_behind() -> None:
    mm = MemoryManager(num_frames=8, block_size=1, prefix_cache=True)
    for name in range(1000):
        grown(mm, [1, 2], tenant=str(name).encode()).release()
    mm.check()
    assert len(mm.state.roots) <= 64


def test_equal_prompts_computed_at_once_share_afterwards(mm: MemoryManager) -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    a, b = mm.open(prompt), mm.open(prompt)
    mm.commit(mm.plan([a, b], [9, 9]), prompt + prompt)
    assert (a.pages[:2] == b.pages[:2]).all()
    assert a.pages[2] != b.pages[2]
    assert mm.stats().mapped == 4
    assert mm.stats().deduplicated == 2


def test_eviction_takes_the_tail_of_the_least_recently_used_first(mm: MemoryManager) -> None:
    old, new = grown(mm, [1] * 12), grown(mm, [2] * 12)
    tails = [*old.pages[::-1], *new.pages[::-1]]
    old.release()
    new.release()
    for frame in tails:
        assert mm.evict(1) == 1
        assert mm.state.frames["status"][frame] == st.FREE
        mm.check()


def test_a_match_protects_a_prefix_from_eviction(mm: MemoryManager) -> None:
    grown(mm, [1] * 9).release()
    kept = mm.open([1] * 9)
    assert mm.evict(16) == 0
    assert len(kept) == 8


def test_the_watermark_is_kept_free_from_new_sequences_only() -> None:
    mm = MemoryManager(num_frames=10, block_size=1, watermark=0.2)
    assert mm.admits(8)
    assert not mm.admits(9)
    assert mm.plan([mm.open()], [10]).num_tokens == 10


def test_waste_counts_the_empty_slots_of_distinct_frames(mm: MemoryManager) -> None:
    parent = grown(mm, [1, 2, 3, 4, 5])
    parent.fork()
    now = mm.stats()
    assert (now.slots_mapped, now.slots_wasted, now.tokens) == (8, 3, 10)


def test_the_waste_of_a_shared_frame_is_counted_once(mm: MemoryManager) -> None:
    whole = grown(mm, [1] * 10)
    short = whole.fork()
    short.truncate(5)  # its tail is a page within `whole`
    shorter = short.fork()
    shorter.truncate(3)
    assert mm.stats().slots_wasted == 2
    whole.release()
    assert mm.stats().slots_wasted == 3
    short.release()
    assert mm.stats().slots_wasted == 1


def test_why_names_the_reason_of_a_miss(mm: MemoryManager) -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    mm.state.reg[st.KEY] = 1  # evicted pages are remembered by a hash: this key gives no collision
    assert mm.why([1, 2, 3]) == Miss("below one page", 0)
    assert mm.why(prompt) == Miss("never published", 0)
    grown(mm, prompt, tenant=b"a").release()
    assert mm.why(prompt, tenant=b"a") == Miss("nothing missed", 8)
    assert mm.why(prompt, tenant=b"b") == Miss("other root", 0)
    mm.evict(1)
    assert mm.why(prompt, tenant=b"a") == Miss("evicted", 4)


def test_a_pin_keeps_its_pages_and_their_prefix(mm: MemoryManager) -> None:
    space = grown(mm, [1] * 9)
    tail = space.pages[1:2]
    space.release()
    pin = mm.pin(tail)
    assert pin.num_frames == 2
    assert mm.available == 14
    assert mm.evict(16) == 0
    mm.unpin(pin)
    assert mm.available == 16


def test_a_writer_copies_a_pinned_page(mm: MemoryManager) -> None:
    space = grown(mm, [1, 2, 3, 4])
    mm.pin(space)
    space.truncate(3)
    assert len(mm.plan([space], [1]).copies) == 1


def test_pins_stay_under_their_cap() -> None:
    mm = MemoryManager(10, 1, max_pinned=0.3)
    short, long = grown(mm, [1, 2]), grown(mm, [3, 4])
    mm.pin(short)
    with pytest.raises(InvalidRequest, match="pins hold 2 of at most 3"):
        mm.pin(long)


def test_a_dropped_frame_waits_for_the_epoch_and_admission_sees_it() -> None:
    mm = MemoryManager(4, 1, prefix_cache=False)
    space, other = grown(mm, [1, 2, 3]), mm.open([9])
    mm.retire(7, [space])
    assert (mm.available, mm.pending) == (1, 3)
    assert not mm.admits(2)
    with pytest.raises(OutOfFrames) as short:
        mm.plan([other], [4])
    assert (short.value.free, short.value.pending) == (1, 3)
    assert mm.advance(7) == 3
    assert (mm.available, mm.pending) == (4, 0)
    assert mm.plan([other], [4]).num_tokens == 4


def test_a_cached_frame_is_found_but_not_evicted_before_the_epoch_has_passed(mm: MemoryManager) -> None:
    mm.retire(1, [grown(mm, [1] * 9)])
    assert mm.evict(16) == 0
    again = mm.open([1] * 9)
    assert len(again) == 8
    mm.retire(2)
    again.release()
    mm.advance(1)
    assert mm.evict(16) == 0  # dropped again under epoch 2
    mm.advance(2)
    assert mm.evict(16) == 2


@pytest.mark.parametrize("apart", [1, 2**30, 2**31, 2**32 + 7, 2**40])
def test_a_completion_that_comes_twice_frees_no_newer_frame(mm: MemoryManager, apart: int) -> None:
    """Epochs may be any increasing numbers, such as nanoseconds, though the pool keeps them modulo 2**31."""
    mm.retire(5)
    mm.advance(5)
    mm.retire(5 + apart, [grown(mm, [1] * 3)])
    assert (mm.advance(5), mm.advance(-1), mm.pending) == (0, 0, 1)
    mm.check()
    assert mm.advance(5 + apart) == 1


def test_handles_differ_when_generations_wrap_around(mm: MemoryManager) -> None:
    mm.state.spaces["generation"][:] = 2**32 - 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # uncompiled, the sums of the hash warn that they wrap around
        warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"pagedkv\.core\.prefix\.index")
        old = grown(mm, [1] * 5)
        mm.unpin(mm.pin(old))
        old.release()
    assert mm.open().generation == 0
    assert mm.is_stale(old)


def prompted(mm: MemoryManager, first: int, times: int = 1) -> list[int]:
    """Open, compute and release a two-page prompt `times` times, and return its frames."""
    for _ in range(times):
        space = grown(mm, [first] * 8 + [0])
        pages = space.pages[:2].tolist()
        space.release()
    return pages


def survivors(mm: MemoryManager, count: int, **prompts: list[int]) -> set[str]:
    """Evict `count` frames, and return the names of the prompts that are still whole."""
    assert mm.evict(count) == count
    mm.check()
    return {name for name, frames in prompts.items() if (mm.state.frames["status"][frames] == st.CACHED).all()}


@pytest.mark.parametrize(
    ("policy", "survives"),
    [("lru", {"scan"}), ("2q", {"hot"}), ("lfu", {"hot"}), ("cost", {"hot"})],
)
def test_which_policies_keep_a_hot_prompt_through_a_scan(policy: str, survives: set[str]) -> None:
    mm = MemoryManager(16, 4, policy=policy)
    hot = prompted(mm, 1, times=4)
    scan = prompted(mm, 2)
    assert survivors(mm, 2, hot=hot, scan=scan) == survives


def test_frequency_ages() -> None:
    mm = MemoryManager(16, 4, policy="lfu")
    hot = prompted(mm, 1, times=4)
    for first in range(2, 40):
        prompted(mm, first, times=2)
        mm.evict(max(0, mm.stats().cached - 6))
    assert len(mm.open([1] * 9)) < 8, f"{hot} were hot once, long ago"


def test_cost_keeps_the_pages_that_are_expensive_to_compute_again() -> None:
    """Both prompts are used once; the deep pages of the long one cost more than the pages of the short one."""
    mm = MemoryManager(64, 4, policy=Cost(scale=8))
    long, short = grown(mm, [1] * 161), grown(mm, [2] * 9)
    deep, flat = long.pages[:40].tolist(), short.pages[:2].tolist()
    long.release()
    short.release()
    assert survivors(mm, 2, deep=deep, flat=flat) == {"deep"}


def test_a_returning_page_counts_as_used_again() -> None:
    mm = MemoryManager(64, 4, policy="2q")
    mm.state.reg[st.KEY] = 1  # evicted pages are remembered by a hash: this key gives no collision
    prompted(mm, 1)
    mm.evict(2)
    back, new = prompted(mm, 1), prompted(mm, 2)
    assert survivors(mm, 2, back=back, new=new) == {"back"}


@pytest.mark.parametrize("policy", POLICIES)
def test_demoted_pages_are_evicted_before_all_others(policy: str) -> None:
    mm = MemoryManager(16, 4, policy=policy)
    old = prompted(mm, 1)
    space = grown(mm, [2] * 9)
    advised = space.pages[:2].tolist()
    mm.advise(space, "demote")
    space.release()
    assert survivors(mm, 2, old=old, advised=advised) == {"old"}


def test_advice_on_a_prefix_never_evicts_it_before_its_suffix(mm: MemoryManager) -> None:
    grown(mm, [1] * 13).release()
    head = mm.open([1] * 9)
    mm.advise(head, "demote")
    head.release()
    mm.check()
    for _ in range(3):
        mm.evict(1)
        mm.check()


def test_check_sees_a_shared_frame_about_to_be_written() -> None:
    mm = MemoryManager(num_frames=16, block_size=4)
    space = grown(mm, [1, 2, 3, 4, 5])
    mm.plan([space], [1])
    other = mm.open([9])
    mm.state.table[other.asid, 0] = space.pages[-1]
    mm.state.spaces["num_pages"][other.asid] = 1
    mm.state.spaces["length"][other.asid] = mm.state.spaces["planned"][other.asid] = 1
    mm.state.frames["refs"][space.pages[-1]] = 2
    with pytest.raises(InvariantViolation, match="I3 broken"):
        mm.check()


@pytest.mark.parametrize("num_frames", [2**16, 91_180, 100_000])
def test_metadata_is_at_most_52_bytes_a_frame(num_frames: int) -> None:
    state = MemoryManager(num_frames=num_frames, block_size=16).state
    per_frame = (state.frames.nbytes + state.chunks.nbytes + state.bucket.nbytes + state.ghosts.nbytes) / num_frames
    assert per_frame <= 52


def test_misses_are_counted_by_reason(mm: MemoryManager) -> None:
    grown(mm, [1] * 9, b"acme").release()  # 8 asked for, new
    mm.open([1] * 11)  # 8 asked for, new to this tenant; 2 below a page
    mm.open([1] * 9, tenant=b"acme")  # 8 asked for and matched
    grown(mm, [2] * 5).release()  # 4 asked for, new
    mm.evict(1)
    mm.open([2] * 5)  # 4 asked for, evicted
    mm.open([3] * 4)  # 3 below a page
    now = mm.stats()
    assert (now.tokens_asked, now.tokens_matched) == (8 + 8 + 8 + 4 + 4, 8)
    assert (now.missed_new, now.missed_evicted, now.below_one_page) == (20, 4, 2 + 3)


PROMPT = [0, 1, 2, 3, 5, 5, 5, 5]
GROUPS = {1: (Group(),), 2: (Group(), Group(window=40)), 3: (Group(), Group(window=40), Group(window=60, sinks=2))}


@pytest.mark.parametrize("num_groups", GROUPS)
@pytest.mark.parametrize("second", [0, 1, 5])
def test_a_prefix_that_was_computed_twice_is_pinned_between_two_commits(second: int, num_groups: int) -> None:
    mm = MemoryManager(16 * num_groups, 4, groups=GROUPS[num_groups])
    grown(mm, PROMPT[:4]).release()
    space = mm.open()
    first, later = mm.plan([space], [8]), mm.plan([space], [second])
    mm.commit(first, PROMPT)
    pin = mm.pin(space)
    mm.check()
    mm.commit(later, [9] * second)
    space.release()
    mm.check()
    mm.evict(99)
    mm.check()
    found = mm.open([*PROMPT, 7])
    assert len(found) == 8
    found.release()
    mm.unpin(pin)
    mm.check()
    assert len(mm.open([*PROMPT, 7])) == 8
