"""A call of paged attention with everything difficult that an engine may hand over, and a grid of such calls.

Frames lie in random order, unwritten slots hold NaN, padded table entries name frames that no pool has. The reference
in float64 is right; TOLERANCE says how far off a backend may be.
"""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass, fields, replace
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from pagedkv.kernels import layout, ops, quant, reference
from pagedkv.kernels.args import AttentionCall, AttentionOptions, KVLayer, PagedBatch, bound_fields, tables_of

ABSURD: Final = 2147480000
"""A frame number that no pool has, for padded table entries."""

POISON: Final = {"fp8_e4m3": 0x7F, "fp8_e5m2": 0x7F, "int8": 0x7F, "int5": 0xFF, "code4": 0xFF}
"""The byte of unwritten slots: NaN for fp8, the largest number for integers. Scales of unwritten slots are NaN."""
KV_KINDS: Final = tuple(f"{kind}/{scales}" for kind in tuple(POISON)[:3] for scales in ("tensor", "token_head"))
TOLERANCE: Final = {"floor": 1e-5, "": 2, "fp8_e4m3": 4, "fp8_e5m2": 4, "int8": 4, "k8v4": 4, "k5v4": 4}
"""max |x - right| <= factor * max |plain - right| + floor: FlashAttention's rule. As there, both maxima are taken over
the whole tensor: an element that plain low-precision torch gets exactly right by luck is no measure."""

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
_State = tuple[Array, Array]  # out [T, H, Dv] and lse [T, H]


