"""The public functions of the kernel layer.

A functional call goes to torch's operator (operators.py) when its options are new, and to a bound call (bound.py) after
that. Serving loops bind a layer once instead: `bind_attention`, `bind_write`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from pagedkv.errors import InvalidRequest
from pagedkv.kernels import checks, cpu, operators, registry
from pagedkv.kernels.args import AttentionOptions, KVLayer, Options, PagedBatch, RotaryTable, Window, sides
from pagedkv.kernels.bound import BoundAttention, BoundWrite, cached
from pagedkv.kernels.case import Case
from pagedkv.spec import KVSpec


class _Options(Options, total=False):
    causal: bool | Tensor  # type: ignore[misc]  # a bound call gets a tensor with each batch
    tree_mask: Tensor | None
    out: Tensor | None
    backend: str | None


@overload
def paged_attention(
    q_THD: Tensor, layer: KVLayer, batch: PagedBatch, *, return_lse: Literal[False] = False, **options: Unpack[_Options]
) -> Tensor: ...
@overload
def paged_attention(
    q_THD: Tensor, layer: KVLayer, batch: PagedBatch, *, return_lse: Literal[True], **options: Unpack[_Options]
) -> tuple[Tensor, Tensor]: ...
def paged_attention(
    q_THD: Tensor,
    layer: KVLayer,
    batch: PagedBatch,
    *,
    scale: float | None = None,
    causal: bool | Tensor = True,
    window: Window | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    tree_mask: Tensor | None = None,
    split_tokens: int | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from the new tokens of a batch to the cached tokens of their sequences.

    The batch may be decode, prefill, chunks, drafts and any mixture of them.
    score = `scale` * q.k (D ** -0.5 if None), then soft cap c * tanh(s / c), then ALiBi slope_h * (pos_k - pos_q), then
    masks, then sinks.
    causal:       bottom-right aligned: the last query of a sequence is its last token. False: every query sees all
                  `seq_lens` tokens. A tensor says it for each sequence.
    window:       w: hide what lies w or more positions before the query. (left, right): show so many positions before
                  the query, its own, and so many after it; None or -1 shows all. So w is (w - 1, None). A causal query
                  sees nothing after it: causal=True with right > 0 is refused, and where a `causal` tensor says True,
                  `right` counts for nothing. Positions, here and in ALiBi, are places in the sequence.
    sinks:        logits that take part in the softmax, and in the LSE, and carry no value.
    tree_mask:    tree_mask[t, j]: may query t see the j-th new token of its own sequence? It replaces causality among
                  the new tokens.
    split_tokens: cut keys at multiples of it; results are then bit-equal whatever else is in the batch.
    backend:      a kernel's name, or None for PAGEDKV_KERNELS or else the first in the registry that can.

    Rows with padding are tokens, too, with `batch.padded(mask)`.

    Shapes:   q [T, H, D]; sinks, alibi_slopes [H] of any float dtype; tree_mask bool [T, >= max_seqlen_q]
              causal bool [>= B]
              returns out [T, H, Dv] of q's dtype; with return_lse also float32 [T, H], natural logarithm
              a query that sees nothing has out 0 and lse -inf (the sink, if there are sinks)
              rows of q past cu_seqlens_q[-1] are padding: neither read nor written
    Modifies: out, if given, and returns it.
    Raises:   InvalidRequest; KernelUnavailable.
    """
    right: int | None = None
    each: Tensor | None = None
    if window is not None and type(window) is not int:
        window, right = sides(window)
    if causal is not True and isinstance(causal, Tensor):
        each = causal
        causal = False
    options: tuple[Any, ...] = (scale, causal, window, right, softcap, sinks, alibi_slopes, split_tokens)
    # Sinks and slopes of another dtype are converted in each call: a bound call would not see later changes.
    if (sinks is None and alibi_slopes is None) or AttentionOptions(*options).is_float32():
        # Types are in the key because 1, 1.0 and True are equal. Dynamo of torch 2.11 traces no id(None).
        key = (
            scale, causal, window, softcap, split_tokens,
            type(scale), type(causal), type(window), type(softcap), type(split_tokens),
            right, sinks is not None and id(sinks), alibi_slopes is not None and id(alibi_slopes), backend,
        )  # fmt: skip
        attend = cached(layer, key, _bound, options, backend)
        if attend is not None:
            return attend(  # type: ignore[no-any-return]
                q_THD, batch, causal=each, tree_mask=tree_mask, out=out, return_lse=return_lse
            )
    if scale is None:
        checks.given(q=q_THD)
        options = (max(1, q_THD.shape[-1]) ** -0.5, *options[1:])  # Dynamo of torch 2.8 traces no _replace
    on, masks = AttentionOptions(*options), (tree_mask, each)
    return operators.attend_by_operator(  # type: ignore[no-any-return]
        q_THD, layer, batch, on, masks, out, return_lse, backend or registry.AUTO
    )


def _bound(layer: KVLayer, options: tuple[Any, ...], backend: str | None) -> BoundAttention:
    return BoundAttention(layer, AttentionOptions(*options), backend)


