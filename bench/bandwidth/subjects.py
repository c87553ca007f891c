"""The operations on a cache whose bandwidth is measured: what runs, the bytes that had to move, and the ceiling.

    decode       reads K and V of all tokens                                                 beside a read
    linear       reads the weights of one layer of an 8B model                               beside a read
    write_kv     reads K and V of new tokens, writes them as they are stored                 beside a copy
    gather_kv    reads K and V in their pages, writes them one after the other               beside a copy
    copy_frames  reads frames, writes frames: random ones, or neighbours                     beside a copy

Operations work on views of the region of the ceilings. Weights of integers and the results of gather_kv are other
memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from pagedkv import copy_frames, gather_kv
from pagedkv.bench.attention.cells import BASE, Cell
from pagedkv.bench.attention.pool import Pool
from pagedkv.bench.attention.runner import KINDS, PLAIN, not_here
from pagedkv.bench.bandwidth.ceilings import KIB, Region
from pagedkv.bench.clock import Step
from pagedkv.kernels import linear, quant

NAMES: Final = {"cpu": "pagedkv", "numba": "pagedkv, numba", "reference": "pagedkv, reference"}
"""backend: the variant of its rows."""
KERNELS: Final = tuple(NAMES)
MOST_OF_REFERENCE: Final = 4096
"""Tokens of a cell that the reference attends to: more take seconds."""
WIDE: Final = 4096
LINEAR: Final = {"norm_linear": 6144, "linear_add": 4096, "norm_gate_up": 28672}
"""operation: rows of its weights; they have WIDE columns, as in Llama 3 8B."""
ORDERS: Final = ("random", "in order")
"""The orders of frames."""
INTEGER_ROWS: Final = 8192
COLD: Final = 128 << 20
"""Bytes of weights of which each repetition takes another part."""


@dataclass(frozen=True)
class Subject:
    """An operation of one shape.

    axes:      the axes of its rows.
    num_bytes: bytes that had to move.
    bound:     the name of its ceiling.
    variants:  the step of each implementation, or the reason why there is none.
    """

    case: str
    axes: dict[str, Any]
    num_bytes: int
    bound: str
    variants: dict[str, Step | str]


def ceilings(region: Region) -> Iterator[Subject]:
    """Yield the ceilings themselves."""
    reads = {
        "read": region.read(),
        "read, random 4 KiB": region.read(4 * KIB, is_random=True),
        "read, random 32 KiB": region.read(32 * KIB, is_random=True),
    }
    for name, step in (reads | {"copy": region.copy()}).items():
        bound = "read" if name in reads else "copy"
        yield Subject("ceiling", {"pattern": name}, region.window, bound, {"memory": step})


def decodes(cells: Iterable[Cell], region: Region, kernels: Sequence[str]) -> Iterator[Subject]:
    """Yield decode attention over the cells."""
    for cell in cells:
        axes = {name: getattr(cell, name) for name in ("batch", "context", "block_size", "head_dim", "dtype")}
        axes |= {"heads": f"{cell.heads}/{cell.kv_heads}", "kv": cell.kv or cell.dtype}
        num_bytes = sum(cell.lens()) * cell.spec().bytes_per_token
        yield Subject("decode", axes, num_bytes, "read", _kernels(cell, region, kernels))


def writes(kinds: Iterable[tuple[str, str]], region: Region, kernels: Sequence[str]) -> Iterator[Subject]:
    """Yield `write_kv` of 2,048 new tokens. kinds: their dtype, and that of the stored KV or ""."""
    for dtype, kv in kinds:
        cell = Cell("write", batch=1, context=2048, new=2048, dtype=dtype, kv=kv)
        fresh = cell.kv_heads * 2 * cell.head_dim * quant.DTYPES[dtype].itemsize
        num_bytes = cell.new * (fresh + cell.spec().bytes_per_token)
        axes = {"tokens": cell.new, "dtype": dtype, "kv": kv or dtype}
        yield Subject("write_kv", axes, num_bytes, "copy", _kernels(cell, region, kernels))


def _kernels(cell: Cell, region: Region, kernels: Sequence[str]) -> dict[str, Step | str]:
    if Pool.bytes_of(cell) > len(region.bytes):
        return dict.fromkeys(map(_named, kernels), "its pool is larger than a third of the memory that is free here")
    pool = Pool(cell, region.bytes)
    variants = {name: not_here(name, cell) or KINDS[cell.kind](cell, pool, name) for name in kernels}
    if "reference" in variants and sum(cell.lens()) > MOST_OF_REFERENCE:
        variants["reference"] = PLAIN
    return {_named(name): step for name, step in variants.items()}


def _named(kernel: str) -> str:
    return NAMES.get(kernel, f"pagedkv, {kernel}")


def gathers(kinds: Iterable[str], region: Region) -> Iterator[Subject]:
    """Yield `gather_kv` of sequences of 4,096 tokens into bfloat16. kinds: dtypes of the stored KV.

    The frames of a sequence lie in random order, or one after the other.
    """
    for kv, order in itertools.product(kinds, ORDERS):
        cell = replace(
            BASE, kv="" if kv == "bfloat16" else kv, batch=4, pages="permuted" if order == "random" else order
        )
        if Pool.bytes_of(cell) > len(region.bytes):
            continue
        pool, tokens = Pool(cell, region.bytes), sum(cell.lens())
        out = tuple(torch.zeros(tokens, cell.kv_heads, cell.head_dim, dtype=torch.bfloat16) for _ in range(2))
        num_bytes = tokens * cell.spec().bytes_per_token + sum(part.nbytes for part in out)
        variants: dict[str, Step | str] = {"pagedkv": _gather(pool, out)}
        variants["torch"] = "its indexing does not dequantise" if cell.kv else _indexed(pool, out)
        axes = {"batch": cell.batch, "context": cell.context, "kv": kv}
        axes |= {} if order == "random" else {"order": order}
        yield Subject("gather_kv", axes, num_bytes, "copy", variants)


def _gather(pool: Pool, out: tuple[torch.Tensor, ...]) -> Step:
    def prepare() -> Callable[[], object]:
        batch = pool.batch(pool.draw())
        return lambda: gather_kv(pool.layer, batch, out=(out[0], out[1]))

    return prepare


def _indexed(pool: Pool, out: tuple[torch.Tensor, ...]) -> Step:
    shape = (-1, pool.cell.block_size, *out[0].shape[1:])

    def prepare() -> Callable[[], object]:
        frames, parts = pool.draw(), (pool.layer.k, pool.layer.v)
        return lambda: [
            torch.index_select(part, 0, frames, out=to.view(shape)) for part, to in zip(parts, out, strict=True)
        ]

    return prepare


def copies(sizes: Iterable[int], region: Region) -> Iterator[Subject]:
    """Yield `copy_frames` of half a window. sizes: bytes of a frame."""
    for size, order in itertools.product(sizes, ORDERS):
        variants: dict[str, Step | str] = {
            "pagedkv": _copy(region, size, order),
            "torch": _copy(region, size, order, by_torch=True),
        }
        count = region.window // 2 // size
        yield Subject("copy_frames", {"frame_KiB": size // KIB, "order": order}, 2 * count * size, "copy", variants)


def _copy(region: Region, size: int, order: str, *, by_torch: bool = False) -> Step:
    frames = region.bytes[: len(region.bytes) // size * size].view(-1, size)
    count, half = region.window // 2 // size, len(frames) // 2

    def prepare() -> Callable[[], object]:
        sources, targets = _order(half, count, order), half + _order(half, count, order)
        if by_torch:
            words = frames.view(torch.int64)  # bytes would be copied one by one
            return lambda: words.index_copy_(0, targets, words[sources])
        pairs = torch.stack([sources, targets], 1).int()
        return lambda: copy_frames(frames, pairs)

    return prepare


def _order(among: int, count: int, order: str) -> torch.Tensor:
    """Return int64 [count]: distinct numbers below `among`."""
    return (
        torch.randperm(among)[:count]
        if order == "random"
        else torch.arange(count) + int(torch.randint(among - count + 1, ()))
    )


def linears(tokens: Iterable[int], kinds: Iterable[str], region: Region) -> Iterator[Subject]:
    """Yield the linear operations of a decoder step over `tokens` tokens. kinds: dtypes of weights of integers."""
    shapes = [(name, rows, "bfloat16") for name, rows in LINEAR.items() if rows * WIDE * 2 <= len(region.bytes)]
    shapes += [("norm_linear", INTEGER_ROWS, kind) for kind in kinds]
    for (name, rows, kind), count in itertools.product(shapes, tokens):
        weights: list[Any]
        if kind == "bfloat16":
            part = rows * WIDE
            every = region.bytes.view(torch.bfloat16)
            weights = [every[at : at + part].view(rows, WIDE) for at in range(0, len(every) - part + 1, part)]
        else:
            one = linear.Matrix.quantised(torch.randn(rows, WIDE).bfloat16(), kind)
            weights = [one, *(linear.Matrix(one.stored.clone(), one.scales.clone()) for _ in range(COLD // one.nbytes))]
        variants: dict[str, Step | str] = {"pagedkv": _linear(name, count, weights, linear.choose)}
        variants["torch"] = "it multiplies floats" if kind != "bfloat16" else _linear(name, count, weights, _by_torch)
        axes = {"operation": name, "tokens": count, "rows": rows, "weights": kind}
        yield Subject("linear", axes, weights[0].nbytes, "read", variants)


def _by_torch(*_: object) -> linear.Operations:
    return linear.Operations()


def _linear(name: str, tokens: int, weights: Sequence[Any], choose: Callable[..., linear.Operations]) -> Step:
    norm, fresh = torch.ones(WIDE, dtype=torch.bfloat16), itertools.cycle(weights)
    x = torch.randn(tokens, WIDE).bfloat16()

    def prepare() -> Callable[[], object]:
        w, do = next(fresh), choose(x.device, x.dtype, tokens)
        if name == "linear_add":
            residual = torch.zeros(tokens, len(w), dtype=x.dtype)
            return lambda: do.linear_add(residual, x, w, None, None, 1e-6)
        if name == "norm_gate_up":
            return lambda: do.norm_gate_up(x, norm, w, None, 1e-6, "silu")
        return lambda: do.norm_linear(x, norm, w, None, 1e-6)

    return prepare
