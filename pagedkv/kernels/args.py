"""The arguments of kernels: one layer of the pool, one batch, one call.

They are frozen dataclasses of plain tensors; an engine may build them by hand. AttentionCall, WriteCall and
GatherSource are the one list of a call's fields: the schemas of torch's operators are derived from them
(`declarations`).

Letters: F frames, S block_size, B sequences, A rows of the page table, P pages, T new tokens, H query heads,
K kv heads, G = H / K, D head_dim, Dv head_dim of the values.

    slot of token t of sequence b   =  block_table[rows[b], t // S] * S + t % S
    query i of sequence b           =  q[cu_seqlens_q[b] + i]
    its position                    =  seq_lens[b] - (cu_seqlens_q[b+1] - cu_seqlens_q[b]) + i
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from pagedkv import debug
from pagedkv.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Collection


@dataclass(frozen=True)
class KVLayer:
    """One layer of the pool, as strided views of memory that the pool owns.

    Shapes:  k [F, S, K, D], v [F, S, K, Dv]; any strides, last dim contiguous.
             dtype float32, bfloat16, float16, float8_e4m3fn, float8_e5m2 or int8, the same of both. Or both are rotated
             (quant.py): v is uint8 [F, S, K, Dv/2], codes of 4 bits; k is int8, or uint8 [F, S, K, 5D/8], integers of
             5 bits. Such S keys of a head in a frame are one run: the low 4 bits of each, [S, D/2], then the fifth
             bits, [S, D/8]. Of two numbers in a byte the first has the low bits.
             k_scale, v_scale: None (scale 1), a number or float32 [] (per tensor), or float16 [F, S, K] (per token
             and head). A number becomes a tensor on the device of k.
             Integers need scales, codes those per (token, head). value = stored * scale, and scale >= 0.
             calibration: None; or, for rotated layers, float32 [K, 2, D]: a centre and a divisor of K's channels. The
             keys that are stored are (k - centre) / divisor.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    calibration: Tensor | None = None

    if TYPE_CHECKING:  # the arguments; the fields hold tensors

        def __init__(
            self, k: Tensor, v: Tensor, k_scale: Tensor | float | None = None, v_scale: Tensor | float | None = None,
            calibration: Tensor | None = None,
        ) -> None: ...  # fmt: skip

    def __post_init__(self) -> None:
        if not (isinstance(self.k, Tensor) and isinstance(self.v, Tensor)):
            given = f"{type(self.k).__name__} and {type(self.v).__name__}"
            raise InvalidRequest(f"k and v of a layer are of type {given}; give tensors")
        for name in ("k_scale", "v_scale"):
            scale = getattr(self, name)
            if scale is not None and not isinstance(scale, Tensor):
                object.__setattr__(self, name, _scale_of(name, scale, self.k))

    _bound: ClassVar[dict[tuple[Any, ...], Any] | None] = None
    """The bound calls of functional calls (bound.py). They are an attribute of the instance once there are any."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields alone.

        Bound calls point to the memory of this layer, so a copy of the layer must not share them.
        """
        return {field.name: getattr(self, field.name) for field in fields(self)}


def _scale_of(name: str, scale: object, k: Tensor) -> Tensor:
    """Return a scale for all elements, given as a number, as float32 []. A fill on the device waits for no host."""
    if isinstance(scale, Real) and not isinstance(scale, bool):
        with suppress(OverflowError):
            if math.isfinite(number := float(scale)):
                return torch.full((), number, dtype=torch.float32, device=k.device)
    raise InvalidRequest(f"layer.{name} is {scale!r}; give a number, a float32 tensor [] or float16 [F, S, K], or None")


