"""The wrappers: `plan` makes the tables of a step once, and `run` reads them in each layer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from pagedkv import KVLayer, PagedBatch, paged_attention
from pagedkv.errors import InvalidRequest
from pagedkv.integrations import stand_in
from pagedkv.integrations.flashinfer.pages import layer_of
from pagedkv.integrations.flashinfer.states import LN2

UNREAD: Final = frozenset(
    ("block_tables", "disable_split_kv", "max_sequence_kv", "max_token_per_sequence", "non_blocking", "rope_scale",
     "rope_theta", "seq_lens_q", "token_pos_in_items_len")
)  # fmt: skip
"""Options of `plan` that change nothing here. The options of RoPE belong to a mode that is refused."""


@dataclass(frozen=True)
class _Plan:
    """The tables of a step, and the options of its calls."""

    batch: PagedBatch
    num_queries: int
    sizes: tuple[int, int, int, int, int]  # H, K, S, D, Dv
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]  # of q, of K and V, of the result
    scale: float | None
    window_left: int
    options: dict[str, Any]
    served: dict[Any, PagedBatch] = field(default_factory=dict)
    """The batches of calls, by the options that they depend on: tables are checked once, and not in each layer."""


class _PagedWrapper:
    """A wrapper: `plan` makes the tables of a step once, and `run` reads them for each layer."""

    def __init__(self, workspace: Tensor, kv_layout: str, use_cuda_graph: bool, jit_args: object) -> None:
        stand_in.check_order(kv_layout)
        stand_in.refuse("flashinfer", jit_args=jit_args, use_cuda_graph=use_cuda_graph)
        self.device: torch.device = workspace.device
        self._kv_layout: str = kv_layout
        self._plan: _Plan | None = None

    is_cuda_graph_enabled: bool = False

    @property
    def _planned(self) -> _Plan:
        if self._plan is None:
            raise InvalidRequest("run() before plan()")
        return self._plan

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Do nothing: kernels here keep no state in a workspace."""

    def run_return_lse(self, *args: Any, **options: Any) -> Any:
        """Return `run` with return_lse=True."""
        return self.run(*args, **{**options, "return_lse": True})

    def _set_plan(
        self, queries: Tensor, tables: tuple[Tensor, Tensor, Tensor], lengths: Tensor | None, sizes: tuple[int, ...],
        dtypes: tuple[object, object, object], mask: Tensor | None, *, pos_encoding_mode: str,
        scale: float | None, window_left: int, soft_cap: float | None, split_pages: int | None, causal: bool,
        least: int | None = None,
    ) -> None:  # fmt: skip
        """Keep the tables and options of a step for its calls.

        queries: int32 [B + 1]. tables: indptr, indices and last_page_len. sizes: as in _Plan.
        least:   the fewest tokens that a request may have.
        """
        H, K, S, D, Dv = sizes
        if K < 1 or H % K:
            raise InvalidRequest(f"num_qo_heads is {H}; it must be a multiple of num_kv_heads={K}")
        q_dtype, kv_dtype, out_dtype = (_dtype(dtypes[0] if of is None else of) for of in dtypes)
        if not q_dtype.is_floating_point or q_dtype.itemsize == 1:
            raise InvalidRequest(f"q_data_type is {q_dtype}; it must be float32, bfloat16 or float16")
        options = self._options(pos_encoding_mode, soft_cap, causal)
        batch = _batch_of(queries, *tables, lengths, S, self.device)
        if least is not None and (batch.seq_lens < least).any():
            at = int((batch.seq_lens < least).int().argmax())
            raise InvalidRequest(f"request {at} has {int(batch.seq_lens[at])} tokens, fewer than {least} queries")
        if mask is not None:
            options["tree_mask"] = _tree_mask(mask, batch.cu_seqlens_q, batch.seq_lens).to(self.device)
        if split_pages is not None and split_pages > 0:
            options["split_tokens"] = split_pages * S
        num_queries = int(batch.cu_seqlens_q[-1])
        batch = replace(batch, seq_lens=batch.seq_lens.to(self.device), cu_seqlens_q=batch.cu_seqlens_q.to(self.device))
        dtypes_planned = (q_dtype, kv_dtype, out_dtype)
        self._plan = _Plan(batch, num_queries, (H, K, S, D, Dv), dtypes_planned, scale, window_left, options)

    def _options(self, pos_encoding_mode: str, soft_cap: float | None, causal: bool) -> dict[str, Any]:
        if pos_encoding_mode != "NONE":
            raise InvalidRequest(
                f"pos_encoding_mode is {pos_encoding_mode!r}; give 'NONE', and turn keys before storing them"
            )
        return {"causal": bool(causal), "softcap": stand_in.softcap_of(soft_cap)}

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        *args: Any,
        q_scale: float | Tensor | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        q_len_per_req: int | None = None,
        **unserved: Any,
    ) -> Any:
        """Attend from the queries of a step in one layer.

        q_scale, k_scale: factors of the scores. v_scale: a factor of the result. sinks: [H].
        Shapes:   q [T, H, D]; returns out [T, H, Dv]; with return_lse also float32 [T, H], base 2
        Modifies: out and lse, if given, and returns them
        Raises:   InvalidRequest, for further options too if they are set; KernelUnavailable
        """
        stand_in.refuse("flashinfer", further_arguments=args or None, **unserved)
        if q_len_per_req is not None and q_len_per_req * len(self._planned.batch.seq_lens) != len(q):
            raise InvalidRequest(f"q has {len(q)} rows, which are not q_len_per_req={q_len_per_req} for each request")
        plan, layer = self._planned, layer_of(paged_kv_cache, self._kv_layout)
        _check(plan, q, layer, out, lse if return_lse else None)
        left = plan.window_left if window_left is None else window_left
        causal = plan.options["causal"]
        window: Any = None if left < 0 else (left + 1 if causal else (left, None))
        scale = q.shape[-1] ** -0.5 if plan.scale is None else plan.scale
        scale *= _factor("q_scale", q_scale) * _factor("k_scale", k_scale)
        options = {**plan.options, "window": window, "scale": scale, "sinks": sinks}
        key = (len(layer.k), window is None)
        if key not in plan.served:
            plan.served[key] = stand_in.served(layer, plan.batch, **options)
        q = q if q.stride(-1) == 1 else q.contiguous()
        is_direct = out is not None and out.dtype == q.dtype and out.stride(-1) == 1 and v_scale is None
        options |= {"out": out if is_direct else None, "return_lse": True}
        result, found_lse = paged_attention(q, layer, plan.served[key], **options)
        if not is_direct:
            result = result if v_scale is None else result.float() * _factor("v_scale", v_scale)
            result = result.to(plan.dtypes[2]) if out is None else out.copy_(result)
        if not return_lse:
            return result
        found_lse.div_(LN2)
        return result, found_lse if lse is None else lse.copy_(found_lse)


