"""The operators of torch: flat tensors in, a checked call to the chosen kernel.

`torch.ops.pagedkv.*` take the fields of an AttentionCall, a WriteCall or a GatherSource, and a backend's name.
torch.compile sees one opaque node with outputs of known shapes and declared mutations. Checks and choice happen inside
the operator, so a compiled graph makes both at run time. No operator has a derivative: the functions here refuse
tensors that require one.

The operators are made with Library.define / impl / register_fake: `torch.library.custom_op` costs 7 us a call instead
of 1.6. This file knows schemas and the order check, choose, run. Public functions are in ops.py, calls without the
dispatcher in bound.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from pagedkv.errors import InvalidRequest
from pagedkv.kernels import checks, quant, registry
from pagedkv.kernels.args import (
    AttentionCall,
    GatherCall,
    GatherSource,
    PagedBatch,
    WriteCall,
    bound_fields,
    declarations,
    tables_of,
)
from pagedkv.kernels.case import Case

if TYPE_CHECKING:
    from pagedkv.kernels.args import AttentionOptions, KVLayer, RotaryTable


def _empty_results(*args: Any) -> tuple[Tensor, Tensor]:
    q, v = args[AttentionCall._fields.index("q")], args[1]
    out = q.new_empty((q.shape[0], q.shape[1], quant.head_dim(v, is_value=True)))
    return out, q.new_empty((q.shape[0], q.shape[1]), dtype=torch.float32)


def _paged_attention(*args: Any) -> tuple[Tensor, Tensor]:
    out, lse = _empty_results(*args)
    _paged_attention_out(*args[:-1], out, lse, args[-1])
    return out, lse


def _paged_attention_out(*args: Any) -> None:
    call = AttentionCall(*args[:-1])
    checks.attention(call)
    batch = (call.seq_lens, call.max_seqlen_k)
    case = Case.of_attention(call, call, call.q, (call.tree_mask, call.causal_of), batch)
    registry.resolve(case, args[-1]).load().paged_attention(call)


def _write_kv(*args: Any) -> None:
    call = WriteCall(*args[:-1])
    if call.v_new.dim() and not call.v_new.shape[-1]:
        call = checks.keys_alone(call)
    checks.write(call)
    kernel = registry.resolve(Case.of_write(call, call.cos is not None, (call.k_new, call.v_new)), args[-1])
    kernel.load().write_kv(call)


def _gather_kv(*args: Any) -> tuple[Tensor, Tensor]:
    *fields, dtype, backend = args
    checks.gather_source(source := GatherSource(*fields))
    starts = source.starts()
    results = _gathered(source, int(starts[-1]), dtype)
    _gather(GatherCall(source, starts, *results), backend)
    return results


def _gather_kv_out(*args: Any) -> None:
    *fields, k_out, v_out, backend = args
    checks.gather_source(source := GatherSource(*fields))
    _gather(GatherCall(source, source.starts() if k_out.dim() == 3 else None, k_out, v_out), backend)


def _gather(call: GatherCall, backend: str) -> None:
    checks.gather_results(call)
    registry.resolve(Case.of_gather(call), backend).load().gather_kv(call)


def _gathered(source: GatherSource, rows: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    K = source.k.shape[2]
    k, v = (rows, K, quant.head_dim(source.k)), (rows, K, quant.head_dim(source.v, is_value=True))
    return source.k.new_empty(k, dtype=dtype), source.k.new_empty(v, dtype=dtype)


def _fake_gather_kv(*args: Any) -> tuple[Tensor, Tensor]:
    return _gathered(GatherSource(*args[:-2]), torch.library.get_ctx().new_dynamic_size(), args[-2])


def _merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    checks.merge(out_a, lse_a, out_b, lse_b)
    return registry.resolve(Case.of_merge(out_a)).load().merge_states(out_a, lse_a, out_b, lse_b)


def _copy_frames(storage: Tensor, copies: Tensor, backend: str) -> None:
    checks.copies(storage, copies)
    registry.resolve(Case.of_copy(storage), backend).load().copy_frames(storage, copies)


def _fake_nothing(*args: Any) -> None:
    """Return nothing: the operator only writes to its arguments."""


_LIBRARY: Any = torch.library.Library("pagedkv", "DEF")  # type: ignore[no-untyped-call]


def _define() -> None:
    attention = declarations(AttentionCall, modified=("out", "lse"))
    write = declarations(WriteCall, modified=("k", "v", "k_scale", "v_scale"))
    gather = ", ".join(declarations(GatherSource).values())
    inputs = ", ".join(text for name, text in attention.items() if name not in ("out", "lse"))
    schemas = {
        "paged_attention": f"({inputs}, str backend) -> (Tensor, Tensor)",
        "paged_attention_out": f"({', '.join(attention.values())}, str backend) -> ()",
        "write_kv": f"({', '.join(write.values())}, str backend) -> ()",
        "gather_kv": f"({gather}, ScalarType dtype, str backend) -> (Tensor, Tensor)",
        "gather_kv_out": f"({gather}, Tensor(a!) k_out, Tensor(b!) v_out, str backend) -> ()",
        "merge_states": "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)",
        "copy_frames": "(Tensor(a!) storage, Tensor copies, str backend) -> ()",
    }
    functions: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "paged_attention": (_paged_attention, _empty_results),
        "paged_attention_out": (_paged_attention_out, _fake_nothing),
        "write_kv": (_write_kv, _fake_nothing),
        "gather_kv": (_gather_kv, _fake_gather_kv),
        "gather_kv_out": (_gather_kv_out, _fake_nothing),
        "merge_states": (_merge_states, lambda a, la, b, lb: (a.new_empty(a.shape), la.new_empty(la.shape))),
        "copy_frames": (_copy_frames, _fake_nothing),
    }
    for name, (run, fake) in functions.items():
        _LIBRARY.define(name + schemas[name])
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"pagedkv::{name}", fake, lib=_LIBRARY)


_define()


def _pool(layer: KVLayer) -> dict[str, Tensor | None]:
    names = ("k", "v", "k_scale", "v_scale", "calibration")
    return {f"layer.{name}": getattr(layer, name) for name in names}


def attend_by_operator(
    q: Tensor, layer: KVLayer, batch: PagedBatch, on: AttentionOptions, masks: tuple[Tensor | None, Tensor | None],
    out: Tensor | None, return_lse: bool, backend: str,
) -> Any:  # fmt: skip
    """Attend through torch.ops.pagedkv. Raises InvalidRequest, KernelUnavailable.

    masks: tree_mask and causal_of
    """
    others = {"tree_mask": masks[0], "causal": masks[1], "out": out}
    checks.given(q=q, **{name: x for name, x in others.items() if x is not None})
    checks.is_layer(layer)
    checks.is_batch(batch)
    checks.is_backend(backend)
    on = on.in_float32()
    if not is_dynamo_compiling():  # torch would refuse them in words of its own
        checks.numbers(on)
        checks.per_head(on)
    checks.writable_views(out=out)
    checks.inference_only(q=q, out=out, sinks=on.sinks, alibi_slopes=on.alibi_slopes, **_pool(layer))
    call = (*bound_fields(layer, on), q, *tables_of(batch), *masks)
    if out is None:
        out, lse = torch.ops.pagedkv.paged_attention.default(*call, backend)
    else:
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        torch.ops.pagedkv.paged_attention_out.default(*call, out, lse, backend)
    return (out, lse) if return_lse else out


def gather_by_operator(
    layer: KVLayer, batch: PagedBatch, first: Tensor | int, out: tuple[Tensor, Tensor] | None,
    dtype: torch.dtype | None, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gather through torch.ops.pagedkv. Raises InvalidRequest, KernelUnavailable."""
    checks.is_layer(layer)
    checks.is_batch(batch)
    checks.is_backend(backend)
    lens = batch.seq_lens
    if not isinstance(first, Tensor):
        first = torch.full_like(lens, checks.position(first))
    call = (*bound_fields(layer, None)[:5], batch.block_table, batch.rows, lens, first)
    if out is None:
        dtype = checks.result_dtype(layer, dtype)
        checks.inference_only(**_pool(layer))
        out = torch.ops.pagedkv.gather_kv.default(*call, dtype, backend)
    else:
        if not isinstance(out, tuple | list) or len(out) != 2 or dtype not in (None, out[0].dtype):
            raise InvalidRequest(
                f"out is {type(out).__name__} and dtype is {dtype}; give the pair (k, v), and no dtype"
            )
        checks.given(**{"out's k": out[0], "out's v": out[1]})
        checks.inference_only(**_pool(layer), **{"out's k": out[0], "out's v": out[1]})
        torch.ops.pagedkv.gather_kv_out.default(*call, *out, backend)
    return out  # type: ignore[no-any-return]


