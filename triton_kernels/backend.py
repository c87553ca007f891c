"""The backend `triton` as the registry loads it: the choice of kernels for a call, and the reasons against a case.

    sequences with few new tokens    decode.py      keys are split; every program does equal work
    sequences with more              prefill.py     queries are split

Each kernel finds its own sequences on the GPU; the host knows only bounds. A launch that finds no sequence costs a few
microseconds; the host leaves it out if the bounds show that it would find none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from pagedkv.kernels.triton import copy, decode, gather, merge, prefill, write
from pagedkv.kernels.triton.elements import INTERPRET
from pagedkv.kernels.triton.specialisation import why_no_specialisation

if TYPE_CHECKING:
    from pagedkv.kernels.args import AttentionCall
    from pagedkv.kernels.case import Case

IS_AMD: Final = torch.version.hip is not None

merge_states = merge.merge_states
write_kv = write.write_kv
gather_kv = gather.gather_kv
copy_frames = copy.copy_frames


def paged_attention(call: AttentionCall) -> None:
    """Compute attention for `call`. Modifies: call.out, call.lse."""
    if not call.max_seqlen_q or not call.seq_lens.shape[0] or not call.q.shape[0]:
        return
    few = decode.most_queries(call)
    if call.max_seqlen_q <= few:
        decode.paged_decode(call)
    elif call.seq_lens.shape[0] == 1 and call.split_tokens is None:
        prefill.paged_prefill(call, decoded=0)
    else:
        decode.paged_decode(call)
        prefill.paged_prefill(call, decoded=few)


def objections(case: Case) -> list[str]:
    """Return the reasons why these kernels cannot serve `case`: those of the GPU, or those of the kernels."""
    if bool(INTERPRET) != (case.device == "cpu"):
        setting = "TRITON_INTERPRET=1 was set" if INTERPRET else "TRITON_INTERPRET was not 1"
        tensors = f"the tensors are on {case.device}"
        return [f"{setting} when the kernels were imported, and {tensors}: the interpreter is for the CPU"]
    if case.device == "cuda" and not IS_AMD and torch.cuda.get_device_capability() < (8, 0):
        return ["the GPU is sm_{}{}; Triton's tensor-core code needs sm_80".format(*torch.cuda.get_device_capability())]
    if case.op == "copy_frames":
        return []
    return [*case.not_a_float(), *(why_no_specialisation(case) if case.op == "paged_attention" else [])]