def _check(plan: _Plan, q: Tensor, layer: KVLayer, out: Tensor | None, lse: Tensor | None) -> None:
    """Raise InvalidRequest unless the tensors are those that `plan` was told of."""
    (H, K, S, D, Dv), (q_dtype, kv_dtype, out_dtype) = plan.sizes, plan.dtypes
    if (q.dtype, layer.k.dtype) != (q_dtype, kv_dtype):
        raise InvalidRequest(
            f"q is {q.dtype} and the cache {layer.k.dtype}; plan() was told q_data_type={q_dtype} and "
            f"kv_data_type={kv_dtype}"
        )
    T = plan.num_queries
    if tuple(q.shape) != (T, H, D) or tuple(layer.k.shape[1:]) != (S, K, D) or layer.v.shape[-1] != Dv:
        raise InvalidRequest(
            f"q is {list(q.shape)} and K {list(layer.k.shape)} in pages, tokens, heads, dims, with V of "
            f"{layer.v.shape[-1]}; plan() was told of {T} queries, {H} query heads, {K} kv heads, pages of {S}, and "
            f"heads of {D} and {Dv}"
        )
    stand_in.check_shapes(out=(out, (T, H, Dv)), lse=(lse, (T, H)))
    if out is not None and out.dtype != out_dtype:
        raise InvalidRequest(f"out is {out.dtype}; plan() was told o_data_type={out_dtype}")
    if lse is not None and lse.dtype != torch.float32:
        raise InvalidRequest(f"lse is {lse.dtype}; it must be float32")


