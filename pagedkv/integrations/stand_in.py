"""Parts of the modules that stand in for the kernels of another package: flash_attn.py and flashinfer/.

Both get K and V of a layer as tensors with each call, and both allow a sequence to have more queries than keys.

The values of tables are read on CPUs. On a GPU the host would wait for them, so wrong values there are as wrong as they
are for the other package.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType
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


def install(name: str, ours: str, submodules: Collection[str], is_forced: bool) -> None:
    """Let `import name` and `import name.submodule` find the public names of our module `ours`.

    is_forced: also if the package `name` can be imported, or was imported already
    Raises:    InvalidRequest if it can and `is_forced` is False
    """
    if not is_forced and not hasattr(sys.modules.get(name), "__pagedkv__"):
        try:
            is_installed = importlib.util.find_spec(name) is not None
        except ValueError:  # a module without a spec lies there
            is_installed = True
        if is_installed:
            raise InvalidRequest(
                f"{name} is installed here, and {ours} would take its place; if that is meant, call "
                "install(replace=True)"
            )
    source = sys.modules[ours]
    names = {public: getattr(source, public) for public in ("__doc__", "__version__", *source.__all__)}
    made = {full: ModuleType(full) for full in (name, *(f"{name}.{submodule}" for submodule in submodules))}
    for full, module in made.items():
        vars(module).update(names, __pagedkv__=ours, __path__=[])  # no path: other submodules are not found
        module.__spec__ = ModuleSpec(full, None, is_package=True)
    for submodule in submodules:
        setattr(made[name], submodule, made[f"{name}.{submodule}"])
    sys.modules.update(made)


def refuse(package: str, **options: object) -> None:
    """Raise InvalidRequest if an option is set that no kernel here serves. An option is unset if it is None or 0."""
    asked = [name for name, value in options.items() if isinstance(value, Tensor) or (value is not None and value != 0)]
    if asked:
        verb, what = ("is", "it") if len(asked) == 1 else ("are", "them")
        raise InvalidRequest(f"{' and '.join(asked)} of {package} {verb} not served here; leave {what} out")


def check_order(order: str) -> None:
    """Raise InvalidRequest unless `order` is one of `layer_of`."""
    if order not in ("NHD", "HND"):
        raise InvalidRequest(f"kv_layout is {order!r}; it must be 'NHD' or 'HND'")


def check_shapes(**tensors: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """Raise InvalidRequest unless each tensor that is given has its shape."""
    for name, (tensor, shape) in tensors.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise InvalidRequest(f"{name} is {list(tensor.shape)}; it must be {list(shape)}")


def check_integers(**tensors: Tensor | None) -> None:
    """Raise InvalidRequest unless each tensor that is given holds integers of 32 bits: others would be cut off."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
            raise InvalidRequest(f"{name} is {tensor.dtype}; it must be int32")
        if tensor.itemsize > 4 and is_readable(tensor) and (wrong := tensor[tensor != tensor.int()]).numel():
            raise InvalidRequest(f"{name} has {int(wrong[0])}, which int32 cannot hold")


def softcap_of(softcap: float | None) -> float:
    """Return the soft cap of `paged_attention`: 0.0, which is none, unless `softcap` is above 0, as both document."""
    return 0.0 if softcap is None or softcap < 0 else float(softcap)


def is_readable(tensor: Tensor) -> bool:
    """Return whether the values of a tensor can be read at once: on a CPU, and not while a graph is traced."""
    is_real = type(tensor) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_dynamo_compiling()
    return is_real and tensor.device.type == "cpu"


def layer_of(k: Tensor, v: Tensor, order: str = "NHD", owner: Tensor | None = None) -> KVLayer:
    """Return K and V as a layer. Nothing is copied, and the memory is freed when its owner drops `owner`.

    order: NHD, [F, S, K, D], or HND, [F, K, S, D].
    owner: the tensor that the caller keeps; None: k.
    Raises: InvalidRequest for another order, dims, or bytes
    """
    check_order(order)
    if torch.uint8 in (k.dtype, v.dtype):
        raise InvalidRequest(
            f"K is {k.dtype} and V {v.dtype}; give bytes of fp8 as views of torch.float8_e4m3fn or torch.float8_e5m2. "
            "k8v4 and k5v4 are served in a PagedKVCache only"
        )
    if k.dim() != 4 or v.dim() != 4:
        raise InvalidRequest(f"K is {list(k.shape)} and V {list(v.shape)}; both must have 4 dims, pages first")
    owner = k if owner is None else owner
    if k.requires_grad or v.requires_grad or not (_is_whole(k) and _is_whole(v)):
        return _layer(k, v, order)  # for the kernels to refuse, or to trace
    found = _layers.get(owner)
    places = [(x.data_ptr(), x.shape, x.stride(), x.dtype) for x in (k, v)]
    if found is None or found[0] != (order, places):
        keys, values = (_alias(x) for x in (k, v))
        found = (order, places), _layer(keys, values, order)
        _layers[owner] = found
    return found[1]


