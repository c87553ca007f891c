"""The wrappers: `plan` makes the tables of a step once, and `run` reads them in each layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pagedkv import PagedBatch
from pagedkv.errors import InvalidRequest
from pagedkv.integrations import stand_in
from pagedkv.integrations.flashinfer.pages import layer_of
from pagedkv.integrations.flashinfer.states import LN2
from pagedkv.integrations.flashinfer.step import alibi_slopes, batch_of, tree_mask


@dataclass(frozen=True)
class _Plan:
    """The tables of a step, and the options of its calls."""

    batch: PagedBatch
    num_queries: int
    heads: tuple[int, int, int]  # H, K, S
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]  # of q, of K and V, of the result
    scale: float | None
    window_left: int
    options: dict[str, Any]


class _PagedWrapper:
    """A wrapper: `plan` makes the tables of a step once, and `run` reads them for each layer.

    fixed: the buffers of the caller for indptr, indices and last_page_len. With them, `plan` writes to the same
           tensors in each step, so that a CUDA graph may replay `run`.
    """

    def __init__(
        self, workspace: Tensor, kv_layout: str, fixed: tuple[Tensor | None, ...] | None, jit_args: object
    ) -> None:
        if kv_layout not in ("NHD", "HND"):
            raise InvalidRequest(f"kv_layout is {kv_layout!r}; it must be 'NHD' or 'HND'")
        stand_in.refuse("flashinfer", jit_args=jit_args)
        if fixed is not None and not all(isinstance(buffer, Tensor) for buffer in fixed):
            raise InvalidRequest("use_cuda_graph needs all buffers of indptr, indices and last_page_len")
        self.device: torch.device = workspace.device
        self._kv_layout: str = kv_layout
        self._fixed: tuple[Tensor | None, ...] | None = fixed
        self._plan: _Plan | None = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Return whether a CUDA graph may replay `run`."""
        return self._fixed is not None

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Do nothing: kernels here keep no state in a workspace."""

    def end_forward(self) -> None:
        """Do nothing, as in flashinfer."""

    def _set_plan(
        self, queries: Tensor, tables: tuple[Tensor, Tensor, Tensor], lengths: Tensor | None, heads: tuple[int, ...],
        dtypes: tuple[object, object, object], mask: tuple[Tensor | None, Tensor | None], *, pos_encoding_mode: str,
        scale: float | None, window_left: int, split_pages: int | None, **options: Any,
    ) -> None:  # fmt: skip
        """queries: int32 [B + 1], on the host. tables: indptr, indices and last_page_len. lengths: or None."""
        H, K, _, S = heads
        if K < 1 or H % K:
            raise InvalidRequest(f"num_qo_heads is {H}; it must be a multiple of num_kv_heads={K}")
        if pos_encoding_mode == "ALIBI":
            if options["softcap"]:
                raise InvalidRequest(
                    "logits_soft_cap with ALIBI: flashinfer caps scores after ALiBi, and kernels here before"
                )
            options["alibi_slopes"] = alibi_slopes(H, self.device)
        elif pos_encoding_mode != "NONE":
            raise InvalidRequest(
                f"pos_encoding_mode is {pos_encoding_mode!r}; give 'ALIBI' or 'NONE', and turn keys before storing them"
            )
        q_dtype, kv_dtype, out_dtype = (_dtype(dtypes[0] if of is None else of) for of in dtypes)
        batch = batch_of(queries, *tables, lengths, S, self.device)
        if any(part is not None for part in mask):
            if self._fixed is not None:
                raise InvalidRequest("a custom mask in a wrapper for CUDA graphs: its tensor changes with each plan")
            options["tree_mask"] = tree_mask(mask, queries, batch.seq_lens).to(self.device)
        if split_pages is not None and split_pages > 0:
            options["split_tokens"] = split_pages * S
        num_queries = int(queries[-1])
        if self._fixed is None:
            batch = replace(
                batch, seq_lens=batch.seq_lens.to(self.device), cu_seqlens_q=batch.cu_seqlens_q.to(self.device)
            )
        else:
            batch = self._in_buffers(batch, num_queries, tables, S)
        self._plan = _Plan(batch, num_queries, (H, K, S), (q_dtype, kv_dtype, out_dtype), scale, window_left, options)

    def _in_buffers(
        self, batch: PagedBatch, num_queries: int, tables: tuple[Tensor, Tensor, Tensor], S: int
    ) -> PagedBatch:
        """Copy the tables of a step to tensors that stay where they are, with bounds that hold for every step."""
        buffers: Any = self._fixed
        B, most_pages, planned = len(buffers[2]), len(buffers[1]), self._plan
        if len(batch.seq_lens) != B or len(tables[1]) > most_pages:
            raise InvalidRequest(
                f"{len(batch.seq_lens)} requests of {len(tables[1])} pages; the buffers are for {B} requests, in each "
                f"plan, and up to {most_pages} pages"
            )
        if planned is not None and num_queries != planned.num_queries:
            raise InvalidRequest(
                f"{num_queries} queries; this wrapper for CUDA graphs was planned with {planned.num_queries}, for good"
            )
        for buffer, values in zip(buffers, tables, strict=True):
            buffer[: len(values)].copy_(values)
        if planned is None:
            sizes: Any = ((B, most_pages), (B,), (B + 1,))
            table, lengths, starts = (torch.zeros(size, dtype=torch.int32, device=self.device) for size in sizes)
            kept = PagedBatch(table, lengths, starts, max_seqlen_q=num_queries, max_seqlen_k=most_pages * S)
        else:
            kept = planned.batch
        kept.block_table[:, : batch.block_table.shape[1]].copy_(batch.block_table)
        kept.seq_lens.copy_(batch.seq_lens)
        kept.cu_seqlens_q.copy_(batch.cu_seqlens_q)
        return kept

    def _run(
        self, q: Tensor, cache: Tensor | tuple[Tensor, Tensor], scales: tuple[Any, Any, Any], out: Tensor | None,
        lse: Tensor | None, return_lse: bool, window_left: int | None, sinks: Tensor | None,
    ) -> Any:  # fmt: skip
        plan = self._plan
        if plan is None:
            raise InvalidRequest("run() before plan()")
        H, K, S = plan.heads
        layer = layer_of(cache, self._kv_layout)
        q_dtype, kv_dtype, out_dtype = plan.dtypes
        if (q.dtype, layer.k.dtype) != (q_dtype, kv_dtype):
            raise InvalidRequest(
                f"q is {q.dtype} and the cache {layer.k.dtype}; plan() was told q_data_type={q_dtype} and "
                f"kv_data_type={kv_dtype}"
            )
        if (q.shape[0], q.shape[1], layer.k.shape[1], layer.k.shape[2]) != (plan.num_queries, H, S, K):
            raise InvalidRequest(
                f"q is {list(q.shape)} and K {list(layer.k.shape)} in pages, tokens, heads, dims; plan() was told of "
                f"{plan.num_queries} queries, {H} query heads, {K} kv heads and pages of {S}"
            )
        if return_lse and "alibi_slopes" in plan.options:
            raise InvalidRequest("return_lse with ALIBI: flashinfer counts positions from elsewhere in the LSE")
        left = plan.window_left if window_left is None else window_left
        causal = plan.options["causal"]
        window: Any = None if left < 0 else (left + 1 if causal else (left, None))
        scale = q.shape[-1] ** -0.5 if plan.scale is None else plan.scale
        for factor in scales[:2]:
            scale *= 1.0 if factor is None else float(factor)
        is_direct = out is not None and out.dtype == q.dtype and scales[2] is None
        result, found_lse = stand_in.attend(
            q, layer, plan.batch, out if is_direct else None, scale=scale, window=window, sinks=sinks, **plan.options
        )
        if not is_direct:
            result = result if scales[2] is None else result.float() * scales[2]
            result = result.to(out_dtype) if out is None else out.copy_(result)
        if not return_lse:
            return result
        found_lse.div_(LN2)
        return result, found_lse if lse is None else lse.copy_(found_lse)


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
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        super().__init__(float_workspace_buffer, kv_layout, buffers if use_cuda_graph else None, jit_args)
        self.use_tensor_cores = use_tensor_cores

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
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        *,
        window_right: int = 0,
    ) -> None:
        """Make the tables of a step. The host reads indptr and last_page_len.

        last_page_len:    1 to page_size, unless a request has no page
        window_left:      positions before a query that it sees; -1: all
        fixed_split_size: pages; results are then bit-equal whatever else is in the batch
        q_len_per_req:    queries of each request, its last tokens, causal
        Shapes: indptr int32 [B + 1], indices int32 [indptr[-1]], last_page_len int32 [B]; seq_lens [B] replaces what
                they say
        Raises: InvalidRequest
        """
        stand_in.refuse("flashinfer", window_right=window_right)
        if q_len_per_req < 1:
            raise InvalidRequest(f"q_len_per_req is {q_len_per_req}; it must be at least 1")
        queries = torch.arange(len(last_page_len) + 1, dtype=torch.int32) * q_len_per_req
        q_type = data_type if q_data_type is None else q_data_type
        self._set_plan(
            queries, (indptr, indices, last_page_len), seq_lens, (num_qo_heads, num_kv_heads, head_dim, page_size),
            (q_type, data_type if kv_data_type is None else kv_data_type, o_data_type), (None, None),
            pos_encoding_mode=pos_encoding_mode, scale=sm_scale, window_left=window_left, causal=True,
            softcap=float(logits_soft_cap or 0.0), split_pages=fixed_split_size,
        )  # fmt: skip

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """Attend from the queries of a step in one layer.

        q_scale, k_scale: factors of the scores. v_scale: a factor of the result. sinks: [H].
        Shapes:   q [B * q_len_per_req, H, D]; returns out, the same shape; with return_lse also float32 [T, H], base 2
        Modifies: out and lse, if given, and returns them
        Raises:   InvalidRequest; KernelUnavailable
        """
        stand_in.refuse(
            "flashinfer", further_arguments=args or None, kv_cache_sf=kv_cache_sf,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        )  # fmt: skip
        return self._run(q, paged_kv_cache, (q_scale, k_scale, v_scale), out, lse, return_lse, window_left, sinks)

    forward = run

    def run_return_lse(self, q: Tensor, paged_kv_cache: Tensor | tuple[Tensor, Tensor], **options: Any) -> Any:
        """Return `run` with return_lse=True."""
        return self.run(q, paged_kv_cache, return_lse=True, **options)

    forward_return_lse = run_return_lse


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """A wrapper whose `run` a CUDA graph may replay after another `plan`."""

    def __init__(
        self,
        workspace_buffer: Tensor,
        indptr_buffer: Tensor,
        indices_buffer: Tensor,
        last_page_len_buffer: Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer, kv_layout, True, use_tensor_cores, indptr_buffer, indices_buffer, last_page_len_buffer
        )


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
        buffers = (paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        super().__init__(float_workspace_buffer, kv_layout, buffers if use_cuda_graph else None, jit_args)

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
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Make the tables of a step. The host reads them, and the mask.

        custom_mask:        of each request bool [queries, tokens], flat, one after the other; it replaces `causal`.
                            Tokens before the request's queries must be visible to all of them.
        packed_custom_mask: the same in bits, the first in the lowest bit; each request begins in a byte of its own
        Others as in the wrapper for decoding.
        Shapes: qo_indptr, paged_kv_indptr int32 [B + 1], paged_kv_indices int32 [paged_kv_indptr[-1]],
                paged_kv_last_page_len int32 [B]
        Raises: InvalidRequest
        """
        if prefix_len_ptr is not None or token_pos_in_items_ptr is not None or max_item_len_ptr is not None:
            raise InvalidRequest("scoring of several items in a request is not served; give a custom_mask")
        self._set_plan(
            qo_indptr.cpu().int(), (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len), seq_lens,
            (num_qo_heads, num_kv_heads, head_dim_qk, page_size), (q_data_type, kv_data_type, o_data_type),
            (custom_mask, packed_custom_mask), pos_encoding_mode=pos_encoding_mode, scale=sm_scale,
            window_left=window_left, causal=bool(causal), softcap=float(logits_soft_cap or 0.0),
            split_pages=fixed_split_size,
        )  # fmt: skip

    begin_forward = plan

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
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Any:
        """Attend from the queries of a step in one layer.

        Shapes:   q [qo_indptr[-1], H, D]; returns out [T, H, Dv]; with return_lse also float32 [T, H], base 2
        Others as in the wrapper for decoding.
        """
        stand_in.refuse(
            "flashinfer", further_arguments=args or None, kv_cache_sf=kv_cache_sf, use_fp16_softmax=use_fp16_softmax,
            uses_spcompress=uses_spcompress, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        )  # fmt: skip
        return self._run(q, paged_kv_cache, (q_scale, k_scale, v_scale), out, lse, return_lse, window_left, sinks)

    forward = run

    def run_return_lse(self, q: Tensor, paged_kv_cache: Tensor | tuple[Tensor, Tensor], **options: Any) -> Any:
        """Return `run` with return_lse=True."""
        return self.run(q, paged_kv_cache, return_lse=True, **options)

    forward_return_lse = run_return_lse


def _dtype(of: object) -> torch.dtype:
    found = getattr(torch, of, None) if isinstance(of, str) else of
    if not isinstance(found, torch.dtype):
        raise InvalidRequest(f"{of!r} is no dtype; give one of torch, or its name")
    return found
