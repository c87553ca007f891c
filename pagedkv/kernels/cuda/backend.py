"""The backend "cuda": the CUDA C++ kernels of csrc/cuda, and their objections.

docs/explanation/cuda-kernels.md explains the kernels. This file does not import CuPy: `objections` looks for it.
Specialisations are compiled at first use and kept on disk (compiler.py), and driver.py runs them. attention.py computes
the launches of attention, moves.py those of the others.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import TYPE_CHECKING, Final

import torch

from pagedkv.errors import InvalidRequest
from pagedkv.kernels import reference
from pagedkv.kernels.cuda import attention, moves, specialisation
from pagedkv.spec import ELEMENTS, NUMBERS

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.kernels.args import AttentionCall, AttentionOptions, KVLayer, RotaryTable, WriteCall
    from pagedkv.kernels.case import Case
    from pagedkv.kernels.cuda import driver


def case_objections(case: Case) -> list[str]:
    """Return the reasons why the kernels cannot serve `case` on any machine."""
    found = case.not_a_float()
    for name, dim in (("head_dim", case.head_dim), ("head_dim_v", case.head_dim_v)):
        if case.op == "paged_attention":
            found += _dim_objections(name, dim, case)
        elif case.op != "gather_kv" and dim is not None and dim > specialisation.LONGEST_ROW:
            found.append(f"{name} is {dim}; it takes up to {specialisation.LONGEST_ROW}")
    return found


def _dim_objections(name: str, dim: int | None, case: Case) -> list[str]:
    """Return the objections to a head dim: fragments of the tensor cores have 16 columns, and warps share wide heads
    equally."""
    dims = (case.head_dim or dim or 16, case.head_dim_v or dim or 16)
    unit = 16 * specialisation.parts_of(dims, (NUMBERS.get(case.dtype or "", NUMBERS["bfloat16"]),))
    is_rotated = ELEMENTS.get(case.kv_dtype or "", ("", ""))[1] == "code4"
    most = specialisation.LARGEST_ROTATED[case.dtype == "float32"] if is_rotated else specialisation.LARGEST_HEAD_DIM
    if dim is None or (dim % unit == 0 and 0 < dim <= most):
        return []
    return [f"{name} is {dim}; with head dims {dims[0]}/{dims[1]} it takes multiples of {unit} up to {most}"]


def _shared_memory_objections(case: Case, shared: tuple[int, int]) -> list[str]:
    """Return the objections of attention to this much shared memory of a CTA and of an SM.

    A fact that `case` lacks is no objection.
    """
    if case.op != "paged_attention" or case.dtype is None or case.kv_dtype not in ELEMENTS or case.head_dim is None:
        return []
    of_k, of_v = ELEMENTS[case.kv_dtype]
    kinds, dims = (NUMBERS[case.dtype], NUMBERS[of_k], NUMBERS[of_v]), (case.head_dim, case.head_dim_v or case.head_dim)
    keys = specialisation.KeyLayout(
        token_scales=int("token_head_scale" in case.features), v_in_k=int(of_v != "code4")
    )  # V in K needs the least memory
    try:
        for rows in specialisation.RowClass.of(kinds, dims):
            specialisation.specialise(kinds, dims, rows, keys, shared)
    except InvalidRequest as why:
        return [str(why)]
    return []


@cache
def _shared_memory(index: int) -> tuple[int, int]:
    """Return the bytes of shared memory that a CTA may have, and that an SM has, on the GPU of this index.

    If torch does not tell, there is no limit.
    """
    about = torch.cuda.get_device_properties(index) if torch.cuda.is_available() else None
    return (
        getattr(about, "shared_memory_per_block_optin", 1 << 30),
        getattr(about, "shared_memory_per_multiprocessor", 1 << 30),
    )


@cache
def _machine_objections(index: int) -> tuple[str, ...]:
    """Return what this machine, or its GPU of this index, lacks."""
    found = []
    if importlib.util.find_spec("cupy") is None:
        found.append("CuPy is not installed; install pagedkv[cuda13], or [cuda12] for a driver older than 580")
    if torch.version.cuda is None:
        found.append(f"torch {torch.__version__} is built without CUDA; install a build with it")
    elif not torch.cuda.is_available():
        found.append("torch finds no CUDA device or driver")
    elif (capability := torch.cuda.get_device_capability(index)) < (8, 0):
        found.append("the GPU is {}.{}; the kernels need compute capability 8.0".format(*capability))
    return tuple(found)


def _index_of(case: Case) -> int:
    """Return the index of the case's GPU: that of the tensors, or of the current device if it is not known."""
    if case.device_index is None and torch.cuda.is_available():
        return torch.cuda.current_device()
    return case.device_index or 0


def objections(case: Case) -> list[str]:
    """Return all reasons why these kernels cannot serve `case`: of this machine, of the case, and of the case on
    this machine's GPU."""
    index = _index_of(case)
    found = [*_machine_objections(index), *case_objections(case)]
    return found or _shared_memory_objections(case, _shared_memory(index))


def paged_attention(call: AttentionCall) -> None:
    """Attend. Modifies: call.out, call.lse."""
    attention.attend(call, _driver(call.q))


def bind_attention(layer: KVLayer, options: AttentionOptions) -> attention.AttentionLauncher:
    """Return the launcher of attention calls on `layer` with these options (bound.py)."""
    return attention.AttentionLauncher(layer, options, _driver(layer.k))


def write_kv(call: WriteCall) -> None:
    """Store each new token's K and V at its slot. Modifies: call.k, call.v, and per-(token, head) scales."""
    moves.write_kv(call, _driver(call.k))


def bind_write(layer: KVLayer, rope: RotaryTable | None) -> moves.WriteLauncher:
    """Return the launcher of writes into `layer` (bound.py)."""
    return moves.WriteLauncher(layer, rope, _driver(layer.k))


gather_kv: Final = reference.gather_kv  # "triton" is asked first: it copied 32,768 tokens in half the time of CUDA C++


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return out and lse over the keys of both states."""
    return moves.merge_states(out_a, lse_a, out_b, lse_b, _driver(out_a))


def copy_frames(storage: Tensor, copies: Tensor) -> None:
    """Run `storage[dst] = storage[src]` for each row of `copies`, every source read first.

    Modifies: the destination frames.
    """
    moves.copy_frames(storage, copies, _driver(storage))


def _driver(x: Tensor) -> driver.Driver:
    from pagedkv.kernels.cuda.driver import driver_of

    return driver_of(x.device)
