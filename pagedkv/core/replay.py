"""Replay: run a trace of requests through the live manager, for several policies and pool sizes.

A trace has one JSON object a line, in the form published with Mooncake (FAST 2025): `hash_ids` names the blocks of a
prompt, and equal ids mean equal prompts up to that block. A block is one frame here. A request matches its longest
known prefix, computes the rest, publishes it and ends; then the next request begins. So a hit rate measures how well a
policy keeps the pages that are used again, and says nothing about load.

    hit rate = matched prompt blocks / all prompt blocks

A tier below the pool holds the pages that were published, as pagedkv.tiers does with every page: a page that the pool
lacks and the tier has is loaded, and counts as matched. A page that the pool evicts counts as a use of the tier's copy.

Belady's optimum knows the future: it evicts the block whose next use is farthest away. The prefix of a block is used no
later than the block itself, so the optimum keeps whole prefixes (of two blocks with the same next use the deeper one
goes first), and no policy can match more.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np

from pagedkv.core.arguments import whole
from pagedkv.core.frame_pool.pool import FramePool
from pagedkv.core.manager import MemoryManager
from pagedkv.core.policies import POLICIES, Cost, Policy, chosen
from pagedkv.core.prefix.digests import page_digest, root_digest
from pagedkv.core.state import I32
from pagedkv.errors import InvalidRequest

BLOCK_TOKENS: Final = 512
"""Prompt tokens for each hash id."""

BELADY: Final = "belady"
"""Name of the optimum."""

MOST_CHARACTERS: Final = 2**24
"""Characters of a line of a trace. A device such as /dev/zero has no end of line."""

_NEVER: Final = 2**62


@dataclass(frozen=True)
class _Replayed:
    """The result of one policy in one pool; rates are shares of 1."""

    policy: str
    num_frames: int
    hit_rate: float
    hit_rate_last_half: float  # of the second half of the requests, when the pool is warm
    requests: int
    blocks: int
    matched: int
    evictions: int | None
    tier_frames: int = 0  # pages that the tier below the pool may hold
    loaded: int = 0  # of the matched blocks, those that came from there


def read_trace(path: str | Path) -> list[I32]:
    """Return the hash ids of each request (int32 [n]). Raises: InvalidRequest that names the first malformed line."""
    requests: list[I32] = []
    with open(path, encoding="utf-8") as file:  # a pipe too: `pagedkv replay <(zcat trace.gz)`
        for number, line in enumerate(iter(lambda: file.readline(MOST_CHARACTERS + 1), ""), 1):
            try:
                requests.append(_hash_ids(line))
            except (ValueError, RecursionError) as why:
                raise InvalidRequest(
                    f"{path}, line {number}: not a request ({why}); "
                    'each line is an object like {"hash_ids": [0, 1, 2]}'
                ) from None
    if not requests:
        raise InvalidRequest(f"{path} holds no request")
    return requests


def _hash_ids(line: str) -> I32:
    """int32 [n]: the hash ids of one request. Raises: ValueError that says what is wrong with the line"""
    if len(line) > MOST_CHARACTERS:
        raise ValueError(f"it has more than {MOST_CHARACTERS:,} characters")
    if not line.strip():
        raise ValueError("an empty line")
    request = json.loads(line)
    if not isinstance(request, dict) or not isinstance(request.get("hash_ids"), list):
        raise ValueError("no object with a list of hash_ids")
    for one in request["hash_ids"]:
        if type(one) is not int or not 0 <= one < 2**31:
            raise ValueError(f"hash id {json.dumps(one)[:40]}; they are ints of 0 or more, below 2**31")
    return np.array(request["hash_ids"], np.int32)


def unbounded(requests: Sequence[I32]) -> int:
    """Return the number of distinct blocks: a pool of so many frames never evicts."""
    return max(1, len(np.unique(np.concatenate(requests))))


def replay(
    trace: str | Path | Sequence[I32],
    num_frames: Sequence[int | None] = (None,),
    policies: Sequence[str | Policy] = ("lru",),
    *,
    tier: int = 0,
) -> list[dict[str, object]]:
    """Run the trace with each policy in each pool size, and return the results: Replayed objects as dicts.

    num_frames: the pool sizes; None means unbounded.
    tier: the pages that a tier below the pool holds, in order of their last use; 0 for no tier.
    policies: names or objects; "belady" is the optimum.
    Raises: InvalidRequest for an unknown policy, a size below 1 or a file that is no trace
    """
    chosen_policies = [policy if policy == BELADY else _for_blocks(policy) for policy in policies]
    requests = read_trace(trace) if isinstance(trace, (str, Path)) else trace
    all_blocks = unbounded(requests)
    sizes = [all_blocks if size is None else size for size in num_frames]
    if min(sizes, default=1) < 1:
        raise InvalidRequest(f"a pool of {min(sizes)} frames; give at least 1")
    if tier and BELADY in chosen_policies:
        raise InvalidRequest(f"{BELADY} knows no tier; name policies that run, such as lru")
    pools = [(min(size, all_blocks), whole(tier, "tier")) for size in sizes]
    return [
        asdict(_run(policy, size, requests, pool))
        for size, pool in zip(sizes, pools, strict=True)
        for policy in chosen_policies
    ]


def _for_blocks(policy: str | Policy) -> Policy:
    """Return the policy with its scale in blocks instead of tokens: a page is one block here."""
    if isinstance(policy, str) and policy not in POLICIES:
        raise InvalidRequest(f"policy is {policy!r}; give one of {', '.join([*POLICIES, BELADY])}")
    found = chosen(policy)
    return Cost(max(1, found.scale // BLOCK_TOKENS)) if isinstance(found, Cost) else found


def _run(policy: str | Policy, size: int, requests: Sequence[I32], pool: tuple[int, int]) -> _Replayed:
    """Run one policy. pool: the frames of the pool, and of the tier below."""
    evictions, (frames, below), loaded = None, pool, 0
    if isinstance(policy, str):
        name, hits = policy, list(_optimal(frames, requests))
    else:
        mm = MemoryManager(frames, 1, policy=policy, events=4 * frames if below else 0)
        tier = _Tier(mm, below) if below else None
        name, hits = policy.name, [_serve(mm, ids, tier) for ids in requests]
        evictions, loaded = mm.stats().evictions, tier.loaded if tier else 0
    matched, blocks = np.array(hits), np.array([len(ids) for ids in requests])
    late = len(requests) // 2
    return _Replayed(
        policy=name,
        num_frames=size,
        hit_rate=_share(matched, blocks),
        hit_rate_last_half=_share(matched[late:], blocks[late:]),
        requests=len(requests),
        blocks=int(blocks.sum()),
        matched=int(matched.sum()),
        evictions=evictions,
        tier_frames=below,
        loaded=loaded,
    )


def _share(matched: np.ndarray, blocks: np.ndarray) -> float:
    return float(matched.sum() / max(1, blocks.sum()))


def _serve(mm: MemoryManager, ids: I32, tier: _Tier | None = None) -> int:
    """Run one request from open to release, and return how many of its blocks matched.

    Blocks beyond the size of the pool are left out.
    """
    ids = ids[: mm.num_frames]
    space = mm.open(np.append(ids, np.int32(-1)))  # one more token: `open` leaves the last one to compute
    matched = len(space)
    loaded = tier.load(ids, matched) if tier else 0
    mm.commit(mm.plan([space], [len(ids) - matched]), ids[matched:])
    space.release()
    if tier:
        tier.follow()
    return matched + loaded


class _Tier:
    """The pages below a pool, without bytes. loaded: how many were asked for and there."""

    def __init__(self, mm: MemoryManager, num_frames: int) -> None:
        self._mm, self._slots, self._since, self.loaded = mm, FramePool(num_frames), 0, 0

    def load(self, ids: I32, known: int) -> int:
        """Return how many blocks of `ids` behind the first `known` ones are there, up to the first that is not."""
        names, digest = [], root_digest(b"")
        for block in range(len(ids)):
            digest = page_digest(digest, ids[block : block + 1])
            names.append(digest)
        found = self._find(names[known:])
        found = found[: int(np.argmin(found >= 0))] if (found < 0).any() else found
        self._use(found)
        self.loaded += len(found)
        return len(found)

    def follow(self) -> None:
        """Store the pages that the pool has published, and count a use of those that it has evicted."""
        changes = self._mm.page_changes(self._since)
        self._since = changes.sequence
        new, gone = [page.digest for _, page in changes.stored], [page.digest for page in changes.removed]
        absent = [name for name, slot in zip(new, self._find(new).tolist(), strict=True) if slot < 0]
        taken = self._slots.take(min(len(absent), self._slots.num_frames))
        self._slots.publish(taken, absent[: len(taken)])
        self._slots.drop(taken[::-1])
        found = self._find(gone)
        self._use(found[found >= 0])

    def _find(self, names: list[bytes]) -> I32:
        return self._slots.find(names) if names else np.empty(0, np.int32)

    def _use(self, slots: I32) -> None:
        self._slots.share(slots)
        self._slots.drop(slots[::-1])  # tails before prefixes


def _optimal(size: int, requests: Sequence[I32]) -> Iterator[int]:
    """Yield the number of matched blocks of each request under Belady's rule. O(blocks x log blocks)."""
    following = _next_uses(requests)
    pool: dict[int, int] = {}  # block: its next use
    farthest: list[tuple[int, int, int]] = []  # heap: -next use, -depth, block; stale where it differs from `pool`
    for ids, uses in zip(requests, following, strict=True):
        matched = next((depth for depth, block in enumerate(ids.tolist()) if block not in pool), len(ids))
        for depth, (block, use) in enumerate(zip(ids.tolist(), uses, strict=True)):
            pool[block] = use
            heapq.heappush(farthest, (-use, -depth, block))
        while len(pool) > size:
            use, _, block = heapq.heappop(farthest)
            if pool.get(block) == -use:
                del pool[block]
        yield matched


def _next_uses(requests: Sequence[I32]) -> list[list[int]]:
    """Return, for each block of each request, the number of the next request that has the block."""
    seen: dict[int, int] = {}
    following: list[list[int]] = []
    for number in range(len(requests) - 1, -1, -1):
        ids = requests[number].tolist()
        following.append([seen.get(block, _NEVER) for block in ids])
        seen.update(dict.fromkeys(ids, number))
    return following[::-1]