@dataclass(frozen=True)
class PagedBatch:
    """The tables of one step, the same for every layer: page tables, lengths, and the slots of the new tokens.

    Shapes:  block_table int32 [A, P]; entries past a sequence's last page, and those of holes (-1), are never read
             seq_lens int32 [B]: KV length, the new tokens included
             cu_seqlens_q int32 [B + 1]: the first query of each sequence, and the end of the last
             rows int32 [B]: the row of `block_table` of each sequence; None if row b is sequence b
             slots int64 [T]: the slot of each new token's K and V; < 0 is skipped. None if `write_kv` gets the slots
             positions int64 [T]: positions of the new tokens; None if no key is turned and no model asks
    max_seqlen_q, max_seqlen_k: host ints, upper bounds of what the tensors hold.
    """

    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    rows: Tensor | None = None
    slots: Tensor | None = None
    positions: Tensor | None = None

    def padded(self, mask: Tensor) -> PagedBatch:
        """Return this batch for the tokens of rows with padding: token b * L + i is column i of row b.

        mask: which columns of each row are its new tokens. Padding may lie before and after them, not between them.
        A store skips padding; attention gives it out 0 and lse -inf (the sink, if there are sinks). No kernel knows
        padding: each run of it is a sequence of length 0, so the result has three sequences for each, and B * L
        tokens. A `causal` tensor or a tree mask is made for these. One result serves all layers of a step. Nothing is
        read back from a device.

            row b of the mask    0 0 0 1 1 1 1 1 0          |  before  |  sequence b    |  after  |       three runs
            cu_seqlens_q                                     b L        first            end       (b + 1) L

        Shapes: mask bool [B, L], on the device of the batch
        Raises: InvalidRequest; for a mask that is not that of the new tokens, on the CPU and with PAGEDKV_DEBUG >= 1
        """
        changed: dict[str, Any] = _padded(mask, self.seq_lens, self.cu_seqlens_q, self.rows, self.slots, self.positions)
        return PagedBatch(self.block_table, max_seqlen_q=mask.shape[1], max_seqlen_k=self.max_seqlen_k, **changed)


def _padded(
    mask: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    rows: Tensor | None,
    slots: Tensor | None,
    positions: Tensor | None,
) -> dict[str, Tensor | None]:
    """Return these fields of a batch as those of its padded batch (`PagedBatch.padded`). Raises InvalidRequest."""
    B, device = seq_lens.shape[0], seq_lens.device
    if not isinstance(mask, Tensor):
        raise InvalidRequest(f"mask is of type {type(mask).__name__}; give a tensor, bool [B={B}, L] on {device}")
    if mask.dtype != torch.bool or mask.dim() != 2 or mask.shape[0] != B or mask.device != device:
        raise InvalidRequest(
            f"mask is {str(mask.dtype)[6:]} {list(mask.shape)} on {mask.device}; it must be bool [B={B}, L] on {device}"
            ", True in the columns of each row that are new tokens"
        )
    L, counts = mask.shape[1], cu_seqlens_q.diff()
    first = mask.int().argmax(1) if L else torch.zeros_like(counts)  # of the first True, or 0
    if not is_dynamo_compiling() and (device.type == "cpu" or debug.level() >= 1):
        _runs(mask, first, counts)
    begin = torch.arange(B, device=device) * L
    runs = torch.stack([begin, begin + first, begin + first + counts], 1).flatten()
    none = torch.zeros_like(seq_lens)
    rows = torch.arange(B, device=device) if rows is None else rows
    return {
        "seq_lens": torch.stack([none, seq_lens, none], 1).flatten(),
        "cu_seqlens_q": torch.nn.functional.pad(runs, (0, 1), value=B * L).int(),
        "rows": rows.int().repeat_interleave(3),
        "slots": _spread(slots, mask, -1),
        "positions": _spread(positions, mask, 0),
    }


def _spread(x: Tensor | None, mask: Tensor, other: int) -> Tensor | None:
    """Return [B * L]: the elements of x where the mask is True, `other` elsewhere."""
    if x is None:
        return None
    return torch.full((mask.numel(),), other, dtype=x.dtype, device=x.device).masked_scatter(mask.flatten(), x)


def _runs(mask: Tensor, first: Tensor, counts: Tensor) -> None:
    """Raise InvalidRequest unless each row of the mask has the new tokens of its sequence, one after the other."""
    held = mask.sum(1)
    for b in (held != counts).nonzero().flatten().tolist():
        raise InvalidRequest(
            f"row {b} of mask has {int(held[b])} tokens and sequence {b} of the batch has {int(counts[b])} new ones; "
            "plan the step with mask.sum(1) tokens"
        )
    column = torch.arange(mask.shape[1], device=mask.device)
    is_run = mask == ((column >= first[:, None]) & (column < (first + held)[:, None]))
    for b in (~is_run.all(1)).nonzero().flatten().tolist():
        raise InvalidRequest(
            f"row {b} of mask has padding between its tokens; padding may lie before and after them. "
            "Pack such rows: q[mask]"
        )


