"""The CPU kernels beside the speed of memory and beside other engines: `pagedkv bench attention`.

One run interleaves these, repetition by repetition:

    ours       the kernels of the registry
    sdpa       torch SDPA on contiguous KV
    vllm       vLLM's CPU kernel, if the caller names a Python that has vLLM
    ceiling    decode: a load-and-xor loop reads as many frames, in random order, with as many threads; write: memcpy
    torch.mm   prefill: a square product of as many operations. It is a reference, not a bound: in float32 it is slower
               than some kernels

KV is cold: the pool has at least 384 MiB, and each repetition uses other frames. A variant that cannot be measured is
reported with the reason. This file knows the public call and the variants; cells.py knows the shapes, pool.py the
memory, clock.py the turns.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import truediv
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn.functional import scaled_dot_product_attention

from pagedkv import bind_attention, bind_write, explain, paged_attention
from pagedkv.bench.attention.cells import Cell
from pagedkv.bench.attention.pool import Pool, region_of
from pagedkv.bench.attention.vllm_peer import Vllm
from pagedkv.bench.clock import Step, Timing, compare, in_turn, ratios
from pagedkv.bench.memory import available
from pagedkv.bench.record import Row
from pagedkv.kernels import cpu, quant, registry
from pagedkv.kernels.args import AttentionCall, AttentionOptions, bound_fields, tables_of
from pagedkv.kernels.linear.cpu import is_slow_in_torch

CEILING: Final = "ceiling"
VLLM: Final = "vllm"
SDPA: Final = "sdpa"
DIRECT: Final = "direct"
FUNCTIONAL: Final = "cpu, functional"
PRODUCT: Final = "torch.mm"
CALLS: Final = 200
"""Calls in one repetition of a cell of kind "call"."""
SLOW: Final = ("numba", "reference")
"""Kernels that are measured on plain cells only; the reference on small plain cells only."""
PLAIN: Final = "measured on plain cells only"
MUSTS: Final = {
    ("decode", "bfloat16", "", 1): 0.75, ("decode", "bfloat16", "", 2): 0.85, ("decode", "float32", "", 1): 0.8,
    ("decode", "float32", "", 2): 0.85, **{("write", "bfloat16", "", threads): 0.5 for threads in (1, 2)},
    **{("write", "bfloat16", kv, threads): 0.3 for kv in ("int8", "fp8_e4m3") for threads in (1, 2)},
}  # fmt: skip
"""(kind, dtype, kv, threads): the share of the ceiling that is promised, of decode in contexts of 4,096 and more."""


@dataclass(frozen=True)
class Asked:
    """The kernels to compare, the number of repetitions, and the Python that has vLLM (None: vLLM is not measured)."""

    kernels: tuple[str, ...] = ("cpu", "numba", "reference")
    repetitions: int = 15
    vllm_python: Path | None = None


@dataclass
class Measured:
    """The measurement of one cell: the timing of each variant, and for each variant without a timing the reason."""

    cell: Cell
    timings: dict[str, Timing] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes of KV: decode reads them, whole pages; a write takes them, the new tokens before they are stored."""
        cell, spec = self.cell, self.cell.spec()
        if cell.kind == "write":
            return cell.new * cell.kv_heads * 2 * cell.head_dim * quant.DTYPES[cell.dtype].itemsize
        return sum(-(-n // cell.block_size) for n in cell.lens()) * spec.frame_bytes

    def rows(self) -> Iterator[Row]:
        """Yield a row for each variant, and for each that could not be measured."""
        cell, calls = self.cell, CALLS if self.cell.kind == "call" else 1
        axes = {"case": cell.kind, "shape": str(cell).removeprefix(f"{cell.kind} ")}
        bound = next((bound for bound in (CEILING, PRODUCT) if bound in self.timings), "")
        for who, timing in self.timings.items():
            row = axes | {"variant": who, "unit": "us"} | timing.fields(lambda seconds: 1e6 * seconds / calls)
            if bound:
                shares = [round(share, 4) for share in ratios(self.timings[bound], timing, truediv)]
                row |= {"bound": bound, "efficiency": compare(self.timings[bound], timing, truediv), "ratios": shares}
            if cell.kind == "prefill":
                row["gflop_per_s"] = cell.flops() / timing.seconds / 1e9
            elif cell.kind != "call":
                row["gb_per_s"] = self.bytes / timing.seconds / 1e9
            must = MUSTS.get((cell.kind, cell.dtype, cell.kv, cell.threads)) if who == "cpu" else None
            is_common = cell.context >= 4096 and (cell.heads, cell.kv_heads, cell.head_dim) == (32, 8, 128)
            row["must"] = must if is_common or cell.kind == "write" else None
            yield row | {"isa": None if _no_extension() else cpu.isa()}
        for who, why in self.refused.items():
            if why != PLAIN:
                yield axes | {"variant": who, "unit": "us", "median": None, "why_not": why}


def measure(cells: Iterable[Cell], asked: Asked, report: Callable[[Row], None]) -> None:
    """Hand the rows of each cell to `report`. The cells of a group take turns."""
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.group(), []).append(cell)
    with _vllms(asked) as vllm_with:
        for group in groups.values():
            vllm = vllm_with(group[0].threads)
            for some in _that_fit(group):
                for one in _measured(some, asked, vllm):
                    for row in one.rows():
                        report(row)
                if isinstance(vllm, Vllm):
                    vllm.forget()


def _that_fit(group: list[Cell]) -> Iterator[list[Cell]]:
    """Yield the group in parts whose pools together take less than a quarter of the memory.

    SDPA and vLLM hold as much memory again.
    """
    most = available() // 4
    part: list[Cell] = []
    for cell in group:
        if part and sum(map(Pool.bytes_of, [*part, cell])) > most:
            yield part
            part = []
        part.append(cell)
    yield part


def _measured(cells: list[Cell], asked: Asked, vllm: Vllm | str) -> list[Measured]:
    found, steps = [Measured(cell) for cell in cells], {}
    fit = [size for size in map(Pool.bytes_of, cells) if size <= available() // 3]
    region = region_of(max(fit)) if fit else None
    with on_threads(cells[0].threads):
        for i, one in enumerate(found):
            for who, step in _variants(one.cell, region, asked, vllm).items():
                if isinstance(step, str):
                    one.refused[who] = step
                else:
                    # vLLM runs in another process: our threads, spinning after a wake-up, would disturb vLLM's threads
                    steps[i, who] = step if who == VLLM else awake(step)
        for (i, who), timing in in_turn(steps, asked.repetitions).items():
            found[i].timings[who] = timing
    return found


def awake(step: Step) -> Step:
    """Return the step with torch's threads woken before the clock starts, as in a model the layer before would do."""
    vector = torch.zeros(1 << 16, dtype=torch.int8)  # large enough for two threads

    def prepare() -> Callable[[], object]:
        run = step()
        vector.add_(1)
        return run

    return prepare


def _variants(cell: Cell, region: torch.Tensor | None, asked: Asked, vllm: Vllm | str) -> dict[str, Step | str]:
    """Return the step of each variant on the cell; for a variant that cannot be measured, the reason."""
    if region is None or Pool.bytes_of(cell) > len(region):
        return dict.fromkeys(
            (*asked.kernels, CEILING), "its pool is larger than a third of the memory that is free here"
        )
    pool = Pool(cell, region)
    kernels: dict[str, Step | str] = {
        name: not_here(name, cell) or KINDS[cell.kind](cell, pool, name) for name in asked.kernels
    }
    if cell.kind == "call":
        ours = {
            "cpu": kernels["cpu"],
            FUNCTIONAL: _functional(cell, pool),
            DIRECT: _no_extension() or _direct(cell, pool),
        }
        return ours if "cpu" in kernels else {}
    others: dict[str, Step | str] = {PRODUCT if cell.kind == "prefill" else CEILING: BOUNDS[cell.kind](cell, pool)}
    if cell.kind != "write":
        others[SDPA] = _sdpa(cell)
    return kernels | others | {VLLM: vllm if isinstance(vllm, str) else vllm.step(cell)}


def _no_extension() -> str:
    return "; ".join(explain(device="cpu").objections["cpu"])


def not_here(name: str, cell: Cell) -> str:
    """Return the reason why a kernel cannot be measured on a cell; "" if it can."""
    known = next(kernel for kernel in registry.KERNELS if kernel.name == name)
    if why := known.refuse(registry.Case.of_spec(cell.spec(), cell.device)):
        return "; ".join(why)
    special = cell.kv or cell.lengths != "uniform" or cell.pages != "permuted"
    if (
        name in SLOW
        and cell.kind != "write"
        and (special or (name == "reference" and cell.batch * cell.new * cell.context > 1 << 20))
    ):
        return PLAIN
    return ""


# The steps: each prepares a repetition and returns the function that is timed.


def _attention(cell: Cell, pool: Pool, name: str) -> Step:
    q = torch.randn(cell.batch * cell.new, cell.heads, cell.head_dim).to(quant.DTYPES[cell.dtype])
    out, attend = torch.empty_like(q), bind_attention(pool.layer, backend=name)

    def prepare() -> Callable[[], object]:
        batch = pool.batch(pool.draw())
        return lambda: attend(q, batch, out=out)

    return prepare


def _write(cell: Cell, pool: Pool, name: str) -> Step:
    fresh, store = itertools.cycle(_new_tokens(cell)), bind_write(pool.layer, backend=name)

    def prepare() -> Callable[[], object]:
        batch, (k, v) = pool.batch(pool.draw()), next(fresh)
        return lambda: store(k, v, batch)

    return prepare


def _calls(cell: Cell, pool: Pool, name: str) -> Step:
    run = _attention(cell, pool, name)()

    def prepare() -> Callable[[], object]:
        return lambda: [run() for _ in range(CALLS)]

    return prepare


def _functional(cell: Cell, pool: Pool) -> Step:
    """Return calls of `paged_attention`, which resolves kernel, checks and options in each call."""
    batch = pool.batch(pool.draw())
    q = torch.randn(cell.batch * cell.new, cell.heads, cell.head_dim).to(quant.DTYPES[cell.dtype])

    def prepare() -> Callable[[], object]:
        return lambda: [paged_attention(q, pool.layer, batch) for _ in range(CALLS)]

    return prepare


def _direct(cell: Cell, pool: Pool) -> Step:
    """Return the kernel's own function over a checked call: the torch operator adds the difference to kind "call"."""
    batch, layer = pool.batch(pool.draw()), pool.layer
    q = torch.randn(cell.batch * cell.new, cell.heads, cell.head_dim).to(quant.DTYPES[cell.dtype])
    fixed = bound_fields(layer, AttentionOptions(cell.head_dim**-0.5))
    call = AttentionCall(*fixed, q, *tables_of(batch), None, None, torch.empty_like(q), torch.empty(q.shape[:2]))

    def prepare() -> Callable[[], object]:
        return lambda: [cpu.paged_attention(call) for _ in range(CALLS)]

    return prepare


def _read(cell: Cell, pool: Pool) -> Step | str:
    if why := _no_extension():
        return why

    def prepare() -> Callable[[], object]:
        offsets, isa = pool.draw() * pool.frame_bytes, cpu.isa()
        args = (pool.bytes.data_ptr(), offsets.data_ptr(), len(offsets), pool.frame_bytes)
        return lambda: (cpu.extension().read(isa, cell.threads, *args), offsets)

    return prepare


def _gemm(cell: Cell, pool: Pool) -> Step | str:
    """Return a square product with as many operations as the cell."""
    n, dtype = round((cell.flops() / 2) ** (1 / 3)), quant.DTYPES[cell.dtype]
    if is_slow_in_torch(dtype):
        return f"torch multiplies {cell.dtype} without oneDNN here: a product takes a hundred times as long as ours"
    a, b = (torch.randn(n, n).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: lambda: torch.mm(a, b, out=out)


def _memcpy(cell: Cell, pool: Pool) -> Step:
    sources, targets = itertools.cycle(_new_tokens(cell)), itertools.cycle(_new_tokens(cell))

    def prepare() -> Callable[[], object]:
        source, target = next(sources), next(targets)
        return lambda: [to.copy_(new) for new, to in zip(source, target, strict=True)]

    return prepare


def _new_tokens(cell: Cell) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return K and V of several steps, together larger than a cache."""
    size = (cell.new, cell.kv_heads, cell.head_dim)
    return [
        (torch.randn(size).to(quant.DTYPES[cell.dtype]), torch.randn(size).to(quant.DTYPES[cell.dtype]))
        for _ in range(8)
    ]


def _sdpa(cell: Cell) -> Step | str:
    """Return torch SDPA on contiguous KV, in its fastest layout.

    With one query, the heads of a group are the rows. With several, KV is repeated for all heads.
    """
    if cell.kv or cell.lengths != "uniform" or cell.pages != "permuted":
        return "it has contiguous sequences of one length, unquantised"
    if cell.batch * cell.context > 300_000:
        return "its contiguous copy would be too large"
    dtype, shape = quant.DTYPES[cell.dtype], (cell.batch, cell.kv_heads, cell.context, cell.head_dim)
    size = 2 * dtype.itemsize * cell.batch * cell.kv_heads * cell.context * cell.head_dim
    copies = itertools.cycle(
        [(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)) for _ in range(max(2, (96 << 20) // size))]
    )
    q = torch.randn(cell.batch, cell.heads, cell.new, cell.head_dim).to(dtype)
    group = cell.heads // cell.kv_heads
    options: dict[str, Any] = {}
    if cell.new > 1:
        options["is_causal"] = cell.new == cell.context
        if cell.new < cell.context:
            options["attn_mask"] = torch.ones(cell.new, cell.context, dtype=torch.bool).tril(cell.context - cell.new)
        copies = itertools.cycle(
            [(k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)) for k, v in itertools.islice(copies, 2)]
        )
    else:
        q = q.view(cell.batch, cell.kv_heads, group, cell.head_dim)

    def prepare() -> Callable[[], object]:
        k, v = next(copies)
        return lambda: scaled_dot_product_attention(q, k, v, **options)

    return prepare


KINDS: Final = {"decode": _attention, "prefill": _attention, "write": _write, "call": _calls}
BOUNDS: Final = {"decode": _read, "prefill": _gemm, "write": _memcpy}


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Run our kernels and torch on `count` threads."""
    before, variable = torch.get_num_threads(), os.environ.get("PAGEDKV_NUM_THREADS")
    os.environ["PAGEDKV_NUM_THREADS"] = str(count)
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if variable is None:
            del os.environ["PAGEDKV_NUM_THREADS"]
        else:
            os.environ["PAGEDKV_NUM_THREADS"] = variable


@contextmanager
def _vllms(asked: Asked) -> Iterator[Callable[[int], Vllm | str]]:
    """Give a function that maps a number of threads to a vLLM worker, or to the reason why there is none.

    A worker is started at its first use.
    """
    workers: dict[int, Vllm | str] = {}

    def with_threads(count: int) -> Vllm | str:
        if asked.vllm_python is None:
            return "no --vllm-python"
        if count not in workers:
            for worker in workers.values():
                if isinstance(worker, Vllm):
                    worker.end()
            workers.clear()
            try:
                workers[count] = Vllm(asked.vllm_python, count)
            except OSError as why:
                workers[count] = str(why)
        return workers[count]

    try:
        yield with_threads
    finally:
        for worker in workers.values():
            if isinstance(worker, Vllm):
                worker.end()
