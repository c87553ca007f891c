"""The only entry points of the kernel layer. A call goes: public function -> torch operator -> checks -> registry -> the kernel chosen; or,
if one like it went there before and nothing of torch watches, straight to the kernel (known.py).

The operators take flat tensors (`torch.ops.pagedkv.*`), so torch.compile sees one opaque node whose outputs have known shapes and whose
mutations are declared. They are made with Library.define / impl / register_fake: `torch.library.custom_op` costs several times more.
Checks and choice happen inside the operator, so a compiled graph makes both at run time. Inference only: no operator has a derivative.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from pagedkv.kernels import checks, cpu, known, quant, registry
from pagedkv.kernels.args import AttentionCall, KVLayer, PagedBatch, RotaryTable, WriteCall
from pagedkv.kernels.case import Case, case_of
from pagedkv.kernels.known import at_once
from pagedkv.spec import KVSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagedkv.kernels.case import Kernel

_ATTENTION = (
    "Tensor q, Tensor k, Tensor v, Tensor? k_scale, Tensor? v_scale, Tensor block_table, Tensor? rows, Tensor seq_lens, "
    "Tensor cu_seqlens_q, SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, bool causal, SymInt? window, float softcap, "
    "Tensor? sinks, Tensor? alibi_slopes, Tensor? tree_mask, SymInt? split_tokens"
)
_LIBRARY: Any = torch.library.Library("pagedkv", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(f"paged_attention({_ATTENTION}, str backend) -> (Tensor, Tensor)")
_LIBRARY.define(f"paged_attention_out({_ATTENTION}, Tensor(a!) out, Tensor(b!) lse, str backend) -> ()")
_POOL = "Tensor(a!) k, Tensor(b!) v, Tensor(c!)? k_scale, Tensor(d!)? v_scale"
_ANGLES = "Tensor? positions, Tensor? cos, Tensor? sin, bool interleaved"
_LIBRARY.define(f"write_kv(Tensor k_new, Tensor v_new, {_POOL}, Tensor slots, {_ANGLES}, str backend) -> ()")
_LIBRARY.define("merge_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)")
_LIBRARY.define("copy_frames(Tensor(a!) storage, Tensor copies, str backend) -> ()")


class _Options(TypedDict, total=False):
    scale: float | None
    causal: bool
    window: int | None
    softcap: float
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    tree_mask: Tensor | None
    split_tokens: int | None
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
    causal: bool = True,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    tree_mask: Tensor | None = None,
    split_tokens: int | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from the new tokens of a batch to the cached tokens of their sequences: decode, prefill, chunks, drafts and any mixture.

    score = `scale` * q.k (D ** -0.5 if None), then soft cap c * tanh(s / c), then ALiBi slope_h * (pos_k - pos_q), then masks, then sinks.
    causal:       bottom-right aligned: the last query of a sequence is its last token. False: every query sees all `seq_lens` tokens.
    window:       hide what lies `window` or more positions before the query. Positions, here and in ALiBi, are places in the sequence.
    sinks:        logits that take part in the softmax, and in the LSE, and carry no value.
    tree_mask:    tree_mask[t, j]: may query t see the j-th new token of its own sequence? It replaces causality among the new tokens.
    split_tokens: cut keys at multiples of it; results are then bit-equal whatever else is in the batch.
    backend:      a kernel's name, or None for PAGEDKV_KERNELS or else the first in the registry that can.

    Shapes:   q [T, H, D]; sinks, alibi_slopes float32 [H]; tree_mask bool [T, >= max_seqlen_q]
              returns out [T, H, Dv] of q's dtype; with return_lse also float32 [T, H], natural logarithm
              a query that sees nothing has out 0 and lse -inf (the sink, if there are sinks)
              rows of q past cu_seqlens_q[-1] are padding: neither read nor written
    Modifies: out, if given, and returns it.
    Raises:   InvalidRequest; KernelUnavailable.
    """
    if not is_dynamo_compiling():
        results: Tensor | tuple[Tensor, Tensor] | None = at_once(
            q_THD, layer.k, layer.v, layer.k_scale, layer.v_scale,
            batch.block_table, batch.rows, batch.seq_lens, batch.cu_seqlens_q, batch.max_seqlen_q, batch.max_seqlen_k,
            scale, causal, window, softcap, sinks, alibi_slopes, tree_mask, split_tokens,
            out, return_lse or None, backend, registry.KERNELS,
        )  # fmt: skip
        if results is not None:
            return results
    pool = (layer.k, layer.v, layer.k_scale, layer.v_scale)
    tables = (batch.block_table, batch.rows, batch.seq_lens, batch.cu_seqlens_q, batch.max_seqlen_q, batch.max_seqlen_k)
    scale = max(1, q_THD.shape[-1]) ** -0.5 if scale is None else scale
    call = (q_THD, *pool, *tables, scale, causal, window, softcap, sinks, alibi_slopes, tree_mask, split_tokens)
    if out is None:
        out, lse = torch.ops.pagedkv.paged_attention.default(*call, backend or registry.AUTO)
    else:
        lse = q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32)
        torch.ops.pagedkv.paged_attention_out.default(*call, out, lse, backend or registry.AUTO)
    assert out is not None  # for mypy
    return (out, lse) if return_lse else out


