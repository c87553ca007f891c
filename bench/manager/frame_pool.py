"""Runs of FramePool: each goes through the life of 64 frames in a full pool, and times one of its calls.

    take 64 (which evicts 64)  ▷  publish  ▷  drop  ▷  find  ▷  share  ▷  drop  ▷  take one and drop it

peers.py does the same with vLLM's BlockPool.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import numpy as np

from pagedkv.bench.manager.peers import FRAME_POOL, KEY_BYTES, ROW, frame_run
from pagedkv.core import FramePool


def life(call: str, *, listed: bool = False) -> Callable[[], float]:
    """Return a run that gives the seconds of `call`, see peers.frame_run. There is one pool for each form of keys.

    listed: give the keys as a list of bytes objects, as vLLM has them, instead of an array.
    """
    return frame_run(_lives(listed), call)


@cache
def _lives(listed: bool) -> Callable[[], dict[str, float]]:
    pool, random = FramePool(FRAME_POOL, key_bytes=KEY_BYTES, twins=True), np.random.default_rng(0)
    seconds: dict[str, float] = {}

    def timed(name: str, began: float) -> float:
        seconds[name] = (now := time.perf_counter()) - began
        return now

    def run() -> dict[str, float]:
        rows = random.integers(0, 256, (ROW, KEY_BYTES), np.uint8)
        keys = [row.tobytes() for row in rows] if listed else rows
        began = time.perf_counter()
        frames = pool.take(ROW)
        began = timed("take frames", began)
        pool.publish(frames, keys)
        timed("publish frames", began)
        last_first = frames[::-1].copy()
        began = time.perf_counter()
        pool.drop(last_first)
        began = timed("drop frames", began)
        found = pool.find(keys)
        began = timed("find frames", began)
        pool.share(found)
        timed("share frames", began)
        assert (found == frames).all()
        pool.drop(found)
        began = time.perf_counter()
        pool.drop(pool.take_one())
        timed("one frame", began)
        return seconds

    for _ in range(FRAME_POOL // ROW + 1):
        run()
    return run
