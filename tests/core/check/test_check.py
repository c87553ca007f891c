"""check() sees every fault: a test corrupts each field of each array, one number at a time, on a busy manager.

UNCHECKED gives the reason for each field that is not checked: any value is legal there, or only the caller knows more.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedkv.core import MemoryManager
from pagedkv.core import state as st
from pagedkv.core.state import State
from pagedkv.errors import InvariantViolation
from tests.core.oracle import grown

Where = Callable[[State], np.ndarray]


@pytest.fixture(scope="module")
def busy() -> MemoryManager:
    """Return a manager with cached frames on several lists, forks, a pin, two tenants, a salt, a fence and plans.

    All tests share it, and leave it as it was.
    """
    mm = MemoryManager(96, 4, policy="2q", events=32)
    for token in (1, 2, 3):
        space = grown(mm, [token] * 21)
        if token > 1:
            mm.advise(space, "demote")
        space.release()
    mm.evict(2)
    mm.open([1] * 17 + [8] * 9).release()
    kept = grown(mm, [5] * 18)
    child, cousin = kept.fork(), kept.fork()
    mm.pin(kept)
    grown(mm, [1] * 13, tenant=b"acme")
    grown(mm, [6] * 21, salt={9: b"cat"})
    closing, ended = grown(mm, [7] * 6), grown(mm, [4] * 14)
    mm.retire(3, [ended])
    mm.plan([child, closing], [3, 5])
    mm.plan([mm.open([9] * 8), child], [9, 2])
    cousin.truncate(9)
    closing.release()
    mm.check(3)
    return mm


def some(s: State, name: str, kinds: list[int]) -> np.ndarray:
    return np.flatnonzero(np.isin(s.frames[name], kinds))


def every_frame(s: State) -> np.ndarray:
    return np.arange(len(s.frames))


def published(s: State) -> np.ndarray:
    return np.flatnonzero(s.frames["published"])


def later_pages(s: State) -> np.ndarray:
    """Return the published pages whose page before is published too."""
    return np.array([f for f in published(s) if (p := s.frames["parent"][f]) >= 0 and has_prefix(s, p, f)])


def has_prefix(s: State, parent: int, frame: int) -> bool:
    return bool(
        s.frames["published"][parent] and s.frames["generation"][parent] == s.frames["parent_generation"][frame]
    )


def prefixes(s: State) -> np.ndarray:
    """Return the pages before a cached page, or before a page of a space without holes."""
    in_spaces = {
        f
        for asid in rows(s)
        if s.spaces["first_hole"][asid] == st.NO_HOLE
        for f in s.table[asid, : s.spaces["complete"][asid]]
    }
    return np.unique(
        [s.frames["parent"][f] for f in later_pages(s) if s.frames["status"][f] == st.CACHED or f in in_spaces]
    )


def listed(s: State) -> np.ndarray:
    return np.flatnonzero(s.frames["place"] != st.NOWHERE)


def evictable(s: State) -> np.ndarray:
    return np.flatnonzero((s.frames["place"] != st.NOWHERE) & (s.frames["place"] != st.AMONG_FENCED))


def floored(s: State) -> np.ndarray:
    """Return the pages whose floor comes from the rank of an evictable successor."""
    return np.unique(
        [
            p
            for f in evictable(s)
            if (p := s.frames["parent"][f]) >= 0 and s.frames["floor"][p] == s.frames["rank"][f] + 1
        ]
    )


def rows(s: State) -> np.ndarray:
    return np.flatnonzero(s.spaces["status"] != st.UNUSED)


def settled_rows(s: State) -> np.ndarray:
    return np.flatnonzero(
        (s.spaces["status"] == st.OPEN) & (s.spaces["outstanding"] == 0) & (s.spaces["first_hole"] == st.NO_HOLE)
    )


def open_rows(s: State) -> np.ndarray:
    return np.flatnonzero((s.spaces["status"] == st.OPEN) | (s.spaces["status"] == st.CLOSING))


def without_plans(s: State) -> np.ndarray:
    """Return the rows without plans: of a space with plans, only its owner knows whether it was released."""
    return np.flatnonzero(s.spaces["outstanding"] == 0)


def later_links(s: State) -> np.ndarray:
    return np.array(
        [f for f in published(s) if s.frames["parent"][f] < 0 or has_prefix(s, int(s.frames["parent"][f]), f)]
    )


RECORDS: dict[tuple[str, str], tuple[Where, list[int]]] = {
    ("frames", "refs"): (every_frame, [1, -1]),
    ("frames", "account"): (every_frame, [1, -1]),
    ("frames", "pins"): (every_frame, [1, -1]),
    ("frames", "status"): (every_frame, [1, 2, 3]),
    ("frames", "published"): (every_frame, [1, -1]),
    ("frames", "place"): (every_frame, [1, -1, 100]),
    ("frames", "rank"): (evictable, [1, 40]),
    ("frames", "floor"): (floored, [-1]),
    ("frames", "generation"): (prefixes, [1, -1]),
    ("frames", "parent"): (later_links, [1, -1, 1000]),
    ("frames", "parent_generation"): (
        lambda s: np.intersect1d(later_pages(s), some(s, "status", [st.CACHED])),
        [1, -1],
    ),
    ("frames", "prefix_hash"): (later_links, [1, 2**20]),
    ("frames", "chain"): (published, [1, -1, 1000]),
    ("frames", "newer"): (listed, [1, -1]),
    ("frames", "older"): (listed, [1, -1]),
    ("frames", "entered"): (listed, [2**29]),
    ("chunks", "bits"): (lambda s: np.arange(len(s.chunks)), [1, 2**33]),
    ("chunks", "newer"): (lambda s: np.flatnonzero(s.chunks["bits"]), [1, -1, 1000]),
    ("chunks", "older"): (lambda s: np.flatnonzero(s.chunks["bits"]), [1, -1, 1000]),
    ("spaces", "length"): (rows, [1, -1, 4]),
    ("spaces", "planned"): (rows, [1, -1, 4]),
    ("spaces", "stamp"): (rows, [1000]),
    ("spaces", "seed"): (open_rows, [1]),
    ("spaces", "num_pages"): (rows, [1, -1]),
    ("spaces", "complete"): (settled_rows, [1, -1]),
    ("spaces", "first_hole"): (rows, [-1]),
    ("spaces", "outstanding"): (rows, [1, -1]),
    ("spaces", "root"): (rows, [1, 2]),
    ("spaces", "advice"): (rows, [40, -40]),
    ("spaces", "no_publish"): (lambda s: settled_rows(s)[s.spaces["complete"][settled_rows(s)] > 0], [1, 2, -1]),
    ("spaces", "named"): (settled_rows, [1, 2]),
    ("spaces", "status"): (without_plans, [1, 2, 3]),
    ("spaces", "unused_asid"): (lambda s: np.arange(s.reg[st.NUM_UNUSED_ASIDS]), [1, -1]),
}

UNCHECKED: dict[tuple[str, str], str] = {
    ("frames", "uses"): "a hint to the policy: every number is legal",
    ("spaces", "generation"): "handles know it, and no array does; a handle that does not agree is refused (I8)",
    ("state", "ghosts"): "prefix hashes of evicted pages: a hint, which may be overwritten at any time",
    ("state", "log"): "events: a follower compares them with a snapshot (test_events)",
    ("state", "checkpoints"): "empty without recurrent states (states/test_states.py)",
    ("state", "history"): "a note of the past: a wrong one explains a miss wrongly, no more",
}

REGISTERS: dict[int, list[int]] = {
    st.NUM_FREE: [1, -1],
    st.NUM_EVICTABLE: [1, -1],
    st.NUM_CACHED: [1, -1],
    st.NUM_RETIRED: [1, -1],
    st.NUM_UNUSED_ASIDS: [1, -1],
    st.TICK: [-20],
    st.KEY: [1, -1],
    st.PUBLISHING: [2, -1],  # 2 is legal, too
    st.MATCHED: [1, -1],
    st.ASKED: [1, -1],
    st.EVICTIONS: [-1000],
    st.COPIES: [-1000],
    st.DEDUPLICATED: [-1000],
    st.PEAK: [-90, 90],
    st.EPOCH: [-4],
    st.PASSED: [1000],
    st.CACHED_FENCED: [1, -1],
    st.RULE: [1, -1],
    st.USED_LISTS: [1, -1],
    st.INFLATION: [1, -1],
    st.SCALE: [1, -1],
    st.MISSED_EVICTED: [1, -1],
    st.MISSED_NEW: [1, -1],
    st.PINNED: [1, -1],
    st.BELOW_PAGE: [-1000],
    st.LOGGED: [-1000],
    **{head: [1, -1, 1000] for head in range(st.FREE_LISTS + 1, st.FREE_LISTS + 4)},
    **{register: [1, -1, 7] for register in range(st.FIRST_LIST, st.NUM_REGISTERS)},
}

UNCHECKED_REGISTERS = {
    st.CLOSED_LONG: "above 0, the next call that opens a space looks for rows whose memory is to be given back",
    st.NUM_LOST: "read with recurrent states only (states/test_states.py)",
    st.CLOCK: "only policies whose clock is the value of the last victim have one",
}


def seen(mm: MemoryManager, array: np.ndarray, place: object, change: int) -> bool:
    """Return whether check() sees `change` added to the number at `place`; the number is restored."""
    before = array[place].copy()
    with np.errstate(over="ignore"):
        array[place] = (before + np.array(change).astype(array.dtype)).astype(array.dtype)
    try:
        mm.check(3)
    except InvariantViolation:
        return True
    finally:
        array[place] = before
    return False


def unseen(mm: MemoryManager, array: np.ndarray, places: list[Any], changes: list[int]) -> list[tuple[Any, int]]:
    """Return the changes that check() does not see, with their places."""
    return [(place, change) for place in places for change in changes if not seen(mm, array, place, change)]


def test_every_field_is_corrupted_or_has_a_reason(busy: MemoryManager) -> None:
    fields = {
        (name, field) for name in ("frames", "chunks", "spaces") for field in getattr(busy.state, name).dtype.names
    }
    notes = {"ghosts", "log", "checkpoints", "history"}
    assert fields == {*RECORDS, *UNCHECKED} - {("state", name) for name in notes}
    assert set(State._fields) == {"frames", "chunks", "spaces", "reg", *notes, *ARRAYS}
    source = "".join(path.read_text().replace("st.", "") for path in Path(st.__file__).parent.rglob("*.py"))
    used = {value for name, value in vars(st).items() if f"reg[{name}]" in source}
    assert used <= {*REGISTERS, *UNCHECKED_REGISTERS}


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize(("array", "field"), RECORDS, ids=[".".join(field) for field in RECORDS])
def test_a_wrong_number_in_a_record_is_seen(busy: MemoryManager, array: str, field: str, step: int) -> None:
    where, changes = RECORDS[array, field]
    places = where(busy.state)
    assert len(places) > 1
    places = places[::step]
    blind = unseen(busy, getattr(busy.state, array)[field], places.tolist(), changes)
    assert not blind, f"{array}.{field}: {blind[:8]} of {len(places)} places"
    busy.check(3)


ARRAYS: dict[str, tuple[Callable[[State], list[Any]], list[int]]] = {
    "tokens": (lambda s: [(frame, offset) for frame in later_links(s) for offset in range(4)], [1]),
    "table": (lambda s: [(asid, page) for asid in rows(s) for page in range(s.spaces["num_pages"][asid])], [1, 1000]),
    "bucket": (lambda s: list(range(len(s.bucket))), [1]),
    "roots": (lambda s: [(root, count) for root in range(len(s.roots)) for count in (st.IN_USE, st.CHARGED)], [1, -1]),
    "salts": (lambda s: published(s).tolist(), [1, 2]),
    "groups": (lambda s: [(0, 0), (0, 1)], [1]),
}


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("array", ARRAYS)
def test_a_wrong_number_in_an_array_is_seen(busy: MemoryManager, array: str, step: int) -> None:
    where, changes = ARRAYS[array]
    assert not unseen(busy, getattr(busy.state, array), where(busy.state)[::step], changes)


def test_a_wrong_register_is_seen(busy: MemoryManager) -> None:
    for register, changes in REGISTERS.items():
        assert not unseen(busy, busy.state.reg, [register], changes)


def test_a_published_frame_in_the_wrong_bucket_is_seen(busy: MemoryManager) -> None:
    s = busy.state
    for bucket in np.flatnonzero(s.bucket >= 0).tolist():
        other = (bucket + 1) % len(s.bucket)
        s.bucket[[bucket, other]] = s.bucket[[other, bucket]]
        with pytest.raises(InvariantViolation, match="would be looked for in"):
            busy.check(3)
        s.bucket[[bucket, other]] = s.bucket[[other, bucket]]


def test_the_frame_that_breaks_the_law_is_named(busy: MemoryManager) -> None:
    frame = int(later_links(busy.state)[3])
    busy.state.tokens[frame, 0] += 1
    with pytest.raises(InvariantViolation, match="I4 broken") as broken:
        busy.check(3)
    busy.state.tokens[frame, 0] -= 1
    assert (broken.value.law, broken.value.frame) == ("I4", frame)
