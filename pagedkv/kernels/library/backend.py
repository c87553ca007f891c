"""The backend "library": plain causal attention by torch's flash attention, on keys gathered from their pages.

    pages  --(_present)-->  tables without holes  --(gather_kv)-->  packed K, V  --(flash attention)-->  out, lse

It is for long prompts, whose products cost much more than a copy of their keys. "auto" chooses it for these alone
(registry.py). The other operations go to the kernel that "auto" chooses among all others.

Two things are not flash attention's:

    holes            punched pages are left out of the tables. Then the new tokens are still the last ones, so that the
                     mask is right, unless a page of new tokens is punched itself.
    hidden values    0 * NaN is NaN, so a value that is not finite may reach queries that do not see it.

`_doubtful` marks the sequences with such a page, or with NaN in their results. Another kernel computes these a second
time: Triton's prefill on a GPU, where programs of other sequences end at once, so the host reads nothing back.

The products are made by the first of these that serves the call:

    FlashAttention 3  where torch.nn.attention has activated it. It reads keys of the queries' dtype in their pages,
                      without a copy, where torch's operator takes a block table (2.12 and later).
    cuDNN             whole prompts of one length. torch's own check (can_use_cudnn_attention) says whether cuDNN is
                      there and takes the heads. Its mask begins at the first key, and the host knows bounds alone:
                      if lengths on the device are not those of whole prompts, all sequences are doubtful.
    FlashAttention 2  all other calls on a GPU
    CPU               torch's flash attention for the CPU, one sequence at a time, to prove this file

The buffer of keys has the size that the bounds allow, B * max_seqlen_k.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from pagedkv.kernels import checks, registry
from pagedkv.kernels.args import GatherCall, GatherSource
from pagedkv.kernels.case import attention_case, copy_case, gather_case, merge_case, write_case

if TYPE_CHECKING:
    from pagedkv.kernels.args import AttentionCall, WriteCall
    from pagedkv.kernels.case import Backend, Case

LARGEST_HEAD_DIM: Final = 256
SERVED: Final = frozenset({"tensor_scale", "token_head_scale", "long_prefill", "whole_prompts"})
"""The features of a case that it serves. Scales are multiplied where keys are gathered."""


def objections(case: Case) -> list[str]:
    """Return all reasons why this backend cannot serve `case`."""
    if case.op != "paged_attention":
        return []
    found = []
    if case.device == "cuda":
        found += _triton("availability").objections(case)
        if torch.version.hip is not None:
            found.append("it was written for NVIDIA's GPUs")
        elif not torch.backends.cuda.is_flash_attention_available():
            found.append(f"torch {torch.__version__} was built without flash attention")
    if case.dtype not in (None, "bfloat16", "float16"):
        found.append(f"q is {case.dtype}; it takes bfloat16 and float16")
    dims = {dim for dim in (case.head_dim, case.head_dim_v) if dim is not None}
    if len(dims) > 1:
        found.append(f"head_dim is {case.head_dim} and head_dim_v {case.head_dim_v}; it takes equal ones")
    elif any(dim % 8 or dim > LARGEST_HEAD_DIM for dim in dims):
        found.append(f"head_dim is {case.head_dim}; it takes multiples of 8 up to {LARGEST_HEAD_DIM}")
    if others := sorted(case.features - SERVED):
        found.append(f"it computes causal attention without options; the call has {', '.join(others)}")
    return found


def paged_attention(call: AttentionCall) -> None:
    """Attend. Modifies: call.out, call.lse.

    Raises: InvalidRequest, on the CPU, for tables that name what is not there
    """
    if call.q.device.type == "cpu":
        checks.table_values(call)
    T, B = call.q.shape[0], call.seq_lens.shape[0]
    if not T or not B or not call.max_seqlen_q:
        return
    table, lens, lost = _present(call)
    out, lse, wrong = (_on_cpu if call.q.device.type == "cpu" else _on_gpu)(call, table, lens)
    lost = lost if wrong is None else lost | wrong
    token = torch.arange(T, device=call.q.device, dtype=torch.int32)
    sequence = torch.searchsorted(call.cu_seqlens_q.narrow(0, 1, B), token, right=True)  # B for padding
    ends = torch.nn.functional.pad(lens, (0, 1), value=1)
    blind = (ends.index_select(0, sequence) == 0).unsqueeze(1)
    written = (sequence < B).unsqueeze(1)
    lse = lse.masked_fill(blind, -torch.inf)
    out = out.masked_fill_(blind.unsqueeze(2), 0.0)
    torch.where(written.unsqueeze(2), out, call.out, out=call.out)
    torch.where(written, lse, call.lse, out=call.lse)
    _repair(call, _doubtful(out, sequence, lost))


def _present(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tables without holes [B, P], the tokens of each sequence that are present int32 [B], and which
    sequences have new tokens in punched pages, bool [B]."""
    B, S = call.seq_lens.shape[0], call.k.shape[1]
    new = call.cu_seqlens_q.diff()
    total = torch.where(new > 0, call.seq_lens, 0).unsqueeze(1)
    pages = min(call.block_table.shape[1], -(-call.max_seqlen_k // S))
    table = call.block_table.narrow(1, 0, pages)
    table = table.narrow(0, 0, B) if call.rows is None else table.index_select(0, call.rows)
    first = torch.arange(0, pages * S, S, device=table.device, dtype=torch.int32)
    tokens = (total - first).clamp_(0, S)
    hole = (table < 0) & (tokens > 0)
    has_new = first + S > total - new.unsqueeze(1)
    order = hole.to(torch.uint8).argsort(stable=True, dim=1)
    lens = tokens.masked_fill(hole, 0).sum(1, dtype=torch.int32)
    return table.gather(1, order), lens, (hole & has_new).any(1)


def _gathered(call: AttentionCall, table: Tensor, lens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the keys and values of all sequences [N, K, D], packed, and int64 [B + 1]: where each sequence begins."""
    source = GatherSource(*call[:4], table, None, lens, torch.zeros_like(lens))
    starts = source.starts()
    on_cpu = lens.device.type == "cpu"
    rows = int(starts[-1]) if on_cpu else lens.shape[0] * call.max_seqlen_k
    k, v = (call.q.new_empty(rows, call.k.shape[2], call.q.shape[2]) for _ in range(2))
    gather_kv(GatherCall(source, starts, k, v))
    return k, v, starts


def _on_gpu(call: AttentionCall, table: Tensor, lens: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return out [T, H, D], lse [T, H], and whether both are wrong, a bool on the device; None: they are right. Rows
    past the last sequence hold anything."""
    if _reads_pages(call):
        return *_flash(call, call.k, call.v, None, seqused_k=lens, block_table=table), None
    k, v, starts = _gathered(call, table, lens)
    if _is_whole(call):
        prompts = [x.view(len(lens), call.max_seqlen_q, *x.shape[1:]).transpose(1, 2) for x in (call.q, k, v)]
        if _cudnn_serves(*prompts):
            return *_by_cudnn(call, *prompts), _uneven(call, starts)
    return *_flash(call, k, v, starts.int()), None


def _reads_pages(call: AttentionCall) -> bool:
    """Return whether flash attention reads this pool in its pages."""
    active = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    plain = call.k.dtype == call.q.dtype and call.k_scale is None and call.v_scale is None
    return active == "FA3" and plain and _takes_pages()


@cache
def _takes_pages() -> bool:
    """Return whether torch's operator has an argument for the page table."""
    operator = torch.ops.aten._flash_attention_forward.default
    return any(argument.name == "block_table" for argument in operator._schema.arguments)


def _flash(call: AttentionCall, k: Tensor, v: Tensor, starts: Tensor | None, **pages: Tensor) -> tuple[Tensor, Tensor]:
    """Return out [T, H, D] and lse [T, H] by FlashAttention 2, or by what torch.nn.attention has activated.

    pages: lengths and page table, where k and v are the pool.
    """
    bounds = (call.max_seqlen_q, call.max_seqlen_k)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        call.q, k, v, call.cu_seqlens_q, starts, *bounds, 0.0, True, False, scale=call.scale, **pages
    )
    return out, lse.t()


def _is_whole(call: AttentionCall) -> bool:
    """Return whether, by the host's bounds, every sequence is a whole prompt of max_seqlen_q tokens."""
    return call.q.shape[0] == call.seq_lens.shape[0] * call.max_seqlen_k and call.max_seqlen_q == call.max_seqlen_k


def _cudnn_serves(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether torch would call cuDNN for q [B, H, M, D] and k, v [B, K, M, D]."""
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, q.shape[1] != k.shape[1])
    return torch.backends.cuda.can_use_cudnn_attention(params)


def _by_cudnn(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return out [T, H, D] and lse [T, H] of whole prompts q [B, H, M, D] and k, v [B, K, M, D]."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, True, False, scale=call.scale
    )
    return out.transpose(1, 2).flatten(0, 1), lse.reshape(q.shape[:3]).transpose(1, 2).flatten(0, 1)


def _uneven(call: AttentionCall, starts: Tensor) -> Tensor:
    """Return a bool on the device: whether some sequence is no whole prompt of max_seqlen_q tokens."""
    even = torch.arange(len(starts), device=starts.device) * call.max_seqlen_q
    return ((starts != even) | (call.cu_seqlens_q != even)).any()


def _on_cpu(call: AttentionCall, table: Tensor, lens: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute as `_on_gpu` does, one sequence after another."""
    k, v, starts = _gathered(call, table, lens)
    G = call.q.shape[1] // k.shape[1]
    out, lse = torch.zeros_like(call.q), call.lse.new_full(call.lse.shape, -torch.inf)
    queries, keys = call.cu_seqlens_q.tolist(), starts.tolist()
    for b in range(len(queries) - 1):
        rows, at = slice(*queries[b : b + 2]), slice(*keys[b : b + 2])
        m, n = rows.stop - rows.start, at.stop - at.start
        if not m or not n:  # torch divides by these
            continue
        mask = torch.zeros(m, n).masked_fill_(~torch.ones(m, n, dtype=torch.bool).tril_(n - m), -torch.inf)
        qkv = (call.q[rows], k[at].repeat_interleave(G, 1), v[at].repeat_interleave(G, 1))
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(x.transpose(0, 1).unsqueeze(0) for x in qkv), 0.0, False, attn_mask=mask, scale=call.scale
        )
        out[rows], lse[rows] = (x.squeeze(0).transpose(0, 1) for x in found)
    return out, lse, None


def _doubtful(out: Tensor, sequence: Tensor, lost: Tensor) -> Tensor:
    """Return int32 [B]: not 0 for sequences that flash attention may have computed wrongly."""
    is_nan = out.sum((1, 2), dtype=torch.float32).isnan()
    counts = lost.new_zeros(lost.shape[0] + 1, dtype=torch.int32).index_add_(0, sequence, is_nan.int())
    return counts.narrow(0, 0, lost.shape[0]) + lost


def _repair(call: AttentionCall, doubtful: Tensor) -> None:
    """Compute the doubtful sequences again with another kernel. Modifies: their rows of call.out and call.lse."""
    if call.q.device.type != "cpu":
        _triton("backend").attend_only(call, doubtful)
    elif doubtful.any():
        again = _other(attention_case(call, call, call.q, (None, None)))
        starts = call.cu_seqlens_q.tolist()
        for b in doubtful.nonzero().flatten().tolist():
            row, rows = b if call.rows is None else int(call.rows[b]), slice(*starts[b : b + 2])
            alone = {
                "block_table": call.block_table[row : row + 1],
                "rows": None,
                "seq_lens": call.seq_lens[b : b + 1],
                "cu_seqlens_q": call.cu_seqlens_q[b : b + 2] - starts[b],
            }
            alone |= {name: getattr(call, name)[rows] for name in ("q", "out", "lse")}
            again.paged_attention(call._replace(**alone))


def _triton(module: str) -> Any:
    return importlib.import_module(f"pagedkv.kernels.triton.{module}")


def _other(case: Case) -> Backend:
    return registry.other_than("library", case).load()


def write_kv(call: WriteCall) -> None:
    """Store each new token's K and V at its slot, by another kernel."""
    _other(write_case(call, call.cos is not None, (call.k_new, call.v_new))).write_kv(call)


def gather_kv(call: GatherCall) -> None:
    """Copy the tokens of each sequence out of their pages, by another kernel. Modifies: call.k_out, call.v_out."""
    _other(gather_case(call)).gather_kv(call)


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return out and lse over the keys of both states, by another kernel."""
    return _other(merge_case(out_a)).merge_states(out_a, lse_a, out_b, lse_b)


def copy_frames(storage: Tensor, copies: Tensor) -> None:
    """Copy frames inside `storage`, every source read first, by another kernel."""
    _other(copy_case(storage)).copy_frames(storage, copies)
