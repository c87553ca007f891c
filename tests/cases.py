"""The grid of cases that every backend and every kernel benchmark uses.

A `Case` is one call within the contract of `paged_attention`. `build` makes its tensors with everything difficult that
an engine may hand over: frames in random order, unwritten slots of NaN, padded table entries of 2147480000, rows in any
order, strides of a larger pool.

    SMALL   one feature at a time, tiny shapes
    GRID    every pair of values of every two axes meets in some case
    LARGE   sizes where splits, chunks and batching begin

The reference, and the error that is allowed: tests/kernels/oracle.py.
"""

from __future__ import annotations

import itertools
import random
import zlib
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagedkv.kernels import layout, quant
from pagedkv.kernels.args import (
    AttentionCall,
    AttentionOptions,
    KVLayer,
    PagedBatch,
    RotaryTable,
    WriteCall,
    bound_fields,
    tables_of,
)
from pagedkv.spec import ELEMENTS

ABSURD = 2147480000
"""A frame number that no pool has, for padded table entries."""

DTYPES = quant.DTYPES
POISON = {"fp8_e4m3": 0x7F, "fp8_e5m2": 0x7F, "int8": 0x7F, "int5": 0xFF}
"""The byte of unwritten slots: NaN for fp8, the largest number for integers, which have no NaN.

The scales of unwritten integers are NaN if scales are per (token, head).
"""
KV_KINDS = (
    "", "fp8_e4m3", *(f"{kind}/{scales}" for kind in tuple(POISON)[:3] for scales in ("tensor", "token_head")),
    "k8v4/token_head", "k8v4/calibrated", "k5v4/token_head", "k5v4/calibrated",
)  # fmt: skip


