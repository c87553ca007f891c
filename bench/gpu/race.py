"""Whether the kernels are right where small cases cannot show it: `python -m pagedkv.bench.gpu.race`.

    shapes     up to 32k keys, so a pipeline is deep and a sequence has many pieces at the same time
    data       scores of random vectors, and a peaked softmax of which few keys have nearly all the weight
    replays    ROUNDS of one captured call into poisoned results, while a second stream is busy with attention over
               other sequences and with plain memory traffic: no bit may move in either stream
    error      |out - float64| <= factor * |same-precision torch - float64| + 1e-5, by the contract's rule

A bit that moves is a race between copies, tickets or merges. This file knows the public call and no kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from pagedkv import KernelUnavailable, PagedBatch, gather_kv, paged_attention
from pagedkv.bench.gpu import attention
from pagedkv.bench.gpu.pool import GpuPool
from pagedkv.bench.gpu.timing import Step, captured, error_line, keep, options_of, provenance, require_gpu, served

ROUNDS: Final = 200
PEAKS: Final = (1.0, 5.0)
"""Factors of the queries. With 5, the heaviest of 4,096 keys has most of the weight."""

CELLS: Final = (
    attention.ONE,
    attention.ONE_4K,
    attention.ONE_LONG,
    attention.BASE,
    attention.RAGGED,
    attention.MIDDLE,
    attention.LONG,
    attention.FP8,
    replace(attention.BASE, kv="int8"),
    replace(attention.BASE, kv="k8v4"),
    replace(attention.BASE, kv="k5v4"),
    attention.DRAFTS,
    replace(attention.RAGGED, batch=5, context=9000, block_size=48),
)
TOLERANCE: Final = {"": 2.0, "fp8_e4m3": 4.0, "fp8_e5m2": 4.0, "int8": 4.0, "k8v4": 4.0, "k5v4": 4.0}
FLOOR: Final = 1e-5
JUDGED: Final = 2
"""Sequences of a cell that are compared with float64: the first, which is the longest, and the last."""

MUST_SERVE: Final = ("triton", "cuda")
"""Backends whose refusal is a fault. The others may object to a cell."""


@dataclass(frozen=True)
class Verdict:
    """One backend on one cell. error: over the allowed error. moved, beside: replays that moved a bit, in this stream
    and in the second. why: a refusal's reason."""

    cell: str
    backend: str
    peak: float
    error: float = 0.0
    moved: int = 0
    beside: int = 0
    why: str = ""

    @property
    def is_good(self) -> bool:
        """Whether nothing moved and the error is allowed. NaN is not."""
        if self.why:
            return self.backend not in MUST_SERVE and self.why.startswith("KernelUnavailable")
        return self.error <= 1 and not self.moved and not self.beside

    def __str__(self) -> str:
        """Return the line to print."""
        head = f"{'ok  ' if self.is_good else 'BAD '} {self.backend:12} {self.cell}, peak {self.peak:g}:"
        if self.why:
            return f"{head} {self.why}"
        return f"{head} error {self.error:.2f} of allowed, moved {self.moved} + {self.beside} times"


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return plain causal attention of q [M, H, D] over k [N, K, D] and v [N, K, Dv] in their dtype: [M, H, Dv]."""
    (M, H, D), (N, K, _) = q.shape, k.shape
    s = torch.einsum("mkgd,nkd->kgmn", q.view(M, K, H // K, D), k) * D**-0.5
    late = torch.arange(N, device=q.device) > torch.arange(N - M, N, device=q.device)[:, None]
    p = s.masked_fill(late, -torch.inf).softmax(-1)
    return torch.einsum("kgmn,nkd->mkgd", p, v).reshape(M, H, -1)


def error_of(out: Tensor, q: Tensor, pool: GpuPool, batch: PagedBatch) -> float:
    """Return the error of `out` over the allowed error, for some sequences of the batch."""
    cell, most, allowed = pool.cell, 0.0, 0.0
    for b in sorted({0, cell.batch - 1})[:JUDGED]:
        at = slice(b, b + 1)
        alone = replace(
            batch,
            block_table=batch.block_table[at],
            seq_lens=batch.seq_lens[at],
            cu_seqlens_q=batch.cu_seqlens_q[:2],
        )
        k, v = gather_kv(pool.layer, alone, dtype=torch.float32, backend="reference")
        rows = slice(b * cell.new, (b + 1) * cell.new)
        exact = attended(q[rows].double(), k.double(), v.double())
        plain = attended(q[rows], k.to(q.dtype), v.to(q.dtype)).double()
        most = max(most, float((out[rows].double() - exact).abs().max().nan_to_num(torch.inf)))
        allowed = max(allowed, float((plain - exact).abs().max()))
    return most / (TOLERANCE[cell.kv] * allowed + FLOOR)


@cache
def second_stream() -> torch.cuda.Stream:
    """Return the stream beside the current one."""
    return torch.cuda.Stream()


def replayed(call: Callable[[], Tensor], other: Callable[[], Tensor], noise: Step, rounds: int) -> tuple[Tensor, Any]:
    """Return the result of `call`, and how many replays moved a bit of it, and how many calls of `other` beside them.

    other: an eager call in the second stream. noise: other work there.
    """
    first, second = call().clone(), other().clone()
    graph, result = captured(call)
    moved, beside = (torch.zeros((), dtype=torch.int64, device=first.device) for _ in range(2))
    side = second_stream() if first.is_cuda else None  # None: the current one
    torch.cuda.synchronize()
    for turn in range(rounds):
        with torch.cuda.stream(side):
            if turn % 2:
                noise()
            elif turn % 4 == 0:
                beside += differ(other(), second)
        result.fill_(torch.nan)
        graph.replay()
        moved += differ(result, first)
    torch.cuda.synchronize()
    return first, (int(moved), int(beside))


def differ(a: Tensor, b: Tensor) -> Tensor:
    """Return on the device whether any bit differs; NaN equals itself."""
    return (a.view(torch.uint8) != b.view(torch.uint8)).any()


def judge(pool: GpuPool, backends: list[str], peak: float, rounds: int = ROUNDS) -> Iterator[Verdict]:
    """Yield the verdict on each backend over one pool."""
    q, (mine, other, *_) = pool.query(peak), pool.batches()
    junk = torch.zeros(1 << (26 if pool.bytes.is_cuda else 4), dtype=torch.float32, device=pool.device)
    for backend in backends:
        about: dict[str, Any] = {"cell": str(pool.cell), "backend": backend, "peak": peak}
        calls = [
            lambda batch=batch, backend=backend: paged_attention(q, pool.layer, batch, backend=backend)
            for batch in (mine, other)
        ]
        try:
            out, (moved, beside) = replayed(*calls, lambda: junk.add_(1), rounds)
        except KernelUnavailable as refused:
            yield Verdict(**about, why=error_line(refused))
            continue
        except Exception as why:
            yield Verdict(**about, why=error_line(why))
            if "illegal" in str(why) or "misaligned" in str(why) or "unspecified launch" in str(why):
                raise  # this process has no GPU any more
            continue
        yield Verdict(**about, error=error_of(out, q, pool, mine), moved=moved, beside=beside)


def main(argv: list[str] | None = None) -> int:
    """Return 0 if every verdict is good, else 1."""
    parser = options_of(__doc__, "race")
    parser.add_argument("--backends", nargs="+", help="names in the registry; by default all that run on a GPU")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args(argv)
    require_gpu()
    about, backends, every = provenance(), given.backends or served(), list[Verdict]()
    for cell in CELLS:
        pool = GpuPool(cell)
        for peak in PEAKS:
            for verdict in judge(pool, backends, peak, given.rounds):
                print(verdict, flush=True)
                keep([asdict(verdict) | {"good": verdict.is_good} | about], given.out, "race")
                every.append(verdict)
        del pool
        torch.cuda.empty_cache()
    bad = [verdict for verdict in every if not verdict.is_good]
    for verdict in bad[:8]:
        print(f"= {verdict}")
    refused = sum(bool(verdict.why) for verdict in every)
    print(f"= {len(every) - len(bad)} of {len(every)} good, {refused} refused; {given.rounds} replays each")
    return int(bool(bad) or refused == len(every))


if __name__ == "__main__":
    sys.exit(main())
