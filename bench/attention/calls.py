"""The cost of a call apart from its kernel: `python -m pagedkv.bench.attention.calls`.

The call is the smallest there is: one token of one sequence, one head of 64, float32, on one thread. Its kernel takes
under a microsecond, so the figure is Python, the checks, torch's dispatcher and the allocation of results. Variants
take turns. Warm: CALLS calls in a row. Cold: one call after SWEPT bytes were read, which leaves no line of the call in
a cache of this processor, as each layer's kernel does in a model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final
from unittest.mock import patch

import torch

import pagedkv
from pagedkv import KVLayer, PagedBatch
from pagedkv.bench import record
from pagedkv.bench.clock import Step, in_turn

LIMITS: Final = {"bound attention": 5.0, "bound write": 5.0, "paged_attention": 10.0, "write_kv": 10.0}
"""The most microseconds of a warm call."""
CALLS: Final = 200
"""Warm calls in one repetition."""
SWEPT: Final = 96 << 20
REPETITIONS: Final = 41


def calls() -> dict[str, Callable[[], object]]:
    """Return the calls to measure, by name."""
    layer = KVLayer(torch.zeros(8, 16, 1, 64), torch.zeros(8, 16, 1, 64))
    table, lens, starts = (torch.tensor(values, dtype=torch.int32) for values in ([[0]], [1], [0, 1]))
    batch = PagedBatch(table, lens, starts, max_seqlen_q=1, max_seqlen_k=1, slots=torch.tensor([0]))
    q, new, lse = torch.randn(1, 1, 64), torch.randn(1, 1, 64), torch.zeros(1, 1)
    out, frames = torch.empty_like(q), torch.zeros(4, 256, dtype=torch.uint8)
    pairs = torch.tensor([[0, 1]], dtype=torch.int32)
    attend, store = pagedkv.bind_attention(layer), pagedkv.bind_write(layer)
    return {
        "bound attention": lambda: attend(q, batch),
        "bound attention, out=": lambda: attend(q, batch, out=out),
        "bound write": lambda: store(new, new, batch),
        "paged_attention": lambda: pagedkv.paged_attention(q, layer, batch),
        "write_kv": lambda: pagedkv.write_kv(new, new, layer, batch),
        "merge_states": lambda: pagedkv.merge_states(q, lse, q, lse),
        "copy_frames": lambda: pagedkv.copy_frames(frames, pairs),
    }


def warm_step(call: Callable[[], object]) -> Step:
    """Return a step that makes CALLS calls in one repetition."""

    def repetition() -> None:
        for _ in range(CALLS):
            call()

    return lambda: repetition


def cold_step(call: Callable[[], object]) -> Step:
    """Return a step that makes one call after the caches were swept."""
    swept = torch.zeros(SWEPT // 8, dtype=torch.int64)

    def prepare() -> Callable[[], object]:
        swept.sum()
        return call

    return prepare


def measured(repetitions: int = REPETITIONS) -> list[dict[str, Any]]:
    """Return a row for each call, warm and cold: the median of clean repetitions and the best, in microseconds."""
    torch.set_num_threads(1)
    rows = []
    with patch.dict("os.environ", PAGEDKV_DEBUG="0"):
        for state, step, number in (("warm", warm_step, CALLS), ("cold", cold_step, 1)):
            timings = in_turn({name: step(call) for name, call in calls().items()}, repetitions, reads_memory=False)
            for name, timing in timings.items():
                figures = {"us": timing.seconds, "best": timing.best}
                row = {key: round(seconds / number * 1e6, 2) for key, seconds in figures.items()}
                limit = LIMITS.get(name) if state == "warm" else None
                rows.append({"what": name, "caches": state, **row, "clean": timing.clean, "limit": limit})
    return rows


def main() -> int:
    """Print and record the figures; return 0 if every warm call keeps its limit."""
    rows, about = measured(), record.provenance()
    for row in rows:
        print(f"{row['us']:7.2f} us  {row['caches']}  {row['what']}")
    record.append([row | about for row in rows], None, "calls")
    return int(any(row["us"] > row["limit"] for row in rows if row["limit"]))


if __name__ == "__main__":
    sys.exit(main())