class Built(NamedTuple):
    """The arguments of `paged_attention(q, layer, batch, **options)`."""

    q: Tensor
    layer: KVLayer
    batch: PagedBatch
    options: dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One call.

    q_lens, kv_lens: new tokens, and KV length with the new tokens, of each sequence
    heads, dims: (H, K) and (D, Dv)
    kv: "" for the dtype of q; or a kind and its scales: "int8/token_head", "fp8_e4m3/tensor", "fp8_e4m3" (1);
        "k5v4/calibrated" has scales per (token, head), and statistics of K's channels
    layout: "NHD", "HND" (gaps between frames, as in a pool of several layers), "mixed" (K beside V), "mla" (V within K)
    mask: "causal", "all", "tree", "some" (every second sequence is causal)
    window: as callers give it; with positions on the right the call is not causal, unless a tensor says so
    rows, punched, padding: an indirection from sequences to rows; random pages missing; extra rows of q
    """

    q_lens: tuple[int, ...] = (1, 1, 1)
    kv_lens: tuple[int, ...] = (97, 16, 33)
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 64)
    block_size: int = 16
    dtype: str = "float32"
    kv: str = ""
    layout: str = "NHD"
    mask: str = "causal"
    window: int | tuple[int | None, int | None] | None = None
    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    split_tokens: int | None = None
    rows: bool = False
    punched: bool = False
    padding: int = 0

    def __str__(self) -> str:
        """Return the fields that differ from the default, as the id of the test."""
        differing = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        texts = {name: str(getattr(self, name)) for name in differing}
        texts |= {name: _run_lengths(getattr(self, name)) for name in ("q_lens", "kv_lens") if name in differing}
        texts |= {name: "/".join(map(str, getattr(self, name))) for name in ("heads", "dims") if name in differing}
        return " ".join(f"{name}={text}" for name, text in texts.items()) or "default"

    def build(self, seed: int = 0, device: str = "cpu") -> Built:
        """Return random tensors of this case, equal for equal `seed` on any device."""
        draw = torch.Generator().manual_seed(zlib.crc32(str(self).encode()) + seed)
        T, H = sum(self.q_lens) + self.padding, self.heads[0]
        q = torch.randn(T, H, self.dims[0], generator=draw).to(DTYPES[self.dtype])
        q[T - self.padding :] = torch.nan
        batch, num_frames = self._batch(draw)
        layer = self._layer(draw, num_frames, batch)
        options: dict[str, Any] = {
            "window": self.window,
            "softcap": self.softcap,
            "split_tokens": self.split_tokens,
            "causal": self.mask != "all" and not (isinstance(self.window, tuple) and self.window[1] != 0),
        }
        if self.mask == "some":
            options["causal"] = torch.arange(len(self.q_lens)) % 2 == 1
        if self.sinks:
            options["sinks"] = torch.randn(H, generator=draw) * 2
        if self.alibi:
            options["alibi_slopes"] = 2.0 ** -torch.linspace(1, 8, H)
        # any mask in which a token sees itself, also one of no tree; columns without a token are True
        if self.mask == "tree":
            tree = torch.rand(T, batch.max_seqlen_q, generator=draw) < 0.5
            index = torch.cat([torch.arange(m) for m in (*self.q_lens, self.padding)])
            options["tree_mask"] = tree | (torch.arange(batch.max_seqlen_q) >= index[:, None])
        return Built(
            q.to(device), moved(layer, device), moved(batch, device), {k: moved(x, device) for k, x in options.items()}
        )

    def _batch(self, draw: torch.Generator) -> tuple[PagedBatch, int]:
        B, S = len(self.q_lens), self.block_size
        # a sequence without queries reads no page
        pages = [-(-n // S) if m else 0 for m, n in zip(self.q_lens, self.kv_lens, strict=True)]
        num_frames = sum(pages) + 3
        frames = iter(torch.randperm(num_frames, generator=draw).tolist())
        rows = torch.randperm(B + 3, generator=draw)[:B] if self.rows else torch.arange(B)
        table = torch.full((B + 3 * self.rows, max(pages, default=0) + 2), ABSURD, dtype=torch.int32)
        for row, count in zip(rows.tolist(), pages, strict=True):
            table[row, :count] = torch.tensor(list(itertools.islice(frames, count)), dtype=torch.int32)
            if self.punched:
                table[row, :count][torch.rand(count, generator=draw) < 0.3] = -1
        positions = torch.cat(
            [torch.arange(n - m, n) for m, n in zip(self.q_lens, self.kv_lens, strict=True)] + [torch.zeros(0).long()]
        )
        slots = [
            int(table[row, t // S]) * S + t % S if t >= 0 and table[row, t // S] >= 0 else -1
            for row, m, n in zip(rows.tolist(), self.q_lens, self.kv_lens, strict=True)
            for t in range(n - m, n)
        ]
        pad = (0, self.padding)
        batch = PagedBatch(
            block_table=table,
            seq_lens=torch.tensor(self.kv_lens, dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, *itertools.accumulate(self.q_lens)], dtype=torch.int32),
            slots=torch.nn.functional.pad(torch.tensor(slots, dtype=torch.int64), pad, value=-1),
            positions=torch.nn.functional.pad(positions, pad),
            max_seqlen_q=max(self.q_lens, default=0),
            max_seqlen_k=max(self.kv_lens, default=0),
            rows=rows.int() if self.rows else None,
        )
        return batch, num_frames

    def _layer(self, draw: torch.Generator, num_frames: int, batch: PagedBatch) -> KVLayer:
        kind, _, scales = self.kv.partition("/")
        layer = empty_layer(self, num_frames)
        k, v, k_scale, v_scale = layer.k, layer.v, layer.k_scale, layer.v_scale
        at = (used := used_slots(batch, self.block_size)) // self.block_size, used % self.block_size
        for pool, scale in ((k, k_scale), (v, v_scale)):
            if self.layout == "mla" and pool is v:
                break
            for part in quant.planes(k) if pool is k and kind == "k5v4" else (pool,):
                shape = (len(used), *part.shape[2:])
                if part.dtype in (torch.int8, torch.uint8):
                    low, high = (-127, 128) if part.dtype == torch.int8 else (0, 256)
                    stored = torch.randint(low, high, shape, generator=draw).to(part.dtype)
                else:
                    stored = (torch.randn(shape, generator=draw) * (2 if kind else 1)).to(part.dtype)
                as_bytes(part)[at] = as_bytes(stored)
            base = {torch.int8: 0.01, torch.uint8: 0.1 if pool is k else 0.02}.get(pool.dtype, 0.6)
            if scale is not None and scales == "tensor":
                scale.fill_(base)
            elif scale is not None:
                scale[at] = ((torch.rand(shape[:-1], generator=draw) + 0.5) * base).half()
        if layer.calibration is not None:
            centre, divisor = layer.calibration.unbind(1)
            centre.copy_(torch.randn(centre.shape, generator=draw) * 2)
            divisor.copy_(torch.rand(divisor.shape, generator=draw) + 0.5)
        return layer


def call_of(built: Built, **changes: Any) -> AttentionCall:
    """Return the flat call of a case, with results of NaN; `changes` override its options."""
    (q, layer, batch), options = built[:3], built.options | changes
    tree, causal_of = options.pop("tree_mask", None), None
    if isinstance(options["causal"], Tensor):
        causal_of, options["causal"] = options["causal"], False
    fixed = bound_fields(layer, AttentionOptions.of(**{"scale": q.shape[2] ** -0.5} | options))
    out = torch.full((*q.shape[:2], quant.head_dim(layer.v, is_value=True)), torch.nan, dtype=q.dtype)
    return AttentionCall(*fixed, q, *tables_of(batch), tree, causal_of, out, torch.full(q.shape[:2], torch.nan))


def write_of(
    layer: KVLayer, k: Tensor, v: Tensor, slots: Tensor, rope: RotaryTable | None = None,
    positions: Tensor | None = None,
) -> WriteCall:  # fmt: skip
    """Return the flat call of a write."""
    return WriteCall(*bound_fields(layer, rope), k, v, slots, positions)


def empty_layer(case: Case, num_frames: int) -> KVLayer:
    """Return a pool with the geometry and layout of `case`, all slots unwritten."""
    kind, _, scales = case.kv.partition("/")
    of_k, of_v = (DTYPES[name] for name in ELEMENTS[kind or case.dtype])
    dtype, K, S = of_k, case.heads[1], case.block_size
    D, Dv = case.dims
    if of_v == torch.uint8:
        D, Dv = D * 5 // 8 if of_k == torch.uint8 else D, Dv // 2
    if kind == "k5v4":  # the keys of a head in a frame are one run
        k = poison((num_frames, 3, K, S, D), of_k)[:, 1].transpose(1, 2)
        v = poison((num_frames, S, K, Dv), of_v)
        v = v if case.layout == "NHD" else v.transpose(1, 2).contiguous().transpose(1, 2)
    elif case.layout == "NHD":
        k, v = poison((num_frames, S, K, D), dtype), poison((num_frames, S, K, Dv), of_v)
    elif case.layout == "HND":
        k, v = (poison((num_frames, 3, K, S, d), t)[:, 1].transpose(1, 2) for d, t in ((D, dtype), (Dv, of_v)))
    elif case.layout == "mixed":
        pool = poison((num_frames, K, S, D + Dv), dtype).transpose(1, 2)
        k, v = pool.split((D, Dv), -1)  # type: ignore[no-untyped-call]
        v = v.view(of_v)
    else:
        k = poison((num_frames, S, K, D), dtype)
        v = k[..., :Dv]
    if not scales:
        return KVLayer(k, v)
    if scales == "tensor":
        return KVLayer(k, v, torch.tensor(1.0), torch.tensor(1.0))
    k_scale, v_scale = (torch.full((num_frames, K, S), torch.nan).half().transpose(1, 2) for _ in range(2))
    statistics = torch.ones(K, 2, case.dims[0]) if scales == "calibrated" else None
    return KVLayer(k, v, k_scale, k_scale if case.layout == "mla" else v_scale, statistics)


def poison(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor with the contents of unwritten memory."""
    for name, byte in POISON.items():
        if DTYPES[name] == dtype:
            return torch.full(shape, byte, dtype=torch.uint8).view(dtype)
    return torch.full(shape, torch.nan, dtype=dtype)


