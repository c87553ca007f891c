"""FrameQueue: the free blocks of vLLM, against a list that is obviously right."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from pagedkv.core import FramePool
from pagedkv.errors import InvalidRequest
from pagedkv.integrations.vllm.frame_queue import FrameQueue


class ListQueue:
    """One list, as vLLM documents its free blocks."""

    def __init__(self, blocks: list[Any]) -> None:
        self.blocks = list(blocks)

    @property
    def num_free_blocks(self) -> int:
        return len(self.blocks)

    def popleft_n(self, n: int) -> list[Any]:
        if n > len(self.blocks):
            raise ValueError
        taken, self.blocks = self.blocks[:n], self.blocks[n:]
        return taken

    def remove_n(self, blocks: list[Any]) -> None:
        for block in blocks:
            self.blocks.remove(block)

    def append_n(self, blocks: list[Any]) -> None:
        self.blocks += blocks

    def prepend_n(self, blocks: list[Any]) -> None:
        self.blocks = blocks + self.blocks


def blocks_of(count: int) -> list[Any]:
    return [SimpleNamespace(block_id=number, block_hash_num_tokens=None) for number in range(count)]


@pytest.mark.parametrize("share_with_hashes", [0.0, 0.5])
@pytest.mark.parametrize("seed", range(6))
def test_blocks_are_taken_in_the_order_of_vllm(seed: int, share_with_hashes: float) -> None:
    """Blocks with hashes, too, may be put in front or removed."""
    dice, blocks = random.Random(seed), blocks_of(24)
    ours, theirs = FrameQueue(blocks, FramePool(24, key_bytes=4)), ListQueue(blocks)
    used: list[Any] = []
    for _ in range(400):
        verb = dice.choice(("pop", "pop", "append", "prepend", "remove"))
        if verb == "pop":
            n = dice.randint(0, 5)
            if n > theirs.num_free_blocks:
                with pytest.raises(ValueError, match="were asked for"):
                    ours.popleft_n(n)
                continue
            found = ours.popleft_n(n)
            assert [block.block_id for block in found] == [block.block_id for block in theirs.popleft_n(n)]
            used += found
        elif verb == "remove":
            free = theirs.blocks
            found = dice.sample(free, min(len(free), dice.randint(0, 3)))
            for queue in (ours, theirs):
                queue.remove_n(found)
            used += found
        else:
            dice.shuffle(used)
            found, used = used[: (n := dice.randint(0, 4))], used[n:]
            for block in found:
                block.block_hash_num_tokens = 16 if dice.random() < share_with_hashes else None
            for queue in (ours, theirs):
                getattr(queue, f"{verb}_n")(found)
        assert ours.num_free_blocks == theirs.num_free_blocks
        assert ours.get_all_free_blocks() == theirs.blocks
        assert list(ours.iter_blocks_after(None)) == theirs.blocks
        if theirs.blocks:
            at = dice.randrange(len(theirs.blocks))
            assert list(ours.iter_blocks_after(theirs.blocks[at])) == theirs.blocks[at + 1 :]
        ours.frames.check()


def test_blocks_that_are_free_or_in_use_already_are_refused_while_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDKV_DEBUG", "1")
    blocks = blocks_of(6)
    queue = FrameQueue(blocks, FramePool(6, key_bytes=4))
    first, second, third = queue.popleft_n(3)
    queue.append(second)
    for add in (queue.append_n, queue.prepend_n):
        for block in (second, blocks[5]):  # cached, spare
            with pytest.raises(InvalidRequest, match=f"block {block.block_id} is free, and was to enter"):
                add([third, block])
    with pytest.raises(InvalidRequest, match=f"block {first.block_id} is in use, and was to leave"):
        queue.remove(first)
    assert queue.num_free_blocks == 4
    queue.prepend_n([first, third])
    assert [block.block_id for block in queue.popleft_n(2)] == [first.block_id, third.block_id]
