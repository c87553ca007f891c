"""Parts of the modules that stand in for the kernels of another package: flash_attn.py and flashinfer.py.

Both get K and V of a layer as tensors with each call, and both allow a sequence to have more queries than keys.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from pagedkv import KVLayer, PagedBatch, paged_attention
from pagedkv.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Collection, MutableMapping

_layers: MutableMapping[Tensor, tuple[Any, KVLayer]] = WeakTensorKeyDictionary()
"""The layers of tensors that callers keep: their addresses and shapes, and the KVLayer.

A KVLayer keeps its bound calls, so a layer that is found here again is called in a few microseconds.
"""


def install(name: str, module: str, submodules: Collection[str], replace: bool) -> None:
    """Let `import name`, and imports of its submodules, find the module of this package called `module`.

    replace: also if the package `name` can be imported, or was imported already
    Raises:  InvalidRequest if it can and `replace` is False
    """
    ours = sys.modules[module]
    if not replace and sys.modules.get(name) is not ours and importlib.util.find_spec(name) is not None:
        raise InvalidRequest(
            f"{name} is installed here, and {module} would take its place; call install(replace=True) if that is meant"
        )
    sys.modules[name] = ours
    for submodule in submodules:
        sys.modules[f"{name}.{submodule}"] = ours


def refuse(package: str, **options: object) -> None:
    """Raise InvalidRequest if an option is set that no kernel here serves. An option is unset if it is None or 0."""
    asked = [name for name, value in options.items() if value is not None and value is not False and value != 0]
    if asked:
        raise InvalidRequest(f"{' and '.join(asked)} of {package} {'is' if len(asked) == 1 else 'are'} not served here")


def layer_of(k: Tensor, v: Tensor, order: str = "NHD", owner: Tensor | None = None) -> KVLayer:
    """Return K and V as a layer. Nothing is copied, and the memory is freed when its owner drops it.

    order: NHD, [F, S, K, D], or HND, [F, K, S, D].
    owner: the tensor that the caller keeps; None: k.
    Raises: InvalidRequest for another order
    """
    if order not in ("NHD", "HND"):
        raise InvalidRequest(f"kv_layout is {order!r}; it must be 'NHD' or 'HND'")
    owner = k if owner is None else owner
    if torch.compiler.is_dynamo_compiling() or k.requires_grad or v.requires_grad:
        return _layer(k, v, order)
    found = _layers.get(owner)
    places = [(x.data_ptr(), x.shape, x.stride(), x.dtype) for x in (k, v)]
    if found is None or found[0] != (order, places):
        keys, values = (_alias(x) for x in (k, v))
        found = (order, places), _layer(keys, values, order)
        _layers[owner] = found
    return found[1]


def _alias(x: Tensor) -> Tensor:
    """Return a tensor of the same memory. A view would keep `x` alive."""
    alias = torch.empty(0, dtype=x.dtype, device=x.device)
    return alias.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())


def _layer(k: Tensor, v: Tensor, order: str) -> KVLayer:
    return KVLayer(k.transpose(1, 2), v.transpose(1, 2)) if order == "HND" else KVLayer(k, v)


def attend(
    q: Tensor, layer: KVLayer, batch: PagedBatch, out: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return `paged_attention` with its LSE, for sequences that may have more queries than keys.

    Such a sequence is aligned at its last query too, so its first causal queries see nothing.
    Raises: InvalidRequest for such a sequence with a window and without causality
    """
    more = _more_queries_than_keys(batch)
    if more is not None:
        tokens, rows = batch.cu_seqlens_q[-1:], batch.rows
        rows = torch.arange(len(batch.seq_lens), dtype=torch.int32) if rows is None else rows
        if options.get("tree_mask") is not None:
            raise InvalidRequest(f"a mask needs as many keys as queries; sequence {int(more.argmax())} has fewer")
        if options["causal"]:  # the queries before the first key become a sequence of their own, without keys
            starts = torch.stack([batch.cu_seqlens_q[:-1], batch.cu_seqlens_q[:-1] + more], 1).flatten()
            batch = replace(
                batch,
                cu_seqlens_q=torch.cat([starts, tokens]),
                seq_lens=torch.stack([torch.zeros_like(batch.seq_lens), batch.seq_lens], 1).flatten(),
                rows=rows.repeat_interleave(2),
            )
        elif options.get("window") is None:  # every query sees all, so each can be a sequence
            counts = batch.cu_seqlens_q.diff()
            batch = replace(
                batch,
                cu_seqlens_q=torch.arange(int(tokens) + 1, dtype=torch.int32),
                seq_lens=batch.seq_lens.repeat_interleave(counts),
                rows=rows.repeat_interleave(counts),
                max_seqlen_q=1,
            )
        else:
            raise InvalidRequest(
                f"sequence {int(more.argmax())} has more queries than keys, in a window that is not causal; give it as "
                "many keys, or causal=True"
            )
    result: tuple[Tensor, Tensor] = paged_attention(q, layer, batch, out=out, return_lse=True, **options)
    return result


def _more_queries_than_keys(batch: PagedBatch) -> Tensor | None:
    """Return how many more, int32 [B], or None if no sequence has more.

    Only kernels of CPUs refuse such sequences. On a GPU the tables are not read, because the host would wait.
    """
    if batch.seq_lens.device.type != "cpu":
        return None
    more = batch.cu_seqlens_q.diff() - batch.seq_lens
    return more.clamp_(min=0) if (more > 0).any() else None