def as_bytes(x: Tensor) -> Tensor:
    """Return `x`, or its bytes if its elements are one byte, as not every operation knows fp8."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def used_slots(batch: PagedBatch, block_size: int) -> Tensor:
    """Return int64 [n]: the slots of all tokens of all sequences with queries, without holes."""
    starts, slots = batch.cu_seqlens_q.tolist(), []
    for b, n in enumerate(batch.seq_lens.tolist()):
        row = batch.block_table[b if batch.rows is None else int(batch.rows[b])].tolist()
        slots += [
            row[t // block_size] * block_size + t % block_size
            for t in range(n)
            if starts[b + 1] > starts[b] and row[t // block_size] >= 0
        ]
    return torch.tensor(slots, dtype=torch.int64)


def moved(x: Any, device: str) -> Any:
    """Return `x`, or the tensors of a KVLayer or PagedBatch, on `device` with the same strides.

    Values and scales of a layer that lie within those of its keys do so there, too.
    """
    if isinstance(x, KVLayer | PagedBatch):
        there = {field.name: moved(getattr(x, field.name), device) for field in fields(x)}
        if isinstance(x, KVLayer) and layout.is_v_in_k(x.k, x.v):
            there["v"] = there["k"][..., : x.v.shape[-1]]
        if isinstance(x, KVLayer) and layout.is_one_scale(x.k_scale, x.v_scale):
            there["v_scale"] = there["k_scale"]
        return replace(x, **there)
    if not isinstance(x, Tensor) or x.device.type == device:
        return x
    there = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device)
    as_bytes(there).copy_(as_bytes(x))
    return there


def _run_lengths(values: tuple[int, ...]) -> str:
    runs = [(value, len(list(run))) for value, run in itertools.groupby(values)]
    texts = [f"{value}x{count}" if count > 1 else str(value) for value, count in runs]
    return ",".join(texts if len(texts) <= 20 else [*texts[:3], "...", texts[-1]]) or "none"


LENGTHS = {
    "decode": ((1,), (97,)),
    "decode of 17": ((1,) * 17, (0, 1, 15, 16, 17, 97, 512, 33, 31, 64, 65, 2, 3, 130, 255, 256, 257)),
    "long decode": ((1, 1, 1), (2011, 5, 512)),
    "drafts": ((1, 2, 3, 4, 5, 6, 7, 8), (97, 2, 16, 17, 512, 15, 100, 8)),
    "prefill": ((17, 127), (17, 127)),
    "chunk": ((33,), (577,)),
    "mixed": ((1, 65, 0, 5, 8), (512, 97, 40, 18, 2011)),
    "more queries than tokens": ((3, 1, 4), (2, 0, 17)),
}
AXES: dict[str, tuple[Any, ...]] = {
    "lengths": tuple(LENGTHS),
    "kv": KV_KINDS,
    "heads": ((4, 4), (8, 2), (5, 1), (28, 4), (32, 8), (64, 4), (32, 1), (64, 2)),
    "dims": ((64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128), (64, 80)),
    "block_size": (1, 5, 8, 16, 32, 64, 128, 256),
    "dtype": ("float32", "bfloat16", "float16"),
    "layout": ("NHD", "HND", "mixed"),
    "mask": ("causal", "all", "tree", "some"),
    "window": (None, 1, 64, 1024, (40, 3), (None, 20), (0, None)),
    "softcap": (0.0, 50.0),
    "sinks": (False, True),
    "alibi": (False, True),
    "split_tokens": (None, 32, 100),
    "rows": (False, True),
    "punched": (False, True),
    "padding": (0, 3),
}


def covering(axes: dict[str, tuple[Any, ...]], *, candidates: int = 24) -> list[dict[str, Any]]:
    """Return points in which every two values of every two axes meet.

    Greedy: each point is the best of some random ones that contain a pair which no earlier point has.
    """
    rng, names = random.Random(0), list(axes)
    sizes = [range(len(axes[name])) for name in names]
    pairs = [
        ((a, x), (b, y)) for a, b in itertools.combinations(range(len(names)), 2) for x in sizes[a] for y in sizes[b]
    ]
    open_pairs, points = dict.fromkeys(pairs), []
    while open_pairs:
        (a, x), (b, y) = next(iter(open_pairs))
        best: list[tuple[tuple[int, int], tuple[int, int]]] = []
        for _ in range(candidates):
            point = [rng.choice(size) for size in sizes]
            point[a], point[b] = x, y
            settled = [pair for pair in itertools.combinations(enumerate(point), 2) if pair in open_pairs]
            if len(settled) > len(best):
                best, chosen = settled, point
        for pair in best:
            del open_pairs[pair]
        points.append({name: axes[name][i] for name, i in zip(names, chosen, strict=True)})
    return points


def _case(point: dict[str, Any]) -> Case:
    q_lens, kv_lens = LENGTHS[point.pop("lengths")]
    if point["mask"] == "causal" and isinstance(point.get("window"), tuple):
        point["window"] = (point["window"][0], 0)
    if point["mask"] != "all":  # a causal sequence has its new tokens, or none at all
        kv_lens = tuple(max(n, q) if n else 0 for q, n in zip(q_lens, kv_lens, strict=True))
    return Case(q_lens=q_lens, kv_lens=kv_lens, **point)


GRID = tuple(_case(point) for point in covering(AXES))

MASKS = (
    Case(q_lens=(3, 1, 20, 40), kv_lens=(2, 0, 50, 130), heads=(2, 1), mask="some", window=(30, 2)),
    Case(q_lens=(1, 5, 40), kv_lens=(33, 40, 60), heads=(8, 2), mask="some", dtype="bfloat16", split_tokens=32),
    Case(q_lens=(3, 20, 1), kv_lens=(40, 30, 97), mask="all", window=(None, 4), dtype="bfloat16", layout="HND"),
    Case(q_lens=(4, 19), kv_lens=(60, 33), heads=(8, 1), mask="tree", window=(25, 3), rows=True, punched=True),
)
"""Two-sided windows, and sequences of which some are causal."""

_DRAFTS = Case(q_lens=(1, 4, 3, 0, 5), kv_lens=(40, 4, 70, 9, 33))
SMALL = (
    Case(),
    *(Case(q_lens=(1,), kv_lens=(n,)) for n in (0, 1, 15, 17)),
    *(Case(q_lens=q, kv_lens=kv) for q, kv in [((), ()), ((0, 0), (5, 0)), ((17, 1), (17, 512)), LENGTHS["mixed"]]),
    _case({"lengths": "more queries than tokens", "mask": "all"}),
    _case({"lengths": "more queries than tokens", "mask": "causal"}),
    *(Case(*LENGTHS["more queries than tokens"], mask="some", window=window) for window in (None, (None, 1), (1, 0))),
    *(Case(*LENGTHS["more queries than tokens"], mask="all", window=window) for window in ((None, 0), (2, 1))),
    *MASKS,
    *(replace(_DRAFTS, heads=heads) for heads in AXES["heads"]),
    *(replace(_DRAFTS, dims=dims) for dims in AXES["dims"]),
    *(replace(_DRAFTS, block_size=size) for size in AXES["block_size"]),
    *(replace(_DRAFTS, layout=layout) for layout in AXES["layout"]),
    *(replace(_DRAFTS, dtype=dtype) for dtype in AXES["dtype"]),
    *(replace(_DRAFTS, dtype="bfloat16", kv=kv, layout="HND") for kv in AXES["kv"]),
    *(replace(_DRAFTS, **{option: value}) for option in ("mask", "split_tokens") for value in AXES[option]),
    *(replace(_DRAFTS, window=window) for window in AXES["window"] if not isinstance(window, tuple)),
    *(replace(_DRAFTS, mask="all", window=window) for window in AXES["window"] if isinstance(window, tuple)),
    *(
        replace(_DRAFTS, **option)
        for option in ({"softcap": 50.0}, {"sinks": True}, {"alibi": True}, {"rows": True}, {"padding": 3})
    ),
    *(
        replace(_DRAFTS, punched=True, block_size=4, mask=mask, sinks=sinks)
        for mask in AXES["mask"]
        for sinks in (False, True)
    ),
    replace(_DRAFTS, heads=(16, 1), dims=(576, 512), layout="mla", dtype="bfloat16"),
    replace(_DRAFTS, heads=(16, 1), dims=(576, 512), layout="mla", dtype="bfloat16", kv="fp8_e4m3/token_head"),
)
SMALL = tuple(dict.fromkeys(SMALL))

LARGE = (
    Case(q_lens=(577,), kv_lens=(577,), dtype="bfloat16", heads=(8, 2), layout="HND"),
    Case(
        q_lens=(577, 1, 129),
        kv_lens=(2011, 2011, 463),
        heads=(8, 2),
        dims=(128, 128),
        window=256,
        softcap=50.0,
        sinks=True,
    ),
    Case(q_lens=(1,) * 128, kv_lens=tuple(range(1, 257, 2)), heads=(8, 2), dtype="float16"),
    Case(q_lens=(1, 4), kv_lens=(16384, 9000), heads=(8, 1), dtype="bfloat16", kv="int8/token_head"),
    Case(q_lens=(1,), kv_lens=(131072,), heads=(2, 1), split_tokens=4096, block_size=64),
    Case(q_lens=(64,), kv_lens=(1500,), heads=(128, 1), dims=(576, 512), layout="mla", dtype="bfloat16", block_size=64),
)
