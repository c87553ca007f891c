"""The read ceiling of a GPU: `python -m pagedkv.bench.gpu.ceiling`.

    contiguous     one run of memory
    random runs    runs in random order: the key or value heads of 128 in pages of 16, in 4 bits (1 KB), in 8 (2 KB) and
                   in 16 (4 KB), and in pages of 128 (32 KB)

Each kernel keeps one number of each block and does nothing else. Grid: one program per BLOCK words of 8 bytes; 16 bytes
per thread and load, all loads of a program in flight together. The kernel of the random runs differs in its addresses
only, so the difference is what memory itself takes for pages. The kernels take turns.
"""

from __future__ import annotations

import sys
from typing import Final

import torch
import triton
import triton.language as tl

from pagedkv.bench.gpu.timing import Rows, Step, in_turn, keep, options_of, provenance, require_gpu

BLOCK: Final = 4096
"""Words that a program reads."""

SIZES: Final = (67, 134, 268, 537, 1074)
"""Megabytes read by one call: the keys and values of the cells."""

RUNS: Final = (1024, 2048, 4096, 32768)
POOL: Final = 4 << 30


@triton.jit
def read_kernel(x, sums, count, BLOCK: tl.constexpr):
    """Store the xor of each program's words in `sums`. Without this use the compiler would leave out the loads."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(x + at, mask=at < count, other=0)
    tl.store(sums + tl.program_id(0), tl.xor_sum(words, 0))


@triton.jit
def read_runs_kernel(x, starts, sums, RUNS: tl.constexpr, WORDS: tl.constexpr):
    """Store the xor of RUNS runs of WORDS words in `sums`; starts: of each run, in runs from `x`."""
    first = tl.program_id(0) * RUNS + tl.arange(0, RUNS)
    at = tl.load(starts + first).to(tl.int64)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    words = tl.reshape(tl.load(x + at), (RUNS * WORDS,))
    tl.store(sums + tl.program_id(0), tl.xor_sum(words, 0))


def read(x: torch.Tensor) -> torch.Tensor:
    """Read `x` (int64, contiguous) once. Returns the xor of each block."""
    sums = x.new_empty(triton.cdiv(len(x), BLOCK))
    read_kernel[(len(sums),)](x, sums, len(x), BLOCK=BLOCK, num_warps=8)
    return sums


def read_runs(x: torch.Tensor, starts: torch.Tensor, run_bytes: int) -> torch.Tensor:
    """Read runs of `run_bytes` bytes of `x` (int64, contiguous). starts: int32, a whole number of programs."""
    words = run_bytes // 8
    runs = max(1, BLOCK // words)
    sums = x.new_empty(len(starts) // runs)
    read_runs_kernel[(len(sums),)](x, starts, sums, RUNS=runs, WORDS=words, num_warps=8)
    return sums


def steps(whole: torch.Tensor, megabytes: int) -> dict[str, list[Step]]:
    """Return the calls of one graph for each kernel; each call reads another place of `whole`."""
    words = (megabytes * 1_000_000 // 32768) * 4096
    calls = max(2, min(64, 2 * 537 // megabytes))
    starts = [i * words % max(1, len(whole) - words) // 4096 * 4096 for i in range(calls)]
    found: dict[str, list[Step]] = {
        f"contiguous, {BLOCK}": [lambda at=at: read(whole[at : at + words]) for at in starts]
    }
    for run in RUNS:
        per_call, total = words * 8 // run, len(whole) * 8 // run
        order = torch.randperm(total, device=whole.device).int()
        found[f"random, {run >> 10} KB"] = [
            lambda i=i, run=run, n=per_call, order=order: read_runs(whole, order[i * n % (len(order) - n) :][:n], run)
            for i in range(calls)
        ]
    return found


def measured(whole: torch.Tensor, megabytes: int, repetitions: int = 12) -> Rows:
    """Return a row for each kernel: terabytes a second."""
    times, refused = in_turn(steps(whole, megabytes), repetitions)
    case, size = f"{megabytes} MB", (megabytes * 1_000_000 // 32768) * 32768
    rows: Rows = [
        {"case": case, "who": who, "us": round(us, 2), "TB_per_s": round(size / us / 1e6, 4)}
        for who, us in times.items()
    ]
    return rows + [{"case": case, "who": who, "us": None, "why_not": why} for who, why in refused.items()]


def main(argv: list[str] | None = None) -> int:
    """Print and keep the ceilings; return 1 if a kernel failed."""
    given = options_of(__doc__, "ceiling").parse_args(argv)
    require_gpu()
    about, failed = provenance(), 0
    whole = torch.randint(-(2**62), 2**62, (POOL // 8,), dtype=torch.int64, device="cuda")
    for megabytes in SIZES:
        rows = [row | about for row in measured(whole, megabytes)]
        keep(rows, given.out, "ceiling")
        failed += sum(row["us"] is None for row in rows)
        words = [f"{row['who']} {row.get('TB_per_s') or row['why_not']}" for row in rows]
        print(f"= TB/s, {megabytes} MB: {'; '.join(words)}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