def slots_of(slots: Tensor | PagedBatch, positions: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return slots and positions, those of the batch if `slots` is one; `positions`, if given, take precedence."""
    if isinstance(slots, PagedBatch):
        return slots.slots, slots.positions if positions is None else positions
    return slots, positions


def write_by_operator(
    k: Tensor, v: Tensor | None, layer: KVLayer, slots: Tensor | PagedBatch, positions: Tensor | None,
    rope: RotaryTable | None, backend: str,
) -> None:  # fmt: skip
    """Store through torch.ops.pagedkv. Raises InvalidRequest, KernelUnavailable."""
    checks.is_layer(layer)
    checks.given(k=k, v=k if v is None else v)
    checks.is_backend(backend)
    if v is None:  # the operator knows it by values of no elements
        v = k[..., :0]
    at, positions = slots_of(slots, positions)
    checks.given(slots=at)
    if positions is not None:
        checks.given(positions=positions)
    positions = None if rope is None else positions
    checks.writable_views(**_pool(layer))
    angles_given = {} if rope is None else {"rope.cos": rope.cos, "rope.sin": rope.sin}
    checks.inference_only(k=k, v=v, **_pool(layer), **angles_given)
    torch.ops.pagedkv.write_kv.default(*bound_fields(layer, rope), k, v, at, positions, backend)
