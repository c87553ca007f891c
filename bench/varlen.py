"""torch's `varlen_attn` with our kernels, next to our bound call and to SDPA over gathered pages, in turns of one run.

python -m pagedkv.bench.varlen     8 sequences of 8,192 tokens in bfloat16, one query each, in random pages

gather, SDPA                 pages are copied to rows of tokens; `enable_gqa=True` repeats the KV heads
gather, SDPA, heads as rows  the same copy; the query heads of a KV head are rows of one call, the fastest form
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.nn.attention.varlen import varlen_attn, varlen_attn_out
from torch.nn.functional import scaled_dot_product_attention as sdpa

from pagedkv import KVLayer, PagedBatch, bind_attention
from pagedkv.bench import record
from pagedkv.bench.clock import compare, in_turn
from pagedkv.integrations import torch_varlen

B, N, H, K, D, S = 8, 8192, 32, 8, 128, 16
REPETITIONS: Final = 15
OURS: Final = "pagedkv, bound call"


def variants() -> dict[str, Any]:
    """Return the calls, over one pool, with other pages in each turn."""
    pages = N // S
    k, v = (torch.randn(B * pages, S, K, D).bfloat16() for _ in range(2))
    q, starts = torch.randn(B, H, D).bfloat16(), torch.arange(B + 1, dtype=torch.int32)
    used, out = torch.full((B,), N, dtype=torch.int32), torch.empty(B, H, D).bfloat16()
    attend = bind_attention(KVLayer(k, v), causal=False)

    def table() -> torch.Tensor:
        return torch.randperm(B * pages, dtype=torch.int32).view(B, pages)

    def gathered() -> list[torch.Tensor]:
        rows = table().flatten()
        return [x.index_select(0, rows).view(B, N, K, D).transpose(1, 2) for x in (k, v)]

    paged = {"seqused_k": used, "enable_gqa": True}
    return {
        OURS: lambda: attend(q, PagedBatch(table(), used, starts, 1, N), out=out),
        "pagedkv, varlen_attn": lambda: varlen_attn(q, k, v, starts, None, 1, N, block_table=table(), **paged),
        "pagedkv, varlen_attn_out": lambda: varlen_attn_out(
            out, q, k, v, starts, None, 1, N, block_table=table(), **paged
        ),
        "gather, SDPA": lambda: sdpa(q[:, :, None], *gathered(), enable_gqa=True),
        "gather, SDPA, heads as rows": lambda: sdpa(q.view(B, K, H // K, D), *gathered()),
    }


def main() -> None:
    """Measure, print and keep the rows."""
    torch_varlen.activate()
    about = record.provenance()
    found = in_turn({name: lambda run=run: run for name, run in variants().items()}, REPETITIONS)
    for name, timing in found.items():
        share = compare(timing, found[OURS], lambda one, other: one / other)
        row: dict[str, Any] = {"bench": "varlen", "case": "decode", "batch": B, "context": N, "variant": name}
        row |= {"unit": "us", "of_bound_call": share, "must": None} | timing.fields(lambda seconds: 1e6 * seconds)
        record.append([row | about], None, "varlen")
        print(f"{name:30}{row['median']:12,.0f} us  {row['of_bound_call']:.3f} x the bound call, {row['clean']} clean")


if __name__ == "__main__":
    main()
