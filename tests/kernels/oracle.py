"""The oracle: the contract of `paged_attention` in float64, written a second time, and the error a kernel may make.

`oracle` is numpy, one query and head at a time over the logical positions of its sequence. It shares no line with the
reference, so a mistake must be made twice to pass. `same_precision` is the yardstick of the error. The table of
tolerances, and the rule, are those of the kit (pagedkv/conformance/cases.py).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagedkv.conformance.cases import _ratios as ratios
from pagedkv.kernels import quant
from pagedkv.kernels.args import KVLayer
from tests.cases import Built, Case, moved

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


class State(NamedTuple):
    """Out [T, H, Dv] and lse [T, H]; rows of no sequence are 0."""

    out: Array
    lse: Array


def oracle(built: Built) -> State:
    """The contract in float64."""
    q = built.q.cpu().double().numpy()
    (T, H, _), options = q.shape, built.options
    sinks, slopes = (
        None if (x := options.get(name)) is None else x.cpu().double().numpy() for name in ("sinks", "alibi_slopes")
    )
    scale, softcap = options.get("scale") or q.shape[2] ** -0.5, options.get("softcap", 0.0)
    out, lse = np.zeros((T, H, quant.head_dim(built.layer.v, is_value=True))), np.zeros((T, H))
    for sequence in logical(built):
        K = sequence.k.shape[1]
        for i, row in enumerate(sequence.rows):
            position = len(sequence.k) - len(sequence.rows) + i
            seen = np.flatnonzero(sequence.visible[i])
            for h in range(H):
                s = sequence.k[seen, h // (H // K)] @ q[row, h] * scale
                s = softcap * np.tanh(s / softcap) if softcap else s
                s = s + slopes[h] * (seen - position) if slopes is not None else s
                logits = s if sinks is None else np.append(s, sinks[h])
                if not len(logits):
                    lse[row, h] = -np.inf
                    continue
                top = logits.max()
                weights = np.exp(logits - top)
                lse[row, h] = top + np.log(weights.sum())
                out[row, h] = weights[: len(seen)] / weights.sum() @ sequence.v[seen, h // (H // K)]
    return State(out, lse)


def same_precision(built: Built) -> State:
    """Plain dense torch attention with every tensor, scores and probabilities too, in q's dtype: the yardstick of
    `allowed_error`.

    In bfloat16 for float16 over rotated integers: there a kernel may keep 7 bits of queries and of weights.
    """
    options, dtype = built.options, built.q.dtype
    if dtype == torch.float16 and quant.is_rotated(built.layer.v):
        dtype = torch.bfloat16
    q = built.q.cpu().to(dtype)
    (T, H, D), softcap = q.shape, options.get("softcap", 0.0)
    out, lse = np.zeros((T, H, quant.head_dim(built.layer.v, is_value=True))), np.zeros((T, H))
    for sequence in logical(built):
        n, m, K = *sequence.visible.shape[::-1], sequence.k.shape[1]
        k, v = (torch.from_numpy(x).to(dtype).repeat_interleave(H // K, 1) for x in (sequence.k, sequence.v))
        s = torch.einsum("mhd,nhd->hmn", q[sequence.rows], k) * (options.get("scale") or D**-0.5)
        s = softcap * torch.tanh(s / softcap) if softcap else s
        if options.get("alibi_slopes") is not None:
            distance = torch.arange(n) - torch.arange(n - m, n)[:, None]
            s = s + (options["alibi_slopes"].cpu()[:, None, None] * distance).to(dtype)
        s = s.masked_fill(~torch.from_numpy(sequence.visible), -torch.inf)
        if options.get("sinks") is not None:
            s = torch.cat([s, options["sinks"].cpu().to(dtype)[:, None, None].expand(H, m, 1)], -1)
        p = s.softmax(-1).nan_to_num(0)[..., :n]
        out[sequence.rows] = torch.einsum("hmn,nhd->mhd", p, v).double().numpy()
        lse[sequence.rows] = s.logsumexp(-1).double().numpy().T if s.shape[-1] else -np.inf
    return State(out, lse)


class Sequence(NamedTuple):
    """One sequence laid out in logical order, float64: k [n, K, D], v [n, K, Dv] (0 in holes), visible bool [m,
    n]; its rows of q."""

    k: Array
    v: Array
    visible: Array
    rows: list[int]


def logical(built: Built) -> list[Sequence]:
    """Follow the page tables token by token; decide query by query what is seen."""
    layer, batch = moved(built.layer, "cpu"), moved(built.batch, "cpu")
    S, K = layer.k.shape[1:3]
    k, v = stored_values(layer)
    tree, window = built.options.get("tree_mask"), built.options.get("window")
    left, right = window if isinstance(window, tuple) else (None if window is None else window - 1, None)
    causal = built.options.get("causal", True)
    starts, sequences = batch.cu_seqlens_q.tolist(), []
    for b, n in enumerate(batch.seq_lens.tolist()):
        rows = list(range(starts[b], starts[b + 1]))
        if not rows:
            continue
        table = batch.block_table[b if batch.rows is None else int(batch.rows[b])].tolist()
        keys, values, visible = (
            np.zeros((n, K, k.shape[-1])),
            np.zeros((n, K, v.shape[-1])),
            np.zeros((len(rows), n), bool),
        )
        first_new = n - len(rows)
        for t in range(n):
            frame = table[t // S]
            if frame < 0:
                continue
            keys[t], values[t] = k[frame, t % S], v[frame, t % S]
            for i, row in enumerate(rows):
                if tree is not None:
                    seen = t < first_new or bool(tree[row, t - first_new])
                else:
                    seen = t <= first_new + i or not (causal[b] if isinstance(causal, Tensor) else causal)
                seen = seen and (left is None or t >= first_new + i - left)
                visible[i, t] = seen and (right is None or t <= first_new + i + right)
        sequences.append(Sequence(keys, values, visible, rows))
    return sequences


def stored_values(layer: KVLayer) -> tuple[Array, Array]:
    """The keys [F, S, K, D] and values [F, S, K, Dv] of a whole layer in float64, poison included."""
    k = _five_bits(layer.k) if layer.k.dtype == torch.uint8 else layer.k.double().numpy()
    v = layer.v.double().numpy()
    if layer.v.dtype == torch.uint8:
        levels = np.array([6, 18, 31, 44, 58, 75, 96, 127])
        v = np.concatenate([-levels[::-1], levels])[_nibbles(layer.v.numpy())]
    k, v = (
        x if scale is None else x * scale.double().numpy().reshape(*scale.shape, *[1] * (4 - scale.dim()))
        for x, scale in ((k, layer.k_scale), (v, layer.v_scale))
    )
    if layer.v.dtype == torch.uint8:
        with np.errstate(invalid="ignore"):  # poison
            k, v = k @ rotation(k.shape[-1]), v @ rotation(v.shape[-1])
    if layer.calibration is not None:
        centre, divisor = (x.double().numpy() for x in layer.calibration.unbind(1))
        k = k * divisor + centre
    return k, v


def _nibbles(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.stack([x % 16, x // 16], -1).reshape(*x.shape[:-1], -1).astype(np.int16)


def _five_bits(k: Tensor) -> Array:
    """The integers of a pool of int5, followed byte by byte: low halves of all slots of a head, then the fifth bits."""
    (F, S, K, row), D = k.shape, k.shape[3] * 8 // 5
    pages = k.transpose(1, 2).contiguous().numpy().reshape(F, K, S * row)
    low = _nibbles(pages[..., : S * D // 2]).reshape(F, K, S, D)
    fifth = np.unpackbits(pages[..., S * D // 2 :], axis=-1, bitorder="little").reshape(F, K, S, D)
    return (low + 16.0 * fifth - 16).transpose(0, 2, 1, 3)


@lru_cache(maxsize=16)
def rotation(D: int) -> Array:
    """The matrix R of `stored = R x`: signs of a hash, then a Hadamard matrix in blocks of the largest power of two."""
    h = np.arange(D, dtype=np.uint64) * np.uint64(0x9E3779B1) % np.uint64(2**32)
    h = (h ^ (h >> np.uint64(15))) * np.uint64(0x85EBCA6B) % np.uint64(2**32)
    signs = np.where(h >> np.uint64(31), -1.0, 1.0)
    n, matrix = D & -D, np.ones((1, 1))
    while len(matrix) < n:
        matrix = np.kron(np.array([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return np.kron(np.eye(D // n), matrix) / n**0.5 * signs


@lru_cache(maxsize=2)
def solved(case: Case) -> tuple[Built, State, State]:
    """The case, what is right, and what plain torch makes of it: once for all kernels."""
    built = case.build()
    return built, oracle(built), same_precision(built)


def assert_right(case: Case, got: tuple[Tensor, Tensor], right: State, low: State) -> None:
    """Compare out and lse with what is right. NaN is not."""
    found = ratios(case, got, right, low)
    assert all(ratio <= 1 for ratio in found.values()), f"error over allowed error: {found}"