def _factor(name: str, scale: Any) -> float:
    if scale is None:
        return 1.0
    if isinstance(scale, Tensor) and scale.numel() != 1:
        raise InvalidRequest(f"{name} is {list(scale.shape)}; kernels here take one number")
    return float(scale)


class BatchDecodeWithPagedKVCacheWrapper(_PagedWrapper):
    """Attention of a few queries of each request, in a step of decoding."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, jit_args)

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        *,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        q_len_per_req: int = 1,
        **others: Any,
    ) -> None:
        """Make the tables of a step. The host reads indptr and last_page_len.

        last_page_len:    1 to page_size, unless a request has no page
        window_left:      positions before a query that it sees; -1: all
        fixed_split_size: pages; results are then bit-equal whatever else is in the batch
        q_len_per_req:    queries of each request, its last tokens, causal
        Shapes: indptr int32 [B + 1], indices int32 [indptr[-1]], last_page_len int32 [B]; seq_lens [B] replaces what
                they say
        Raises: InvalidRequest, for further options too if they are set, except UNREAD
        """
        _refuse_unserved(others)
        if q_len_per_req < 1:
            raise InvalidRequest(f"q_len_per_req is {q_len_per_req}; it must be at least 1")
        queries = torch.arange(len(last_page_len) + 1, dtype=torch.int32) * q_len_per_req
        q_type = data_type if q_data_type is None else q_data_type
        self._set_plan(
            queries, (indptr, indices, last_page_len), seq_lens,
            (num_qo_heads, num_kv_heads, page_size, head_dim, head_dim),
            (q_type, data_type if kv_data_type is None else kv_data_type, o_data_type), None,
            pos_encoding_mode=pos_encoding_mode, scale=sm_scale, window_left=window_left, causal=True,
            soft_cap=logits_soft_cap, split_pages=fixed_split_size, least=None if q_len_per_req == 1 else q_len_per_req,
        )  # fmt: skip


class BatchPrefillWithPagedKVCacheWrapper(_PagedWrapper):
    """Attention of prompts and chunks: any number of queries of each request."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, jit_args)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        *,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        **others: Any,
    ) -> None:
        """Make the tables of a step. The host reads them, and the mask.

        custom_mask:        bool [queries, tokens] of each request, flat, one after the other; it replaces `causal`.
                            Tokens before the request's queries must be visible to all of them.
        Others as in the wrapper for decoding.
        Shapes: qo_indptr, paged_kv_indptr int32 [B + 1], paged_kv_indices int32 [paged_kv_indptr[-1]],
                paged_kv_last_page_len int32 [B]
        Raises: InvalidRequest
        """
        _refuse_unserved({**others, "packed_custom_mask": packed_custom_mask})
        self._set_plan(
            qo_indptr, (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len), seq_lens,
            (num_qo_heads, num_kv_heads, page_size, head_dim_qk, head_dim_vo or head_dim_qk),
            (q_data_type, kv_data_type, o_data_type),
            custom_mask, pos_encoding_mode=pos_encoding_mode, scale=sm_scale,
            window_left=window_left, causal=causal, soft_cap=logits_soft_cap, split_pages=fixed_split_size,
        )  # fmt: skip


def _refuse_unserved(others: dict[str, Any]) -> None:
    """Raise InvalidRequest if an option of `plan` is set that no kernel here serves."""
    stand_in.refuse("flashinfer", **{name: value for name, value in others.items() if name not in UNREAD})


def _dtype(of: object) -> torch.dtype:
    found = getattr(torch, of, None) if isinstance(of, str) else of
    if not isinstance(found, torch.dtype):
        raise InvalidRequest(f"{of!r} is no dtype; give one of torch, or its name")
    return found