def write_kv(
    k_TKD: Tensor,
    v_TKD: Tensor,
    layer: KVLayer,
    batch: PagedBatch,
    *,
    rope: RotaryTable | None = None,
    backend: str | None = None,
) -> None:
    """Store the keys and values of the new tokens at `batch.slots`; a slot < 0 is skipped. Quantises if the layer does.

    rope:     turn each key by the angles of its token's position (`batch.positions`) on the way; values are left alone.
    Shapes:   k [T, K, D], v [T, K, Dv], any float dtype
    Modifies: layer.k and layer.v at those slots, and per-(token, head) scales there (amax / qmax, 1 where that is 0)
    Raises:   InvalidRequest; KernelUnavailable.
    """
    layers = (layer.k, layer.v, layer.k_scale, layer.v_scale)
    angles = (None, None, None, False) if rope is None else (batch.positions, rope.cos, rope.sin, rope.interleaved)
    if not is_dynamo_compiling() and known.write_at_once(
        k_TKD, v_TKD, *layers, batch.slots, *angles, backend, registry.KERNELS
    ):
        return
    torch.ops.pagedkv.write_kv.default(k_TKD, v_TKD, *layers, batch.slots, *angles, backend or registry.AUTO)


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The attention over the keys of both, from attention over disjoint halves (sinks belong to one half only).

    lse = ln(e^a + e^b), out = out_a e^(a - lse) + out_b e^(b - lse). Where lse_a is -inf, out_a is not looked at.
    Shapes: out [T, H, Dv], lse float32 [T, H], natural logarithm, any strides; returns the same, contiguous.
    Raises: InvalidRequest.
    """
    if not is_dynamo_compiling():
        results: tuple[Tensor, Tensor] | None = known.merge_at_once(out_a, lse_a, out_b, lse_b, None, registry.KERNELS)
        if results is not None:
            return results
    merged: tuple[Tensor, Tensor] = torch.ops.pagedkv.merge_states.default(out_a, lse_a, out_b, lse_b)
    return merged


def copy_frames(storage: Tensor, copies: Tensor, *, backend: str | None = None) -> None:
    """Copy whole frames inside the pool. Every source is read before a destination is written, even if a frame is both.

    Shapes:   storage uint8 [F, frame_bytes], or any tensor whose first dim is frames
              copies int32 [C, 2]: source, destination; destinations distinct
    Modifies: the destination frames.
    Raises:   InvalidRequest; KernelUnavailable.
    """
    if is_dynamo_compiling() or not known.copy_at_once(storage, copies, backend, registry.KERNELS):
        torch.ops.pagedkv.copy_frames.default(storage, copies, backend or registry.AUTO)


@dataclass(frozen=True, repr=False)
class Explanation:
    """Which kernel serves a case, and why the others do not. Prints as a table."""

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
    """Every kernel in order of preference with its objections to a cache's geometry, to a `Case`, or (None) to this machine alone.

    device: a type such as "cuda"; by default CUDA if the machine has it. A `Case` has its own.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if case is None:
        case = Case(device=device)
    elif isinstance(case, KVSpec):
        case = case_of(case, device)
    objections = {kernel.name: kernel.refuse(case) for kernel in registry.KERNELS}
    return Explanation(str(case), next((name for name, why in objections.items() if not why), None), objections)


# The operators: flat arguments in, checked call to the chosen kernel. Argument order is the field order of AttentionCall and WriteCall.


def _results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = q.new_empty((q.shape[0], q.shape[1], quant.head_dim(v)))
    return out, q.new_empty((q.shape[0], q.shape[1]), dtype=torch.float32)


def _paged_attention(*args: Any) -> tuple[Tensor, Tensor]:
    out, lse = _results(args[0], args[2])
    _paged_attention_out(*args[:-1], out, lse, args[-1])
    return out, lse


def _paged_attention_out(*args: Any) -> None:
    if known.again(*args, registry.KERNELS) is not None:
        return
    call = AttentionCall(*args[:-1])
    checks.attention(call)
    kernel = registry.resolve(_attention_case(call), args[-1])
    kernel.load().paged_attention(call)
    _remember(known.remember, args, kernel, call, "ready")