def _is_whole(x: Tensor) -> bool:
    """Return whether the memory of all elements is there, and a tensor of its own may describe it."""
    if type(x) not in (Tensor, torch.nn.Parameter) or torch.compiler.is_dynamo_compiling():
        return False
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else -1
    return (x.storage_offset() + last + 1) * x.itemsize <= x.untyped_storage().nbytes()


def _alias(x: Tensor) -> Tensor:
    """Return a tensor of the same memory. A view would keep `x` alive."""
    alias = torch.empty(0, dtype=x.dtype, device=x.device)
    return alias.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())


def _layer(k: Tensor, v: Tensor, order: str) -> KVLayer:
    return KVLayer(k.transpose(1, 2), v.transpose(1, 2)) if order == "HND" else KVLayer(k, v)


def check_call(q: Tensor, layer: KVLayer, **options: Any) -> None:
    """Raise as `paged_attention` does for a wrong dtype, heads, head dim or option, before anything is computed."""
    none = torch.zeros(1, dtype=torch.int32, device=q.device)
    batch = PagedBatch(none[:0, None], none[:0], none, max_seqlen_q=0, max_seqlen_k=0)
    paged_attention(q[:0], layer, batch, **options)


def served(layer: KVLayer, batch: PagedBatch, **options: Any) -> PagedBatch:
    """Return a batch for `paged_attention`, in which no sequence has more queries than keys.

    A sequence that has more is aligned at its last query too, so its first causal queries see nothing.
    Raises: InvalidRequest for pages that the pool does not have, and for such a sequence with a mask, or with a window
            and without causality
    """
    if not is_readable(batch.seq_lens):
        return batch
    _check_pages(layer, batch)
    more = batch.cu_seqlens_q.diff() - batch.seq_lens
    if not (more > 0).any():
        return batch
    at, tokens, rows = int(more.argmax()), batch.cu_seqlens_q[-1:], batch.rows
    rows = torch.arange(len(batch.seq_lens), dtype=torch.int32) if rows is None else rows
    if options.get("tree_mask") is not None:
        raise InvalidRequest(f"sequence {at} has more queries than keys, and a mask; give it as many keys")
    if options["causal"]:  # the queries before the first key become a sequence of their own, without keys
        ahead = batch.cu_seqlens_q[:-1] + more.clamp(min=0)
        return replace(
            batch,
            cu_seqlens_q=torch.cat([torch.stack([batch.cu_seqlens_q[:-1], ahead], 1).flatten(), tokens]),
            seq_lens=torch.stack([torch.zeros_like(batch.seq_lens), batch.seq_lens], 1).flatten(),
            rows=rows.repeat_interleave(2),
        )
    if options.get("window") is not None:
        raise InvalidRequest(
            f"sequence {at} has more queries than keys, in a window that is not causal; give it as many keys, or a "
            "causal window"
        )
    counts = batch.cu_seqlens_q.diff()
    parts = torch.where(more > 0, counts, 1)  # such a query sees all keys, so each can be a sequence
    queries = torch.where(more > 0, 1, counts).repeat_interleave(parts)
    return replace(
        batch,
        cu_seqlens_q=torch.cat([batch.cu_seqlens_q[:1], queries.cumsum(0)]).int(),
        seq_lens=batch.seq_lens.repeat_interleave(parts),
        rows=rows.repeat_interleave(parts),
        max_seqlen_q=int(queries.max()),
    )


def _check_pages(layer: KVLayer, batch: PagedBatch) -> None:
    """Raise InvalidRequest unless the pages in use are pages of the pool. Our kernels skip pages below 0."""
    pages, size, num_frames = batch.block_table.shape[1], layer.k.shape[1], layer.k.shape[0]
    lengths = batch.seq_lens.long() * (batch.cu_seqlens_q.diff() > 0)  # without queries, no page is read
    if len(lengths) and (int(lengths.min()) < 0 or int(lengths.max()) > pages * size):
        raise InvalidRequest(
            f"sequences have {int(lengths.min())} to {int(lengths.max())} tokens; {pages} pages of {size} tokens hold "
            f"0 to {pages * size}"
        )
    is_used = torch.arange(pages) * size < lengths[:, None]
    is_wrong = is_used & ((batch.block_table < 0) | (batch.block_table >= num_frames))
    if is_wrong.any():
        b, page = (int(x) for x in is_wrong.nonzero()[0])
        raise InvalidRequest(
            f"page {page} of sequence {b} is {int(batch.block_table[b, page])}; the cache has pages 0 to "
            f"{num_frames - 1}"
        )
