"""The grid of cases that every backend and every kernel benchmark uses: those of the kit, and those of pagedkv alone.

A `Case` is one call within the contract of `paged_attention`. `build` makes its tensors with everything difficult that
an engine may hand over (pagedkv/conformance/cases.py); to these the class here adds rows in any order, masks of trees,
and more layouts and kinds of KV.

    SMALL   one feature at a time, tiny shapes
    GRID    every pair of values of every two axes meets in some case
    LARGE   sizes where splits, chunks and batching begin

The oracle, with which the kit's reference is compared: tests/kernels/oracle.py.
"""

from __future__ import annotations

import itertools
import random
import zlib
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from pagedkv.conformance import cases as kit
from pagedkv.conformance.cases import ABSURD
from pagedkv.conformance.cases import _Built as Built
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

DTYPES = quant.DTYPES
KV_KINDS = (
    "", "fp8_e4m3", *kit.KV_KINDS, "k8v4/token_head", "k8v4/calibrated", "k5v4/token_head", "k5v4/calibrated",
)  # fmt: skip


@dataclass(frozen=True)
class Case(kit.Case):
    """One call.

    kv: also "k8v4/token_head"; "k5v4/calibrated" has scales per (token, head), and statistics of K's channels
    layout: also "mixed" (K beside V), "mla" (V within K)
    mask: also "tree", "some" (every second sequence is causal, and a window on the right holds for the others)
    rows: an indirection from sequences to rows
    """

    split_tokens: int | None = None
    rows: bool = False

    def build(self, seed: int = 0) -> Built:
        """Return random tensors of this case on the CPU, equal for equal `seed`."""
        draw = torch.Generator().manual_seed(zlib.crc32(str(self).encode()) - seed)
        q, layer, batch, options = super().build(seed)
        if layer.calibration is not None:  # it says what the stored keys are
            layer.calibration[:, 0] = torch.randn(layer.calibration[:, 0].shape, generator=draw) * 2
            layer.calibration[:, 1] = torch.rand(layer.calibration[:, 1].shape, generator=draw) + 0.5
        options["split_tokens"] = self.split_tokens
        at = [torch.arange(n - m, n) for m, n in zip(self.q_lens, self.kv_lens, strict=True)]
        batch = replace(batch, positions=torch.cat([*at, torch.zeros(self.padding, dtype=torch.int64)]))
        if self.mask == "some":
            options["causal"] = torch.arange(len(self.q_lens)) % 2 == 1
        # any mask in which a token sees itself, also one of no tree; columns without a token are True
        if self.mask == "tree":
            tree = torch.rand(len(q), batch.max_seqlen_q, generator=draw) < 0.5
            index = torch.cat([torch.arange(m) for m in (*self.q_lens, self.padding)])
            options["tree_mask"] = tree | (torch.arange(batch.max_seqlen_q) >= index[:, None])
        if self.rows:
            B = len(self.q_lens)
            rows = torch.randperm(B + 3, generator=draw)[:B].int()
            table = torch.full((B + 3, batch.block_table.shape[1]), ABSURD, dtype=torch.int32)
            table[rows.long()] = batch.block_table
            batch = replace(batch, block_table=table, rows=rows)
        return Built(q, layer, batch, options)

    def empty_layer(self, num_frames: int) -> KVLayer:
        """Return a pool with the geometry and layout of this case, all slots unwritten."""
        kind, _, scales = self.kv.partition("/")
        of_k, of_v = ELEMENTS[kind or self.dtype]
        if self.layout not in ("mixed", "mla") and of_v != "code4":
            return super().empty_layer(num_frames)
        K, S, (D, Dv) = self.heads[1], self.block_size, self.dims
        D, Dv = D * 5 // 8 if of_k == "int5" else D, Dv // 2 if of_v == "code4" else Dv
        if self.layout == "mixed" and of_k != "int5":
            pool = kit._poison((num_frames, K, S, D + Dv), of_k).transpose(1, 2)
            k, v = pool[..., :D], pool[..., D:].view(DTYPES[of_v])
        else:  # the int5 keys of a head in a frame are one run
            k, v = (kit._poison((num_frames, 3, K, S, d), x)[:, 1].transpose(1, 2) for d, x in ((D, of_k), (Dv, of_v)))
            k = k.contiguous() if self.layout != "HND" and of_k != "int5" else k
            v = k[..., :Dv] if self.layout == "mla" else v.contiguous() if self.layout == "NHD" else v
        if not scales or scales == "tensor":
            return KVLayer(k, v, *([0.03, 0.05] if scales else []))
        k_scale, v_scale = (torch.full((num_frames, K, S), torch.nan).half().transpose(1, 2) for _ in range(2))
        statistics = torch.ones(K, 2, self.dims[0]) if scales == "calibrated" else None
        return KVLayer(k, v, k_scale, k_scale if self.layout == "mla" else v_scale, statistics)


empty_layer = Case.empty_layer


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


def as_bytes(x: Tensor) -> Tensor:
    """Return `x`, or its bytes if its elements are one byte, as not every operation knows fp8."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


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
    Case(q_lens=(), kv_lens=()),
    Case(*LENGTHS["mixed"]),
    Case(*LENGTHS["decode of 17"]),
    *itertools.chain.from_iterable(cases for name, cases in kit._features(_DRAFTS).items() if "write" not in name),
    *(Case(*LENGTHS["more queries than tokens"], mask="some", window=window) for window in (None, (None, 1), (1, 0))),
    *(Case(*LENGTHS["more queries than tokens"], mask="all", window=window) for window in ((None, 0), (2, 1))),
    _case({"lengths": "more queries than tokens", "mask": "causal"}),
    *MASKS,
    replace(_DRAFTS, layout="mixed"),
    *(replace(_DRAFTS, dtype="bfloat16", kv=kv, layout="HND") for kv in KV_KINDS if kv.startswith("k")),
    *(replace(_DRAFTS, mask=mask) for mask in ("tree", "some")),
    *(replace(_DRAFTS, split_tokens=tokens) for tokens in (32, 100)),
    replace(_DRAFTS, rows=True),
    *(
        replace(_DRAFTS, punched=True, block_size=4, mask=mask, sinks=sinks)
        for mask in ("tree", "some")
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
