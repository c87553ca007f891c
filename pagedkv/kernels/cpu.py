"""The C++ kernels of csrc/cpu, seen from Python: what they cannot do, and which of them runs.

This file knows the extension's argument order and nothing of how it computes; docs/cpu-kernels.md tells that. One source per instruction
set is compiled and the best that this processor has is used, unless PAGEDKV_CPU_ISA names another. Threads are as many as torch's
(`torch.set_num_threads`) or PAGEDKV_NUM_THREADS, on torch's own OpenMP team where that is found.
"""

from __future__ import annotations

from operator import attrgetter
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor

from pagedkv import debug
from pagedkv.errors import InvalidRequest
from pagedkv.kernels import reference
from pagedkv.kernels.args import AttentionCall, WriteCall
from pagedkv.kernels.threads import num_threads

if TYPE_CHECKING:
    from pagedkv.kernels.case import Case

_cpu: Any  # None without the extension
try:
    from pagedkv.kernels import _cpu  # type: ignore[attr-defined, no-redef]

    _missing = ""
except ImportError as why:
    _cpu, _missing = None, str(why)

_FIELDS: Final = attrgetter(*AttentionCall.__slots__)
_WRITE_FIELDS: Final = attrgetter(*WriteCall.__slots__)

FLOATS: Final = ("float32", "bfloat16", "float16")


def objections(case: Case) -> list[str]:
    """Why these kernels cannot serve `case`."""
    if _cpu is None:
        return [f"the extension is not built: {_missing}; install a C++17 compiler and pagedkv again"]
    if case.op == "copy_frames":
        return []
    if case.dtype not in (None, *FLOATS):
        return [f"{_SUBJECTS[case.op]} is {case.dtype}; it takes {', '.join(FLOATS)}"]
    if case.op == "write_kv" and max(case.head_dim or 0, case.head_dim_v or 0) > _LARGEST_WRITE:
        return [f"head_dim is {max(case.head_dim or 0, case.head_dim_v or 0)}; write_kv takes at most {_LARGEST_WRITE}"]
    return []


_SUBJECTS: Final = {"paged_attention": "q", "write_kv": "k", "merge_states": "out"}
_LARGEST_WRITE: Final = 4096  # elements of the buffer on the stack in write.inc


def isa() -> str:
    """The instruction set in use: the best that this processor has, or PAGEDKV_CPU_ISA. Raises: InvalidRequest if it has not that one."""
    sets: tuple[str, ...] = _extension().sets()
    wish = debug.forced_cpu_isa()
    if wish is not None and wish not in sets:
        raise InvalidRequest(f"PAGEDKV_CPU_ISA is {wish!r}; this processor and build have: {', '.join(sets)}")
    return wish or sets[0]


def paged_attention(call: AttentionCall) -> None:
    """Attend. Modifies: call.out, call.lse."""
    _extension().attention(*_FIELDS(call), isa(), num_threads())


def write_kv(call: WriteCall) -> None:
    """Store each new token's K and V at its slot. Modifies: call.k, call.v, and per-(token, head) scales."""
    _extension().write(*_WRITE_FIELDS(call), isa(), num_threads())


def copy_frames(storage: Tensor, copies: Tensor) -> None:
    """`storage[dst] = storage[src]` for each row of `copies`, every source read first; memcpy where a frame is one run of bytes."""
    if not are_runs(storage, copies):
        return reference.copy_frames(storage, copies)
    _extension().copy(storage.unsqueeze(-1).flatten(1).view(torch.uint8), copies, num_threads())
    return None


def are_runs(storage: Tensor, copies: Tensor) -> bool:
    """Whether each frame is one run of bytes, and each pair of `copies` two numbers in a row."""
    return len(storage) > 0 and storage[0].is_contiguous() and not (len(copies) and copies.stride(1) != 1)


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The state over the keys of both: out [T, H, Dv] of `out_a`'s dtype, lse float32 [T, H]."""
    merged: tuple[Tensor, Tensor] = _extension().merge(out_a, lse_a, out_b, lse_b, isa(), num_threads())
    return merged


def _extension() -> ModuleType:
    assert _cpu is not None, "the registry asks objections() first"
    return cast(ModuleType, _cpu)
