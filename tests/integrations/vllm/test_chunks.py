"""Chunks over a tier, called as vLLM's tiering manager calls a secondary tier, and copies as its worker makes them."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Sequence
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from pagedkv.integrations.vllm import chunks
from pagedkv.integrations.vllm.chunks import ChunkCopies, TierUnderChunks
from pagedkv.tiers import HostTier, Op
from pagedkv.tiers.slots import SlotTier

CHUNKS, SIZE = 16, 4096
KEYS = [bytes([at]) * 32 + bytes(4) for at in range(CHUNKS)]
FACTS = {"weights": "sha256", "tp_size": 1}


class Primary:
    """vLLM's host memory over a tier."""

    def __init__(self, tier: SlotTier, facts: dict[str, object] | None = None) -> None:
        self.bytes = np.zeros((CHUNKS, SIZE), np.int8)
        self.under = TierUnderChunks(memoryview(self.bytes), tier, FACTS if facts is None else facts)

    def job(self, op: Op, keys: Sequence[bytes], places: Sequence[int], number: int = 7) -> chunks._Ended:
        self.under.begin(op, number, keys, places)
        assert self.under.num_pending <= 1
        self.under.drain()
        [ended] = self.under.ended()
        assert (ended.number, ended.keys, self.under.num_pending) == (number, list(keys), 0)
        return ended

    def stored(self, count: int = 4) -> None:
        """Fill the first chunks, store them, and clear the memory."""
        for at in range(count):
            self.bytes[at] = at + 1
        assert self.job(Op.STORE, KEYS[:count], range(count)).loaded == KEYS[:count]
        self.bytes[:] = 0


def test_chunks_come_back_to_other_places_as_they_were() -> None:
    primary = Primary(HostTier("1MiB"))
    assert not primary.under.has(KEYS[0])
    primary.stored()
    assert [primary.under.has(key) for key in KEYS[:5]] == [True] * 4 + [False]
    ended = primary.job(Op.LOAD, KEYS[:3], [9, 8, 7])
    assert (ended.loaded, ended.failed, ended.num_bytes) == (KEYS[:3], False, 3 * SIZE)
    assert primary.bytes[[9, 8, 7]].tolist() == [[1] * SIZE, [2] * SIZE, [3] * SIZE]
    primary.under.close()


def test_a_chunk_that_cannot_be_loaded_is_not_asked_for_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    clock = SimpleNamespace(monotonic=lambda: now, sleep=time.sleep)  # a busy machine shortens no skip
    monkeypatch.setattr(chunks, "time", clock)
    tier = HostTier("1MiB")
    tier._load = Mock(side_effect=OSError(errno.EIO, "no such luck"))  # type: ignore[method-assign]
    primary = Primary(tier)
    primary.stored(1)
    assert primary.under.has(KEYS[0])
    ended = primary.job(Op.LOAD, KEYS[:1], [0])
    assert (ended.loaded, ended.failed) == ([], True)
    now += chunks.SKIPPED - 0.1
    assert not primary.under.has(KEYS[0])  # else vLLM would promote it in each step, and never compute it
    now += 0.2
    assert primary.under.has(KEYS[0])
    primary.under.close()


@pytest.mark.parametrize("per_chunk", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_copies_reach_the_blocks_and_chunks_that_loops_reach(seed: int, per_chunk: int) -> None:
    draw, dice = random.Random(seed), torch.Generator().manual_seed(seed)
    pages = (8, 5)
    blocks = [torch.randint(-128, 128, (20, page), dtype=torch.int8, generator=dice) for page in pages]
    memory = torch.zeros(12, per_chunk * sum(pages) + 3, dtype=torch.int8)
    places, begin = list[torch.Tensor](), 0
    for page in pages:
        places.append(memory[:, begin : begin + per_chunk * page].unflatten(1, (per_chunk, page)))
        begin += per_chunk * page
    copies = ChunkCopies(blocks, places, [[(0, 8), (1, 4)], [(1, 5)]])
    sizes, first = [draw.randrange(1, 7), draw.randrange(0, 7)], [draw.randrange(9), draw.randrange(9)]
    used = np.array(draw.sample(range(20), sum(sizes)), np.int32)
    counts = [
        -(-(number % per_chunk + size) // per_chunk) if size else 0 for size, number in zip(sizes, first, strict=True)
    ]
    rows = np.array(draw.sample(range(12), sum(counts)), np.int32)
    copies.move(used, rows, sizes, first, to_host=True)
    expected = torch.zeros_like(memory)
    at_block = at_row = 0
    for layers, size, number, count in zip([[(0, 8), (1, 4)], [(1, 5)]], sizes, first, counts, strict=True):
        for each in range(size):
            place = number % per_chunk + each
            for tensor, length in layers:
                start = (0, per_chunk * 8)[tensor] + place % per_chunk * pages[tensor]
                row = int(rows[at_row + place // per_chunk])
                expected[row, start : start + length] = blocks[tensor][int(used[at_block + each]), :length]
        at_block, at_row = at_block + size, at_row + count
    assert (memory == expected).all()
    before = [block.clone() for block in blocks]
    for block in blocks:
        block[used.astype(np.int64)] = 0
    num_bytes = copies.move(used, rows, sizes, first, to_host=False)
    assert num_bytes == sizes[0] * 12 + sizes[1] * 5
    group = used[: sizes[0]].astype(np.int64)
    assert (blocks[0][group] == before[0][group]).all()
    assert (blocks[1][group, :4] == before[1][group, :4]).all()
    group = used[sizes[0] :].astype(np.int64)
    assert (blocks[1][group] == before[1][group]).all()
