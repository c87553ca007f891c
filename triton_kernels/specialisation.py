"""The specialisation of a call, all that a kernel is compiled for, as one frozen value; and the arguments of kernels.

Two calls with equal `Specialisation` share a compiled kernel. Lengths, batch size, strides and scales are not part of
it: they change from step to step, and a step must never wait for a compiler. This file knows AttentionCall and the
widths of tiles; it launches nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagedkv.kernels import quant
from pagedkv.kernels.layout import bounds, is_v_in_k, scale_kind, scale_strides
from pagedkv.kernels.triton import tuning

if TYPE_CHECKING:
    from pagedkv.kernels.args import AttentionCall
    from pagedkv.kernels.case import Case

DTYPES: Final = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class Specialisation:
    """The compile-time specialisation of the attention kernels: their argument `SPEC`, a `tl.constexpr`.

    dtype:            the dtype of q.
    kind, v_kind:     the elements of K and of V: "e4m3", "e5m2", "int8", "int5" (K), "code4" (V), or "" for q's dtype.
    calibrated:       keys are less a centre and over a divisor for each channel.
    S, G, D, Dv:      block_size, query heads of a kv head, head dims in elements.
    M, N:             rows and keys of a tile.
    heads:            query heads in a tile, at most G; the tile has M // heads queries of each.
    whole_pages:      a tile of N keys lies in one page, so one frame addresses it.
    k_scale, v_scale: 0 no scale, 1 one scale for all, 2 a scale per (token, head).
    v_in_k:           V is the first part of K in the same memory (MLA): it is read once.
    mixed:            a tile may load values that not all of its rows see.
    edges:            only the last tiles of a walk are masked (prefill).
    overlapped:       before them, products with the keys of the next tile run under the softmax of a tile.
    right:            some query may not see all positions after it: causality, or a window.
    split:            `split_tokens` is given. Then calls with a tree mask and without one run the same code: `tree` is
                      set, so `mixed` is, too, and the kernels learn from `tree_stride` whether there is a mask.
    causal:           with `split`: all sequences are causal, if there is no mask.
    above:            decode takes the sequences with more new tokens than this.
    """

    dtype: Any
    kind: str
    v_kind: str
    S: int
    G: int
    D: int
    Dv: int
    M: int
    N: int
    heads: int
    whole_pages: bool = False
    right: bool = True
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    alibi: bool = False
    tree: bool = False
    k_scale: int = 0
    v_scale: int = 0
    calibrated: bool = False
    v_in_k: bool = False
    native_fp8: bool = True
    float32_products: str = "ieee"
    split: bool = False
    causal: bool = False
    above: int = 0
    mixed: bool = True
    edges: bool = False
    overlapped: bool = False

    @cached_property
    def narrow(self) -> bool:
        """Whether operands are float16. It holds each quantised element exactly."""
        return self.kind != "" and self.dtype != tl.float32

    @cached_property
    def rotated(self) -> bool:
        """Whether K and V are rotated; a byte of V holds an even and an odd element."""
        return self.v_kind == "code4"

    @cached_property
    def lift(self) -> int:
        """The exponent of the power of two that weights carry, see tile.py."""
        return 13 if self.narrow and self.v_scale != 2 else 0

    @cached_property
    def operand(self) -> Any:
        """The dtype of the operands of products."""
        return tl.float16 if self.narrow else self.dtype

    @cached_property
    def factor(self) -> float:
        """The factor that `elements.parts` leaves out: the exponent bias of fp16 differs from that of e4m3."""
        return 256.0 if self.kind == "e4m3" and not self.native_fp8 else 1.0

    @cached_property
    def queries(self) -> int:
        """Queries of one sequence that fit a tile."""
        return self.M // self.heads

    @cached_property
    def head_tiles(self) -> int:
        """Tiles for the query heads of one kv head."""
        return -(-self.G // self.heads)

    @cached_property
    def K0(self) -> int:
        """Columns of K's first part in memory."""
        return _widths(self.D, self.kind)[0]

    @cached_property
    def K1(self) -> int:
        """Columns of K's second part in memory; 0 for no second part."""
        return _widths(self.D, self.kind)[1]

    @cached_property
    def V0(self) -> int:
        """Columns of V's first part in memory."""
        return _widths(self.Dv, self.v_kind)[0]

    @cached_property
    def V1(self) -> int:
        """Columns of V's second part in memory; 0 for no second part."""
        return _widths(self.Dv, self.v_kind)[1]

    @cached_property
    def second(self) -> int:
        """Columns of the second part of an output; without a second part 16, the smallest tile."""
        return self.V0 if self.rotated else max(self.V1, 16)


