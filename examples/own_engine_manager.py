"""An engine that owns its tensors: pagedkv.core decides where each token lives, in integers. Nothing imports torch.

Run: python examples/own_engine_manager.py
"""

import sys

import numpy as np

from pagedkv.core import AddressSpace, MemoryManager
from pagedkv.errors import OutOfFrames

BLOCK, FRAMES, DIM = 4, 8, 16
mm = MemoryManager(num_frames=FRAMES, block_size=BLOCK)  # 8 frames of 4 tokens: 32 slots
pool = np.full((FRAMES, BLOCK, DIM), np.nan, np.float32)  # the engine's own memory: pagedkv never sees it


def kv_of(tokens: list[int], positions: np.ndarray) -> np.ndarray:
    """Return a stand-in for a model's keys, float32 [T, DIM]: a function of the token and its position."""
    return np.sin(np.outer(np.asarray(tokens) + 100 * positions, np.arange(1, DIM + 1)), dtype=np.float32)


def step(spaces: list[AddressSpace], tokens: list[list[int]]) -> None:
    """Run one step of the engine: plan, copy, write, commit."""
    plan = mm.plan(spaces, [len(new) for new in tokens])  # maps a frame for every new token, or raises OutOfFrames
    for source, target in plan.copies:  # a tail page that two sequences share is copied before it is written
        pool[target] = pool[source]
    flat = [token for new in tokens for token in new]
    pool.reshape(-1, DIM)[plan.slots] = kv_of(flat, plan.positions)  # slot = frame * BLOCK + offset
    mm.commit(plan, flat)  # from now on these tokens belong to their sequences


def kv_in(space: AddressSpace) -> np.ndarray:
    """Read the keys of a whole sequence through its page table, float32 [len(space), DIM]."""
    return pool[space.pages].reshape(-1, DIM)[: len(space)]


prompt = [11, 12, 13, 14, 15, 16]
first = mm.open()
step([first], [prompt])  # prefill: six tokens take two frames
second = first.fork()  # a second sample of the same prompt shares both frames
step([first, second], [[21], [22]])  # decode: one token each; the shared tail page is copied once
print("frames of the two samples:", first.pages.tolist(), second.pages.tolist())
for space, last in ((first, 21), (second, 22)):
    assert np.array_equal(kv_in(space), kv_of([*prompt, last], np.arange(7)))
assert first.pages[0] == second.pages[0]  # the full page is still shared
assert first.pages[1] != second.pages[1]  # the tail is not

try:
    step([first], [list(range(100))])
except OutOfFrames as error:  # a plan that fails has changed nothing; the error has the numbers for a scheduler
    print(f"out of frames: {error.needed} needed, {error.free} free, {error.evictable} evictable")
assert len(first) == 7

second.release()
mm.check()  # proves all invariants; for tests and debugging
print(mm)
assert "torch" not in sys.modules
