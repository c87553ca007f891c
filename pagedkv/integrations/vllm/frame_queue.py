"""FrameQueue: the free blocks of vLLM in a FramePool. No vLLM is imported here.

vLLM keeps its free blocks in one list. Ours are in three places, and are taken from them in this order:

    spare       blocks that hold nothing, the one freed last first, then those that were never used. Their frames keep a
                reference
    cached      frames without a reference, whose blocks have hashes or are still read: evicted in the policy's order
    retained    blocks with a hint, the one that is needed last first. Their frames keep a reference
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import Any, Final

import numpy as np

from pagedkv import debug
from pagedkv.core import FramePool
from pagedkv.errors import InvalidRequest

Block = Any
"""KVCacheBlock of vLLM: block_id, block_hash_num_tokens."""

_NUMBER: Final = attrgetter("block_id")


class FrameQueue:
    """The free blocks of a pool, in place of FreeKVCacheBlockQueue. Block i is frame i.

    frames: all of them free; the queue takes them. share: the part of all blocks that hints may retain.
    vLLM gives the queue blocks that are in use, and removes blocks that are free. PAGEDKV_DEBUG >= 1 checks that.
    """

    def __init__(self, blocks: Sequence[Block], frames: FramePool, share: float = 0.1) -> None:
        self._blocks, self.frames = blocks, frames
        self._spare = [blocks[number] for number in reversed(frames.take(len(blocks)).tolist())]  # a stack
        self._spare_has_hashes = False  # vLLM never puts such a block there while it looks for hashes
        self._needs_positions = frames.policy.name == "cost"
        self._checks = debug.level() >= 1
        self.num_free_blocks = len(blocks)
        self._most_retained = int(share * len(blocks))
        self._until: dict[int, tuple[float, int]] = {}  # of each block with a hint: when it ends; the tokens before it
        self._soonest = float("inf")  # no hint ends before
        self._retained: dict[int, Block] = {}  # those of them that are free

    def _require(self, blocks: Sequence[Block], is_free: bool) -> None:
        """Raise InvalidRequest unless all blocks are free, or all are in use. O(frames)."""
        references, spare = self.frames.references(), {block.block_id for block in self._spare} | set(self._retained)
        for block in blocks:
            found = block.block_id in spare or int(references[block.block_id]) == 0
            if found is not is_free:
                state, wanted = ("free", "enter") if found else ("in use", "leave")
                raise InvalidRequest(f"block {block.block_id} is {state}, and was to {wanted} the list of free blocks")

    def popleft(self) -> Block:
        """Return the first free block. Raises: ValueError if there is none."""
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Block]:
        """Return the first `n` free blocks; they are no longer free. Raises: ValueError if there are fewer."""
        if n > self.num_free_blocks:
            raise ValueError(f"{n} free blocks were asked for, and there are {self.num_free_blocks}")
        self.num_free_blocks -= n
        if self._retained and (lack := len(self._retained) - self.num_free_blocks) > 0:
            self._end(self._last_needed(self._retained)[:lack])
        kept = max(0, len(self._spare) - n)
        found = self._spare[kept:]
        found.reverse()
        del self._spare[kept:]
        missing = n - len(found)
        if missing == 1:
            found.append(self._blocks[self.frames.take_one()])
        elif missing:
            victims = self.frames.victims(missing)  # `take` gives the same frames in the order of their runs
            taken = self.frames.take(missing)
            if self._checks and not np.array_equal(np.sort(victims), np.sort(taken)):
                raise RuntimeError(f"the frames {taken.tolist()} were taken, and {victims.tolist()} were to be")
            found += itemgetter(*victims.tolist())(self._blocks)
        return found

    def remove(self, block: Block) -> None:
        """Take `block`, which is free, out of the list."""
        self.remove_n([block])

    def remove_n(self, blocks: Sequence[Block]) -> None:
        """Take `blocks`, which are free, out of the list. Frames that are cached count a use for the policy.

        Blocks that requests find have hashes, and vLLM puts blocks without one on the stack: so they are not looked for
        there.
        """
        if self._checks:
            self._require(blocks, is_free=True)
        cached_if_hashed = not self._spare_has_hashes
        cached = [
            block.block_id
            for block in blocks
            if self._retained.pop(block.block_id, None) is None
            if (cached_if_hashed and block.block_hash_num_tokens is not None) or not self._leaves_spare(block)
        ]
        if cached:
            self.frames.share(cached)
        self.num_free_blocks -= len(blocks)

    def _leaves_spare(self, block: Block) -> bool:
        """Take `block` off the stack of spare blocks. Return False if it is not there. O(spare)."""
        at = next((at for at, spare in enumerate(self._spare) if spare is block), None)
        if at is not None:
            del self._spare[at]
        return at is not None

    def append(self, block: Block) -> None:
        """Add a block that is evicted last."""
        self.append_n([block])

    def append_n(self, blocks: Sequence[Block]) -> None:
        """Add blocks that are evicted in the policy's order, the first of these first."""
        if self._checks:
            self._require(blocks, is_free=False)
        self.num_free_blocks += len(blocks)
        if self._until:
            self._retained |= {block.block_id: block for block in blocks if block.block_id in self._until}
            blocks = [block for block in blocks if block.block_id not in self._until]
        self._cache(blocks)

    def _cache(self, blocks: Sequence[Block]) -> None:
        """Leave free blocks to the policy."""
        if blocks:
            positions = [block.block_hash_num_tokens or 0 for block in blocks] if self._needs_positions else None
            numbers = np.fromiter(map(_NUMBER, blocks), np.int32, len(blocks))
            self.frames.drop(numbers, last=True, positions=positions)

    def prepend_n(self, blocks: Sequence[Block]) -> None:
        """Add blocks that are taken before all others, the first of these first."""
        if self._checks:
            self._require(blocks, is_free=False)
        self._spare += reversed(blocks)
        for number in map(_NUMBER, blocks) if self._until else ():
            self._until.pop(number, None)
        for block in blocks:
            if block.block_hash_num_tokens is not None:
                self._spare_has_hashes = True
        self.num_free_blocks += len(blocks)

    def get_all_free_blocks(self) -> list[Block]:
        """Return the free blocks in the order in which they would be taken. O(blocks)."""
        return [self._blocks[number] for number in self._free()]

    def _free(self) -> list[int]:
        cached = self.frames.victims(self.frames.num_frames).tolist()
        return [*map(_NUMBER, reversed(self._spare)), *cached, *self._last_needed(self._retained)]

    def iter_blocks_after(self, cursor: Block | None) -> Iterator[Block]:
        """Return the free blocks after `cursor`, which is free, or all. O(blocks): vLLM's own list costs O(visited)."""
        numbers = self._free()
        first = 0 if cursor is None else numbers.index(cursor.block_id) + 1
        return (self._blocks[number] for number in numbers[first:])

    # -- hints ---------------------------------------------------------------------------------------------------------

    def retain(self, blocks: Sequence[Block], until: float) -> str:
        """Let `blocks`, a prefix from its beginning, be evicted after all others until a time. Return the answer.

        Beyond the share of the pool the blocks that are needed last lose their hints. "clipped": the end of the prefix
        has none. "rejected": no block has one. O(blocks with hints).
        """
        fresh = [block for block in blocks if block.block_id not in self._until]
        room = self._most_retained - len(self._until)
        if len(fresh) > room:
            own = set(map(_NUMBER, blocks))
            later = [number for number, (end, _) in self._until.items() if end > until and number not in own]
            room += self._end(self._last_needed(later)[: len(fresh) - room])
        unfit = set(map(_NUMBER, fresh[max(0, room) :]))
        held = [block for block in blocks if block.block_id not in unfit]
        for block in held:
            end, _ = self._until.get(block.block_id, (until, 0))
            self._until[block.block_id] = max(end, until), block.block_hash_num_tokens or 0
        self._soonest = min(self._soonest, until)
        return "accepted" if not unfit else "clipped" if held else "rejected"

    def release(self, blocks: Sequence[Block]) -> int:
        """End the hints of `blocks`. Return how many had one."""
        return self._end([block.block_id for block in blocks if block.block_id in self._until])

    def expire(self, now: float) -> None:
        """End the hints that have reached their time."""
        if now >= self._soonest:
            self._end([number for number, (end, _) in self._until.items() if end <= now])
            self._soonest = min((end for end, _ in self._until.values()), default=float("inf"))

    def _last_needed(self, numbers: Iterable[int]) -> list[int]:
        """Return the blocks, which have hints, from the one that is needed last, and tails before prefixes."""
        return sorted(numbers, key=self._until.__getitem__, reverse=True)

    def _end(self, numbers: Iterable[int]) -> int:
        """End the hints of blocks. The free ones of them become cached."""
        ended = self._last_needed(numbers)
        for number in ended:
            del self._until[number]
        self._cache([self._retained.pop(number) for number in ended if number in self._retained])
        return len(ended)
