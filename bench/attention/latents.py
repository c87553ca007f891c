"""Decode of latents (MLA, absorbed) on a CPU: `python -m pagedkv.bench.attention.latents`.

8 sequences of 4,096 tokens in bfloat16, head dims 576 and 512, one kv head, 16 query heads. `once`: V is a view of K.
`apart`: V has memory of its own. `read`: a load-and-xor loop over the bytes that `once` reads, on as many threads. All
take turns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import torch

from pagedkv import KVSpec, PagedBatch, bind_attention
from pagedkv.bench import record
from pagedkv.bench.clock import compare, in_turn
from pagedkv.cache.storage import Storage
from pagedkv.kernels import cpu

B, N, S, H = 8, 4096, 16, 16
REPETITIONS: Final = 21


def calls() -> tuple[dict[str, Callable[[], object]], dict[str, int]]:
    """Return the three calls, and the bytes of keys and values that each reads."""
    found: dict[str, Callable[[], object]] = {}
    moved, pages = {}, N // S
    q, lens = torch.randn(B, H, 576).bfloat16(), torch.full((B,), N, dtype=torch.int32)
    table, starts = torch.randperm(B * pages).int().view(B, pages), torch.arange(B + 1, dtype=torch.int32)
    batch = PagedBatch(table, lens, starts, max_seqlen_q=1, max_seqlen_k=N)
    for name, is_once in (("once", True), ("apart", False)):
        spec = KVSpec(1, 1, 576, 512, block_size=S, value_in_key=is_once)
        storage = Storage(spec, B * pages)
        storage.bytes.view(torch.bfloat16).normal_()
        attend = bind_attention(storage.layers[0])
        found[name], moved[name] = (lambda attend=attend: attend(q, batch)), B * N * spec.bytes_per_token
        if is_once:
            places = (table.flatten().long() * spec.frame_bytes).contiguous()
            base, run = storage.bytes.data_ptr(), S * 576 * 2
    threads = torch.get_num_threads()  # the bound call keeps the memory at `base`
    found["read"] = lambda: cpu._cpu.read(cpu.isa(), threads, base, places.data_ptr(), len(places), run)
    return found, moved | {"read": moved["once"]}


def measured(repetitions: int = REPETITIONS) -> list[dict[str, Any]]:
    """Return a row for each call: milliseconds, GB/s, and its rate over that of `read` in the same turn."""
    found, moved = calls()
    timings, rows = in_turn({name: (lambda call=call: call) for name, call in found.items()}, repetitions), []
    for name, timing in timings.items():
        ratio = compare(timings["read"], timing, lambda read, own: read / own) * moved[name] / moved["read"]
        rate = round(moved[name] / timing.seconds / 1e9, 2)
        row = {"what": f"latents {name}", "ms": round(timing.seconds * 1e3, 3), "gb_s": rate}
        rows.append(row | {"of_read": round(ratio, 3), "clean": timing.clean, "memory": timing.memory})
    return rows


def main() -> int:
    """Print and record the figures."""
    rows, about = measured(), record.provenance() | {"threads": torch.get_num_threads()}
    for row in rows:
        print(f"{row['ms']:8.2f} ms  {row['gb_s']:6.2f} GB/s  {row['of_read']:5.2f} of read  {row['what']}")
    record.append([row | about for row in rows], None, "latents")
    return 0


if __name__ == "__main__":
    sys.exit(main())
