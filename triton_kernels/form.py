"""Everything about a call that a kernel is compiled for, as one frozen value; and the tensors of a call as Triton takes them.

Two calls of equal `Form` share a compiled kernel. Lengths, batch size, strides and scales are not in here: they change from step to step,
and a step must never wait for a compiler. This file knows AttentionCall and the widths of tiles; it launches nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagedkv.kernels.layout import FARTHEST, is_v_in_k, scale_kind, scale_strides
from pagedkv.kernels.triton import tuning

if TYPE_CHECKING:
    from pagedkv.kernels.args import AttentionCall
    from pagedkv.kernels.case import Case

DTYPES: Final = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
KINDS: Final = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8", torch.uint8: "int4"}


@dataclass(frozen=True)
class Form:
    """A `tl.constexpr` of the attention kernels.

    dtype, kind:      of q; of the pool: "e4m3", "e5m2", "int8", "int4", or "" where it is q's.
    S, G, D, Dv:      block_size, query heads of a kv head, head dims in elements.
    M, N:             rows and keys of a tile.            heads:   query heads in a tile, at most G; M // heads queries fit beside them.
    whole_pages:      a tile of N keys lies in one page, so one frame addresses it.
    k_scale, v_scale: 0 none, 1 one for all, 2 per (token, head).
    v_in_k:           V is the first part of K in the same memory (MLA): it is read once.
    one_launch:       decode's partials are merged by the last program that has one, not by a second launch.
    """

    dtype: Any
    kind: str
    S: int
    G: int
    D: int
    Dv: int
    M: int
    N: int
    heads: int
    whole_pages: bool = False
    causal: bool = True
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    alibi: bool = False
    tree: bool = False
    k_scale: int = 0
    v_scale: int = 0
    v_in_k: bool = False
    native_fp8: bool = True
    float32_products: str = "ieee"
    split: bool = False
    one_launch: bool = False

    @cached_property
    def factor(self) -> float:
        """What `elements.element` leaves out: fp16's exponent has another bias than e4m3's."""
        return 256.0 if self.kind == "e4m3" and not self.native_fp8 else 1.0

    @cached_property
    def queries(self) -> int:
        """Queries of one sequence that fit a tile."""
        return self.M // self.heads

    @cached_property
    def head_tiles(self) -> int:
        """Tiles for the heads of one kv head."""
        return -(-self.G // self.heads)

    @cached_property
    def K0(self) -> int:
        """Columns of K's first part in memory; K1, V0, V1 likewise."""
        return _widths(self.D, self.kind)[0]

    @cached_property
    def K1(self) -> int:
        """0: there is no second part."""
        return _widths(self.D, self.kind)[1]

    @cached_property
    def V0(self) -> int:
        """As K0."""
        return _widths(self.Dv, self.kind)[0]

    @cached_property
    def V1(self) -> int:
        """As K1."""
        return _widths(self.Dv, self.kind)[1]

    @cached_property
    def second(self) -> int:
        """Columns of the second part of an output; where there is none, of something as small as it can be."""
        return self.V0 if self.kind == "int4" else max(self.V1, 16)

    @cached_property
    def k_limit(self) -> int:
        """Elements of a stored key in memory: bytes of two for int4."""
        return self.D // 2 if self.kind == "int4" else self.D

    @cached_property
    def v_limit(self) -> int:
        """As k_limit."""
        return self.Dv // 2 if self.kind == "int4" else self.Dv


