"""The backend `triton` as the registry loads it: the choice of kernels for a call, and the reasons against a case.

    sequences with few new tokens    decode.py      keys are split; every program does equal work
    sequences with more              prefill.py     queries are split

Each kernel finds its own sequences on the GPU; the host knows only bounds. A launch that finds no sequence costs a few
microseconds; the host leaves it out if the bounds show that it would find none.

Triton launches on the current GPU's stream, whatever GPU the pointers belong to. So each function here makes the GPU of
its tensors the current one (`_on_its_gpu`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import torch
from torch import Tensor

from pagedkv.kernels.triton import copy, decode, gather, merge, prefill, write
from pagedkv.kernels.triton.elements import INTERPRET
from pagedkv.kernels.triton.specialisation import why_no_specialisation

if TYPE_CHECKING:
    from pagedkv.kernels.args import AttentionCall
    from pagedkv.kernels.case import Case

Function = TypeVar("Function", bound=Callable[..., Any])

IS_AMD: Final = torch.version.hip is not None


def _on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which the GPU of `x` is the current one."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()


def _on_its_gpu(function: Function) -> Function:
    """Return `function` of a tensor, or of a call with tensors, as one that runs on their GPU."""

    @wraps(function)
    def run(first: Any, *others: Any) -> Any:
        x = first if isinstance(first, Tensor) else next(x for x in first if isinstance(x, Tensor))
        with _on_device_of(x):
            return function(first, *others)

    return cast("Function", run)


merge_states = _on_its_gpu(merge.merge_states)
write_kv = _on_its_gpu(write.write_kv)
gather_kv = _on_its_gpu(gather.gather_kv)
copy_frames = _on_its_gpu(copy.copy_frames)
present = _on_its_gpu(gather.present)
starts_of = _on_its_gpu(gather.starts_of)
store_states = _on_its_gpu(merge.store_states)


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
