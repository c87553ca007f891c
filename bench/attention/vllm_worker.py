"""Run vLLM's CPU attention in vLLM's own environment: `python vllm_worker.py`.

Each line of stdin is a request in JSON; each line of stdout is its answer:

    {"do": "open", "cell": {...}}  ->  {"ok": n}, or {"why_not": "..."}      cell: the fields of cells.Cell, and "lens"
    {"do": "run", "of": n}         ->  {"seconds": 0.0029, "clean": true}    one repetition of cell n over other blocks
    {"do": "close"}                ->  {"ok": 0}                             free all cells

This file imports torch and vllm. It imports nothing of pagedkv, which vLLM's environment lacks. The scheduler metadata
is made before the clock starts, because vLLM makes it once for all layers of a step. The output of vLLM goes to stderr.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from typing import Any

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import torch  # noqa: E402
import vllm._custom_ops as ops  # noqa: E402
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: E402

POOL_BYTES = 384 << 20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class OpenCell:
    """The cache and queries of a cell."""

    def __init__(self, cell: dict[str, Any]) -> None:
        self.cell, self.dtype = cell, DTYPES[cell["dtype"]]
        self.kv = "fp8" if cell["kv"] else "auto"
        K, S, D = cell["kv_heads"], cell["block_size"], cell["head_dim"]
        self.isa = _get_attn_isa(self.dtype, S, D, self.kv)
        stored = torch.uint8 if cell["kv"] else self.dtype
        self.pages = [-(-n // S) for n in cell["lens"]]
        num_blocks = max(sum(self.pages), POOL_BYTES // (2 * K * S * D * stored.itemsize))
        cache = torch.empty(num_blocks, K, 2 * S, D, dtype=stored)
        noise = (
            torch.randint(0, 120, cache.shape[1:], dtype=torch.uint8)
            if cell["kv"]
            else torch.randn(cache.shape[1:]).to(stored)
        )
        cache.copy_(noise)
        self.k, self.v = cache.chunk(2, dim=2)
        T = cell["batch"] * cell["new"]
        self.q = torch.randn(T, cell["heads"], D).to(self.dtype)
        self.out = torch.empty_like(self.q)
        self.fresh = [torch.randn(T, K, D).to(self.dtype) for _ in range(8 if cell["kind"] == "write" else 1)]
        self.lens = torch.tensor(cell["lens"], dtype=torch.int32)
        self.starts = torch.arange(cell["batch"] + 1, dtype=torch.int32) * cell["new"]
        self.turn = 0

    def run(self) -> dict[str, Any]:
        """Run and time one repetition."""
        cell, S = self.cell, self.cell["block_size"]
        blocks = torch.randperm(len(self.k))[: sum(self.pages)].int()
        table = torch.zeros(cell["batch"], max(self.pages), dtype=torch.int32)
        for b, part in enumerate(blocks.split(self.pages)):
            table[b, : len(part)] = part
        if cell["kind"] == "write":
            positions = torch.arange(cell["new"])
            slots = table[0, positions // S].long() * S + positions % S
            self.turn = (self.turn + 1) % len(self.fresh)
            fresh = self.fresh[self.turn]
            return clocked(
                lambda: ops.cpu_attn_reshape_and_cache(fresh, fresh, self.k, self.v, slots, self.isa, 1.0, 1.0, self.kv)
            )
        shape = (cell["batch"], cell["heads"], cell["kv_heads"], cell["head_dim"])
        rest = (self.lens, self.dtype, self.starts, True, -1, self.isa, True, None, self.kv)
        metadata = ops.cpu_attn_get_scheduler_metadata(*shape, *rest)
        scale = cell["head_dim"] ** -0.5
        tensors = (self.q, self.k, self.v, self.out, self.starts, self.lens)
        return clocked(
            lambda: ops.cpu_attention_with_kv_cache(
                *tensors, scale, True, None, -1, table, 0.0, metadata, None, None, 1.0, 1.0, self.kv
            )
        )


AWAKE = torch.zeros(1 << 16, dtype=torch.int8)


def clocked(run: Any) -> dict[str, Any]:
    """Time one call of `run`, and say whether an involuntary context switch disturbed it."""
    AWAKE.add_(1)  # wakes the threads, as in a model the layer before would do
    switches, began = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw, time.perf_counter()
    run()
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "clean": resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw == switches}


def main() -> None:
    """Answer the requests until stdin ends."""
    opened: list[OpenCell] = []
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "open":
                cell = OpenCell(request["cell"])
                cell.run()
                opened.append(cell)
                answer: dict[str, Any] = {"ok": len(opened) - 1}
            elif request["do"] == "run":
                answer = opened[request["of"]].run()
            else:
                opened.clear()
                answer = {"ok": 0}
        except Exception as why:  # any error of vLLM is the answer for this cell
            answer = {"why_not": f"{type(why).__name__}: {why}".splitlines()[0]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
