"""Events and snapshots: a reader that follows them knows which pages can be found, or is told that it fell behind.

A pool is refilled from a snapshot under restoring().
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest

from pagedkv.core import Group, MemoryManager
from pagedkv.core.prefix.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, as_array, as_map
from pagedkv.errors import EventsLost, InvalidRequest
from tests.core.oracle import Follower, content_digest, findable, grown


def watched(num_frames: int = 16, events: int = 64) -> MemoryManager:
    return MemoryManager(num_frames, 4, events=events)


def test_a_stored_page_is_named_by_the_chain_of_all_its_tokens() -> None:
    mm = watched()
    grown(mm, [1, 2, 3, 4, 5, 6, 7, 8, 9], tenant=b"acme")
    root = hashlib.sha256(b"root" + b"acme").digest()
    first = hashlib.sha256(b"page" + root + struct.pack("<4i", 1, 2, 3, 4)).digest()
    second = hashlib.sha256(b"page" + first + struct.pack("<4i", 5, 6, 7, 8)).digest()
    assert mm.events(0) == [
        BlockStored(1, (first,), None, (1, 2, 3, 4), 4, b"acme"),
        BlockStored(2, (second,), first, (5, 6, 7, 8), 4, b"acme"),
    ]


def names(mm: MemoryManager, since: int | None) -> tuple[dict[int, bytes], list[bytes]]:
    """Return ({frame: digest} of the pages published since, digests removed since)."""
    changes = mm.page_changes(since)
    return {frame: page.digest for frame, page in changes.stored}, [page.digest for page in changes.removed]


def test_changes_name_the_frames_that_hold_the_pages_still() -> None:
    mm = watched()
    space = grown(mm, list(range(9)))
    first, second = (event.block_hashes[0] for event in mm.events(0))  # type: ignore[union-attr]
    assert names(mm, 0) == (dict(zip(space.pages.tolist(), (first, second), strict=False)), [])
    assert names(mm, mm.last_event) == ({}, [])
    pages = space.pages.tolist()
    space.release()
    mm.evict(1)
    assert names(mm, 0) == ({pages[0]: first}, [second])
    assert names(mm, 2) == ({}, [second])
    grown(mm, [7] * 5)
    mm.forget()
    changes = mm.page_changes(0)
    assert (changes.stored, changes.removed, changes.cleared) == ((), (), True)


def test_an_evicted_page_is_removed_under_the_name_it_was_stored_by() -> None:
    mm = watched()
    grown(mm, [1] * 9).release()
    stored = mm.events(0)
    assert mm.evict(2) == 2
    first, second = (event.block_hashes for event in stored)  # type: ignore[union-attr]
    assert mm.events(2) == [BlockRemoved(3, second), BlockRemoved(4, first)]


def test_a_frame_that_was_reused_before_the_log_was_read_has_the_right_name() -> None:
    mm = watched(num_frames=2)
    for token in (1, 2, 3):  # each prompt takes the frames of the one before
        grown(mm, [token] * 8).release()
    reader = Follower(mm, since=0)
    reader.catch_up()
    assert reader.names == findable(mm) == {content_digest(b"", [3] * 4), content_digest(b"", [3] * 8)}


def test_a_reader_that_fell_behind_is_told_where_the_log_begins() -> None:
    mm = watched(num_frames=16, events=3)
    for token in range(4):
        grown(mm, [token] * 5)
        mm.events(token)
    with pytest.raises(EventsLost, match="events 1 to 1") as lost:
        mm.events(0)
    assert (lost.value.since, lost.value.first_available) == (0, 2)
    assert [event.sequence for event in mm.events(1)] == [2, 3, 4]


def test_a_page_without_prefix_is_removed_only_with_its_twin() -> None:
    """A page loses its prefix, and an equal page is computed: two frames have one name, and one can be found."""
    mm = MemoryManager(8, 4, groups=(Group(window=4),), events=64)
    orphan = grown(mm, [1] * 9)  # page 0 is behind its window
    assert mm.evict(1) == 1
    twin = grown(mm, [1] * 9)
    reader = Follower(mm, since=0)
    reader.catch_up()
    assert reader.names == findable(mm) == {content_digest(b"", [1] * 4), content_digest(b"", [1] * 8)}
    orphan.release()
    reader.catch_up()
    assert reader.names == findable(mm)
    twin.release()
    mm.evict(8)
    reader.catch_up()
    assert reader.names == set()


def test_a_snapshot_has_prefixes_before_what_follows_them() -> None:
    mm = watched(num_frames=64)
    rng = np.random.default_rng(0)
    for _ in range(30):
        grown(mm, rng.integers(0, 2, rng.integers(4, 17)).tolist()).release()
    known: set[bytes] = set()
    for block in mm.events_snapshot().blocks:
        assert block.parent_block_hash is None or block.parent_block_hash in known
        known.update(block.block_hashes)
    assert known == findable(mm)


def predicted(reader: Follower, tokens: list[int], groups: tuple[Group, ...], size: int) -> int:
    """Return how many tokens `open` will match, as a router predicts from the groups and the events alone."""
    names = [content_digest(b"", tokens[: end * size], size) for end in range(1, (len(tokens) - 1) // size + 1)]
    known = next((page for page, name in enumerate(names) if name not in reader.names), len(names))
    for pages in range(known, 0, -1):
        first = [max(0, pages * size + 1 - group.window) // size if group.window else 0 for group in groups]
        sinks = [-(-group.sinks // size) for group in groups]
        needed = [(p, g) for g in range(1, len(groups)) for p in range(pages) if p >= first[g] or p < sinks[g]]
        if all((names[page], group) in reader.companions for page, group in needed):
            return pages * size
    return 0


@pytest.mark.many_steps
@pytest.mark.parametrize(
    "groups", [(Group(), Group()), (Group(), Group(window=5, sinks=2)), (Group(), Group(window=3), Group(window=9))]
)
@pytest.mark.parametrize("events", [7, 4000])
def test_a_router_that_follows_the_events_of_all_groups_knows_what_a_prompt_will_match(
    groups: tuple[Group, ...], events: int
) -> None:
    mm, rng = MemoryManager(60, 2, groups=groups, events=events), np.random.default_rng(1)
    reader, matched = Follower(mm, since=0), 0
    for turn in range(150):
        grown(mm, rng.integers(0, 2, rng.integers(1, 14)).tolist()).release()
        mm.evict(int(rng.integers(0, 9)))
        if turn % 3 == 0:
            reader.catch_up()
            prompt = rng.integers(0, 2, 13).tolist()
            expected = predicted(reader, prompt, groups, 2)
            space = mm.open(prompt)
            assert len(space) == expected
            matched += expected
            space.release()
    assert matched > 50


def test_an_evicted_companion_is_removed_before_its_leader() -> None:
    mm = MemoryManager(16, 4, groups=(Group(), Group()), events=16)
    grown(mm, [1] * 9).release()
    stored = [(type(event), event.group) for event in mm.events(0)]  # type: ignore[union-attr]
    assert stored == [(BlockStored, group) for group in (0, 1, 0, 1)]
    assert mm.evict(2) == 2
    removed = [(type(event), event.group) for event in mm.events(4)]  # type: ignore[union-attr]
    assert removed == [(BlockRemoved, 1)] * 2
    assert len(mm.open([1] * 9)) == 0
    assert Follower(mm).names == findable(mm)


def test_forget_is_one_event() -> None:
    mm = watched()
    grown(mm, [1] * 9).release()
    kept = grown(mm, [2] * 9)
    reader = Follower(mm, since=0)
    mm.forget()
    assert mm.events(4) == [AllBlocksCleared(5)]
    grown(mm, [1] * 9).release()
    mm.commit(mm.plan([kept], [8]), [2] * 8)
    reader.catch_up()
    assert reader.names == findable(mm) == {content_digest(b"", [1] * 4), content_digest(b"", [1] * 8)}
    kept.release()
    mm.evict(16)
    reader.catch_up()
    assert reader.names == set()


EVENTS: list[Event] = [
    BlockStored(1, (bytes(range(32)),), bytes([255] * 32), (1, 2), 2, b"acme", 3),
    BlockRemoved(2, (bytes(range(32)),)),
    AllBlocksCleared(3),
]


def test_short_names_are_the_last_64_bits_of_digests_as_those_of_vllm() -> None:
    stored, removed, cleared = (as_map(event, short=True) for event in EVENTS)
    assert (stored["block_hashes"], stored["parent_block_hash"]) == ([0x18191A1B1C1D1E1F], 2**64 - 1)
    assert removed["block_hashes"] == [0x18191A1B1C1D1E1F]
    assert cleared == {"type": "AllBlocksCleared"}
    assert as_map(BlockStored(1, (bytes(32),), None, (1,), 1, b"", 0), short=True)["parent_block_hash"] is None


def test_the_form_of_sglang_is_an_array_with_its_type_first_and_short_hashes() -> None:
    stored, removed, cleared = (as_array(event, medium="CPU_PINNED") for event in EVENTS)
    assert stored == ["BlockStored", [0x0001020304050607], -1, [1, 2], 2, None, "CPU_PINNED"]
    assert removed == ["BlockRemoved", [0x0001020304050607], "CPU_PINNED"]
    assert cleared == ["AllBlocksCleared"]
    assert all(-(2**63) <= short < 2**63 for short in stored[1])


def test_a_manager_that_keeps_no_events_says_how_to_keep_them() -> None:
    mm = MemoryManager(4, 4)
    for ask in (lambda: mm.events(0), mm.events_snapshot):
        with pytest.raises(InvalidRequest, match="events=N"):
            ask()
    assert mm.state.log.nbytes == 0


PROMPT_FIGURES = ("tokens_asked", "tokens_matched", "missed_evicted", "missed_new", "below_one_page")


def observed(**options: object) -> MemoryManager:
    """Return a manager that counts everything about prompts, for two tenants, and has counted some."""
    mm = MemoryManager(64, 4, events=64, **options)  # type: ignore[arg-type]
    mm.set_quota(b"acme", hard=48)
    grown(mm, [1] * 10, tenant=b"acme").release()
    grown(mm, [1] * 10).release()
    grown(mm, [1] * 9, tenant=b"acme").release()
    return mm


def prompt_figures(mm: MemoryManager) -> dict[str, object]:
    """Return every statistic of prompts."""
    stats = mm.stats()
    figures: dict[str, object] = {name: getattr(stats, name) for name in PROMPT_FIGURES}
    figures |= {name.decode(): (use.tokens_asked, use.tokens_matched) for name, use in stats.tenants.items()}
    return figures


def test_restoring_counts_in_no_statistic_of_prompts() -> None:
    mm = observed()
    before = prompt_figures(mm)
    with mm.restoring():
        grown(mm, [2] * 20, tenant=b"acme").release()
        grown(mm, [2] * 20).release()
        grown(mm, [1] * 10, tenant=b"acme").release()
    assert prompt_figures(mm) == before
    space = mm.open([2] * 20)
    assert len(space) == 16  # the pages stay
    assert prompt_figures(mm) != before  # statistics count again
    mm.check()


def windowed() -> MemoryManager:
    """Return a manager whose only group sees the first 2 tokens and 4 positions back."""
    return MemoryManager(64, 4, groups=(Group(window=4, sinks=2),))


def gives_back(mm: MemoryManager, first: int) -> bool:
    """Append 20 tokens, one step each, to a new space. Return True if the manager gave back pages behind the window."""
    tokens = np.arange(first, first + 20, dtype=np.int32)
    space = mm.open(tokens)
    for token in tokens[len(space) :]:
        mm.commit(mm.plan([space], [1]), [token])
    holes = bool((space.pages == -1).any())
    space.release()
    return holes


@pytest.mark.parametrize("fails", [False, True])
def test_restoring_suspends_the_window_of_a_single_group_until_it_ends(fails: bool) -> None:
    mm = windowed()
    assert gives_back(mm, 100)
    try:
        with mm.restoring():
            assert not gives_back(mm, 200)
            mm.check()
            if fails:
                raise OSError("broken file")
    except OSError:
        assert fails
    assert mm.groups == (Group(window=4, sinks=2),)
    assert gives_back(mm, 300)
    mm.check()
