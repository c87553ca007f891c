"""The host cost of a launch of the CUDA kernels, up to the driver's own call: `python -m pagedkv.bench.gpu.launch`.
Needs no GPU.

A recorder that does nothing (`Nothing`) stands for the driver's API, and the tensors are on the CPU. So the figures are
our Python and C++, and torch's allocation of results and workspace; the driver's own time for a launch comes on top. A
decode of one layer is measured, in turns: bound and functional calls. Sequences have one token, as a call reads page
tables on a CPU, and not on a GPU. The launches follow from the bound of the lengths, which is 4,096.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Final
from unittest.mock import patch

import torch

from pagedkv import KVLayer, PagedBatch
from pagedkv.bench import record
from pagedkv.bench.clock import Step, in_turn
from pagedkv.bench.gpu.host import calls_of
from pagedkv.kernels import registry
from pagedkv.kernels.args import AttentionCall, AttentionOptions, RotaryTable, WriteCall
from pagedkv.kernels.cuda import attention, backend, compiler, moves
from pagedkv.kernels.cuda.driver import Driver

LIMITS: Final = {"attend, bound": 8.5, "paged_attention": 10.0, "store, bound": 8.5, "write_kv": 10.0}
"""The most microseconds of the host for a call."""
CALLS: Final = 200
"""Calls in one repetition."""
REPETITIONS: Final = 41


class Nothing:
    """A stand-in for cupy.cuda.driver, torch and the runtime: an H200 that does nothing."""

    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT = 8, 9
    arch, num_sms, shared_per_block, shared_per_sm = "sm_90", 132, 227 << 10, 228 << 10

    def context(self, cuda: object) -> int:
        return 1

    def stream(self) -> int:
        return 0

    def is_capturing(self, stream: int) -> bool:
        return False

    def order(self) -> tuple[int, int]:
        return 0, 0

    def beside_captures(self) -> AbstractContextManager[None]:
        return nullcontext()

    def zeros(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64)

    def ctxGetCurrent(self) -> int:
        return 1

    def moduleLoadData(self, cubin: bytes) -> int:
        return 1

    def moduleGetFunction(self, module: int, name: str) -> int:
        return 1

    def funcSetAttribute(self, function: int, attribute: int, value: int) -> None:
        pass

    def launchKernel(self, function: int, *arguments: int) -> None:
        pass


# The functions below make this module a backend of the registry, whose GPU is a `Nothing`.


@cache
def driver() -> Driver:
    """Return the one driver of this process, over two `Nothing`s."""
    return Driver(Nothing(), Nothing())  # type: ignore[arg-type]


def paged_attention(call: AttentionCall) -> None:
    """Launch attention on the driver that does nothing."""
    attention.attend(call, driver())


def bind_attention(layer: KVLayer, options: AttentionOptions) -> Callable[..., None]:
    return attention.AttentionLauncher(layer, options, driver())


def write_kv(call: WriteCall) -> None:
    """Launch the write on the driver that does nothing."""
    moves.write_kv(call, driver())


def bind_write(layer: KVLayer, rope: RotaryTable | None) -> Callable[..., None]:
    return moves.WriteLauncher(layer, rope, driver())


def calls() -> dict[str, Callable[[], object]]:
    """Return the calls to measure: a decode of 8 sequences, 32 query heads on 8 kv heads of 128, bfloat16."""
    B, H, K, D, S, P = 8, 32, 8, 128, 16, 256
    pool = torch.zeros(B * P, 2, K, S, D, dtype=torch.bfloat16).permute(1, 0, 3, 2, 4)
    q, new = (torch.zeros(B, heads, D, dtype=torch.bfloat16) for heads in (H, K))
    table, lens, starts = torch.arange(B * P).view(B, P).int(), torch.ones(B).int(), torch.arange(B + 1).int()
    batch = PagedBatch(table, lens, starts, max_seqlen_q=1, max_seqlen_k=S * P, slots=torch.arange(B) * S)
    return {name: make() for name, make in calls_of(KERNEL.name, KVLayer(pool[0], pool[1]), q, batch, new).items()}


KERNEL: Final = registry.Kernel("cuda-recorded", ("cpu",), __name__, backend.case_objections)


def measured(repetitions: int = REPETITIONS) -> list[dict[str, Any]]:
    """Return a row for each call: the median of clean repetitions and the best, in microseconds a call."""
    torch.set_num_threads(1)
    with (
        patch.object(compiler, "cubin_for", lambda *asked: b""),
        patch.object(registry, "KERNELS", (KERNEL, *registry.KERNELS)),
        patch.dict("os.environ", PAGEDKV_DEBUG="0"),
    ):
        steps: dict[str, Step] = {
            name: lambda call=call: lambda: [call() for _ in range(CALLS)]  # type: ignore[misc]
            for name, call in calls().items()
        }
        timings = in_turn(steps, repetitions, reads_memory=False)
    us = {name: (round(t.seconds / CALLS * 1e6, 2), round(t.best / CALLS * 1e6, 2)) for name, t in timings.items()}
    return [{"what": name, "us": us[name][0], "best": us[name][1], "limit": LIMITS[name]} for name in timings]


def main() -> int:
    """Print and record the figures; return 0 if every call keeps its limit."""
    rows, about = measured(), record.provenance()
    for row in rows:
        print(f"{row['us']:7.2f} us  {row['what']}")
    record.append([row | about for row in rows], None, "launch")
    return int(any(row["us"] > row["limit"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
