"""The prefix index, checked: I4 and I9 from the page's side. Plain numpy, written apart from the code it checks, like check.py.

Every published page is hashed again from its tokens and its prefix, and must stand in the bucket of that hash: a page in a wrong one is
never found, and one whose tokens were overwritten is found by the wrong prompts.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from pagedkv.core import state as st
from pagedkv.core.check.requirements import none, require
from pagedkv.core.state import I64, State


def check_index(s: State, seeds: dict[int, int]) -> None:
    """The index, the fingerprints and the roots. `seeds`: fingerprint of the empty prefix of each root in use. O(published frames x block_size)."""
    require(len(s.bucket) & (len(s.bucket) - 1) == 0, "I4", f"{len(s.bucket)} buckets are no power of two")
    require(s.reg[st.PUBLISHING] in (0, 1), "I4", f"the switch of the prefix cache is {s.reg[st.PUBLISHING]}")
    found = _check_buckets(s)
    require(s.reg[st.PUBLISHING] or not found, "I4", f"frame {found[:1]} is published, and nothing is to be")
    whole = [
        frame for frame in found if s.frames["parent"][frame] < 0 or _lives(s, int(s.frames["parent"][frame]), frame)
    ]
    identities = Counter(_identity(s, frame) for frame in whole)
    for frame in whole:  # the others can match nothing; resize lets them all name the same prefix that is not there
        require(
            identities[_identity(s, frame)] == 1,
            "I4",
            f"frame {frame} has the identity of another published frame",
            frame=frame,
        )
    _check_roots(s, found)
    _check_prints(s, np.array(found, np.int64), seeds)
    for asid in np.flatnonzero((s.spaces["status"] == st.OPEN) | (s.spaces["status"] == st.CLOSING)).tolist():
        _check_chain(s, asid, seeds)
    if len(s.successors):
        _check_kin(s, found)


def _identity(s: State, frame: int) -> tuple[int, int, int, bytes]:
    """The tokens of a companion are those of its leader."""
    number = int(s.frames["published"][frame])
    held = s.tokens[frame].tobytes() if number == 1 else b""
    return number, int(s.frames["parent"][frame]), int(s.frames["parent_generation"][frame]), held


def _check_buckets(s: State) -> list[int]:
    """The published frames, as the index has them."""
    found: list[int] = []
    for bucket, head in enumerate(s.bucket.tolist()):
        frame = head
        while frame >= 0:
            require(frame < len(s.frames), "I4", f"bucket {bucket} names frame {frame}, which is none")
            at = int(s.frames["fingerprint"][frame]) & (len(s.bucket) - 1)
            require(
                at == bucket,
                "I4",
                f"frame {frame} stands in bucket {bucket} and would be looked for in {at}",
                frame=frame,
            )
            require(
                len(found) <= len(s.frames),
                "I4",
                f"the chain of bucket {bucket} is a ring, at frame {frame}",
                frame=frame,
            )
            found.append(frame)
            frame = int(s.frames["chain"][frame])
        require(frame == st.NIL, "I4", f"the chain of bucket {bucket} ends in {frame}")
    times = np.bincount(np.array(found, np.int64), minlength=len(s.frames))
    none(times != (s.frames["published"] != 0), "I4", "the index and the published frames differ")
    none(s.frames["published"] > len(s.groups), "I4", "a frame is published for a group that is none")
    return found


def _check_roots(s: State, found: list[int]) -> None:
    counted = np.zeros(len(s.roots), np.int64)
    for frame in found:
        parent = int(s.frames["parent"][frame])
        require(
            -2 - len(s.roots) < parent < len(s.frames) and parent != st.NIL,
            "I4",
            f"frame {frame} comes after {parent}",
            frame=frame,
        )
        if parent < 0:
            counted[-2 - parent] += 1
            known = s.frames["parent_generation"][frame] == 0
            require(known, "I4", f"first page {frame} has the generation of a page before", frame=frame)
        else:
            lost = not _lives(s, parent, frame) and s.frames["status"][frame] == st.CACHED
            require(not lost, "I9", f"cached frame {frame} lost its prefix {parent}", frame=frame)
    np.add.at(counted, s.spaces["root"][:: len(s.groups)][s.spaces["status"][:: len(s.groups)] != st.UNUSED], 1)
    none(counted != s.roots[:, 0], "I4", "a root is counted wrongly", places="root")


def _lives(s: State, parent: int, frame: int) -> bool:
    """Whether the page before `frame` is still published."""
    return bool(
        s.frames["published"][parent] and s.frames["generation"][parent] == s.frames["parent_generation"][frame]
    )


def _check_prints(s: State, found: I64, seeds: dict[int, int]) -> None:
    """Each fingerprint is the keyed hash of the fingerprint before and of the tokens; what lost its prefix cannot be hashed again, nor found."""
    if len(found) == 0:
        return
    parents = s.frames["parent"][found].astype(np.int64)
    before = s.frames["fingerprint"][np.maximum(parents, 0)].astype(np.uint64)
    alive = (s.frames["published"][np.maximum(parents, 0)] != 0) & (
        s.frames["generation"][np.maximum(parents, 0)] == s.frames["parent_generation"][found]
    )
    for place in np.flatnonzero(parents < 0).tolist():
        root = int(-2 - parents[place])
        require(
            root in seeds,
            "I4",
            f"frame {found[place]} is a first page under root {root}, which nobody has",
            frame=int(found[place]),
        )
        before[place] = seeds[root]
    group = s.frames["published"][found].astype(np.uint64) - np.uint64(1)
    fingerprints = hashed(int(s.reg[st.KEY]), before, s.tokens[found])
    fingerprints = np.where(group > 0, before ^ (group * np.uint64(0x9E3779B9) & np.uint64(0xFFFFFFFF)), fingerprints)
    broken = (fingerprints != s.frames["fingerprint"][found]) & (alive | (parents < 0))
    none(
        np.isin(np.arange(len(s.frames)), found[broken]),
        "I4",
        "a fingerprint is not that of the frame's prefix and tokens",
    )


def hashed(key: int, before: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """uint64 [n]: the fingerprints of pages that hold `tokens` (int32 [n, S]) after pages of fingerprint `before` (uint64 [n])."""
    multiplier, shift = np.uint64(0x9E3779B97F4A7C15), np.uint64(32)
    with np.errstate(over="ignore"):
        places = np.uint64(key) + multiplier * np.arange(1, tokens.shape[1] + 1, dtype=np.uint64)
        products = (tokens.astype(np.uint32).astype(np.uint64) ^ places) * multiplier
        mixed = (products ^ (products >> shift)).sum(axis=1, dtype=np.uint64)
        mixed = (mixed ^ before) * multiplier
        fingerprints: np.ndarray = ((mixed ^ (mixed >> shift)) * multiplier) >> shift
    return fingerprints


def _check_chain(s: State, asid: int, seeds: dict[int, int]) -> None:
    """The published pages of a space follow one another, and no full page is left out."""
    row, record = s.table[asid], s.spaces[asid]
    root, done, whole = int(record.root), int(record.complete), int(record.length) // s.tokens.shape[1]
    require(
        seeds.get(root) == record.seed,
        "I4",
        f"space {asid} begins with fingerprint {record.seed}, its root with {seeds.get(root)}",
        asid=asid,
    )
    before = -2 - root
    for page in range(min(done, int(record.first_hole))):
        frame = int(row[page])
        require(
            s.frames["published"][frame],
            "I4",
            f"page {page} of space {asid} counts as published; frame {frame} is not",
            frame=frame,
        )
        follows = s.frames["parent"][frame] == before and (before < 0 or _lives(s, before, frame))
        require(
            follows,
            "I4",
            f"frame {frame} of space {asid} was not published after the page before it, {before}",
            frame=frame,
        )
        before = frame
    if record.outstanding == 0 and record.first_hole == st.NO_HOLE:
        due = whole if s.reg[st.PUBLISHING] and not record.no_publish else 0
        require(done == due, "I4", f"space {asid}: {done} pages are published, {due} should be", asid=asid)


def _check_kin(s: State, published: list[int]) -> None:
    """Whoever has a living prefix is among its successors, once, and the links go both ways."""
    following: dict[int, list[int]] = {}
    heads = [(frame, int(s.successors[frame, 0])) for frame in published] + [
        (-2 - root, int(first)) for root, first in enumerate(s.roots[:, 1])
    ]
    for parent, frame in heads:
        before = st.NIL
        while frame >= 0 and len(following.setdefault(parent, [])) <= len(published):
            require(frame < len(s.successors), "I4", f"frame {frame}, which is none, is a successor of {parent}")
            require(
                s.successors[frame, 2] == before,
                "I4",
                f"successor {frame} of {parent} does not link back to {before}",
                frame=frame,
            )
            following[parent].append(frame)
            before, frame = frame, int(s.successors[frame, 1])
        require(frame == st.NIL, "I4", f"the successors of {parent} do not end", frame=max(frame, 0))
    expected: dict[int, list[int]] = {}
    for frame in published:
        parent = int(s.frames["parent"][frame])
        if parent < 0 or _lives(s, parent, frame):
            expected.setdefault(parent, []).append(frame)
    for parent in {**following, **expected}:
        listed, due = sorted(following.get(parent, [])), sorted(expected.get(parent, []))
        require(
            listed == due,
            "I4",
            f"the successors of {parent} are {due[:4]}, listed are {listed[:4]}",
            frame=max(parent, 0),
        )