def write_kv(
    k_TKD: Tensor,
    v_TKD: Tensor | None,
    layer: KVLayer,
    slots: Tensor | PagedBatch,
    positions: Tensor | None = None,
    *,
    rope: RotaryTable | None = None,
    backend: str | None = None,
) -> None:
    """Store the keys and values of the new tokens at `slots`; a slot < 0 is skipped. Quantises if the layer does.

    slots:    the slot of each token, or a PagedBatch, whose slots and positions are taken.
    rope:     turn each key by the angles of its token's position on the way; values are left alone.
    v:        None if each value is the first part of its key in the pool (KVSpec.value_in_key): only keys are stored.
    Shapes:   k [T, K, D], v [T, K, Dv], any float dtype; slots int64 [T]; positions int64 [T], needed with rope
    Modifies: layer.k and layer.v at those slots, and per-(token, head) scales there (amax / qmax, 1 where that is 0)
    Raises:   InvalidRequest; KernelUnavailable.
    """
    angles = None if rope is None else (id(rope.cos), id(rope.sin), rope.interleaved)
    store = cached(layer, (angles, backend), BoundWrite, rope, backend)
    if store is not None:
        store(k_TKD, v_TKD, slots, positions)
    else:
        operators.write_by_operator(k_TKD, v_TKD, layer, slots, positions, rope, backend or registry.AUTO)


def gather_kv(
    layer: KVLayer,
    batch: PagedBatch,
    first: Tensor | int = 0,
    out: tuple[Tensor, Tensor] | None = None,
    *,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Copy K and V of the sequences of a batch out of their pages, in the order of their tokens, and dequantise them.

    Of the batch, `block_table`, `rows` and `seq_lens` are read. A hole (a page that a window gave back) gives zeros.

    first: the position with which each sequence begins. Positions before 0 give zeros, so `first=seq_lens - L` pads
           every sequence to L rows on the left.
    out:   where to store K and V. Packed, or padded: row [b, j] is position first[b] + j, and zeros after the last
           token. Without `out`, the host waits for the device to know how many tokens there are.
    dtype: the dtype of the result, without `out`. None: the layer's dtype; a quantised layer needs a dtype.
    Shapes:   first an int, or int32 [B]
              returns k [N, K, D] and v [N, K, Dv], packed: sequence after sequence, N = sum(seq_lens - first)
              out packed, of N or more rows, or padded k [B, L, K, D] and v [B, L, K, Dv]; any strides, last dim
              contiguous; float32, bfloat16 or float16
    Modifies: out, if given, and returns it. Packed: rows after the first N stay as they are.
    Raises:   InvalidRequest; KernelUnavailable.
    """
    return operators.gather_by_operator(layer, batch, first, out, dtype, backend or registry.AUTO)


def _is_direct() -> bool:
    """Return whether the extension may serve a call without torch's dispatcher, if it finds no reason against it."""
    return cpu.MERGE_AT_ONCE is not None and not is_dynamo_compiling() and registry.KERNELS[0].backend == cpu.__name__


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention over two disjoint sets of keys, from the attention over each. Sinks belong to one set only.

    lse = ln(e^a + e^b), out = out_a e^(a - lse) + out_b e^(b - lse). Where lse_a is -inf, out_a is not read.
    Shapes: out [T, H, Dv], lse float32 [T, H], natural logarithm, any strides; returns the same, contiguous.
    Raises: InvalidRequest.
    """
    if _is_direct():
        direct: tuple[Tensor, Tensor] | None = cpu.MERGE_AT_ONCE(out_a, lse_a, out_b, lse_b)
        if direct is not None:
            return direct
    states = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    checks.given(**states)
    checks.inference_only(**states)
    merged: tuple[Tensor, Tensor] = torch.ops.pagedkv.merge_states.default(out_a, lse_a, out_b, lse_b)
    return merged


def copy_frames(storage: Tensor, copies: Tensor, *, backend: str | None = None) -> None:
    """Copy whole frames inside the pool. Every source is read before a destination is written, even if a frame is both.

    The arguments are checked in each call.

    Shapes:   storage uint8 [F, frame_bytes], or any tensor whose first dim is frames
              copies int32 [C, 2]: source, destination; destinations distinct
    Modifies: the destination frames.
    Raises:   InvalidRequest; KernelUnavailable.
    """
    if backend is None and _is_direct() and cpu.COPY_AT_ONCE(storage, copies):
        return
    checks.given(storage=storage, copies=copies)
    checks.is_backend(backend or registry.AUTO)
    checks.inference_only(storage=storage)
    torch.ops.pagedkv.copy_frames.default(storage, copies, backend or registry.AUTO)


@dataclass(frozen=True, repr=False)
class Explanation:
    """The kernel that serves a case, and the objections of each other kernel. Prints as a table."""

    case: str
    chosen: str | None
    objections: dict[str, list[str]]

    def __repr__(self) -> str:
        width = max(map(len, self.objections))
        marks = {name: ">" if name == self.chosen else " " for name in self.objections}
        return "\n".join(
            [
                self.case,
                *(f"{marks[name]} {name:{width}}  {'; '.join(why) or 'can'}" for name, why in self.objections.items()),
            ]
        )


def explain(case: Case | KVSpec | None = None, *, device: str | None = None) -> Explanation:
    """Return every kernel in order of preference with its objections to a cache's geometry, to a `Case`, or (None) to
    this machine alone.

    device: a type such as "cuda", or a name such as "cuda:1"; by default CUDA if the machine has it. A `Case` has its
            own.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if case is None:
        case = Case.of_device(device)
    elif isinstance(case, KVSpec):
        case = Case.of_spec(case, device)
    elif not isinstance(case, Case):
        raise InvalidRequest(f"case is of type {type(case).__name__}; give a Case, a KVSpec, or None for this machine")
    objections = {kernel.name: kernel.refuse(case) for kernel in registry.KERNELS}
    chosen = next((kernel.name for kernel in registry.in_order(case) if not objections[kernel.name]), None)
    return Explanation(str(case), chosen, objections)
