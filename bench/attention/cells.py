"""Cells, each one shape that `pagedkv bench attention` measures, and the two grids of cells.

    decode    one new token for each of `batch` sequences
    prefill   `new` tokens of one sequence of `context` tokens in all, causal
    write     `new` tokens stored
    call      the smallest decode, repeated: its time is the cost of a call

Cells of one group (same kind, sizes, heads and threads) take turns, repetition by repetition. So a ratio of two cells
compares times of the same moment.
A grid is a star around 32/8 heads of 128, the shape of the 8B models: each axis varies while the others stay typical.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

from pagedkv import KVSpec


@dataclass(frozen=True)
class Cell:
    """One shape to measure.

    kind:    "decode", "prefill", "write" or "call", see above.
    kv:      the dtype of stored KV; "" for `dtype`, unquantised.
    lengths: "uniform", or "zipf" with the same sum.
    pages:   "permuted" or "in order" in the pool.
    """

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
        """Return the kind, size, dtype and shape in short; of lengths and pages only what differs from the default."""
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
        """Return the geometry of one layer. A key of 576 elements is a latent (MLA); its first 512 are the value."""
        latent: dict[str, Any] = {"head_dim_v": 512, "value_in_key": True} if self.head_dim == 576 else {}
        kinds: dict[str, Any] = {"dtype": self.dtype, "kv_dtype": self.kv or None}
        return KVSpec(1, self.kv_heads, self.head_dim, block_size=self.block_size, **kinds, **latent)

    def lens(self) -> list[int]:
        """Return the KV length of each sequence.

        Zipf: the i-th longest sequence has 1/i of the longest length, rounded; the sum equals that of uniform lengths.
        """
        if self.lengths == "uniform":
            return [self.context] * self.batch
        shares = [1 / (rank + 1) for rank in range(self.batch)]
        lens = [max(1, int(self.batch * self.context * share / sum(shares))) for share in shares]
        lens[0] += self.batch * self.context - sum(lens)
        return lens

    def flops(self) -> int:
        """Return the operations of a causal prefill: two products of D for each query head and each visible key."""
        return 4 * self.heads * self.head_dim * (self.new * self.context - self.new * (self.new - 1) // 2) * self.batch

    def group(self) -> tuple[Any, ...]:
        """Return the key of the cell's group: cells with equal keys take turns."""
        return (self.kind, self.batch, self.context, self.new, self.heads, self.kv_heads, self.head_dim, self.threads)


BASE: Final = Cell()
_PLAIN, _NARROW = ("bfloat16", "float32", "float16"), ("fp8_e4m3", "int8", "k8v4", "k5v4")
_TYPES: Final = (*((dtype, "") for dtype in _PLAIN), *(("bfloat16", kv) for kv in _NARROW))


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
    """Return the cells that check each promise once: under two minutes on two cores."""
    cells = [
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
    return _by_threads(cells, threads)


def full(threads: Iterable[int]) -> list[Cell]:
    """Return the whole star of cells: about half an hour."""
    sizes = [(batch, context) for context in (1024, 4096, 16384, 65536) for batch in (1, 8, 32)]
    cells = [replace(BASE, batch=b, context=n, block_size=s) for b, n in sizes for s in (16, 128)]
    cells += [
        replace(BASE, batch=b, context=n, block_size=s, dtype="float32") for b, n in sizes[:-3] for s in (16, 128)
    ]
    cells += [cell for b, n in ((8, 4096), (4, 16384)) for cell in _each_type(replace(BASE, batch=b, context=n))]
    cells += [replace(BASE, batch=8, block_size=size) for size in (32, 128)]
    cells += [replace(BASE, batch=8, heads=h, kv_heads=k) for h, k in ((16, 16), (28, 4), (64, 8), (32, 1))]
    cells += [replace(BASE, batch=8, head_dim=64), replace(BASE, batch=8, head_dim=64, heads=64, kv_heads=8)]
    cells += [
        replace(BASE, batch=b, context=4096, **special)
        for b in (8, 32)
        for special in ({"lengths": "zipf"}, {"pages": "in order"})
    ]
    cells += _prefills(["bfloat16", "float32", "float16"], [(2048, 2048), (512, 8192)])
    cells += _writes(_TYPES)
    return _by_threads([*cells, Cell("call", batch=1, context=16)], threads)


def _by_threads(cells: Iterable[Cell], threads: Iterable[int]) -> list[Cell]:
    return list(
        dict.fromkeys(replace(cell, threads=n) for n in threads for cell in cells if cell.kind != "call" or n == 1)
    )
