"""Check the prefix index: I4, and I9 from the page's side. Plain numpy, apart from the code it checks, like laws.py.

The check hashes every published page again from its tokens and its prefix, and looks for it in the bucket of that hash.
A page in a wrong bucket would never be found; a page whose tokens were overwritten would be found by the wrong prompts.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from pagedkv.core import state as st
from pagedkv.core.check.requirements import I4, I9
from pagedkv.core.state import I64, State


def check_index(s: State, seeds: dict[int, int], *, twins: bool = False) -> None:
    """Check the buckets, the prefix hashes and the roots. O(published frames x block_size).

    seeds: the prefix hash of the empty prefix, for each root in use. twins: whether two frames may have one identity.
    """
    num_buckets = len(s.bucket)
    I4.require(num_buckets & (num_buckets - 1) == 0, f"the index has {num_buckets} buckets, not a power of two")
    I4.require(s.reg[st.PUBLISHING] in (0, 1), f"the register PUBLISHING is {s.reg[st.PUBLISHING]}, not 0 or 1")
    found = _check_buckets(s)
    I4.require(s.reg[st.PUBLISHING] or not found, f"frames {found[:4]} are published, but the prefix cache is off")
    # a page that lost its prefix can match nothing; resize makes all such pages name one parent, so they may be equal
    whole = [frame for frame in found if _has_prefix(s, frame)]
    salts = st.page_salts(s)
    identities = Counter(_identity(s, frame, int(salts[frame])) for frame in whole)
    for frame in whole:
        I4.require(
            twins or identities[_identity(s, frame, int(salts[frame]))] == 1,
            f"frame {frame} has the same group, parent and tokens as another published frame",
            frame=frame,
        )
    _check_roots(s, found)
    _check_prefix_hashes(s, np.array(found, np.int64), seeds)
    for asid in np.flatnonzero((s.spaces["status"] == st.OPEN) | (s.spaces["status"] == st.CLOSING)).tolist():
        _check_chain(s, asid, seeds)
    for row in (np.flatnonzero(s.spaces["status"][:: len(s.groups)] == st.HELD) * len(s.groups)).tolist():
        _check_pinned_prefixes(s, row)


def _identity(s: State, frame: int, salt: int) -> tuple[int, int, int, bytes]:
    """Return (1 + group, parent, its generation, tokens and salt) of a page; a companion has those of its leader."""
    number = int(s.frames["published"][frame])
    tokens = s.tokens[frame].tobytes() + salt.to_bytes(4, "little", signed=True) if number == 1 else b""
    return number, int(s.frames["parent"][frame]), int(s.frames["parent_generation"][frame]), tokens


def _check_buckets(s: State) -> list[int]:
    """Check the chains of the index, and return the frames in them."""
    found: list[int] = []
    for bucket, head in enumerate(s.bucket.tolist()):
        frame = head
        while frame >= 0:
            I4.require(
                frame < len(s.frames),
                f"bucket {bucket} of the prefix index names frame {frame}, but the pool has {len(s.frames)} frames",
            )
            home = int(s.frames["prefix_hash"][frame]) & (len(s.bucket) - 1)
            I4.require(
                home == bucket,
                f"frame {frame} is in bucket {bucket} of the prefix index, but would be looked for in {home}",
                frame=frame,
            )
            I4.require(
                len(found) <= len(s.frames),
                f"the chain of bucket {bucket} of the prefix index comes back to frame {frame} and does not end",
                frame=frame,
            )
            found.append(frame)
            frame = int(s.frames["chain"][frame])
        I4.require(frame == st.NIL, f"the chain of bucket {bucket} of the prefix index ends in {frame}, not {st.NIL}")
    times = np.bincount(np.array(found, np.int64), minlength=len(s.frames))
    I4.forbid(
        times != (s.frames["published"] != 0),
        "a published frame must be in the prefix index once, and any other frame not at all",
    )
    I4.forbid(
        s.frames["published"] > len(s.groups),
        f"a frame is published for a group that is not one of the {len(s.groups)}",
    )
    return found


def _check_roots(s: State, found: list[int]) -> None:
    """Check the parents of the published frames `found`, and how many spaces and first pages each root counts."""
    counted = np.zeros(len(s.roots), np.int64)
    for frame in found:
        parent = int(s.frames["parent"][frame])
        I4.require(
            -2 - len(s.roots) < parent < len(s.frames) and parent != st.NIL,
            f"frame {frame} has parent {parent}, which is neither a frame nor one of the {len(s.roots)} roots",
            frame=frame,
        )
        if parent < 0:
            counted[-2 - parent] += 1
            generation = s.frames["parent_generation"][frame]
            I4.require(
                generation == 0,
                f"frame {frame} is a first page, but has generation {generation} of a page before it",
                frame=frame,
            )
        else:
            cached = s.frames["status"][frame] == st.CACHED and s.frames["rank"][frame] < st.BEHIND_WINDOW
            orphaned = not _has_prefix(s, frame) and cached
            I9.require(not orphaned, f"frame {frame} is cached, but the page before it, {parent}, is gone", frame=frame)
    salts = st.page_salts(s)[np.array(found, np.int64)]
    I4.require(
        not len(found) or 0 <= salts.min() <= salts.max() <= len(s.roots),
        f"a published frame has the salts of a root that is not one of the {len(s.roots)} roots",
    )
    np.add.at(counted, salts[salts > 0] - 1, 1)
    np.add.at(counted, s.spaces["root"][:: len(s.groups)][s.spaces["status"][:: len(s.groups)] != st.UNUSED], 1)
    I4.forbid(
        counted != s.roots[:, st.IN_USE],
        "a root must count the spaces and the published first pages under it, and counts another number",
        place="root",
    )


def _has_prefix(s: State, frame: int) -> bool:
    """Return whether `frame` is a first page, or the page before it is still published."""
    parent = int(s.frames["parent"][frame])
    if parent < 0:
        return True
    same = s.frames["generation"][parent] == s.frames["parent_generation"][frame]
    return bool(s.frames["published"][parent] and same)


def _check_prefix_hashes(s: State, found: I64, seeds: dict[int, int]) -> None:
    """Check that each prefix hash is the keyed hash of the prefix hash before it and of the page's tokens.

    A page that lost its prefix is left out: it cannot be hashed again, and no prompt can find it.
    """
    if len(found) == 0:
        return
    parents = s.frames["parent"][found].astype(np.int64)
    before = s.frames["prefix_hash"][np.maximum(parents, 0)].astype(np.uint64)
    has_parent = (s.frames["published"][np.maximum(parents, 0)] != 0) & (
        s.frames["generation"][np.maximum(parents, 0)] == s.frames["parent_generation"][found]
    )
    for place in np.flatnonzero(parents < 0).tolist():
        root = int(-2 - parents[place])
        I4.require(
            root in seeds,
            f"frame {found[place]} is a published first page under root {root}, which no tenant has",
            frame=int(found[place]),
        )
        before[place] = seeds[root]
    salts = st.page_salts(s)[found]
    before ^= np.where(salts > 0, s.roots[salts - 1, st.SALT_SEED].view(np.uint32), 0).astype(np.uint64)
    group = s.frames["published"][found].astype(np.uint64) - np.uint64(1)
    prefix_hashes = _hashed(int(s.reg[st.KEY]), before, s.tokens[found])
    prefix_hashes = np.where(group > 0, before ^ (group * np.uint64(0x9E3779B9) & np.uint64(0xFFFFFFFF)), prefix_hashes)
    broken = (prefix_hashes != s.frames["prefix_hash"][found]) & (has_parent | (parents < 0))
    I4.forbid(
        np.isin(np.arange(len(s.frames)), found[broken]),
        "the prefix hash of a frame is not the hash of its prefix and tokens",
    )


def _hashed(key: int, before: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return uint64 [n]: the prefix hash of each page.

    Shapes: before uint64 [n], the prefix hash of the page before; tokens int32 [n, S], the tokens of the page.
    """
    multiplier, shift = np.uint64(0x9E3779B97F4A7C15), np.uint64(32)
    with np.errstate(over="ignore"):
        places = np.uint64(key) + multiplier * np.arange(1, tokens.shape[1] + 1, dtype=np.uint64)
        products = (tokens.astype(np.uint32).astype(np.uint64) ^ places) * multiplier
        mixed = (products ^ (products >> shift)).sum(axis=1, dtype=np.uint64)
        mixed = (mixed ^ before) * multiplier
        prefix_hashes: np.ndarray = ((mixed ^ (mixed >> shift)) * multiplier) >> shift
    return prefix_hashes


