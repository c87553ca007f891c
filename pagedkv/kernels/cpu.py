"""The backend "cpu": the C++ kernels of csrc/cpu, their objections, and the choice of an instruction set.

This file knows the extension's functions and not how they compute (docs/explanation/cpu-kernels.md). One source per
instruction set is compiled. The best set of this processor is used, unless PAGEDKV_CPU_ISA names another. The number of
threads is torch's (`torch.set_num_threads`), at most the quota of the cgroup, or PAGEDKV_NUM_THREADS. The threads are
those of torch's OpenMP team, or a team of the extension (csrc/cpu/team.hpp).
"""

from __future__ import annotations

from operator import attrgetter
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor

from pagedkv import debug
from pagedkv.errors import InvalidRequest
from pagedkv.kernels import checks, reference
from pagedkv.kernels.args import AttentionCall, GatherCall, WriteCall
from pagedkv.kernels.threads import QUOTA, num_threads

if TYPE_CHECKING:
    from pagedkv.kernels.case import Case

_cpu: Any  # None without the extension
try:
    from pagedkv.kernels import _cpu  # type: ignore[attr-defined, no-redef]

    _missing = ""
except ImportError as _error:
    _cpu, _missing = None, str(_error)

if _cpu is not None and not hasattr(_cpu, "use_own_team"):
    _cpu, _missing = None, "it was built from older sources"


def _observers() -> tuple[Any, ...]:
    """Return C functions, each truthy while its part of torch observes operators; () if torch lacks one."""
    modes = ("_len_torch_dispatch_stack", "_len_torch_function_stack", "_functorch.peek_interpreter_stack")
    try:
        return tuple(attrgetter(name)(torch._C) for name in (*modes, "_is_tracing", "_autograd._profiler_enabled"))
    except AttributeError:
        return ()


OBSERVERS: Final = _observers()


def _register_torch(*, by_table: bool = True) -> None:
    """Register torch's type of tensors and its functions with the extension.

    by_table: read tensors through DLPack's C functions where torch has them.
    """
    threads = num_threads if QUOTA else torch.get_num_threads  # a C function, where it will do
    _cpu.register_torch(torch.Tensor, by_table, threads, torch.is_grad_enabled, OBSERVERS)


_BOUND: Final = ("k", "v", "k_scale", "v_scale", "calibration", "sinks", "alibi_slopes")
_CONTRACT: Final = (
    checks.of_extension(checks.ATTENTION, *AttentionCall._fields[13:-1], "", *_BOUND),  # it makes lse itself
    checks.of_extension(checks.WRITE, *WriteCall._fields[8:]),
    checks.of_extension(checks.MERGE, "out_a", "lse_a", "out_b", "lse_b"),
)

if _cpu is not None:
    _register_torch()
    for _operation, _rules in enumerate(_CONTRACT):
        _cpu.set_contract(_operation, _rules)

MERGE_AT_ONCE: Final[Any] = getattr(_cpu, "merge_at_once", None) if OBSERVERS else None
COPY_AT_ONCE: Final[Any] = getattr(_cpu, "copy_at_once", None)
"""Calls without torch's dispatcher. They return None for a call that the operator must serve or refuse."""


def objections(case: Case) -> list[str]:
    """Return all reasons why these kernels cannot serve `case`."""
    if _cpu is None:
        return missing()
    if case.op == "copy_frames":
        return []
    widest = max(case.head_dim or 0, case.head_dim_v or 0)
    most = _MOST_ROTATED if case.kv_dtype in ("k8v4", "k5v4") else _LARGEST_WRITE if case.op == "write_kv" else widest
    if widest > most and not case.not_a_float():
        return [f"head_dim is {widest}; {case.op} of {case.kv_dtype} takes at most {most}"]
    return case.not_a_float()


_LARGEST_WRITE: Final = 4096  # elements of the buffer on the stack in moves/write.inc
_MOST_ROTATED: Final = 1024  # MOST_ROTATED of elements.inc


def missing() -> list[str]:
    """Return why there is no extension; [] if there is one."""
    if _cpu is not None:
        return []
    return [f"the extension is not built: {_missing}; install a C++17 compiler and pagedkv again"]


def isa() -> str:
    """Return the instruction set in use: PAGEDKV_CPU_ISA, or the best of this processor.

    Raises InvalidRequest if it lacks that set.
    """
    sets: tuple[str, ...] = extension().sets()
    forced = debug.forced_cpu_isa()
    if forced is not None and forced not in sets:
        raise InvalidRequest(f"PAGEDKV_CPU_ISA is {forced!r}; this processor and build have: {', '.join(sets)}")
    return forced or sets[0]


def paged_attention(call: AttentionCall) -> None:
    """Attend. Modifies: call.out, call.lse. Raises: InvalidRequest for tables that name what is not there."""
    x = extension()
    binding = x.bind_attention(*call[:13])
    x.set_kernel(binding, 0, isa(), num_threads(), None)
    if x.attend(binding, *call[13:]) is None:
        checks.table_values(call)


def write_kv(call: WriteCall) -> None:
    """Store each new token's K and V at its slot. Modifies: call.k, call.v, and per-(token, head) scales.

    Raises: InvalidRequest for slots and positions that are not there
    """
    x = extension()
    binding = x.bind_write(*call[:8])
    x.set_kernel(binding, 0, isa(), num_threads(), None)
    if x.write(binding, *call[8:], True) is None:
        checks.slot_values(call)


def gather_kv(call: GatherCall) -> None:
    """Copy the tokens of each sequence out of their pages. Modifies: call.k_out, call.v_out."""
    x = call.source
    extension().gather(*x, call.starts, call.k_out, call.v_out, isa(), num_threads())


def copy_frames(storage: Tensor, copies: Tensor) -> None:
    """Run `storage[dst] = storage[src]` for each row of `copies`, every source read first.

    A frame that is one run of bytes is a memcpy.
    """
    # Each frame must be one run of bytes, and each pair of `copies` two adjacent numbers.
    if len(storage) and storage[0].is_contiguous() and (not len(copies) or copies.stride(1) == 1):
        is_bytes = storage.dtype == torch.uint8 and storage.dim() == 2
        storage = storage if is_bytes else storage.unsqueeze(-1).flatten(1).view(torch.uint8)
        extension().copy(storage, copies, num_threads())
    else:
        reference.copy_frames(storage, copies)


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state over the keys of both: out [T, H, Dv] of `out_a`'s dtype, lse float32 [T, H]."""
    out, lse = out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)
    extension().merge(out_a, lse_a, out_b, lse_b, out, lse, isa(), num_threads())
    return out, lse


def extension() -> ModuleType:
    """Return the extension. The caller must have checked that it is installed."""
    assert _cpu is not None, "the registry asks objections() first"
    return cast(ModuleType, _cpu)
