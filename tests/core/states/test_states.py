"""Recurrent states: laws I10 to I16, places, rows that go on from them, and what a step reads and writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagedkv.core import AddressSpace, Group, MemoryManager, Places, StatePool
from pagedkv.errors import InvalidRequest, InvariantViolation, OutOfFrames, PlanConflict, QuotaExceeded
from tests.core.states.walk import total_of

PROMPT = list(range(100, 450))


def manager(num_states: int = 32, num_frames: int = 256, **places: Any) -> MemoryManager:
    return MemoryManager(num_frames, 16, states=StatePool(num_states, Places(**places)))


def computed(mm: MemoryManager, prompt: list[int]) -> AddressSpace:
    """Return a space that holds `prompt`, computed in one step."""
    space = mm.open(prompt)
    step(mm, space, prompt[space.ready :])
    return space


def step(mm: MemoryManager, space: AddressSpace, tokens: list[int], kept: int | None = None, **options: Any) -> None:
    plan = mm.plan([space], [len(tokens)], **options)
    count = len(tokens) if kept is None else kept
    mm.commit(plan, tokens[:count], [count])


def states_of(mm: MemoryManager) -> Any:
    return mm.stats().states


# -- the walk ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 9], ids=["no window", "a window"])
def test_a_random_walk_finds_every_state_as_it_was_written(window: int | None) -> None:
    seen = total_of(range(6), 150, window)
    assert min(seen[what] for what in ("hits", "aborts", "drafts rejected", "fork", "truncate", "resize", "pin")) > 0


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 9], ids=["no window", "a window"])
def test_100_000_random_operations_break_no_law(window: int | None) -> None:
    seen = total_of(range(100, 300), 500, window)
    assert min(seen["hits"], seen["short of states"], seen["short of pages"]) > 100
    assert min(seen["QuotaExceeded of states"], seen["QuotaExceeded of pages"]) > 10


# -- quotas ------------------------------------------------------------------------------------------------------------


def test_a_quota_is_the_same_share_of_the_states_as_of_the_pages() -> None:
    mm = manager(num_states=40, num_frames=400)
    mm.set_quota(b"a", hard=40)  # 4 of the states
    mm.set_quota(b"b", protected=100)  # 10 of them
    other = mm.open(PROMPT, tenant=b"b")
    step(mm, other, PROMPT)
    kept = states_of(mm).checkpoints
    other.release()
    spaces = [mm.open([first, 9], tenant=b"a") for first in range(5)]
    for first, space in enumerate(spaces[:4]):
        step(mm, space, [first, 9])
    with pytest.raises(QuotaExceeded, match="needs 1 state frames for tenant b'a'.* 4 of at most 4") as error:
        mm.plan([spaces[4]], [2])
    assert error.value.pool == "states"
    free = [mm.open([token]) for token in range(60)]
    with pytest.raises(OutOfFrames, match="state frames"):
        mm.plan(free, [1] * 60)
    plan = mm.plan(free[:26], [1] * 26)  # 40 less the 4 of a, less the 10 that b may keep
    assert states_of(mm).checkpoints >= kept
    mm.abort(plan)
    mm.check()


def test_a_smaller_pool_of_states_keeps_those_that_quotas_protect() -> None:
    mm = manager(num_states=8, num_frames=80, distances=(), branches=False)
    mm.set_quota(b"a", protected=20)  # 2 of 8 states, 1 of 5
    computed(mm, PROMPT[:40]).release()
    for tenant, start in ((b"a", 0), *((b"", 10 * number) for number in range(1, 6))):
        space = mm.open(PROMPT[start : start + 40], tenant=tenant)
        step(mm, space, PROMPT[start + space.ready : start + 40])
        space.release()
    ready = mm.why(PROMPT[:40], tenant=b"a").ready
    mm.resize_states(5)
    assert mm.why(PROMPT[:40], tenant=b"a").ready == ready == 32
    mm.check()


# -- where states are kept, and who goes on from them ------------------------------------------------------------------


def test_a_prompt_sent_again_computes_the_rest_of_its_last_page() -> None:
    mm = manager()
    computed(mm, PROMPT).release()
    again = mm.open(PROMPT)
    assert (len(again), again.ready) == (336, 336)


def test_a_branch_is_a_place_at_first_sight() -> None:
    mm = manager()
    computed(mm, PROMPT).release()
    first = mm.open([*PROMPT[:200], 1, 2, 3])
    assert (len(first), first.ready) == (192, 80)
    assert 192 in first.stops(203)
    plan = mm.plan([first], [203 - 80])
    assert (plan.slots[:112] == -1).all()
    assert (plan.slots[112:] >= 0).all()
    mm.commit(plan, [*PROMPT[80:200], 1, 2, 3])
    assert mm.open([*PROMPT[:200], 4, 5]).ready == 192


def test_a_message_start_is_a_place_rounded_down_to_a_page() -> None:
    prompt = [7, *range(20, 120), 7, *range(20, 200)]
    mm = manager(boundary_tokens=(7,))
    assert mm.open(prompt).stops(len(prompt)) == [96, 208, 272, 282]


def test_distances_grow_by_fours_where_no_message_start_is_known() -> None:
    assert manager().open(PROMPT).stops(350) == [80, 272, 320, 336, 350]


def test_the_output_keeps_its_last_page_alone() -> None:
    mm = manager()
    space = computed(mm, PROMPT)
    made = states_of(mm).checkpoints
    for token in range(100):
        step(mm, space, [token])
    assert states_of(mm).checkpoints == made + 1
    space.release()
    assert mm.open([*PROMPT, *range(100), 9]).ready == 448


def test_two_rows_that_compute_the_same_share_a_checkpoint() -> None:
    mm = manager()
    twins = [mm.open(PROMPT), mm.open(PROMPT)]
    mm.commit(mm.plan(twins, [350, 350]), PROMPT * 2)
    mm.check()
    assert states_of(mm).published == len(twins[0].stops(350)) or states_of(mm).published == 4


def test_a_running_row_holds_two_frames_and_three_with_drafts() -> None:
    mm = manager(rolling=False)
    space = computed(mm, [1, 2, 3])
    held = []
    for drafts in (0, 0, 3, 3):
        plan = mm.plan([space], [1 + drafts], certain=[1])
        held.append(states_of(mm).mapped)
        mm.commit(plan, [5], [1])
    assert held == [2, 2, 3, 3]
    assert states_of(mm).copied == 0


def test_a_rejected_draft_costs_no_replay_where_a_state_is_saved_behind_the_certain_tokens() -> None:
    mm = manager()
    space = computed(mm, PROMPT)
    step(mm, space, [1, 2, 3, 4], kept=1, certain=[1])
    assert space.ready == len(space) == 351
    step(mm, space, [1, 2, 3, 4], kept=2)
    assert (space.ready, len(space)) == (352, 353)  # the state after a whole page was saved on the way
    step(mm, space, [2, 8])  # the first is computed again
    assert space.ready == len(space) == 354
    assert states_of(mm).tokens_replayed == 1


def test_a_host_that_saves_at_ends_only_stops_at_places() -> None:
    mm = manager()
    space = mm.open(PROMPT)
    while space.ready < 350:
        end = space.stops(350)[0]
        step(mm, space, PROMPT[space.ready : end], saves_inside=False)
    space.release()
    assert mm.open(PROMPT).ready == 336
    assert states_of(mm).skipped == 0


def test_a_fork_shares_its_state_and_a_truncated_space_goes_back_to_a_checkpoint() -> None:
    mm = manager()
    space = computed(mm, PROMPT)
    child = space.fork()
    assert child.ready == 350
    assert states_of(mm).mapped == 1
    space.truncate(300)
    assert (len(space), space.ready, child.ready) == (300, 272, 350)
    mm.check()


def test_a_pin_keeps_the_last_checkpoint_of_its_pages() -> None:
    mm = manager(num_states=6)
    space = computed(mm, PROMPT)
    pin = mm.pin(space)
    space.release()
    for first in range(1000, 3000, 400):
        computed(mm, list(range(first, first + 100))).release()
    assert mm.open(PROMPT).ready == 336
    mm.unpin(pin)
    mm.check()


def test_pages_take_their_checkpoints_with_them() -> None:
    mm = manager()
    computed(mm, PROMPT).release()
    mm.evict(10**6)
    assert states_of(mm).checkpoints == 0
    assert states_of(mm).free == 32


def test_forget_leaves_running_spaces_their_states() -> None:
    mm = manager()
    space = computed(mm, PROMPT)
    mm.forget()
    assert states_of(mm).checkpoints == 0
    assert space.ready == 350
    step(mm, space, [1])
    mm.check()


def test_a_frame_that_an_epoch_may_read_is_not_written() -> None:
    mm = manager(num_states=3, rolling=False)
    space = computed(mm, [1, 2, 3])
    mm.retire(1, [space])
    assert states_of(mm).free == 2
    mm.advance(1)
    assert states_of(mm).free == 3


def test_frames_of_a_step_that_runs_wait_for_its_epoch() -> None:
    mm = manager(num_states=8, rolling=False)
    space = computed(mm, [1, 2, 3])
    plan = mm.plan([space], [3], certain=[1])
    mm.retire(1)
    mm.commit(plan, [4], [1])
    names = [*plan.states.state_in.tolist(), *plan.states.state_out.tolist()]
    other = mm.open([9, 9])
    late = mm.plan([other, space], [2, 1])
    assert not {*late.states.state_out.tolist()} & {*names, *plan.states.save_frames.tolist()}
    mm.retire(2)
    mm.abort(late)
    assert states_of(mm).retired == 4
    mm.check()
    mm.advance(2)
    assert (states_of(mm).retired, states_of(mm).mapped) == (0, 1)


def test_an_output_leaves_the_checkpoint_of_another_prompt_alone() -> None:
    mm = manager()
    space, other = mm.open(PROMPT[:16]), mm.open(PROMPT[:33])
    mm.commit(mm.plan([space], [16]), PROMPT[:16])
    mm.commit(mm.plan([other], [33]), PROMPT[:33])
    other.release()
    for token in PROMPT[16:70]:
        step(mm, space, [token])
    assert mm.open(PROMPT[:33]).ready == 32


def test_a_save_behind_certain_tokens_comes_before_one_among_drafts() -> None:
    mm = MemoryManager(32, 4, states=StatePool(3))
    space = computed(mm, [1, 2, 3, 4])
    step(mm, space, [5])
    plan = mm.plan([space], [4], certain=[1])
    assert plan.states.save_offsets.tolist() == [1]


def test_pins_leave_states_to_sequences_that_run() -> None:
    mm = manager(num_states=4)
    for first in range(0, 300, 100):
        space = computed(mm, list(range(first, first + 40)))
        mm.pin(space)
        space.release()
    step(mm, mm.open([7, 8]), [7, 8])
    mm.check()


def test_a_batch_skips_the_columns_that_are_ready() -> None:
    mm = manager()
    computed(mm, PROMPT).release()
    opened = mm.open_batch([PROMPT, [*PROMPT[:200], 1, 2, 3]], pads=[0, 0])
    assert opened.skip == min(space.ready for space in opened.spaces) == 80


def test_windows_end_a_prefix_at_a_checkpoint() -> None:
    mm = MemoryManager(256, 16, groups=(Group(), Group(window=40)), states=StatePool(32))
    computed(mm, PROMPT).release()
    branch = mm.open([*PROMPT[:200], 1, 2, 3])
    assert len(branch) == branch.ready == mm.lookup([*PROMPT[:200], 4, 5, 6])


def test_resize_moves_pages_with_their_checkpoints() -> None:
    mm = manager(num_frames=128)
    for first in range(1000, 2600, 400):
        computed(mm, list(range(first, first + 200))).release()
    kept = computed(mm, PROMPT)
    kept.release()
    mm.resize(40)
    mm.check()
    assert mm.open(PROMPT).ready == 336


def test_why_names_the_state() -> None:
    mm = manager(num_states=5, distances=(), branches=False)
    computed(mm, PROMPT).release()
    assert str(mm.why(PROMPT)) == "pages to 336: nothing missed"
    assert str(mm.why([*PROMPT[:200], 1])) == "pages to 192, state to 0: never kept"
    for first in range(1000, 4000, 300):
        computed(mm, list(range(first, first + 100))).release()
    assert str(mm.why(PROMPT)) == "pages to 336, state to 0: evicted"


# -- mistakes ----------------------------------------------------------------------------------------------------------


def test_a_pool_without_a_state_for_each_row_is_short_and_nothing_is_changed() -> None:
    mm = manager(num_states=3)
    spaces = [mm.open([token]) for token in range(4)]
    with pytest.raises(OutOfFrames, match="takes 4 state frames, one for each sequence, and 3 of 3") as lack:
        mm.plan(spaces, [1, 1, 1, 1])
    assert lack.value.pool == "states"
    mm.check()
    assert mm.stats().mapped == 0


def test_saves_take_no_frame_that_a_row_needs() -> None:
    mm = manager(num_states=2)
    computed(mm, PROMPT)
    assert states_of(mm).skipped > 0
    mm.check()


@pytest.mark.parametrize("certain", [[], [-1], [4], [1, 2]], ids=str)
def test_certain_tokens_that_no_step_has_are_refused(certain: list[int]) -> None:
    mm = manager()
    space = mm.open(PROMPT)
    for inside in (True, False):
        with pytest.raises(InvalidRequest):
            mm.plan([space], [3], certain=certain, saves_inside=inside)
    mm.check()


def test_more_tokens_than_the_pool_holds_are_refused() -> None:
    mm = manager()
    with pytest.raises(OutOfFrames):
        mm.plan([mm.open(PROMPT)], [2**31 - 1])


def test_other_tokens_than_those_that_have_kv_are_refused() -> None:
    mm = manager()
    computed(mm, PROMPT).release()
    space = mm.open([*PROMPT[:200], 1, 2, 3])
    plan = mm.plan([space], [123])
    with pytest.raises(InvalidRequest, match=r"token 0 of the commit is 292, but the KV .* begins at space.ready"):
        mm.commit(plan, [*PROMPT[192:], *PROMPT][:123])
    mm.abort(plan)
    mm.check()


def test_a_space_has_one_plan_at_a_time() -> None:
    mm = manager()
    space = mm.open(PROMPT)
    plan = mm.plan([space], [10])
    with pytest.raises(PlanConflict, match="has one at a time; commit or abort it first"):
        mm.plan([space], [10])
    with pytest.raises(InvalidRequest, match="which is committed at once"):
        mm.commit(plan, PROMPT[:5], [5], keep_planned=True)
    mm.abort(plan)


@pytest.mark.parametrize(
    "options",
    [{"grid": 24}, {"distances": (-1,)}, {"distances": tuple(range(17))}, {"boundary_tokens": ("<|im_start|>",)}],
    ids=str,
)
def test_places_that_make_no_sense_are_refused(options: Any) -> None:
    with pytest.raises(InvalidRequest, match="Places"):
        manager(**options)


def test_a_manager_without_states_is_ready_at_its_length() -> None:
    mm = MemoryManager(32, 16)
    space = mm.open([1, 2])
    assert (space.ready, space.stops(2)) == (0, [2])
    with pytest.raises(InvalidRequest, match="this manager has no states"):
        mm.plan([space], [2], certain=[1])
    with pytest.raises(InvalidRequest, match="give a StatePool"):
        MemoryManager(32, 16, states=64)  # type: ignore[arg-type]


# -- every law, broken on purpose --------------------------------------------------------------------------------------


def busy() -> tuple[MemoryManager, AddressSpace, Any]:
    """Return a manager with checkpoints, a space and an outstanding plan of another space."""
    mm = manager()
    computed(mm, PROMPT).release()
    space = computed(mm, PROMPT[:100])
    other = mm.open([*PROMPT[:200], 1, 2])
    return mm, space, mm.plan([other], [202 - other.ready])


def checkpoint(mm: MemoryManager) -> int:
    return int(np.flatnonzero(mm.states.pool.frames["published"])[0])


def _row(mm: MemoryManager, space: AddressSpace) -> Any:
    return mm.states.held.rows[space.asid : space.asid + 1]


FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "a state without ready tokens": ("I10", lambda m, a, p: _row(m, a)["ready"].fill(0)),
    "ready beyond the length": ("I10", lambda m, a, p: _row(m, a)["ready"].fill(101)),
    "a closed row with a state": ("I2|I10", lambda m, a, p: m.state.spaces["status"].__setitem__(a.asid, 0)),
    "a frame written twice": ("I11", lambda m, a, p: p.states.state_out.fill(p.states.save_frames[0])),
    "a state that a step writes": ("I11", lambda m, a, p: _row(m, a)["state"].fill(p.states.state_out[0])),
    "a reference too many": ("I12", lambda m, a, p: m.states.pool.frames["refs"].__setitem__(_row(m, a)["state"], 2)),
    "a page that names no state": ("I13", lambda m, a, p: m.state.checkpoints[:256].fill(-1)),
    "a page of another time": (
        "I9|I13",
        lambda m, a, p: m.state.frames["generation"].__setitem__(m.states.pool.tokens[checkpoint(m), 0], 9),
    ),
    "no distance": ("I13", lambda m, a, p: m.states.held.gaps.fill(0)),
    "KV written again": ("I14", lambda m, a, p: p.slots.__setitem__(0, 3)),
    "a checkpoint that cannot go": (
        "I15|I7",
        lambda m, a, p: m.states.pool.frames["place"].__setitem__(m.states.pool.frames["status"] == 2, 0),
    ),
    "a count": ("I16", lambda m, a, p: m.states.pool.reg.__setitem__(0, 33)),
    "a loss that nobody followed": ("I16|I13", lambda m, a, p: m.states.held.totals.fill(-1)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_check_finds_each_law_that_is_broken(fault: str) -> None:
    laws, spoil = FAULTS[fault]
    mm, space, plan = busy()
    mm.check()
    spoil(mm, space, plan)
    with pytest.raises(InvariantViolation) as broken:
        mm.check()
    assert broken.value.law in laws.split("|"), str(broken.value)
