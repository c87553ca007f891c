"""The CUDA kernels with pieces merged by a second launch, which begins while the first one ends, from compute capability 9.0 on.

A candidate of its own, as cuda_bulk.py is and for the same reason: to be forced and measured beside `cuda`, whose bits its results have.
There the last CTA to arrive at a shared unit merges it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pagedkv.kernels import cuda, cuda_launch
from pagedkv.kernels.cuda import copy_frames, merge_states, ready_write, write_kv

if TYPE_CHECKING:
    from pagedkv.kernels.args import AttentionCall
    from pagedkv.kernels.registry import Case

__all__ = ["copy_frames", "merge_states", "objections", "paged_attention", "ready", "ready_write", "write_kv"]

WAYS: Final = cuda_launch.Ways(second_launch=True)


def objections(case: Case) -> list[str]:
    """Why these kernels cannot serve `case`: all that `cuda` objects to, and GPUs whose launches cannot begin early."""
    return [*cuda.objections(case), *cuda.too_old("launches that begin early need")]


def paged_attention(call: AttentionCall) -> None:
    """Attend. Modifies: call.out, call.lse."""
    from pagedkv.kernels import cuda_driver

    cuda_launch.attend(call, cuda_driver.driver(call.q.device), WAYS)


def ready(call: AttentionCall) -> cuda_launch.Ready:
    """What attends, given the fields of calls like this one (known.py)."""
    from pagedkv.kernels import cuda_driver

    return cuda_launch.ready(call, cuda_driver.driver(call.q.device), WAYS)
