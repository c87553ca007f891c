"""Replay: a trace of requests against pools of several sizes and policies, by the live manager itself, and against the best that can be.

A trace has one JSON object a line, as published with Mooncake (FAST 2025): `hash_ids` names the blocks of a prompt, and equal ids mean
equal prompts up to there. A block is one frame here. A request matches its longest known prefix, computes the rest, publishes it and ends;
the next one begins then. So a figure tells how well a policy keeps what comes back, and nothing about load.

    hit rate = matched prompt blocks / all prompt blocks

Belady's optimum knows the future: it gives up the block whose next use is farthest away. A block's prefix is used no later than the block
itself, so what it keeps is whole prefixes (the deeper one goes first where two are equal), and no policy can match more.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np

from pagedkv.core.manager import MemoryManager
from pagedkv.core.observation import Observe
from pagedkv.core.pool.policies import POLICIES, Cost, Policy, chosen
from pagedkv.core.state import I32
from pagedkv.errors import InvalidRequest

BLOCK_TOKENS: Final = 512
"""Prompt tokens for each hash id."""

BELADY: Final = "belady"
ESTIMATE: Final = "estimate"
"""What `hit_curve` of a pool a quarter as large says of this one under LRU."""
FOLLOWED: Final = 8192
"""Pages that it follows."""

_NEVER: Final = 2**62


@dataclass(frozen=True)
class Replayed:
    """What one policy achieved in one pool; rates are shares of 1."""

    policy: str
    num_frames: int
    hit_rate: float
    hit_rate_last_half: float  # over the second half of the requests, when the pool is warm
    requests: int
    blocks: int
    matched: int
    evictions: int | None


def read_trace(path: str | Path) -> list[I32]:
    """The hash ids of each request. Raises: InvalidRequest naming the first line that is not of this form."""
    requests: list[I32] = []
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                requests.append(_hash_ids(line))
            except (ValueError, RecursionError) as why:
                raise InvalidRequest(
                    f'{path}, line {number}: not a request ({why}); each line is an object like {{"hash_ids": [0, 1, 2]}}'
                ) from None
    if not requests:
        raise InvalidRequest(f"{path} holds no request")
    return requests


def _hash_ids(line: str) -> I32:
    """int32 [n]: those of one request. Raises: ValueError that says what is wrong"""
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
    """Frames that hold every block of the trace."""
    return max(1, len(np.unique(np.concatenate(requests))))


def replay(
    trace: str | Path | Sequence[I32],
    num_frames: Sequence[int | None] = (None,),
    policies: Sequence[str | Policy] = ("lru",),
) -> list[dict[str, object]]:
    """Each policy in each pool: a list of Replayed as dicts. None as a size means unbounded.

    "belady" is the optimum, "estimate" what `hit_curve` says of LRU.

    Raises: InvalidRequest for an unknown policy, a size below 1 or a file that is no trace
    """
    named = [policy if policy in (BELADY, ESTIMATE) else _for_blocks(policy) for policy in policies]
    requests = read_trace(trace) if isinstance(trace, (str, Path)) else trace
    every = unbounded(requests)
    sizes = [every if size is None else size for size in num_frames]
    if min(sizes, default=1) < 1:
        raise InvalidRequest(f"a pool of {min(sizes)} frames; give at least 1")
    return [asdict(_run(policy, size, requests, min(size, every))) for size in sizes for policy in named]


def _for_blocks(policy: str | Policy) -> Policy:
    """A page is one block here: distances in tokens become distances in blocks."""
    if isinstance(policy, str) and policy not in POLICIES:
        raise InvalidRequest(f"policy is {policy!r}; it is one of {', '.join([*POLICIES, BELADY, ESTIMATE])}")
    found = chosen(policy)
    return Cost(max(1, found.scale // BLOCK_TOKENS)) if isinstance(found, Cost) else found


def _estimate(size: int, requests: Sequence[I32], frames: int) -> Replayed:
    """One pass of a smaller pool, whose own hits do not matter."""
    longest = max(len(ids) for ids in requests)
    mm = MemoryManager(max(1, -(-frames // 4), longest), 1, observe=Observe(reuse=FOLLOWED))
    late, before = len(requests) // 2, np.zeros(0, np.int64)
    reuse = mm._reuse
    assert reuse is not None
    for number, ids in enumerate(requests):
        if number == late:
            before = reuse.counts()
        _serve(mm, ids)
    blocks = sum(map(len, requests))
    rate = reuse.hit_rate(size, reuse.counts())
    return Replayed(
        policy=ESTIMATE,
        num_frames=size,
        hit_rate=rate,
        hit_rate_last_half=reuse.hit_rate(size, reuse.counts() - before),
        requests=len(requests),
        blocks=blocks,
        matched=round(rate * blocks),
        evictions=None,
    )


def _run(policy: str | Policy, size: int, requests: Sequence[I32], frames: int) -> Replayed:
    evictions = None
    if policy == ESTIMATE:
        return _estimate(size, requests, frames)
    if isinstance(policy, str):
        name, hits = policy, list(_optimal(frames, requests))
    else:
        mm = MemoryManager(frames, 1, policy=policy)  # never more than there are blocks
        name, hits = policy.name, [_serve(mm, ids) for ids in requests]
        evictions = mm.stats().evictions
    matched, blocks = np.array(hits), np.array([len(ids) for ids in requests])
    late = len(requests) // 2
    return Replayed(
        policy=name,
        num_frames=size,
        hit_rate=_share(matched, blocks),
        hit_rate_last_half=_share(matched[late:], blocks[late:]),
        requests=len(requests),
        blocks=int(blocks.sum()),
        matched=int(matched.sum()),
        evictions=evictions,
    )


def _share(matched: np.ndarray, blocks: np.ndarray) -> float:
    return float(matched.sum() / max(1, blocks.sum()))


def _serve(mm: MemoryManager, ids: I32) -> int:
    """One request from beginning to end; returns how many of its blocks were there. What no pool could hold is left out."""
    ids = ids[: mm.num_frames]
    space = mm.open(np.append(ids, np.int32(-1)))  # a last token, which is always computed
    matched = len(space)
    mm.commit(mm.plan([space], [len(ids) - matched]), ids[matched:])
    space.release()
    return matched


def _optimal(size: int, requests: Sequence[I32]) -> Iterator[int]:
    """Matched blocks of each request under Belady's rule. O(blocks x log blocks)."""
    following = _next_uses(requests)
    held: dict[int, int] = {}  # block: its next use
    farthest: list[tuple[int, int, int]] = []  # -next use, -depth, block; entries that differ from `held` are stale
    for ids, uses in zip(requests, following, strict=True):
        matched = next((depth for depth, block in enumerate(ids.tolist()) if block not in held), len(ids))
        for depth, (block, use) in enumerate(zip(ids.tolist(), uses, strict=True)):
            held[block] = use
            heapq.heappush(farthest, (-use, -depth, block))
        while len(held) > size:
            use, _, block = heapq.heappop(farthest)
            if held.get(block) == -use:
                del held[block]
        yield matched


def _next_uses(requests: Sequence[I32]) -> list[list[int]]:
    """For each block of each request, the next request that has it."""
    seen: dict[int, int] = {}
    following: list[list[int]] = []
    for number in range(len(requests) - 1, -1, -1):
        ids = requests[number].tolist()
        following.append([seen.get(block, _NEVER) for block in ids])
        seen.update(dict.fromkeys(ids, number))
    return following[::-1]