def _check_chain(s: State, asid: int, seeds: dict[int, int]) -> None:
    """Check that the published pages of a space follow one another, and that every full page is published."""
    row, record = s.table[asid], s.spaces[asid]
    root, complete, full = int(record.root), int(record.complete), int(record.length) // s.tokens.shape[1]
    I4.require(
        seeds.get(root) == record.seed,
        f"space {asid} begins with prefix hash {record.seed}, but its root {root} with {seeds.get(root)}",
        asid=asid,
    )
    salts = _salts_of(s, root)
    before = -2 - salts.pop(-1)
    for page in range(min(complete, int(record.first_hole))):
        frame = int(row[page])
        I4.require(
            s.frames["published"][frame],
            f"space {asid} counts page {page} as published, but its frame {frame} is not",
            frame=frame,
        )
        follows = s.frames["parent"][frame] == before and _has_prefix(s, frame)
        I4.require(
            follows,
            f"frame {frame} of page {page} of space {asid} was not published after {before}, the page before it",
            frame=frame,
        )
        salt = int(s.salts[frame]) if len(s.salts) else 0
        I4.require(
            salt == 1 + salts.get(page, -1),
            f"frame {frame} of page {page} of space {asid} has salt {salt} instead of {1 + salts.get(page, -1)}",
            frame=frame,
        )
        before = frame
    if record.outstanding == 0:
        expected = min(full, int(record.named)) if s.reg[st.PUBLISHING] and not record.no_publish else 0
        I4.require(
            complete == expected, f"space {asid} has {complete} published pages instead of {expected}", asid=asid
        )


def _salts_of(s: State, root: int) -> dict[int, int]:
    """Return {page: root whose salts lie in the page} of a space with `root`; -1: the root of its tenant."""
    found: dict[int, int] = {}
    while root != st.NIL and len(found) <= len(s.roots):
        found[int(s.roots[root, st.SALTED_PAGE])] = root
        root = int(s.roots[root, st.ROOT_BEFORE])
    return found


def _check_pinned_prefixes(s: State, row: int) -> None:
    """Check that a pin holds the page before each published page it holds: else eviction would orphan the page (I9)."""
    held = s.table[row, : min(int(s.spaces["num_pages"][row]), int(s.spaces["first_hole"][row]))]
    for frame in held.tolist():
        parent = int(s.frames["parent"][frame])
        I9.require(
            not s.frames["published"][frame] or parent < 0 or parent in held,
            f"frame {frame} is pinned by row {row}, but the page before it, {parent}, is not",
            frame=frame,
        )
