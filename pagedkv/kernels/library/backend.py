"""The backend "library": causal attention by libraries of torch and vLLM, on keys gathered from their pages or in them.

    pages -(_present)-> tables without holes -(gather_kv)-> K, V -(flash attention)-> states -(_store)-> out, lse

It is for long prompts: their products cost much more than a copy of their keys. "auto" chooses it for these, and for
all prefills that need no copy of keys (registry.py). The other operations go to the kernel that "auto" chooses among
all others.

The products are made by the first of these that serves the call:

    cuDNN             whole prompts of one length; and one sequence with keys before its new tokens, where
                      FlashAttention 3 does not read the pool. products.py has the shapes of its calls.
    FlashAttention 3  all other calls in a process of vLLM on Hopper. It reads keys of the queries' dtype in their
                      pages, without a copy, and takes windows, soft caps and sinks
    FlashAttention 2  all other calls on a GPU; another version where torch.nn.attention has activated it
    CPU               torch's flash attention for the CPU, one sequence at a time, to prove this file

A sequence is doubtful, and another kernel computes it a second time, if

    a page of its new tokens, or of       other holes are left out of the tables. The new tokens are still the last
    their windows, is a hole              ones, and their windows hold the same tokens
    there are sinks, and one is no        FlashAttention 3 takes sinks in bfloat16, and gives a query without keys the
    bfloat16, or the sequence is empty    LSE -inf
    a result is NaN, or one of two        0 * NaN is NaN, so a value that is not finite may reach queries that do not
    states is not finite                  see it; and a state with a weight of 0 would not reach queries that see it
    cuDNN was called and its lengths are  cuDNN's mask knows nothing of lengths, and the host knows bounds alone: they
    not those that the bounds say         must be the lengths

The second kernel is Triton's prefill on a GPU, where programs of other sequences end at once, so the host reads nothing
back. `_present` and `_store` are one Triton kernel each there; torch's operations, here, are their definition.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from pagedkv.kernels import checks, registry
from pagedkv.kernels.args import GatherCall, GatherSource
from pagedkv.kernels.case import Case
from pagedkv.kernels.library.products import AttentionState, is_aligned, products_of

if TYPE_CHECKING:
    from pagedkv.kernels.args import AttentionCall, WriteCall
    from pagedkv.kernels.case import Backend

LARGEST_HEAD_DIM: Final = 256
SERVED: Final = frozenset({"tensor_scale", "token_head_scale", "prefill", "long_prefill"})
"""The features of a case that it serves. Scales are multiplied where keys are gathered."""
_IN_PAGES: Final = frozenset({"window", "softcap", "sinks", "prefill", "long_prefill", "in_pages"})
"""The features of a case that FlashAttention 3 serves over the pages."""


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
    served = SERVED | _IN_PAGES if _reads_pages(case) else SERVED
    if others := sorted(case.features - served):
        found.append(f"it computes causal attention without options; the call has {', '.join(others)}")
    return found


def _reads_pages(case: Case) -> bool:
    """Return whether FlashAttention 3 would read the keys of `case` in their pages: in a process of vLLM, on Hopper.

    fp8 keys need fp8 queries there, and to round the queries is a larger error than the contract allows. With sinks it
    takes up to 64 heads.
    """
    takes = case.kv_dtype in (None, "bfloat16", "float16") and case.features <= _IN_PAGES
    few = "sinks" not in case.features or (case.num_heads or 0) <= 64
    is_loaded = case.device == "cuda" and _flash_attention_3() is not None
    return takes and few and is_loaded and torch.cuda.get_device_capability(case.device_index)[0] == 9


def _flash_attention_3() -> Any:
    """Return the operator of FlashAttention 3 that vLLM loads while it starts, or None."""
    return getattr(torch.ops._vllm_fa3_C, "fwd", None)


def _in_pages(call: AttentionCall) -> bool:
    """Return whether FlashAttention 3 reads this pool in its pages. It copies 16 bytes at a time."""
    if _flash_attention_3() is None or not (is_aligned(call.k) and is_aligned(call.v)):
        return False
    return _reads_pages(Case.of_attention(call, call, call.q))


def _has_options(call: AttentionCall) -> bool:
    return call.window is not None or call.softcap != 0 or call.sinks is not None


class _Present(NamedTuple):
    """The page table of each sequence without holes, its tokens that are there, 0, and whether it is doubtful.

    Shapes: table int32 [B, P], entries past the last page hold anything; lens, zeros, doubtful int32 [B]
    """

    table: Tensor
    lens: Tensor
    zeros: Tensor
    doubtful: Tensor


def paged_attention(call: AttentionCall) -> None:
    """Attend. Modifies: call.out, call.lse.

    Raises: InvalidRequest, on the CPU, for tables that name what is not there
    """
    if _on_host(call):
        checks.table_values(call)
    if not call.q.shape[0] or not call.seq_lens.shape[0] or not call.max_seqlen_q:
        return
    if _has_options(call) and not _in_pages(call):  # rows of the pool are not aligned
        batch = (call.seq_lens, call.max_seqlen_k)
        return _other(Case.of_attention(call, call, call.q, (None, call.causal_of), batch)).paged_attention(call)
    found, states = (_on_cpu if _on_host(call) else _on_gpu)(call)
    _store(call, states, found)
    _repair(call, found.doubtful)


def _on_host(call: AttentionCall) -> bool:
    return call.q.device.type == "cpu"


def _present(call: AttentionCall, prefix: int | None = None) -> _Present:
    """Return what is there of each sequence.

    prefix: how many tokens must be there before the new ones, which must begin at token b * max_seqlen_q; any other
            sequence is doubtful. None: these are free.
    """
    if not _on_host(call):
        table, (lens, zeros, doubtful) = _triton("backend").present(call, prefix)
        return _Present(table, lens, zeros, doubtful)
    B, S = call.seq_lens.shape[0], call.k.shape[1]
    new = call.cu_seqlens_q.diff()
    total = torch.where(new > 0, call.seq_lens, 0).unsqueeze(1)
    pages = min(call.block_table.shape[1], -(-call.max_seqlen_k // S))
    table = call.block_table.narrow(1, 0, pages)
    table = table.narrow(0, 0, B) if call.rows is None else table.index_select(0, call.rows)
    first = torch.arange(0, pages * S, S, device=table.device, dtype=torch.int32)
    tokens = (total - first).clamp_(0, S)
    hole = (table < 0) & (tokens > 0)
    reach = 0 if call.window is None else min(call.window - 1, call.max_seqlen_k)
    has_new = first + S > total - new.unsqueeze(1) - reach
    order = hole.to(torch.uint8).argsort(stable=True, dim=1)
    lens = tokens.masked_fill(hole, 0).sum(1, dtype=torch.int32)
    doubtful = (hole & has_new).any(1)
    if prefix is not None:
        begin = torch.arange(B, dtype=torch.int32) * call.max_seqlen_q
        doubtful |= (call.cu_seqlens_q[:B] != begin) | (lens - new != prefix)
    return _Present(table.gather(1, order), lens, torch.zeros_like(lens), doubtful.int())


def _store(call: AttentionCall, states: list[AttentionState], found: _Present) -> None:
    """Store the state over the keys of one or two states, 0 and -inf for a sequence without keys.

    Modifies: call.out, call.lse; found.doubtful, where a result is NaN or one of two states is not finite
    """
    if not _on_host(call):
        return _triton("backend").store_states(call, states, found.lens, found.doubtful)  # type: ignore[no-any-return]
    B = found.lens.shape[0]
    outs, lses = ([x.flatten(0, 1) for x in parts] for parts in zip(*states, strict=True))
    out, lse = (outs[0], lses[0]) if len(states) == 1 else _merged(outs, lses)
    lost = out.isnan().any(2).any(1)
    if len(states) == 2:  # a weight of 0 hides what is not finite
        for x, log in zip(outs, lses, strict=True):
            lost |= (~x.isfinite().all(2) & (log != -torch.inf)).any(1)
    token = torch.arange(call.q.shape[0], dtype=torch.int32)
    sequence = torch.searchsorted(call.cu_seqlens_q.narrow(0, 1, B), token, right=True)  # B for padding
    ends = torch.nn.functional.pad(found.lens, (0, 1), value=1)
    blind, written = (ends.index_select(0, sequence) == 0).unsqueeze(1), (sequence < B).unsqueeze(1)
    out, lse = out.masked_fill(blind.unsqueeze(2), 0.0), lse.masked_fill(blind, -torch.inf)
    torch.where(written.unsqueeze(2), out, call.out, out=call.out)
    torch.where(written, lse, call.lse, out=call.lse)
    found.doubtful[sequence[lost & written[:, 0] & ~blind[:, 0]]] = 1


def _merged(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return out and lse over the keys of two states, by the formula of `merge_states`."""
    lse = torch.logaddexp(*lses)
    weights = [(x - torch.where(lse == -torch.inf, 0.0, lse)).exp().unsqueeze(2) for x in lses]
    parts = [torch.where(w > 0, out.float() * w, 0.0) for out, w in zip(outs, weights, strict=True)]
    return (parts[0] + parts[1]).to(outs[0].dtype), lse