class _Built(NamedTuple):
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
    kv: "" for the dtype of q; or a kind and its scales: "int8/token_head", "fp8_e4m3/tensor", "fp8_e4m3" (1)
    layout, mask: "NHD" or "HND" (gaps between frames, as in a pool of several layers); "causal" or "all"
    window: as callers give it; with positions on the right the call is not causal
    punched, padding: random pages missing; extra rows of q
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
    punched: bool = False
    padding: int = 0

    def __str__(self) -> str:
        return self.changes(type(self)()) or "default"

    def changes(self, start: Case) -> str:
        """Return the fields that differ from those of `start`."""
        values = {x.name: (getattr(self, x.name), getattr(start, x.name)) for x in fields(self)}
        return " ".join(f"{name}={x}".replace(" ", "") for name, (x, y) in values.items() if x != y)

    def build(self, seed: int = 0) -> _Built:
        """Return random tensors of this case on the CPU, equal for equal `seed`."""
        draw = torch.Generator().manual_seed(zlib.crc32(str(self).encode()) + seed)
        T, (H, K) = sum(self.q_lens) + self.padding, self.heads
        q = torch.randn(T, H, self.dims[0], generator=draw).to(quant.DTYPES[self.dtype])
        q[T - self.padding :] = torch.nan
        batch, num_frames = self._batch(draw)
        layer, slots = self.empty_layer(num_frames), _used_slots(batch, self.block_size)
        k, v = (torch.randn(len(slots), K, d, generator=draw) for d in self.dims)
        ops.write_kv(k, None if layout.is_v_in_k(layer.k, layer.v) else v, replace(layer), slots, backend="reference")
        is_causal = self.mask != "all" and not (isinstance(self.window, tuple) and self.window[1] != 0)
        options: dict[str, Any] = {"window": self.window, "softcap": self.softcap, "causal": is_causal}
        if self.sinks:
            options["sinks"] = torch.randn(H, generator=draw) * 2
        if self.alibi:
            options["alibi_slopes"] = 2.0 ** -torch.linspace(1, 8, H)
        return _Built(q, layer, batch, options)

    def _batch(self, draw: torch.Generator) -> tuple[PagedBatch, int]:
        S = self.block_size
        # a sequence without queries reads no page
        pages = [-(-n // S) if m else 0 for m, n in zip(self.q_lens, self.kv_lens, strict=True)]
        num_frames = sum(pages) + 3
        table = torch.full((len(pages), max(pages, default=0) + 2), ABSURD, dtype=torch.int32)
        for row, frames in zip(
            table, torch.randperm(num_frames, generator=draw).split_with_sizes([*pages, 3]), strict=False
        ):
            row[: len(frames)] = frames
            if self.punched:
                row[: len(frames)][torch.rand(len(frames), generator=draw) < 0.3] = -1
        batch = PagedBatch(
            block_table=table,
            seq_lens=torch.tensor(self.kv_lens, dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, *itertools.accumulate(self.q_lens)], dtype=torch.int32),
            max_seqlen_q=max(self.q_lens, default=0),
            max_seqlen_k=max(self.kv_lens, default=0),
        )
        each = zip(table, self.q_lens, self.kv_lens, strict=True)  # a position before 0 has no slot
        slots = [pad(_slots(row, n, S), (m, 0), value=-1)[-m:] for row, m, n in each if m]
        slots.append(torch.full((self.padding,), -1))
        return replace(batch, slots=torch.cat(slots)), num_frames

    def empty_layer(self, num_frames: int) -> KVLayer:
        """Return a pool with the geometry and layout of this case, all slots unwritten."""
        kind, _, scales = self.kv.partition("/")
        K, S, gaps = self.heads[1], self.block_size, 3 if self.layout == "HND" else 1
        k, v = (_poison((num_frames, gaps, K, S, d), kind or self.dtype)[:, -1].transpose(1, 2) for d in self.dims)
        if self.layout == "NHD":
            k, v = k.contiguous(), v.contiguous()
        if scales != "token_head":
            return KVLayer(k, v, *(torch.tensor([0.03, 0.05]).unbind() if scales else ()))
        return KVLayer(k, v, *(torch.full((num_frames, K, S), torch.nan).half().transpose(1, 2) for _ in range(2)))


def _poison(shape: tuple[int, ...], element: str) -> Tensor:
    """Return a tensor with the contents of unwritten memory."""
    value, dtype = POISON.get(element, torch.nan), quant.DTYPES[element]
    return torch.full(shape, value, dtype=torch.uint8 if element in POISON else dtype).view(dtype)


def _slots(row: Tensor, n: int, block_size: int) -> Tensor:
    """Return int64 [n]: the slots of the tokens of a sequence, by its row of a table; negative in a hole."""
    t = torch.arange(n)
    frames = row[t // block_size].long()
    return torch.where(frames < 0, -1, frames * block_size + t % block_size)


def _used_slots(batch: PagedBatch, block_size: int) -> Tensor:
    """Return int64 [n]: the slots of all tokens of all sequences with queries, -1 in holes."""
    each = zip(batch.block_table, batch.seq_lens.tolist(), batch.cu_seqlens_q.diff().tolist(), strict=True)
    return torch.cat([_slots(row, n if m else 0, block_size) for row, n, m in each] or [torch.zeros(0).long()])


def _computed(built: _Built, dtype: torch.dtype) -> _State:
    """Return what the reference computes with all its tensors in `dtype`: float64 is right, q's own dtype is plain."""
    (q, layer, batch), options = built[:3], AttentionOptions.of(scale=built.q.shape[2] ** -0.5, **built.options)
    out, lse = torch.zeros(*q.shape[:2], layer.v.shape[3]).double(), torch.zeros(q.shape[:2]).double()
    call = AttentionCall._make([*bound_fields(layer, options), q, *tables_of(batch), None, None, out, lse])
    reference.paged_attention(call, dtype)
    return out.numpy(), lse.numpy()


def _allowed_error(case: Case, right: Array, plain: Array) -> float:
    """By the rule of TOLERANCE, for `out` or `lse` of this case; only finite elements of `right` count."""
    finite = np.isfinite(right)
    error = float(np.abs(plain[finite] - right[finite]).max(initial=0.0))
    return TOLERANCE[case.kv.partition("/")[0]] * error + TOLERANCE["floor"]


def _ratios(case: Case, got: tuple[Tensor, Tensor], right: _State, plain: _State) -> dict[str, float]:
    """Return error over allowed error of out and lse; inf where a query that sees nothing has something."""
    out, lse = (x.double().cpu().numpy()[: sum(case.q_lens)] for x in got)
    (exact, lse_exact), (low, lse_low) = ([x[: sum(case.q_lens)] for x in state] for state in (right, plain))
    seen = ~np.isneginf(lse_exact)
    if (np.isneginf(lse) == seen).any() or (out[~seen] != 0).any():
        return {"blind": np.inf}
    parts = {"out": (out, exact, low), "lse": (lse[seen], lse_exact[seen], lse_low[seen])}
    errors = {name: float(np.abs(x - y).max(initial=0.0)) for name, (x, y, _) in parts.items()}
    return {name: errors[name] / _allowed_error(case, y, z) for name, (_, y, z) in parts.items()}


def _features(start: Case) -> dict[str, list[Case]]:
    """Return the grid: the cases of each feature, which differ from `start` in that feature alone."""

    def over(**axes: Any) -> list[Case]:
        return [replace(start, **dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]

    def lengths(*pairs: tuple[tuple[int, ...], tuple[int, ...]]) -> list[Case]:
        return [replace(start, q_lens=q_lens, kv_lens=kv_lens) for q_lens, kv_lens in pairs]

    return {
        "decode": lengths(*(((1,), (n,)) for n in (1, 15, 17, 97)), ((1, 1, 1), (2011, 5, 512))),
        "prefill": lengths(((17, 127), (17, 127))),
        "chunk": lengths(((33,), (577,)), ((17, 1), (17, 512)), ((1, 65, 5, 8), (512, 97, 18, 2011))),
        "empty sequences": lengths(((1,), (0,)), ((0, 0), (5, 0)), ((1, 65, 0, 5), (512, 97, 40, 18))),
        "more queries than keys": [replace(x, mask="all") for x in lengths(((3, 1, 4), (2, 0, 17)))],
        "dtype": over(dtype=("float32", "bfloat16", "float16")),
        "head dim": over(dims=((64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (256, 256))),
        "head dim of V": over(dims=((192, 128), (64, 80))),
        "heads per KV head": over(heads=((4, 4), (8, 2), (5, 1), (28, 4), (32, 8), (64, 4), (32, 1), (64, 2))),
        "block size": over(block_size=(1, 5, 8, 16, 32, 64, 128, 256)),
        "strides": over(layout=("NHD", "HND")),
        "no mask": over(mask=("all",)),
        "window": over(window=(1, 64, 1024)),
        "two-sided window": over(mask=("all",), window=((40, 3), (None, 20), (0, None))),
        "soft cap": over(softcap=(50.0,)),
        "sinks": over(sinks=(True,)),
        "ALiBi": over(alibi=(True,)),
        "holes": over(punched=(True,), block_size=(4,), mask=("causal", "all"), sinks=(False, True)),
        "padded rows": over(padding=(3,)),
        **{f"KV {kv}": over(dtype=("bfloat16",), kv=(kv,), layout=("HND",)) for kv in ("fp8_e4m3", *KV_KINDS)},
        "write": over(dtype=("float32", "bfloat16", "float16"), layout=("NHD", "HND"), padding=(0, 3)),
        "write quantised": over(dtype=("bfloat16",), kv=KV_KINDS),
    }
