"""Finds the tuning of the Triton kernels on the GPU at hand: `python -m pagedkv.bench.tune [--apply]`.

Each candidate is measured in turn with all others on one decode and one prefill cell per size of a stored head; the best goes to
FOLDER/tuning.json, or with --apply into the table beside the kernels, under this architecture's name. Candidates that do not compile, or
want more shared memory than there is, are left out. It is the only place that searches: a serving step only reads the table.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton

from pagedkv import PagedBatch, paged_attention
from pagedkv.bench.gpu_attention import BASE, GpuPool, Step, in_turn, ours
from pagedkv.kernels import quant
from pagedkv.kernels.triton import tuning

DECODE = {"N": (32, 64, 128), "num_warps": (4, 8), "stages": (2, 3, 4), "programs": (1, 2, 3)}
PREFILL = {"N": (32, 64, 128), "M": (64, 128), "num_warps": (4, 8), "stages": (2, 3)}
SIZES = (
    replace(BASE),
    replace(BASE, head_dim=64),
    replace(BASE, head_dim=256, batch=16),
    replace(BASE, kv="fp8_e4m3"),
    replace(BASE, kv="int4"),
)


def prefill_steps(pool: GpuPool, tokens: int = 2048) -> list[Step]:
    """One chunk of `tokens` new tokens at the end of one sequence."""
    cell = pool.cell
    q = torch.randn(tokens, cell.heads, cell.head_dim, device="cuda").to(quant.DTYPES[cell.dtype])
    step = pool.batch()
    lens, starts = step.seq_lens[:1], torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    none = torch.zeros(tokens, dtype=torch.int64, device="cuda")
    batch = PagedBatch(step.block_table[:1], lens, starts, none, none, max_seqlen_q=tokens, max_seqlen_k=cell.context)
    return [lambda: paged_attention(q, pool.layer, batch, backend="triton")] * 4


def best(kernel: str, pool: GpuPool, key: str, candidates: list[dict[str, int]]) -> tuple[dict[str, int], float, float]:
    """The fastest candidate, its microseconds, and those of the rule."""
    arch, real = tuning.target(torch.device("cuda")).arch, tuning._table
    steps = ours("triton", pool) if kernel == "decode" else prefill_steps(pool)

    def under(candidate: dict[str, int]) -> list[Step]:
        def first() -> None:
            tuning._table = lambda: {arch: {kernel: {key: candidate}}}  # type: ignore[assignment]
            tuning.tuning.cache_clear()

        return [lambda: (first(), steps[0]()), *steps[1:]]

    try:
        times, _ = in_turn({json.dumps(candidate): under(candidate) for candidate in [{}, *candidates]}, repetitions=7)
    finally:
        tuning._table = real
        tuning.tuning.cache_clear()
    name = min(times, key=times.__getitem__)
    return json.loads(name), times[name], times["{}"]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="pagedkv.bench.tune", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--apply", action="store_true", help="write the table beside the kernels")
    given = parser.parse_args(argv)
    home = Path(tuning.__file__).with_name("tuning.json")
    table: dict[str, Any] = json.loads(home.read_text())
    arch = tuning.target(torch.device("cuda")).arch
    for cell, (kernel, axes) in itertools.product(SIZES, (("decode", DECODE), ("prefill", PREFILL))):
        pool = GpuPool(cell)
        head_bytes = (pool.layer.k.shape[3] + pool.layer.v.shape[3]) * pool.layer.k.element_size()
        key = str(triton.next_power_of_2(head_bytes))
        candidates = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
        found, us, rule = best(kernel, pool, key, candidates)
        print(f"{arch} {kernel} {key}: {found or 'the rule'} {us:.1f} us, the rule {rule:.1f} us", flush=True)
        table.setdefault(arch, {}).setdefault(kernel, {})[key] = found
        for path in (given.out / "tuning.json", *([home] if given.apply else [])):
            path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
        del pool
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