def _gathered(call: AttentionCall, found: _Present) -> tuple[Tensor, Tensor, Tensor]:
    """Return the keys and values of all sequences [N, K, D], packed, and int32 [B + 1]: where each sequence begins."""
    source = GatherSource(*call[:5], found.table, None, found.lens, found.zeros)
    starts, narrow = _triton("backend").starts_of(found.lens) if not _on_host(call) else (source.starts(),) * 2
    rows = int(starts[-1]) if _on_host(call) else found.lens.shape[0] * call.max_seqlen_k
    k, v = (call.q.new_empty(rows, call.k.shape[2], call.q.shape[2]) for _ in range(2))
    gather_kv(GatherCall(source, starts, k, v))
    return k, v, narrow


def _on_gpu(call: AttentionCall) -> tuple[_Present, list[AttentionState]]:
    """Return what is there of each sequence, and the states of its new tokens. Rows past the last sequence hold
    anything."""
    in_pages = _in_pages(call)
    is_plain = call.max_seqlen_k <= call.max_seqlen_q and not _has_options(call)
    products = products_of(call) if is_plain or not in_pages else None
    if products is not None:
        found = _present(call, products.prefix)
        source = GatherSource(*call[:5], found.table, None, found.lens, found.zeros)
        gather_kv(GatherCall(source, None, products.k, products.v))
        return found, products.states(call.scale)
    found = _present(call)
    return found, [_flash_in_pages(call, found) if in_pages else _flash(call, *_gathered(call, found))]


