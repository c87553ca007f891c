"""The backend `triton` as the registry loads it: the choice of kernels for a call, and the reasons against a case.

    sequences with few new tokens    decode.py      keys are split; every program does equal work
    sequences with more              prefill.py     queries are split

Each kernel finds its own sequences on the GPU; the host knows only bounds. A launch that finds no sequence costs a few
microseconds; the host leaves it out if the bounds show that it would find none.

Triton launches on the current GPU's stream, whatever GPU the pointers belong to. So each function here makes the GPU of
its tensors the current one (`_on_device_of`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch

from pagedkv.kernels.triton import copy, decode, gather, merge, prefill, write
from pagedkv.kernels.triton.elements import INTERPRET
from pagedkv.kernels.triton.specialisation import why_no_specialisation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from pagedkv.kernels.args import AttentionCall, GatherCall, WriteCall
    from pagedkv.kernels.case import Case

IS_AMD: Final = torch.version.hip is not None


def _on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which the GPU of `x` is the current one."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return out and lse over the keys of both states."""
    with _on_device_of(out_a):
        return merge.merge_states(out_a, lse_a, out_b, lse_b)


def write_kv(call: WriteCall) -> None:
    """Store each new token's K and V at its slot. Modifies: call.k, call.v, and per-(token, head) scales."""
    with _on_device_of(call.k):
        write.write_kv(call)


def gather_kv(call: GatherCall) -> None:
    """Copy the tokens of each sequence out of their pages. Modifies: call.k_out, call.v_out."""
    with _on_device_of(call.k_out):
        gather.gather_kv(call)


def copy_frames(storage: Tensor, copies: Tensor) -> None:
    """Run `storage[dst] = storage[src]` for each row of `copies`, every source read first.

    Modifies: the destination frames.
    """
    with _on_device_of(storage):
        copy.copy_frames(storage, copies)


def paged_attention(call: AttentionCall) -> None:
    """Compute attention for `call`. Modifies: call.out, call.lse."""
    if not call.max_seqlen_q or not call.seq_lens.shape[0] or not call.q.shape[0]:
        return
    few = decode.most_queries(call)
    with _on_device_of(call.q):
        if call.max_seqlen_q <= few:
            decode.paged_decode(call)
        elif call.seq_lens.shape[0] == 1 and call.split_tokens is None:
            prefill.paged_prefill(call, decoded=0)
        else:
            decode.paged_decode(call)
            prefill.paged_prefill(call, decoded=few)


def attend_only(call: AttentionCall, only: Tensor) -> None:
    """Compute attention for the sequences that are not 0 in `only`, int32 [B]. The host does not read it.

    Modifies: their rows of call.out and call.lse.
    """
    with _on_device_of(call.q):
        prefill.paged_prefill(call, decoded=0, only=only)


def present(call: AttentionCall, prefix: int | None) -> tuple[Tensor, Tensor]:
    """Return the tables of the sequences without holes, and what is known of each sequence. See gather.py."""
    with _on_device_of(call.q):
        return gather.present(call, prefix)


def starts_of(lens: Tensor) -> tuple[Tensor, Tensor]:
    """Return where each sequence of `lens` tokens begins in packed rows, and the end: int64 and int32 [B + 1]."""
    with _on_device_of(lens):
        return gather.starts_of(lens)


def store_states(call: AttentionCall, states: Sequence[tuple[Tensor, Tensor]], lens: Tensor, doubtful: Tensor) -> None:
    """Store the state over the keys of one or two states. Modifies: call.out, call.lse, doubtful. See merge.py."""
    with _on_device_of(call.q):
        merge.store_states(call, states, lens, doubtful)


def objections(case: Case) -> list[str]:
    """Return the reasons why these kernels cannot serve `case`: those of the GPU, or those of the kernels."""
    if bool(INTERPRET) != (case.device == "cpu"):
        setting = "TRITON_INTERPRET=1 was set" if INTERPRET else "TRITON_INTERPRET was not 1"
        tensors = f"the tensors are on {case.device}"
        return [f"{setting} when the kernels were imported, and {tensors}: the interpreter is for the CPU"]
    if case.device == "cuda" and not IS_AMD:
        capability = torch.cuda.get_device_capability(case.device_index)
        if capability < (8, 0):
            return ["the GPU is sm_{}{}; Triton's tensor-core code needs sm_80".format(*capability)]
    if case.op == "copy_frames":
        return []
    return [*case.not_a_float(), *(why_no_specialisation(case) if case.op == "paged_attention" else [])]
