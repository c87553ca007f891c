"""The laws of the memory manager, each as the shortest story that would break it."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from pagedkv.core import AddressSpace, MemoryManager
from pagedkv.core import state as st
from pagedkv.errors import ConcurrentUse, InvalidRequest, InvariantViolation, OutOfFrames, PlanConflict
from tests.core.oracle import everything


@pytest.fixture
def mm() -> MemoryManager:
    return MemoryManager(num_frames=16, block_size=4)


def grown(mm: MemoryManager, tokens: list[int], tenant: bytes = b"") -> AddressSpace:
    """A space that holds `tokens`, committed."""
    space = mm.open(tokens, tenant=tenant)
    rest = tokens[len(space) :]
    mm.commit(mm.plan([space], [len(rest)]), rest)
    return space


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
    assert len(mm.plan(spaces[:2], [1, 1]).copies) == 2
    assert len(mm.plan(spaces[2:], [1, 1]).copies) == 1  # the last owner writes in place


def test_writers_of_a_published_tail_all_copy(mm: MemoryManager) -> None:
    space = grown(mm, [1, 2, 3, 4, 5, 6, 7, 8])
    twin = space.fork()
    for writer in (space, twin):
        writer.truncate(6)
    assert len(mm.plan([space, twin], [1, 1]).copies) == 2


def test_the_source_of_a_copy_survives_its_owners_until_commit(mm: MemoryManager) -> None:
    parent = grown(mm, [1, 2, 3, 4, 5])
    child = parent.fork()
    plan = mm.plan([child], [1])
    source = int(plan.copies[0, 0])
    parent.release()
    assert mm.state.frames["status"][source] == st.RETIRED
    assert mm.stats().retired == 1
    mm.commit(plan, [6])
    assert mm.state.frames["status"][source] == st.FREE


def test_a_prefix_is_found_only_once_it_was_computed(mm: MemoryManager) -> None:
    first = mm.open([1, 2, 3, 4, 5])
    plan = mm.plan([first], [5])
    assert len(mm.open([1, 2, 3, 4, 5])) == 0
    mm.commit(plan, [1, 2, 3, 4, 5])
    assert len(mm.open([1, 2, 3, 4, 5])) == 4


def test_one_token_is_always_left_to_compute(mm: MemoryManager) -> None:
    grown(mm, [1, 2, 3, 4, 5, 6, 7, 8])
    assert len(mm.open([1, 2, 3, 4, 5, 6, 7, 8])) == 4


def test_tenants_cannot_see_each_others_pages(mm: MemoryManager) -> None:
    grown(mm, [1, 2, 3, 4, 5], tenant=b"a")
    assert len(mm.open([1, 2, 3, 4, 5], tenant=b"b")) == 0
    assert len(mm.open([1, 2, 3, 4, 5], tenant=b"a")) == 4


def test_a_thousand_tenants_leave_nothing_behind() -> None:
    mm = MemoryManager(num_frames=8, block_size=1, prefix_cache=True)
    for name in range(1000):
        grown(mm, [1, 2], tenant=str(name).encode()).release()
        mm.check()
    assert len(mm._roots) < 40
    assert len(mm.state.root_refs) <= 64


def test_equal_prompts_computed_at_once_share_afterwards(mm: MemoryManager) -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    a, b = mm.open(prompt), mm.open(prompt)
    mm.commit(mm.plan([a, b], [9, 9]), prompt + prompt)
    assert (a.pages[:2] == b.pages[:2]).all()
    assert a.pages[2] != b.pages[2]
    assert mm.stats().mapped == 4
    assert mm.stats().deduplicated == 2
    mm.check()


def test_an_evicted_parent_cannot_be_taken_for_its_successor() -> None:
    """The frame number comes back with other tokens; children that remember the old one must not be found under it."""
    mm = MemoryManager(num_frames=3, block_size=1)
    window = grown(mm, [1, 2, 3])
    parent = int(window.pages[0])
    window.punch(0, 1)
    mm.evict(1)
    impostor = grown(mm, [7])
    assert impostor.pages.tolist() == [parent]
    assert len(mm.open([7, 2, 3])) == 1
    mm.check()


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


def test_a_failed_plan_changes_nothing(mm: MemoryManager) -> None:
    greedy = mm.open([7])
    before = everything(mm)
    with pytest.raises(OutOfFrames, match="needs 17 frames; 16 are free") as short:
        mm.plan([greedy], [16 * 4 + 1])
    assert short.value.shortfall == 1
    assert everything(mm) == before


def test_a_cut_commit_gives_back_the_frames_of_rejected_drafts(mm: MemoryManager) -> None:
    space = grown(mm, [1, 2, 3])
    plan = mm.plan([space], [9])
    assert len(space.pages) == 3
    mm.commit(plan, [4, 5], [2])
    assert space.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert len(space.pages) == 2
    assert mm.stats().mapped == 2


def test_an_aborted_plan_leaves_the_tables_as_they_were(mm: MemoryManager) -> None:
    parent = grown(mm, [1, 2, 3, 4, 5])
    child = parent.fork()
    before = parent.pages.tolist(), child.pages.tolist(), mm.stats().free
    mm.abort(mm.plan([parent, child], [9, 9]))
    assert (parent.pages.tolist(), child.pages.tolist(), mm.stats().free) == before
    mm.check()


def test_release_under_an_outstanding_plan_waits_for_it(mm: MemoryManager) -> None:
    space = mm.open([1])
    plan = mm.plan([space], [5])
    space.release()
    assert mm.stats().mapped == 2
    mm.commit(plan, [1, 2, 3, 4, 5])
    assert mm.stats().mapped == 0


def test_plans_of_a_space_are_committed_oldest_first(mm: MemoryManager) -> None:
    space = mm.open([1])
    older, newer = mm.plan([space], [2]), mm.plan([space], [2])
    with pytest.raises(PlanConflict, match="older plans first"):
        mm.commit(newer, [3, 4])
    with pytest.raises(PlanConflict, match="newer plan"):
        mm.commit(older, [1], [1])
    mm.commit(older, [1, 2])
    mm.commit(newer, [3, 4])
    assert space.token_ids.tolist() == [1, 2, 3, 4]


def test_an_array_of_asids_plans_what_the_spaces_do(mm: MemoryManager) -> None:
    spaces = [mm.open([i]) for i in range(3)]
    plan = mm.plan(np.array([s.asid for s in spaces]), np.array([1, 2, 3]))
    assert plan.rows.tolist() == [s.asid for s in spaces]
    assert plan.cu_seqlens_q.tolist() == [0, 1, 3, 6]


def test_tables_grow_and_plans_keep_what_they_hold() -> None:
    mm = MemoryManager(num_frames=200, block_size=1)
    first = mm.open([1])
    plan = mm.plan([first], [1])
    held = plan.block_table
    others = [grown(mm, [i] * 3) for i in range(40)]
    long = grown(mm, [9] * 60)
    assert held[first.asid, 0] == first.pages[0]
    assert len({s.asid for s in [first, long, *others]}) == 42
    mm.commit(plan, [1])
    mm.check()


def test_the_watermark_is_kept_from_newcomers_only() -> None:
    mm = MemoryManager(num_frames=10, block_size=1, watermark=0.2)
    assert mm.admits(8)
    assert not mm.admits(9)
    assert mm.plan([mm.open()], [10]).num_tokens == 10


def test_waste_counts_the_empty_slots_of_distinct_frames(mm: MemoryManager) -> None:
    parent = grown(mm, [1, 2, 3, 4, 5])
    parent.fork()
    now = mm.stats()
    assert (now.slots_mapped, now.slots_wasted, now.tokens) == (8, 3, 10)


def test_a_second_thread_is_refused(mm: MemoryManager) -> None:
    mm._entered.acquire()  # as if a call were under way
    raised: list[BaseException] = []

    def intrude() -> None:
        try:
            mm.open([1])
        except ConcurrentUse as error:
            raised.append(error)

    thread = threading.Thread(target=intrude)
    thread.start()
    thread.join()
    mm._entered.release()
    assert "one thread owns a manager" in str(raised[0])


@pytest.mark.parametrize("bad", [{"num_frames": 0, "block_size": 4}, {"num_frames": 4, "block_size": 0}])
def test_a_pool_that_cannot_be_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest):
        MemoryManager(**bad)


def test_handles_of_another_manager_are_refused(mm: MemoryManager) -> None:
    with pytest.raises(InvalidRequest, match="another manager"):
        mm.plan([MemoryManager(4, 4).open([1])], [1])


@pytest.mark.parametrize("ids", [[1.5], [[1]], [2**40]])
def test_token_ids_are_one_row_of_int32(mm: MemoryManager, ids: list[object]) -> None:
    with pytest.raises(InvalidRequest, match="token id"):
        mm.open(ids)  # type: ignore[arg-type]


DAMAGE = {
    "I1": lambda s: s.reg.__setitem__(st.NUM_FREE, s.reg[st.NUM_FREE] - 1),
    "I2": lambda s: s.frames["refs"].__setitem__(0, 7),
    "I4": lambda s: s.frames["published"].__setitem__(0, 0),
    "I5": lambda s: s.spaces["num_pages"].__setitem__(0, 1),
    "I6": lambda s: s.spaces["planned"].__setitem__(0, 6),
    "I7": lambda s: s.frames["pins"].__setitem__(int(s.free[0]), 1),
    "I8": lambda s: s.spare.__setitem__(0, 0),
    "I9": lambda s: s.frames["generation"].__setitem__(int(s.frames["parent"][s.reg[st.OLDEST]]), 99),
}


@pytest.mark.parametrize("law", DAMAGE)
def test_check_names_the_broken_law(mm: MemoryManager, law: str) -> None:
    grown(mm, [1, 2, 3, 4, 5])
    grown(mm, [2] * 12).release()
    mm.check()
    DAMAGE[law](mm.state)
    with pytest.raises(InvariantViolation, match=f"{law} broken"):
        mm.check()


def test_check_sees_a_shared_frame_about_to_be_written(mm: MemoryManager) -> None:
    space = grown(mm, [1, 2, 3, 4, 5])
    mm.plan([space], [1])
    other = mm.open([9])
    mm.state.table[other.asid, 0] = space.pages[-1]
    mm.state.spaces["num_pages"][other.asid] = 1
    mm.state.spaces["length"][other.asid] = mm.state.spaces["planned"][other.asid] = 1
    mm.state.frames["refs"][space.pages[-1]] = 2
    with pytest.raises(InvariantViolation, match="I3 broken"):
        mm.check()


def test_metadata_is_at_most_48_bytes_a_frame() -> None:
    state = MemoryManager(num_frames=2**16, block_size=16).state
    per_frame = (state.frames.nbytes + state.free.nbytes + state.bucket.nbytes) / 2**16
    assert per_frame <= 48