def _flash_in_pages(call: AttentionCall, found: _Present) -> AttentionState:
    """Return the state of all new tokens by FlashAttention 3, which reads K and V in their pages.

    Arguments go by the names of the operator's schema, in which versions differ: a name that is not here is None.
    Modifies: found.doubtful, if there are sinks
    """
    sinks = None
    if call.sinks is not None:
        sinks = call.sinks.to(torch.bfloat16).contiguous()
        found.doubtful.masked_fill_((sinks != call.sinks).any() | (found.lens == 0), 1)
    operator = _flash_attention_3().default
    q = call.q if is_aligned(call.q) else call.q.clone(memory_format=torch.contiguous_format)
    left = -1 if call.window is None else min(call.window - 1, call.max_seqlen_k)
    given = {
        "q": q, "k": call.k, "v": call.v, "page_table": found.table, "seqused_k": found.lens, "s_aux": sinks,
        "cu_seqlens_q": call.cu_seqlens_q, "max_seqlen_q": call.max_seqlen_q, "max_seqlen_k": call.max_seqlen_k,
        "softmax_scale": call.scale, "softcap": call.softcap, "is_causal": True, "is_rotary_interleaved": False,
        "window_size_left": left, "window_size_right": 0, "cp_world_size": 1, "cp_rank": 0, "sm_margin": 0,
        "num_splits": 0,  # as many as it finds best
    }  # fmt: skip
    out, lse, *_ = operator(*(given.get(argument.name) for argument in operator._schema.arguments))
    return AttentionState(out.unsqueeze(0), lse.t().unsqueeze(0))


def _flash(call: AttentionCall, k: Tensor, v: Tensor, starts: Tensor) -> AttentionState:
    """Return the state of all new tokens by FlashAttention 2, or by what torch.nn.attention has activated.

    The bound of queries is never 1. With it and fewer kv heads than heads, FlashAttention 2 takes row b of q for the
    one query of sequence b: it refuses q with padding, and is wrong where a sequence without queries hides padding.
    """
    bounds = (max(2, call.max_seqlen_q), call.max_seqlen_k)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        call.q, k, v, call.cu_seqlens_q, starts, *bounds, 0.0, True, False, scale=call.scale
    )
    return AttentionState(out.unsqueeze(0), lse.t().unsqueeze(0))


def _on_cpu(call: AttentionCall) -> tuple[_Present, list[AttentionState]]:
    """Compute as `_on_gpu` does, one sequence after another."""
    found = _present(call)
    k, v, starts = _gathered(call, found)
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
        one = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(x.transpose(0, 1).unsqueeze(0) for x in qkv), 0.0, False, attn_mask=mask, scale=call.scale
        )
        out[rows], lse[rows] = (x.squeeze(0).transpose(0, 1) for x in one)
    return found, [AttentionState(out.unsqueeze(0), lse.unsqueeze(0))]


def _repair(call: AttentionCall, doubtful: Tensor) -> None:
    """Compute the doubtful sequences again with another kernel. Modifies: their rows of call.out and call.lse."""
    if not _on_host(call):
        _triton("backend").attend_only(call, doubtful)
    elif doubtful.any():
        again = _other(Case.of_attention(call, call, call.q, (None, None)))
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
    _other(Case.of_write(call, call.cos is not None, (call.k_new, call.v_new))).write_kv(call)


def gather_kv(call: GatherCall) -> None:
    """Copy the tokens of each sequence out of their pages, by another kernel. Modifies: call.k_out, call.v_out."""
    _other(Case.of_gather(call)).gather_kv(call)


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return out and lse over the keys of both states, by another kernel."""
    return _other(Case.of_merge(out_a)).merge_states(out_a, lse_a, out_b, lse_b)


def copy_frames(storage: Tensor, copies: Tensor) -> None:
    """Copy frames inside `storage`, every source read first, by another kernel."""
    _other(Case.of_copy(storage)).copy_frames(storage, copies)