@dataclass(frozen=True)
class RotaryTable:
    """The angles by which `write_kv` turns keys before it stores them (RoPE): row p holds cos and sin for position p.

    Dims (i, i + R/2) of a head are a pair, or (2i, 2i + 1) if `interleaved`:
    x_a' = x_a cos_i - x_b sin_i, x_b' = x_b cos_i + x_a sin_i. Dims from R on stay as they are.
    Keys are turned in float32 and rounded once, when they are stored.

    Shapes:  cos, sin float32 [positions, R/2], R <= D; last dim contiguous
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False


Window = int | tuple[int | None, int | None]
"""A window as callers give it: w, the last w positions; or (left, right), see `sides`."""


class AttentionOptions(NamedTuple):
    """The options of `paged_attention` that a bound call fixes. A backend gets a number for scale, never None.

    window: positions that a query sees up to its own, its own included; None: all before it
    right:  positions after its own that a query sees if its sequence is not causal; None: all
    """

    scale: float | None = None
    causal: bool = True
    window: int | None = None
    right: int | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    split_tokens: int | None = None

    @classmethod
    def of(cls, *, window: Window | None = None, **others: Any) -> AttentionOptions:
        """Return the options as callers give them. Raises: InvalidRequest for a window that has no two sides."""
        left, right = sides(window)
        return cls(window=left, right=right, **others)

    def is_float32(self) -> bool:
        """Return whether sinks and alibi_slopes are as backends take them."""
        return not any(_is_other_float(x) for x in (self.sinks, self.alibi_slopes))

    def in_float32(self) -> AttentionOptions:
        """Return the options with sinks and alibi_slopes in float32. Models store them in their own dtype."""
        if self.is_float32():
            return self
        sinks, slopes = (
            x.float() if x is not None and _is_other_float(x) else x for x in (self.sinks, self.alibi_slopes)
        )
        return AttentionOptions(*self[:5], sinks, slopes, self.split_tokens)  # Dynamo of torch 2.8 traces no _replace


def sides(window: Window | None) -> tuple[int | None, int | None]:
    """Return `window` and `right` of AttentionOptions.

    window: None; w; or (left, right), the numbers of positions before and after the query that it sees, None or -1 for
            all. So w is (w - 1, None).
    Raises: InvalidRequest for anything else
    """
    # Dynamo of torch 2.9 takes tuples of classes, not unions.
    if not isinstance(window, (tuple, list)):
        if window is None or isinstance(window, (Integral, torch.SymInt)):
            return window, None
        raise InvalidRequest(f"window is {window!r}; give an integer, (left, right), or None for all positions")
    if len(window) != 2 or not all(x is None or (isinstance(x, Integral) and -1 <= x < 2**63 - 1) for x in window):
        raise InvalidRequest(
            f"window is {window!r}; a tuple must be (left, right), the numbers of positions before and after the query "
            "that it sees: integers of at least 0, None or -1 for all"
        )
    left, right = (None if x == -1 else x for x in window)
    return None if left is None else left + 1, right


def _is_other_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float32


class Options(TypedDict, total=False):
    """AttentionOptions as keyword arguments."""

    scale: float | None
    causal: bool
    window: Window | None
    softcap: float
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    split_tokens: int | None


class AttentionCall(NamedTuple):
    """One call of `paged_attention`, flat and checked: the argument of a backend.

    The fields are the operator's arguments, in order: those of KVLayer, those of AttentionOptions, then those that
    change from call to call, which a bound call gives to its kernel.

    Shapes:   k, v, k_scale, v_scale, calibration as in KVLayer
              window, right as in AttentionOptions; sinks, alibi_slopes float32 [H]
              q [T, H, D]; block_table, rows, seq_lens, cu_seqlens_q as in PagedBatch
              tree_mask bool [T, >= max_seqlen_q]
              causal_of bool [>= B]: which sequences are causal; None: all or none, as `causal` says
              out [T, H, Dv] of q's dtype; lse float32 [T, H]
    Modifies: out, lse: the rows that `cu_seqlens_q` names. Rows past its last entry are padding.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    calibration: Tensor | None
    scale: float
    causal: bool
    window: int | None
    right: int | None
    softcap: float
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    split_tokens: int | None
    q: Tensor
    block_table: Tensor
    rows: Tensor | None
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    tree_mask: Tensor | None
    causal_of: Tensor | None
    out: Tensor
    lse: Tensor

    def split(self) -> tuple[KVLayer, AttentionOptions, tuple[Any, ...]]:
        """Return the layer, the options, and the arguments that change from call to call."""
        return KVLayer(*self[:5]), AttentionOptions(*self[5:13]), self[13:]


