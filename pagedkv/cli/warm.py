"""`pagedkv warm`: compile everything that is compiled at first use, for an image or before a server listens."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from rich.console import Console

from pagedkv import KVSpec, PagedKVCache, paged_attention, write_kv
from pagedkv.core.warm import place, warm_up, warm_up_frame_pool, warm_up_states


def run() -> None:
    """Compile the functions of core and the numba kernels, and print how long each took and where the code is kept."""
    console = Console(highlight=False)
    parts = (
        ("memory manager", warm_up),
        ("frame pool", warm_up_frame_pool),
        ("states", warm_up_states),
        ("numba kernels", _warm_numba),
    )
    for name, compile_all in parts:
        console.print(f"{name:16}{_seconds(compile_all):6.1f} s")
    console.print(place())


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _warm_numba() -> None:
    cache = PagedKVCache(KVSpec(1, 1, 8, block_size=2, dtype="float32"), num_frames=2)
    space = cache.open()
    batch, k = cache.plan([space], [2]), torch.zeros(2, 1, 8)
    write_kv(k, k, cache[0], batch, backend="numba")
    paged_attention(k, cache[0], batch, backend="numba")
    cache.abort(batch)
    space.release()
