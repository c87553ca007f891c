"""The read ceiling of a GPU: a Triton kernel that reads a run of memory and keeps one number of each block.

Grid: one program per BLOCK words of 8 bytes; 16 bytes per thread and load, all loads of a program in flight together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def read_kernel(x, sums, count, BLOCK: tl.constexpr):
    """Store the xor of each program's words in `sums`. Without this use the compiler would leave out the loads."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(x + at, mask=at < count, other=0)
    tl.store(sums + tl.program_id(0), tl.xor_sum(words, 0))


def read(x: torch.Tensor) -> torch.Tensor:
    """Read `x` (int64, contiguous) once. Returns the xor of each block."""
    sums = x.new_empty(triton.cdiv(len(x), BLOCK))
    read_kernel[(len(sums),)](x, sums, len(x), BLOCK=BLOCK, num_warps=8)
    return sums