def _widths(dim: int, kind: str) -> tuple[int, int]:
    """Return the columns of a head's two parts: powers of two, at least 16, the smallest operand of a tensor core.

    int5, code4: the columns are bytes, which hold an even and an odd element.
    """
    if kind in ("int5", "code4"):
        return max(16, triton.next_power_of_2(dim // 2)), 0
    first = max(16, 1 << (dim.bit_length() - 1))
    return first, max(16, triton.next_power_of_2(dim - first)) if dim > first else 0


def _kind_of(pool: Tensor, is_value: bool = False) -> str:
    """Return the element of K, or of V, as kernels name it: "e4m3", "int5", "code4", ...; "" for a float dtype."""
    if pool.dtype == torch.uint8:
        return "code4" if is_value else "int5"
    name = quant.NAMES[pool.dtype]
    return "" if name in quant.FLOATS else name.removeprefix("fp8_")


def specialisation_of(call: AttentionCall, M: int, N: int) -> Specialisation:
    """Return the Specialisation of `call` with tiles of M rows and N keys."""
    K, S = call.k.shape[2], call.k.shape[1]
    G, D, Dv = call.q.shape[1] // K, call.q.shape[2], call.out.shape[2]
    kind = _kind_of(call.k)
    heads, on, split = min(G, M), tuning.target(call.q.device), call.split_tokens is not None
    # for heads wider than 256, three products of TF32 need more than the 99 KiB of shared memory of some processors
    float32_products = "ieee" if max(D, Dv) > 256 else on.float32_products
    return Specialisation(
        dtype=DTYPES[call.q.dtype], kind=kind, v_kind=_kind_of(call.v, True), S=S, G=G, D=D, Dv=Dv, M=M, N=N,
        heads=heads, calibrated=call.calibration is not None,
        whole_pages=S % N == 0 and (call.split_tokens or N) % N == 0,
        right=_is_right_bounded(call), window=call.window is not None, softcap=call.softcap != 0,
        sinks=call.sinks is not None, alibi=call.alibi_slopes is not None, tree=split or call.tree_mask is not None,
        k_scale=scale_kind(call.k_scale), v_scale=scale_kind(call.v_scale),
        v_in_k=_v_in_k(call, kind), native_fp8=on.native_fp8,
        float32_products=float32_products, split=split, causal=split and _is_causal(call),
    )  # fmt: skip


def why_no_specialisation(case: Case) -> list[str]:
    """Return the reasons why no attention kernel can be compiled for `case`, or launched on its GPU."""
    widest = max(case.head_dim or 0, case.head_dim_v or 0)
    if case.kv_dtype in ("k8v4", "k5v4") and widest > 256:
        return [f"{case.kv_dtype} heads of {widest} elements: it rotates at most 256"]
    return []


def keys_of(call: AttentionCall, M: int, most: int) -> int:
    """Return the keys of a tile of M rows: `most`, or fewer if registers must hold more than scores and outputs."""
    one_byte = call.k.element_size() == 1
    # AMD converts e4m3 by its bits, in registers
    if M >= 64 and one_byte and tuning.target(call.q.device).arch.startswith("gfx"):
        return min(most, 16)
    # a tree mask takes a pointer for each score, but with split_tokens a word of at most 64 bits for each row; one-byte
    # keys take registers for their converted values
    split = call.split_tokens is not None
    crowded = (M > 16 and call.tree_mask is not None and not split) or (M >= 64 and one_byte)
    return min(most, 32 if crowded else 64 if split else most)


def head_bytes(call: AttentionCall) -> int:
    """Return the bytes of K and V of one token and kv head as stored; as float32 for a float32 query.

    A float32 query converts stored keys of any dtype to float32.
    """
    if call.q.dtype == torch.float32:
        return (call.q.shape[2] + call.out.shape[2]) * 4
    return call.k.shape[3] * call.k.element_size() + call.v.shape[3] * call.v.element_size()


def _v_in_k(call: AttentionCall, kind: str) -> bool:
    """Return True if V is the first part of K in the same memory, and a tile loads that part by itself."""
    is_first_part = call.out.shape[2] == _widths(call.q.shape[2], kind)[0]
    return is_first_part and call.v.dtype != torch.uint8 and is_v_in_k(call.k, call.v)


def as_stored(pool: Tensor) -> Tensor:
    """Return the pool as kernels take it: as uint8 if elements are one byte, whatever their dtype."""
    return pool.view(torch.uint8) if pool.element_size() == 1 else pool


class Arguments(NamedTuple):
    """The arguments of a call that the kernels of decode and of prefill have in common, each as its function says."""

    pool: tuple[Any, ...]
    tables: tuple[Any, ...]
    rules: tuple[Any, ...]
    strides: tuple[int, ...]
    mask: tuple[Any, ...]

    @classmethod
    def of(cls, call: AttentionCall) -> Arguments:
        """Return the arguments of `call`."""
        return cls(_pool_of(call), _tables_of(call), _rules_of(call), _strides_of(call), _mask_of(call))


def _pool_of(call: AttentionCall) -> tuple[Any, ...]:
    """Return the kernel argument `pool`: k, v, their scales, the strides of frames, slots and heads of each; and the
    calibration of K's channels."""
    return (
        as_stored(call.k), as_stored(call.v), call.k_scale, call.v_scale,
        *call.k.stride()[:3], *call.v.stride()[:3], *scale_strides(call.k_scale), *scale_strides(call.v_scale),
        call.calibration,
    )  # fmt: skip


def _tables_of(call: AttentionCall) -> tuple[Any, ...]:
    """Return the kernel argument `tables`: page tables, their row stride, the row of each sequence, lengths, starts,
    and which sequences are causal.

    starts: cu_seqlens_q, where the queries of each sequence begin.
    The last is None if all sequences see equally far, or a tree mask replaces causality. With `split_tokens`, a mask
    changes nothing here.
    """
    causal_of = None if _is_masked(call) else _contiguous(call.causal_of)
    rows = _contiguous(call.rows)
    return call.block_table, call.block_table.stride(0), rows, call.seq_lens, call.cu_seqlens_q, causal_of


def _rules_of(call: AttentionCall) -> tuple[Any, ...]:
    """Return the kernel argument `rules`: scale, soft cap, window, sinks, slopes, tree mask and its stride, right.

    right: positions after its own that a query sees, unless `tables` says that its sequence is causal; None for 0, if
           all are causal: then no register holds it.

    An option that the call does not use is None or 0. With `split_tokens` the mask is not here, but in `_mask_of`, and
    `right` is never None.
    """
    tree = _rows_of(call.tree_mask) if _is_masked(call) else None
    window, right = bounds(call.window, call.right)
    return (
        call.scale,
        call.softcap,
        window,
        _contiguous(call.sinks),
        _contiguous(call.alibi_slopes),
        tree,
        0 if tree is None else tree.stride(0),
        None if call.split_tokens is None and _is_causal(call) else right,
    )


def _mask_of(call: AttentionCall) -> tuple[Any, ...]:
    """Return the kernel arguments `tree` and `tree_stride` of a call with `split_tokens`; None and None of another.

    They are in no tuple: Triton compiles a kernel again if a number in a tuple is 1 or a multiple of 16.
    tree:        the tree mask, or one element that is never read.
    tree_stride: the stride of its rows; -1 if there is no mask.
    """
    if call.split_tokens is None:
        return None, None
    if call.tree_mask is None:
        return call.q.new_empty(1, dtype=torch.bool), -1
    tree = _rows_of(call.tree_mask)
    return tree, tree.stride(0)


def _rows_of(tree_mask: Tensor) -> Tensor:
    """Return the mask with rows of stride 1."""
    return tree_mask if tree_mask.stride(1) == 1 else tree_mask.contiguous()


def _is_masked(call: AttentionCall) -> bool:
    """Return whether the kernels are compiled for a tree mask that is there, which replaces causality."""
    return call.tree_mask is not None and call.split_tokens is None


def _is_causal(call: AttentionCall) -> bool:
    """Return whether causality bounds the queries of all sequences, or would without a mask that may be absent."""
    return call.causal and call.causal_of is None and not _is_masked(call)


def _is_right_bounded(call: AttentionCall) -> bool:
    """Return whether causality or a window hides positions after some query."""
    some_causal = call.causal_of is not None and not _is_masked(call)
    return _is_causal(call) or some_causal or call.right is not None


@triton.jit
def right_of(b, tables, rules, SPEC: tl.constexpr):
    """Return the positions after its own that a query of sequence b sees; a tree mask may hide more."""
    causal_of, right = tables[5], rules[7]
    if SPEC.split:
        unmasked = right
        if SPEC.causal:
            unmasked = 0
        elif causal_of is not None:
            unmasked = tl.where(tl.load(causal_of + b) != 0, 0, right)
        right = tl.where(rules[6] >= 0, right, unmasked)
    elif right is None:
        right = 0
    elif causal_of is not None:
        right = tl.where(tl.load(causal_of + b) != 0, 0, right)
    return right


def _contiguous(x: Tensor | None) -> Tensor | None:
    """Return `x`, one element per head or sequence, with the stride 1 that kernels expect.

    If that takes a copy, each replay of a captured graph copies again.
    """
    return x if x is None else x.contiguous()


def _strides_of(call: AttentionCall) -> tuple[int, ...]:
    """Return the kernel argument `strides`: of tokens and heads in q and in out, and of tokens in lse."""
    return *call.q.stride()[:2], *call.out.stride()[:2], call.lse.stride(0)