def _batch_of(
    queries: Tensor, indptr: Tensor, indices: Tensor, last: Tensor, lengths: Tensor | None, S: int, device: torch.device
) -> PagedBatch:
    """Return the tables of a step: pages on `device`, seq_lens and cu_seqlens_q on the host.

    queries: int32 [B + 1]. lengths: [B], or None if `last` says them. The tensors are not kept.
    Raises:  InvalidRequest
    """
    stand_in.check_integers(qo_indptr=queries, indptr=indptr, indices=indices, last_page_len=last, seq_lens=lengths)
    ends, last_on_host, B = indptr.cpu().long(), last.cpu().long(), len(last)
    queries = queries.to("cpu", torch.int32, copy=True)
    counts = ends.diff()
    if len(ends) != B + 1 or len(queries) != B + 1 or int(ends[0]) != 0 or (counts < 0).any():
        raise InvalidRequest(
            f"indptr is {ends.tolist()} for {len(queries) - 1} requests and {B} lengths of last pages; it must have "
            "one entry more than there are requests, begin with 0 and never fall"
        )
    if len(indices) < int(ends[-1]):
        raise InvalidRequest(f"indptr ends with {int(ends[-1])} pages, and indices has {len(indices)}")
    if lengths is None:
        is_wrong = (counts > 0) & ((last_on_host < 1) | (last_on_host > S))
        if is_wrong.any():
            at = int(is_wrong.int().argmax())
            raise InvalidRequest(f"last_page_len of request {at} is {int(last_on_host[at])}; it must be 1 to {S}")
        lengths = torch.where(counts > 0, (counts - 1) * S + last_on_host, 0)
    tokens = lengths.to("cpu", torch.int32, copy=True)
    if tokens.shape != counts.shape or (tokens < 0).any() or (tokens > counts * S).any():
        raise InvalidRequest(
            f"seq_lens is {tokens.tolist()}; the requests have {counts.tolist()} pages of {S} tokens by indptr"
        )
    used = indices[: int(ends[-1])]
    if stand_in.is_readable(used) and (used < 0).any():
        raise InvalidRequest(f"indices go down to {int(used.min())}; pages are numbered from 0")
    P = max(1, int(counts.max()) if B else 0)
    places = (ends[:-1, None] + torch.arange(P)).clamp(max=max(0, len(indices) - 1))
    pages = indices.to(device) if len(indices) else torch.zeros(1, dtype=torch.int32, device=device)
    table = pages[places.to(device)].int()
    most = (int(queries.diff().max()), int(tokens.max())) if B else (0, 0)
    return PagedBatch(table, tokens, queries, max_seqlen_q=most[0], max_seqlen_k=most[1])


def _tree_mask(mask: Tensor, queries: Tensor, lengths: Tensor) -> Tensor:
    """Return the mask among new tokens, bool [T, most queries of a request]. Raises InvalidRequest for other masks."""
    counts = queries.diff()
    sizes = (counts.long() * lengths.long()).tolist()
    if mask.numel() != sum(sizes):
        raise InvalidRequest(f"custom_mask has {mask.numel()} elements; the requests have {sum(sizes)}")
    parts = torch.split(mask.cpu().bool().flatten(), sizes)
    result = torch.zeros(int(queries[-1]), int(counts.max()) if len(counts) else 0, dtype=torch.bool)
    for b, (first, count, length) in enumerate(zip(queries.tolist(), counts.tolist(), lengths.tolist(), strict=False)):
        shown = parts[b][: count * length].view(count, length)
        before = length - count
        if before < 0:
            raise InvalidRequest(f"custom_mask of request {b}: it has {count} queries and {length} tokens, fewer")
        if not shown[:, :before].all():
            raise InvalidRequest(
                f"custom_mask of request {b} hides some of its {before} tokens before its {count} queries; "
                "kernels here take masks among the new tokens"
            )
        result[first : first + count, :count] = shown[:, before:]
    return result