def _widths(dim: int, kind: str) -> tuple[int, int]:
    """The two parts of a head: powers of two of at least 16, the least that a tensor core multiplies. int4: bytes, and no second load."""
    if kind == "int4":
        return max(16, triton.next_power_of_2(dim // 2)), 0
    first = max(16, 1 << (dim.bit_length() - 1))
    return first, max(16, triton.next_power_of_2(dim - first)) if dim > first else 0


def form_of(call: AttentionCall, M: int, N: int) -> Form:
    """The Form of `call` with tiles of at least M rows, and N keys."""
    K, S = call.k.shape[2], call.k.shape[1]
    G, D, Dv = call.q.shape[1] // K, call.q.shape[2], call.out.shape[2]
    kind = KINDS.get(call.k.dtype, "")
    heads, on = min(G, M), tuning.target(call.q.device)
    exact = (
        "ieee" if max(D, Dv) > 256 else on.float32_products
    )  # three products of TF32 of heads so wide fit no processor of 99 KiB
    return Form(
        dtype=DTYPES[call.q.dtype], kind=kind, S=S, G=G, D=D, Dv=Dv, M=M, N=N, heads=heads,
        whole_pages=S % N == 0 and (call.split_tokens or N) % N == 0,
        causal=call.causal, window=call.window is not None, softcap=call.softcap != 0, sinks=call.sinks is not None,
        alibi=call.alibi_slopes is not None, tree=call.tree_mask is not None,
        k_scale=scale_kind(call.k_scale), v_scale=scale_kind(call.v_scale),
        v_in_k=_v_in_k(call, kind), native_fp8=on.native_fp8, float32_products=exact, split=call.split_tokens is not None,
    )  # fmt: skip


def no_form(case: Case) -> list[str]:
    """Why no attention kernel can be compiled for `case`, or not launched on the GPU at hand."""
    if case.dtype not in (None, "float32", "bfloat16", "float16"):
        return [f"q is {case.dtype}; it takes float32, bfloat16, float16"]
    if (
        (case.dtype, case.kv_dtype) == ("float32", "int4")
        and max(case.head_dim or 0, case.head_dim_v or 0) > 256
        and case.device == "cuda"
    ):
        on = tuning.target(torch.device("cuda"))
        if on.arch.startswith("sm_") and on.shared < 128 << 10:
            room = f"needs 128 KiB of shared memory, {on.arch} has {on.shared >> 10}"
            return [f"a float32 q over int4 heads wider than 256 {room}: take q in bfloat16"]
    return []


def keys_of(call: AttentionCall, M: int, most: int) -> int:
    """Keys of a tile of M rows: fewer than `most` where more than scores and outputs is held, so that nothing spills."""
    one_byte = call.k.element_size() == 1
    if M >= 64 and one_byte and tuning.target(call.q.device).arch.startswith("gfx"):  # e4m3 is converted by its bits
        return min(most, 16)
    tree = (
        call.tree_mask is not None or call.split_tokens is not None
    )  # a split's bits do not depend on a neighbour's mask
    crowded = (M > 16 and tree) or (M > 64 and one_byte)  # a pointer into the mask for each score; converted keys
    return min(most, 32) if crowded else most


def head_bytes(call: AttentionCall) -> int:
    """Of K and V of one token and kv head: as stored, but for a float32 query, whose keys become float32 whatever they were."""
    if call.q.dtype == torch.float32:
        return (call.q.shape[2] + call.out.shape[2]) * 4
    return (call.k.shape[3] + call.v.shape[3]) * call.k.element_size()


def _v_in_k(call: AttentionCall, kind: str) -> bool:
    """Return True if V is the first part of K, in the same memory, and that part is one of the two that a tile loads."""
    is_first_part = call.out.shape[2] == _widths(call.q.shape[2], kind)[0]
    return is_first_part and kind != "int4" and is_v_in_k(call.k, call.v)


def as_stored(pool: Tensor) -> Tensor:
    """What a kernel is given: bytes where elements are one byte, whatever they mean."""
    return pool.view(torch.uint8) if pool.element_size() == 1 else pool


def pool_of(call: AttentionCall) -> tuple[Any, ...]:
    """k, v, their scales, and the strides of frames, slots and heads of each: one argument of a kernel."""
    return (
        as_stored(call.k), as_stored(call.v), call.k_scale, call.v_scale,
        *call.k.stride()[:3], *call.v.stride()[:3], *scale_strides(call.k_scale), *scale_strides(call.v_scale),
    )  # fmt: skip


def tables_of(call: AttentionCall) -> tuple[Any, ...]:
    """Page table, the stride of its rows, which row is whose, lengths, and where queries begin."""
    return call.block_table, call.block_table.stride(0), _run(call.rows), call.seq_lens, call.cu_seqlens_q


def rules_of(call: AttentionCall) -> tuple[Any, ...]:
    """scale, soft cap, window, sinks, slopes, tree mask and its stride. What an argument does not use is None or 0."""
    tree = call.tree_mask if call.tree_mask is None or call.tree_mask.stride(1) == 1 else call.tree_mask.contiguous()
    window = min(call.window or 0, FARTHEST)
    return (
        call.scale,
        call.softcap,
        window,
        _run(call.sinks),
        _run(call.alibi_slopes),
        tree,
        0 if tree is None else tree.stride(0),
    )


def _run(x: Tensor | None) -> Tensor | None:
    """With stride 1, as kernels step through what has an element a head or a sequence. A graph copies it again at each replay."""
    return x if x is None else x.contiguous()


def steps_of(call: AttentionCall) -> tuple[int, ...]:
    """Strides of tokens and heads: of q, of out; and of tokens in lse."""
    return *call.q.stride()[:2], *call.out.stride()[:2], call.lse.stride(0)
