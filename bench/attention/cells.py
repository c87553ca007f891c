"""What `pagedkv bench attention` measures: cells, and the two grids of them.

    decode    one new token for each of `batch` sequences          prefill   `new` tokens of one sequence, causal, `context` in all
    write     `new` tokens stored                                  call      the smallest decode, over and over: what a call costs

Cells of one group (same kind, sizes, heads and threads) are measured in turn, repetition by repetition: their ratios are of one moment.
A grid is a star around 32/8 heads of 128, the shape of the 8B models: each axis is walked where the others are typical.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

from pagedkv import KVSpec


@dataclass(frozen=True)
class Cell:
    """One shape. kv: a stored dtype, or "" for `dtype`; lengths: "uniform" or "zipf" of equal sum; pages: "permuted" or "in order"."""

    kind: str = "decode"
    batch: int = 4
    context: int = 4096
    new: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: str = "bfloat16"
    kv: str = ""
    lengths: str = "uniform"
    pages: str = "permuted"
    threads: int = 1
    device: str = "cpu"

    def __str__(self) -> str:
        """What matters of it, short."""
        size = {
            "decode": f"{self.batch} x {self.context:,}" + (f", {self.new} rows" if self.new > 1 else ""),
            "prefill": f"{self.new:,} of {self.context:,}",
            "write": f"{self.new:,} tokens",
            "call": "one call",
        }[self.kind]
        kv = f"{self.dtype}{' kv ' + self.kv if self.kv else ''}"
        special = [text for text in (self.lengths, self.pages) if text not in ("uniform", "permuted")]
        shape = f"{self.heads}/{self.kv_heads}/{self.head_dim}"
        return " ".join([self.kind, size, kv, f"block {self.block_size}", shape, *special, f"{self.threads} thr"])

    def spec(self) -> KVSpec:
        """One layer of it."""
        return KVSpec(
            1, self.kv_heads, self.head_dim, block_size=self.block_size, dtype=self.dtype, kv_dtype=self.kv or None
        )

    def lens(self) -> list[int]:
        """The KV length of each sequence. Zipf: the i-th longest has 1/i of the longest, rounded; the sum is that of the uniform ones."""
        if self.lengths == "uniform":
            return [self.context] * self.batch
        shares = [1 / (rank + 1) for rank in range(self.batch)]
        lens = [max(1, int(self.batch * self.context * share / sum(shares))) for share in shares]
        lens[0] += self.batch * self.context - sum(lens)
        return lens

    def group(self) -> tuple[Any, ...]:
        """Cells that are measured in turn have this in common."""
        return (self.kind, self.batch, self.context, self.new, self.heads, self.kv_heads, self.head_dim, self.threads)


BASE: Final = Cell()
_TYPES: Final = (
    ("bfloat16", ""),
    ("float32", ""),
    ("float16", ""),
    ("bfloat16", "fp8_e4m3"),
    ("bfloat16", "int8"),
    ("bfloat16", "int4"),
)


def _each_type(base: Cell) -> list[Cell]:
    return [replace(base, dtype=dtype, kv=kv) for dtype, kv in _TYPES]


def _prefills(dtypes: Iterable[str], sizes: Iterable[tuple[int, int]]) -> list[Cell]:
    return [
        Cell("prefill", batch=1, context=context, new=new, dtype=dtype, block_size=128)
        for dtype in dtypes
        for new, context in sizes
    ]


def _writes(kinds: Iterable[tuple[str, str]]) -> list[Cell]:
    return [Cell("write", batch=1, context=2048, new=2048, dtype=dtype, kv=kv) for dtype, kv in kinds]


def quick(threads: Iterable[int]) -> list[Cell]:
    """Every promise once: under two minutes on two cores."""
    one = [
        *_each_type(BASE),
        replace(BASE, block_size=128),
        replace(BASE, block_size=128, dtype="float32"),
        replace(BASE, block_size=128, kv="fp8_e4m3"),  # vLLM has no fp8 in blocks of 16
        replace(BASE, pages="in order"),
        replace(BASE, lengths="zipf"),
        replace(BASE, batch=1, context=1024),
        *_prefills(["bfloat16", "float32"], [(2048, 2048)]),
        *_writes([("bfloat16", ""), ("bfloat16", "int8"), ("bfloat16", "fp8_e4m3")]),
        Cell("call", batch=1, context=16),
    ]
    return _by_threads(one, threads)


def full(threads: Iterable[int]) -> list[Cell]:
    """The star of the grid: about half an hour."""
    sizes = [(batch, context) for context in (1024, 4096, 16384, 65536) for batch in (1, 8, 32)]
    some = [replace(BASE, batch=b, context=n, block_size=s) for b, n in sizes for s in (16, 128)]
    some += [replace(BASE, batch=b, context=n, block_size=s, dtype="float32") for b, n in sizes[:-3] for s in (16, 128)]
    some += [cell for b, n in ((8, 4096), (4, 16384)) for cell in _each_type(replace(BASE, batch=b, context=n))]
    some += [replace(BASE, batch=8, block_size=size) for size in (32, 128)]
    some += [replace(BASE, batch=8, heads=h, kv_heads=k) for h, k in ((16, 16), (28, 4), (64, 8), (32, 1))]
    some += [replace(BASE, batch=8, head_dim=64), replace(BASE, batch=8, head_dim=64, heads=64, kv_heads=8)]
    some += [
        replace(BASE, batch=b, context=4096, **special)
        for b in (8, 32)
        for special in ({"lengths": "zipf"}, {"pages": "in order"})
    ]
    some += _prefills(["bfloat16", "float32", "float16"], [(2048, 2048), (512, 8192)])
    some += _writes(_TYPES)
    return _by_threads([*some, Cell("call", batch=1, context=16)], threads)


def _by_threads(cells: Iterable[Cell], threads: Iterable[int]) -> list[Cell]:
    return list(
        dict.fromkeys(replace(cell, threads=n) for n in threads for cell in cells if cell.kind != "call" or n == 1)
    )
