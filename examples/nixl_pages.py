"""Compute a prompt in one process and answer it in another: its pages go from pool to pool by NIXL.

    prefill process                                   decode process
    compute the prompt, keep its pages                plan frames for them
           ◀──────── addresses of these frames ────────────
    write page by page into them ──────── NIXL ──────▶
           ──────── a checksum of each page ──────────────▶ compare, commit: prompts find the pages

A frame is one run of bytes with all layers of its tokens, so a page is one descriptor of NIXL, and any other transport
could carry it. NIXL takes shared memory, TCP or RDMA (UCX_TLS, UCX_NET_DEVICES). Both processes must have the same
weights and the same KVSpec. A process that can write to the pool can plant pages: use a private network. A pipe carries
the few messages here; between machines, use a connection of your own.

Run: python examples/nixl_pages.py    (after pip install --no-deps nixl nixl-cu13, or nixl-cu12)
"""

import multiprocessing
import os
import time
from multiprocessing.connection import Connection

from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
from xxhash import xxh3_128_digest

from pagedkv import PagedKVCache
from pagedkv.engine import Engine, SamplingParams

PROMPT = list(range(10, 500))
MEMORY = "DRAM"  # "VRAM" and the number of the GPU for a pool there
ONE, EIGHT = SamplingParams(max_tokens=1), SamplingParams(max_tokens=8)


class Side:
    """One of two processes: an agent of NIXL that knows the memory of this pool and of the other one."""

    def __init__(self, name: str, cache: PagedKVCache, pipe: Connection) -> None:
        self.cache, self.pipe, self.pool = cache, pipe, cache.storage.frames
        # no progress thread: it would take a core; check_xfer_state and get_new_notifs make progress
        sync = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        self.agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"], sync_mode=sync))
        self.agent.register_memory([(self.pool.data_ptr(), self.pool.numel(), 0, "")], MEMORY)
        pipe.send(self.agent.get_agent_metadata())
        self.peer = self.agent.add_remote_agent(pipe.recv())

    def addresses(self, frames: list[int]) -> list[int]:
        """Return where frames lie. The pool must not be resized meanwhile."""
        return [self.pool.data_ptr() + frame * self.cache.frame_bytes for frame in frames]

    def checksum(self, frame: int) -> bytes:
        """Return 16 bytes that change with any byte of a frame."""
        return xxh3_128_digest(self.pool[frame].numpy().data)


def prefill(pipe: Connection) -> None:
    """Compute the prompt that the other side asks for, and write its pages into the frames that it has planned."""
    engine = Engine.load(num_frames=128)
    side = Side("prefill", engine.cache, pipe)
    prompt, targets = pipe.recv()
    engine.generate([prompt], ONE)
    space = engine.cache.open(prompt)  # maps the pages: they stay until it is released
    frames = space.pages.tolist()
    size = engine.cache.frame_bytes
    ours, theirs = (
        side.agent.get_xfer_descs([(at, size, 0) for at in places], MEMORY)
        for places in (side.addresses(frames), targets)
    )
    handle = side.agent.initialize_xfer("WRITE", ours, theirs, side.peer)
    state = side.agent.transfer(handle)
    while state == "PROC":
        time.sleep(0.0001)
        state = side.agent.check_xfer_state(handle)
    side.agent.release_xfer_handle(handle)
    pipe.send([side.checksum(frame) for frame in frames] if state == "DONE" else [])
    space.release()
    pipe.recv()  # the other side has read them
    os._exit(0)  # a library in the wheel of NIXL 1.5.1 crashes at the usual end of a process


def fetch(side: Side, prompt: list[int]) -> int:
    """Bring the whole pages of a prompt into the pool. Return how many tokens prompts find now."""
    cache, size = side.cache, side.cache.spec.block_size
    num_pages = (len(prompt) - 1) // size  # the last token is computed here: it gives the first logits
    space = cache.open()
    batch = cache.plan([space], [num_pages * size])
    frames = space.pages.tolist()
    side.pipe.send((prompt, side.addresses(frames)))
    while not side.pipe.poll(0.0001):
        side.agent.get_new_notifs()  # makes progress
    sums = side.pipe.recv()
    good = 0
    while good < len(sums) and side.checksum(frames[good]) == sums[good]:
        good += 1
    cache.commit(batch, prompt[: good * size], [good * size])  # a damaged page, and those behind it, are not kept
    space.release()
    side.pipe.send(None)
    return good * size


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=prefill, args=(there,))
    process.start()
    expected = Engine.load(num_frames=128).generate([PROMPT], EIGHT)[0].completions[0].token_ids
    engine = Engine.load(num_frames=128)
    print("tokens that came from the prefill process:", fetch(Side("decode", engine.cache, here), PROMPT))
    answer = engine.generate([PROMPT], EIGHT)[0].completions[0]
    assert answer.token_ids == expected
    assert answer.cached_tokens == 480  # whole pages of 16; the rest of the prompt is computed here
    process.join()
    assert process.exitcode == 0
    print("the answer is that of one process:", answer.text[:40], flush=True)
    os._exit(0)