def _write_kv(*args: Any) -> None:
    if known.write_again(*args, registry.KERNELS):
        return
    call = WriteCall(*args[:-1])
    checks.write(call)
    features = _scales(call) | ({"rope"} if call.cos is not None else set())
    widest = max(call.k_new.dtype, call.v_new.dtype, key=lambda dtype: dtype.itemsize)
    case = Case("write_kv", call.k.device.type, quant.NAMES[widest], features=features, **_geometry(call.k, call.v))
    kernel = registry.resolve(case, args[-1])
    kernel.load().write_kv(call)
    _remember(known.remember_write, args, kernel, call, "ready_write")


def _remember(
    remember: Callable[..., None], args: tuple[Any, ...], kernel: Kernel, call: AttentionCall | WriteCall, ready: str
) -> None:
    """Have a call that went well remembered, if the C++ kernels served it or a module that says what will serve the next: its `ready`."""
    serving = getattr(kernel.load(), ready, None)
    if known.remembers() and (serving or kernel.backend == cpu.__name__):
        remember(*args, registry.KERNELS, serve=serving and serving(call))


def _merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    states = (out_a, lse_a, out_b, lse_b)
    again: tuple[Tensor, Tensor] | None = known.merge_again(*states, None, registry.KERNELS)
    if again is not None:
        return again
    checks.merge(*states)
    case = Case("merge_states", out_a.device.type, quant.NAMES[out_a.dtype], head_dim_v=out_a.shape[-1])
    kernel = registry.resolve(case)
    merged = kernel.load().merge_states(*states)
    if kernel.backend == cpu.__name__:
        known.remember_merge(*states, None, registry.KERNELS)
    return merged


def _copy_frames(storage: Tensor, copies: Tensor, backend: str) -> None:
    if known.copy_again(storage, copies, backend, registry.KERNELS):
        return
    checks.copies(storage, copies)
    kernel = registry.resolve(Case("copy_frames", storage.device.type), backend)
    kernel.load().copy_frames(storage, copies)
    if kernel.backend == cpu.__name__ and cpu.are_runs(storage, copies):
        known.remember_copy(storage, copies, backend, registry.KERNELS)


def _attention_case(call: AttentionCall) -> Case:
    given = ("window", "sinks", "alibi_slopes", "tree_mask", "split_tokens")
    features = {name for name in given if getattr(call, name) is not None} | _scales(call)
    features |= {name for name, on in (("softcap", call.softcap), ("non_causal", not call.causal)) if on}
    known = _geometry(call.k, call.v) | {"num_heads": call.q.shape[1], "features": frozenset(features)}
    return Case("paged_attention", call.q.device.type, quant.NAMES[call.q.dtype], **known)


def _geometry(k: Tensor, v: Tensor) -> dict[str, Any]:
    sizes = {
        "block_size": k.shape[1],
        "num_kv_heads": k.shape[2],
        "head_dim": quant.head_dim(k),
        "head_dim_v": quant.head_dim(v),
    }
    return {"kv_dtype": quant.NAMES[k.dtype], **sizes}


def _scales(call: AttentionCall | WriteCall) -> frozenset[str]:
    kinds = {0: "tensor_scale", 3: "token_head_scale"}
    return frozenset(kinds[scale.dim()] for scale in (call.k_scale, call.v_scale) if scale is not None)


def _fake_nothing(*args: Any) -> None:
    """Operators that only write into their arguments."""


_LIBRARY.impl("paged_attention", _paged_attention, "CompositeExplicitAutograd")
_LIBRARY.impl("paged_attention_out", _paged_attention_out, "CompositeExplicitAutograd")
_LIBRARY.impl("write_kv", _write_kv, "CompositeExplicitAutograd")
_LIBRARY.impl("merge_states", _merge_states, "CompositeExplicitAutograd")
_LIBRARY.impl("copy_frames", _copy_frames, "CompositeExplicitAutograd")
torch.library.register_fake("pagedkv::paged_attention", lambda *args: _results(args[0], args[2]), lib=_LIBRARY)
torch.library.register_fake("pagedkv::paged_attention_out", _fake_nothing, lib=_LIBRARY)
torch.library.register_fake("pagedkv::write_kv", _fake_nothing, lib=_LIBRARY)
torch.library.register_fake(
    "pagedkv::merge_states", lambda a, la, b, lb: (a.new_empty(a.shape), la.new_empty(la.shape)), lib=_LIBRARY
)
torch.library.register_fake("pagedkv::copy_frames", _fake_nothing, lib=_LIBRARY)
