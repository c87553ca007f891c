"""The CUDA kernels with keys and values copied in bulk: one instruction for a row, from compute capability 9.0 on (csrc/cuda/stages.cuh).

A candidate of its own, so that it can be forced and measured beside `cuda`, whose results it has bit by bit; "auto" never comes to it:
`cuda` objects to nothing that this does not object to. Rows that are no multiples of 16 bytes, or begin at none, are copied as there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pagedkv.kernels import cuda, cuda_launch
from pagedkv.kernels.cuda import copy_frames, merge_states, ready_write, write_kv

if TYPE_CHECKING:
    from pagedkv.kernels.args import AttentionCall
    from pagedkv.kernels.registry import Case

__all__ = ["copy_frames", "merge_states", "objections", "paged_attention", "ready", "ready_write", "write_kv"]

WAYS: Final = cuda_launch.Ways(bulk=True)


def objections(case: Case) -> list[str]:
    """Why these kernels cannot serve `case`: all that `cuda` objects to, and GPUs without bulk copies."""
    return [*cuda.objections(case), *cuda.too_old("bulk copies need")]


def paged_attention(call: AttentionCall) -> None:
    """Attend. Modifies: call.out, call.lse."""
    from pagedkv.kernels import cuda_driver

    cuda_launch.attend(call, cuda_driver.driver(call.q.device), WAYS)


def ready(call: AttentionCall) -> cuda_launch.Ready:
    """What attends, given the fields of calls like this one (known.py)."""
    from pagedkv.kernels import cuda_driver

    return cuda_launch.ready(call, cuda_driver.driver(call.q.device), WAYS)
