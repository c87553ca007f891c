"""FrameQueue: the free blocks of vLLM in a FramePool. No vLLM is imported here.

vLLM keeps its free blocks in one list. Ours are in two places, and are taken from them in this order:

    spare       blocks that hold nothing, the one freed last first, then those that were never used. Their frames keep a
                reference
    cached      frames without a reference, whose blocks have hashes or are still read: evicted in the policy's order
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pagedkv.core import FramePool

Block = Any
"""KVCacheBlock of vLLM: block_id, block_hash_num_tokens."""


class FrameQueue:
    """The free blocks of a pool, in place of FreeKVCacheBlockQueue. Block i is frame i.

    frames: all of them free; the queue takes them.
    """

    def __init__(self, blocks: Sequence[Block], frames: FramePool) -> None:
        self._blocks, self.frames = blocks, frames
        self._spare = dict.fromkeys(reversed(frames.take(len(blocks)).tolist()))  # the last one is taken first
        self._needs_positions = frames.policy.name == "cost"
        self.num_free_blocks = len(blocks)

    def popleft(self) -> Block:
        """Return the first free block. Raises: ValueError if there is none."""
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Block]:
        """Return the first `n` free blocks; they are no longer free. Raises: ValueError if there are fewer."""
        if n > self.num_free_blocks:
            raise ValueError(f"{n} free blocks were asked for, and there are {self.num_free_blocks}")
        self.num_free_blocks -= n
        spare, blocks = self._spare, self._blocks
        found = [blocks[spare.popitem()[0]] for _ in range(min(n, len(spare)))]
        missing = n - len(found)
        if missing == 1:
            found.append(blocks[self.frames.take_one()])
        elif missing:
            victims = self.frames.victims(missing).tolist()  # `take` gives the same frames in the order of their runs
            taken = self.frames.take(missing)
            if len(victims) != missing or set(victims) != set(taken.tolist()):
                raise RuntimeError(f"the frames {taken.tolist()} were taken, and {victims} were to be")
            found += [blocks[frame] for frame in victims]
        return found

    def remove(self, block: Block) -> None:
        """Take `block`, which is free, out of the list."""
        self.remove_n([block])

    def remove_n(self, blocks: Sequence[Block]) -> None:
        """Take `blocks`, which are free, out of the list. Frames that are cached count a use for the policy."""
        spare = self._spare
        cached = [block.block_id for block in blocks if block.block_id not in spare]
        if cached:
            self.frames.share(cached)
        if len(cached) < len(blocks):
            for block in blocks:
                spare.pop(block.block_id, None)
        self.num_free_blocks -= len(blocks)

    def append(self, block: Block) -> None:
        """Add a block that is evicted last."""
        self.append_n([block])

    def append_n(self, blocks: Sequence[Block]) -> None:
        """Add blocks that are evicted in the policy's order, the first of these first."""
        if blocks:
            positions = [block.block_hash_num_tokens or 0 for block in blocks] if self._needs_positions else None
            self.frames.drop([block.block_id for block in blocks], last=True, positions=positions)
            self.num_free_blocks += len(blocks)

    def prepend_n(self, blocks: Sequence[Block]) -> None:
        """Add blocks that are taken before all others, the first of these first."""
        for block in reversed(blocks):
            self._spare[block.block_id] = None
        self.num_free_blocks += len(blocks)

    def get_all_free_blocks(self) -> list[Block]:
        """Return the free blocks in the order in which they would be taken. O(blocks)."""
        cached = self.frames.victims(self.frames.num_frames).tolist()
        return [self._blocks[number] for number in (*reversed(self._spare), *cached)]

    def iter_blocks_after(self, cursor: Block | None) -> Iterator[Block]:
        """Return the free blocks after `cursor`, or all."""
        blocks = self.get_all_free_blocks()
        return iter(blocks[0 if cursor is None else blocks.index(cursor) + 1 :])
