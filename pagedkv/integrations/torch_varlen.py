"""torch's attention over pages, `torch.nn.attention.varlen`, by our kernels: on CPUs, and on GPUs that it lacks.

    from pagedkv.integrations import torch_varlen
    torch_varlen.activate()                    # torch.nn.attention.restore_flash_attention_impl() takes it back
    from torch.nn.attention.varlen import varlen_attn, varlen_attn_out

torch's functions call ATen's operators `_flash_attention_*`. On a CPU our kernels serve every call; gradients are
refused. On CUDA they serve calls with a block table; other calls, and gradients, stay with torch's own kernels.

- pages may have any number of tokens, and heads any size
- num_splits=1 gives bits that do not depend on the rest of the batch; other values change nothing
- a query that sees nothing has the LSE -inf
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from pagedkv import PagedBatch, paged_attention
from pagedkv.errors import InvalidRequest
from pagedkv.integrations import stand_in
from pagedkv.integrations.flash_attn import _options, _paged, _whole_heads

_FORWARD, _INTO = "_flash_attention_forward", "_flash_attention_forward_no_dropout_inplace"
_SPLIT_TOKENS = 512
"""The multiple at which num_splits=1 cuts keys. Fixed cuts give fixed bits, and still occupy all processors."""


def activate() -> None:
    """Let our kernels serve `varlen_attn` and `varlen_attn_out` of torch, as its flash attention named "pagedkv".

    `torch.nn.attention.restore_flash_attention_impl()` takes it back, and so does the activation of another one.
    Raises: InvalidRequest for a torch before 2.12, in which these functions know no pages
    """
    operator = getattr(torch.ops.aten, _INTO, None)
    if operator is None or "block_table" not in str(operator.default._schema):
        raise InvalidRequest(f"varlen_attn of torch {torch.__version__} knows no pages; install torch 2.12 or newer")
    torch.nn.attention.register_flash_attention_impl("pagedkv", register_fn=_Kernels)
    torch.nn.attention.activate_flash_attention_impl("pagedkv")


class _Kernels:
    """Our kernels in torch's dispatcher, until `remove` is called."""

    def __init__(self) -> None:
        aten: Any = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        self._library: Library | None = aten
        aten.impl("_flash_attention_backward", _refuse_gradients, "CPU")
        for name, ours in {_FORWARD: _forward, _INTO: _attend}.items():
            aten.impl(name, ours, "CPU")
            if torch.version.cuda is not None:
                own = torch.library.get_kernel(f"aten::{name}", "CUDA").call_boxed
                aten.impl(name, partial(_on_gpu, own, ours), "CUDA", with_keyset=True)

    def remove(self) -> None:
        self._library = None  # torch forgets the kernels with the last reference


def _on_gpu(own: Any, ours: Any, keyset: Any, *args: Any, **kwargs: Any) -> Any:
    return own(keyset, *args, **kwargs) if kwargs.get("block_table") is None else ours(*args, **kwargs)


def _refuse_gradients(*args: Any, **kwargs: Any) -> Any:
    raise InvalidRequest("gradients of varlen_attn on a CPU are not served; pagedkv is for inference: use no_grad()")


def _forward(query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return out, the LSE, and what belongs to dropout: two states of a generator, and probabilities."""
    out, state = torch.empty_like(query), torch.zeros(2, dtype=torch.uint64, device=query.device)
    return out, _attend(out, query, *args, **kwargs), state, state.new_zeros(()), query.new_empty(0)


def _attend(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None,
    max_q: int, max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None, block_table: Tensor | None = None, num_splits: int | None = None,
) -> Tensor:  # fmt: skip
    """Fill out [T, H, D], and return the LSE, float32 [H, T]. The parameters are those of ATen's operator."""
    stand_in.refuse("torch", dropout_p=dropout_p, return_debug_mask=return_debug_mask, alibi_slopes=alibi_slopes)
    if cum_seq_q is None:
        raise InvalidRequest("cu_seq_q is missing; give the first token of each sequence, and the end")
    if query.dim() != 3:
        raise InvalidRequest(f"query is {list(query.shape)}; give [tokens, heads, dims]")
    if value.shape[-1:] != key.shape[-1:]:
        raise InvalidRequest(f"value is {list(value.shape)} and key {list(key.shape)}; their heads must have one size")
    stand_in.check_integers(cu_seq_q=cum_seq_q, cu_seq_k=cum_seq_k, seqused_k=seqused_k, block_table=block_table)
    if block_table is None:
        if cum_seq_k is None:
            raise InvalidRequest("cu_seq_k is missing; give it, or block_table and seqused_k")
        layer, table = _paged(key, value, cum_seq_k, max_k, may_be_one=num_splits != 1)
        lengths = _used(cum_seq_k, seqused_k)
    elif seqused_k is None:
        raise InvalidRequest("seqused_k is missing; block_table needs the number of tokens of each sequence")
    else:
        stand_in.check_shapes(seqused_k=(seqused_k, (seqused_k.numel(),)))
        layer, table, lengths = stand_in.layer_of(key, value), block_table, seqused_k
    shapes = {"cu_seq_q": (cum_seq_q, (len(lengths) + 1,)), "block_table": (table, (len(lengths), *table.shape[-1:]))}
    stand_in.check_shapes(**shapes)
    batch = PagedBatch(table.int(), lengths.int(), cum_seq_q.int(), int(max_q), int(max_k))
    left, right = (-1 if side is None else int(side) for side in (window_size_left, window_size_right))
    options = _options(scale, is_causal or right == 0, (left, right), 0.0, None, batch)
    batch = stand_in.served(layer, batch, **options)
    options["split_tokens"] = _SPLIT_TOKENS if num_splits == 1 else None
    into = _whole_heads(out)
    _, lse = paged_attention(_whole_heads(query), layer, batch, out=into, return_lse=True, **options)
    if into is not out:
        out.copy_(into)
    return lse.T.contiguous()


def _used(starts: Tensor, used: Tensor | None) -> Tensor:
    """Return the number of keys of each sequence that are used."""
    stored = starts.int().diff()
    stand_in.check_shapes(seqused_k=(used, tuple(stored.shape)))
    if used is not None and stand_in.is_readable(used) and (used > stored).any():
        b = int((used - stored).argmax())
        raise InvalidRequest(f"sequence {b} uses {int(used[b])} keys, and has {int(stored[b])} by cu_seq_k")
    return stored if used is None else used
