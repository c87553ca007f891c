"""The time of `gather_kv` on a CPU beside memcpy: `python -m pagedkv.bench.attention.gather`.

8 sequences of 4,096 tokens, 8 kv heads of 128, pages of 16 in random order, results in bfloat16. memcpy copies so many
bytes that it reads and writes together as many as the gather does. Both take turns on all threads of torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import torch

from pagedkv import KVSpec, PagedBatch, gather_kv
from pagedkv.bench import record
from pagedkv.bench.clock import compare, in_turn
from pagedkv.cache.storage import Storage

B, N, K, D, S = 8, 4096, 8, 128, 16
KINDS: Final = (None, "int8", "fp8_e4m3", "int4")
LEAST: Final = 0.8
"""The least rate of a gather that only copies, over that of memcpy."""
REPETITIONS: Final = 21


def calls(kv: str | None) -> tuple[dict[str, Callable[[], object]], int]:
    """Return a gather of elements of this kind and a memcpy, and the bytes that each of them reads and writes."""
    spec = KVSpec(1, K, D, block_size=S, kv_dtype=kv)
    pages = N // S
    storage = Storage(spec, B * pages)
    storage.bytes.fill_(0x41)
    layer, tables = storage.layers[0], torch.randperm(B * pages).int().view(B, pages)
    for scale in (layer.k_scale, layer.v_scale):
        if scale is not None:
            scale.fill_(0.5)  # products of zeros and subnormals would take other times
    lens, starts = torch.full((B,), N, dtype=torch.int32), torch.arange(B + 1, dtype=torch.int32)
    batch = PagedBatch(tables, lens, starts, max_seqlen_q=1, max_seqlen_k=N)
    out = gather_kv(layer, batch, dtype=torch.bfloat16)
    moved = B * N * spec.bytes_per_token + sum(x.numel() * x.element_size() for x in out)
    source = torch.ones(moved // 2, dtype=torch.uint8)
    target = source.clone()
    return {"gather": lambda: gather_kv(layer, batch, out=out), "memcpy": lambda: target.copy_(source)}, moved


def measured(repetitions: int = REPETITIONS) -> list[dict[str, Any]]:
    """Return a row for each kind of elements: GB/s of both, read and written, and the median ratio of a turn."""
    rows = []
    for kv in KINDS:
        both, moved = calls(kv)
        timings = in_turn({name: (lambda call=call: call) for name, call in both.items()}, repetitions)
        ratio = compare(timings["memcpy"], timings["gather"], lambda copy, gather: copy / gather)
        rates = {f"{name}_gb_s": round(moved / timing.seconds / 1e9, 1) for name, timing in timings.items()}
        clean = min(timing.clean for timing in timings.values())
        rows.append({"what": f"gather {kv or 'bfloat16'}", **rates, "ratio": round(ratio, 2), "clean": clean})
        rows[-1]["memory"] = timings["memcpy"].memory
    return rows


def main() -> int:
    """Print and record the figures; return 0 if a gather that only copies is as fast as it should be."""
    rows, about = measured(), record.provenance() | {"threads": torch.get_num_threads()}
    for row in rows:
        print(f"{row['gather_gb_s']:6.1f} GB/s  memcpy {row['memcpy_gb_s']:6.1f}  ratio {row['ratio']}  {row['what']}")
    record.append([row | about for row in rows], None, "gather")
    return int(rows[0]["ratio"] < LEAST)


if __name__ == "__main__":
    sys.exit(main())
