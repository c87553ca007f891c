"""Replay on small traces whose result is known, or found by trying every choice."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from pagedkv.core.policies import POLICIES
from pagedkv.core.replay import BELADY, read_trace, replay
from pagedkv.core.state import I32
from pagedkv.errors import InvalidRequest

pytestmark = pytest.mark.many_steps


def random_trace(seed: int, requests: int, blocks: int) -> list[I32]:
    """Return requests that share prefixes: each continues a prefix of an earlier request with new blocks."""
    rng = np.random.default_rng(seed)
    requests_so_far: list[list[int]] = [[]]
    fresh = 0
    for _ in range(requests):
        prefix = requests_so_far[rng.integers(len(requests_so_far))]
        prefix = prefix[: rng.integers(len(prefix) + 1)]
        new = int(rng.integers(blocks + 1))
        requests_so_far.append([*prefix, *range(fresh, fresh + new)])
        fresh += new
    return [np.array(ids, np.int32) for ids in requests_so_far[1:]]


def best_by_trying(requests: list[I32], size: int) -> int:
    """Return the most blocks that can match, over every choice of the blocks to keep after each request."""
    best = {frozenset[int](): 0}
    for ids in requests:
        after: dict[frozenset[int], int] = {}
        for pool, matched in best.items():
            found = next((i for i, block in enumerate(ids.tolist()) if block not in pool), len(ids))
            everything = pool | set(ids.tolist())
            for kept in combinations(sorted(everything), min(size, len(everything))):
                after[frozenset(kept)] = max(after.get(frozenset(kept), 0), matched + found)
        best = after
    return max(best.values())


@pytest.mark.parametrize("seed", range(4))
def test_beladys_optimum_is_the_best_that_can_be(seed: int) -> None:
    requests = random_trace(seed, requests=6, blocks=3)
    for size in (1, 2, 3):
        assert replay(requests, [size], [BELADY])[0]["matched"] == best_by_trying(requests, size)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_no_policy_beats_the_optimum_and_all_are_equal_without_bound(seed: int) -> None:
    requests = random_trace(seed, requests=80, blocks=5)
    policies = [*POLICIES, BELADY]
    for row in (replay(requests, [20], policies), replay(requests, [None], policies)):
        best = row[-1]["matched"]
        assert all(one["matched"] <= best for one in row)  # type: ignore[operator]
    assert {one["matched"] for one in row} == {best}
    assert best > 0


def test_hit_rates_are_matched_blocks_over_prompt_blocks() -> None:
    requests = [np.array(ids, np.int32) for ids in ([1, 2], [1, 2, 3], [9, 10, 11], [1, 2, 3, 4])]
    (only,) = replay(requests)
    assert only["hit_rate"] == 5 / 12
    assert only["hit_rate_last_half"] == 3 / 7
    assert only["num_frames"] == 7


def test_a_request_longer_than_the_pool_is_served_as_far_as_it_fits() -> None:
    long = np.arange(10, dtype=np.int32)
    (only,) = replay([long, long], [4])
    assert only["matched"] == 4


def test_a_trace_is_read_from_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps({"timestamp": 0, "hash_ids": ids}) for ids in ([0, 1], [0, 1, 2])))
    assert [ids.tolist() for ids in read_trace(path)] == [[0, 1], [0, 1, 2]]
    assert replay(path)[0]["hit_rate"] == 2 / 5


@pytest.mark.parametrize(
    ("line", "why"),
    {
        "nonsense": "Expecting value",
        '{"hash_ids": [0, 1': "Expecting ',' delimiter",
        "\n": "an empty line",
        "{}": "no object with a list of hash_ids",
        "[]": "no object with a list of hash_ids",
        '{"hash_ids": 3}': "no object with a list of hash_ids",
        '{"hash_ids": [-1]}': "hash id -1; they are ints of 0 or more",
        '{"hash_ids": [4294967296]}': "hash id 4294967296; they are",
        '{"hash_ids": [0, 1.5]}': "hash id 1.5",
        '{"hash_ids": [true]}': "hash id true",
        '{"hash_ids": [null]}': "hash id null",
        '{"hash_ids": ["7"]}': 'hash id "7"',
    }.items(),
)
def test_a_line_that_is_no_request_is_named_with_what_is_wrong(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"hash_ids": [0]}\n' + line)
    with pytest.raises(InvalidRequest, match=f"line 2: not a request .{re.escape(why)}"):
        replay(path)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="the system has no /dev/zero")
def test_a_file_without_an_end_of_line_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="line 1: not a request .it has more than 16,777,216 characters"):
        replay("/dev/zero")


def test_unknown_policies_and_absurd_sizes_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="2q, lfu, cost, belady"):
        replay([np.array([1], np.int32)], policies=["fifo"])
    with pytest.raises(InvalidRequest, match="at least 1"):
        replay([np.array([1], np.int32)], [0])


def pool_and_tier(requests: list[I32], size: int, below: int) -> tuple[int, int]:
    """Return (blocks matched, blocks matched below): LRU lists of whole prefixes, written down as simply as can be.

    Equal ids mean equal prefixes, so an id is a name. The pool evicts the block unused longest, tails first.
    """
    pool, tier, matched, loaded = dict[int, None](), dict[int, None](), 0, 0
    for ids in (request.tolist()[:size] for request in requests):
        known = next((i for i, block in enumerate(ids) if block not in pool), len(ids))
        there = next((i for i, block in enumerate(ids[known:]) if block not in tier), len(ids) - known)
        for block in reversed(ids[known : known + there]):
            tier[block] = tier.pop(block)
        kept = [block for block in pool if block not in ids]
        gone = kept[: max(0, len(kept) + len(ids) - size)]
        for block in ids[known:]:
            if block not in tier:
                tier[block] = None
        pool = dict.fromkeys([*kept[len(gone) :], *reversed(ids)])
        for block in gone:
            if block in tier:
                tier[block] = tier.pop(block)
        while len(tier) > below:
            del tier[next(iter(tier))]
        matched, loaded = matched + known + there, loaded + there
    return matched, loaded


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def test_a_pool_over_a_tier_finds_as_much_as_lists_say(seed: int) -> None:
    requests = random_trace(seed, requests=60, blocks=4)
    for size, below in ((12, 200), (30, 400)):  # no page leaves the tier
        (row,) = replay(requests, [size], tier=below)
        assert (row["matched"], row["loaded"]) == pool_and_tier(requests, size, below)
    (small,) = replay(requests, [12], tier=24)
    least, most = pool_and_tier(requests, 12, 24)[0] * 0.8, unbounded_matches(requests)
    assert least <= small["matched"] <= most  # type: ignore[operator]


def unbounded_matches(requests: list[I32]) -> int:
    return replay(requests)[0]["matched"]  # type: ignore[return-value]


def test_rules_that_know_no_tier_say_so() -> None:
    with pytest.raises(InvalidRequest, match="knows no tier"):
        replay([np.array([1], np.int32)], [1], [BELADY], tier=3)