class WriteCall(NamedTuple):
    """One call of `write_kv`, flat and checked. The fields are the operator's arguments, in order.

    Shapes:   k, v, k_scale, v_scale, calibration as in KVLayer
              cos, sin as in RotaryTable, both None if keys are not turned
              k_new [T, K, D], v_new [T, K, Dv], any float dtype; slots int64 [T], < 0 skipped; positions int64 [T]
    Modifies: k and v at `slots`; k_scale and v_scale there too, if they are per (token, head).
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    calibration: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    interleaved: bool
    k_new: Tensor
    v_new: Tensor
    slots: Tensor
    positions: Tensor | None

    def split(self) -> tuple[KVLayer, RotaryTable | None, tuple[Any, ...]]:
        """Return the layer, the rotary tables, and the arguments that change from call to call."""
        rope = None if self.cos is None or self.sin is None else RotaryTable(self.cos, self.sin, self.interleaved)
        return KVLayer(*self[:5]), rope, self[8:]


class GatherSource(NamedTuple):
    """The tokens that a call of `gather_kv` reads. The fields are the operator's arguments, in order.

    Row j of sequence b is position first[b] + j. A position before 0, at or past seq_lens[b], or in a hole has no
    token.

    Shapes:   k, v, k_scale, v_scale, calibration as in KVLayer; block_table, rows, seq_lens as in PagedBatch; first
              int32 [B]
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    calibration: Tensor | None
    block_table: Tensor
    rows: Tensor | None
    seq_lens: Tensor
    first: Tensor

    def starts(self) -> Tensor:
        """Return int64 [B + 1]: where the rows of each sequence begin in packed results, and the end of the last."""
        counts = (self.seq_lens.long() - self.first).clamp_(min=0)
        return torch.nn.functional.pad(counts, (1, 0)).cumsum_(0)


class GatherCall(NamedTuple):
    """One call of `gather_kv`, flat and checked: the argument of a backend.

    Shapes:   starts int64 [B + 1]: the starts of `source`, for packed results; None if they are padded
              k_out [N, K, D], v_out [N, K, Dv] if packed; [B, L, K, D], [B, L, K, Dv] if padded: row j < L of each
              sequence. Float elements of one dtype, any strides, last dim contiguous.
    Modifies: k_out, v_out: the values, times their scales; 0 where there is no token. Packed: rows before starts[B].
    """

    source: GatherSource
    starts: Tensor | None
    k_out: Tensor
    v_out: Tensor


_SCHEMA_TYPES: Final = {
    "Tensor": "Tensor", "Tensor | None": "Tensor?", "int": "SymInt", "int | None": "SymInt?",
    "float": "float", "bool": "bool",
}  # fmt: skip


def bound_fields(layer: KVLayer, rest: AttentionOptions | RotaryTable | None) -> tuple[Any, ...]:
    """Return the first fields of an AttentionCall, or of a WriteCall: those that a bound call fixes."""
    pool = (layer.k, layer.v, layer.k_scale, layer.v_scale, layer.calibration)
    if isinstance(rest, AttentionOptions):
        return *pool, *rest
    return *pool, *((None, None, False) if rest is None else (rest.cos, rest.sin, rest.interleaved))


def tables_of(batch: PagedBatch) -> tuple[Any, ...]:
    """Return the fields of an AttentionCall that are those of a batch, in order."""
    x = batch
    return x.block_table, x.rows, x.seq_lens, x.cu_seqlens_q, x.max_seqlen_q, x.max_seqlen_k


def declarations(
    call: type[AttentionCall | WriteCall | GatherSource], modified: Collection[str] = ()
) -> dict[str, str]:
    """Return the declaration of each field of `call` in a schema of torch: {"q": "Tensor q", ...}.

    modified: the fields that the operator writes to.
    """
    declared = {name: f"{_SCHEMA_TYPES[kind.__forward_arg__]} {name}" for name, kind in call.__annotations__.items()}
    for letter, name in zip("abcd", modified, strict=False):
        declared[name] = declared[name].replace("Tensor", f"Tensor({letter}!)", 1)
    return declared
