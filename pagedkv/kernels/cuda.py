"""The CUDA C++ kernels of csrc/cuda, seen from Python: what they cannot do, and where a call goes.

docs/cuda-kernels.md tells how they work. This file imports no CuPy: that is found missing, or found, when someone asks. Specialisations
(cuda_shapes.py) are compiled at first use and kept on disk (cuda_compile.py), and run by cuda_driver.py; what a launch is made of is
cuda_launch.py's for attention, cuda_moves.py's for the other three operations.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import TYPE_CHECKING, Final

import torch

from pagedkv.errors import InvalidRequest
from pagedkv.kernels import cuda_launch, cuda_moves, cuda_shapes

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.kernels.args import AttentionCall, WriteCall
    from pagedkv.kernels.registry import Case

FLOATS: Final = ("float32", "bfloat16", "float16")


def objections(case: Case) -> list[str]:
    """Why these kernels cannot serve `case`: of this machine, of the case, and of the case on this machine's GPU."""
    found = [*machine_objections(), *case_objections(case)]
    return found or room_objections(case, shared_memory())


def case_objections(case: Case) -> list[str]:
    """What the kernels cannot do on any machine."""
    found = []
    if case.dtype not in (None, *FLOATS):
        of = {"paged_attention": "q", "write_kv": "k"}.get(case.op, "out")
        found.append(f"{of} is {case.dtype}; it takes {', '.join(FLOATS)}")
    for name, dim in (("head_dim", case.head_dim), ("head_dim_v", case.head_dim_v)):
        if case.op == "paged_attention":
            found += _dim_objections(name, dim, case)
        elif dim is not None and dim > cuda_shapes.LONGEST_ROW:
            found.append(f"{name} is {dim}; it takes up to {cuda_shapes.LONGEST_ROW}")
    return found


def _dim_objections(name: str, dim: int | None, case: Case) -> list[str]:
    """What attention has against a head dim: fragments of the tensor cores have 16 columns, and warps share wide heads equally."""
    dims = (case.head_dim or dim or 16, case.head_dim_v or dim or 16)
    unit = 16 * cuda_shapes.parts_of(dims, (cuda_shapes.KINDS.get(case.dtype or "", 0), 0))
    if dim is None or (dim % unit == 0 and 0 < dim <= cuda_shapes.LARGEST_HEAD_DIM):
        return []
    return [f"{name} is {dim}; with head dims {dims[0]}/{dims[1]} it takes multiples of {unit} up to {cuda_shapes.LARGEST_HEAD_DIM}"]


def room_objections(case: Case, shared: tuple[int, int]) -> list[str]:
    """Whether attention, as far as `case` is known, fits into so much shared memory: of a CTA, of an SM."""
    if case.op != "paged_attention" or case.dtype is None or case.kv_dtype not in cuda_shapes.KINDS or case.head_dim is None:
        return []
    kinds = (cuda_shapes.KINDS[case.dtype], cuda_shapes.KINDS[case.kv_dtype])
    keys = cuda_shapes.Keys(token_scales=int("token_head_scale" in case.features), v_in_k=1)  # at best V needs no room of its own
    try:
        for rows in cuda_shapes.CLASSES:
            cuda_shapes.shape_for(kinds, (case.head_dim, case.head_dim_v or case.head_dim), rows, keys, shared)
    except InvalidRequest as why:
        return [str(why)]
    return []


@cache
def shared_memory() -> tuple[int, int]:
    """Bytes of it that a CTA may have, and that an SM has; without a torch that tells, no limit."""
    about = torch.cuda.get_device_properties() if torch.cuda.is_available() else None
    return (
        getattr(about, "shared_memory_per_block_optin", 1 << 30),
        getattr(about, "shared_memory_per_multiprocessor", 1 << 30),
    )


@cache
def machine_objections() -> tuple[str, ...]:
    """What this machine lacks."""
    found = []
    if importlib.util.find_spec("cupy") is None:
        found.append("CuPy is not installed; install pagedkv[cuda13], or [cuda12] for a driver older than 580")
    if torch.version.cuda is None:
        found.append(f"torch {torch.__version__} is built without CUDA; install a build with it")
    elif not torch.cuda.is_available():
        found.append("torch finds no CUDA device or driver")
    elif torch.cuda.get_device_capability() < (8, 0):
        found.append("the GPU is {}.{}; the kernels need compute capability 8.0".format(*torch.cuda.get_device_capability()))
    return tuple(found)


@cache
def too_old(what_needs: str) -> tuple[str, ...]:
    """An objection to GPUs before compute capability 9.0."""
    if not torch.cuda.is_available() or (capability := torch.cuda.get_device_capability()) >= (9, 0):
        return ()
    return ("the GPU is {}.{}; {} compute capability 9.0".format(*capability, what_needs),)


def paged_attention(call: AttentionCall) -> None:
    """Attend. Modifies: call.out, call.lse."""
    from pagedkv.kernels import cuda_driver

    cuda_launch.attend(call, cuda_driver.driver(call.q.device))


def ready(call: AttentionCall) -> cuda_launch.Ready:
    """What attends, given the fields of calls like this one (known.py)."""
    from pagedkv.kernels import cuda_driver

    return cuda_launch.ready(call, cuda_driver.driver(call.q.device))


def write_kv(call: WriteCall) -> None:
    """Store each new token's K and V at its slot. Modifies: call.k, call.v, and per-(token, head) scales."""
    from pagedkv.kernels import cuda_driver

    cuda_moves.write_kv(call, cuda_driver.driver(call.k.device))


def ready_write(call: WriteCall) -> cuda_moves.ReadyWrite:
    """What writes, given the fields of calls like this one (known.py)."""
    from pagedkv.kernels import cuda_driver

    return cuda_moves.ready(call, cuda_driver.driver(call.k.device))


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Out and lse over the keys of both."""
    from pagedkv.kernels import cuda_driver

    return cuda_moves.merge_states(out_a, lse_a, out_b, lse_b, cuda_driver.driver(out_a.device))


def copy_frames(storage: Tensor, copies: Tensor) -> None:
    """`storage[dst] = storage[src]` for each row of `copies`, every source read first. Modifies: the destination frames."""
    from pagedkv.kernels import cuda_driver

    cuda_moves.copy_frames(storage, copies, cuda_driver.driver(storage.device))
