"""The C++ kernels of csrc/cpu, seen from Python: what they cannot do, and a call's tensors as addresses and strides.

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
from pagedkv.kernels import quant, reference
from pagedkv.kernels.args import AttentionCall

if TYPE_CHECKING:
    from pagedkv.kernels.args import WriteCall
    from pagedkv.kernels.registry import Case

_cpu: Any  # None without the extension
try:
    from pagedkv.kernels import _cpu  # type: ignore[attr-defined, no-redef]

    _missing = ""
except ImportError as why:
    _cpu, _missing = None, str(why)

CODES: Final = {name: code for code, name in enumerate(quant.DTYPES)}
"""The extension's number of a dtype: its place in quant.DTYPES, in the order of `Dtype` in csrc/cpu/contract.hpp."""

_FIELDS: Final = attrgetter(*AttentionCall.__slots__)

FLOATS: Final = ("float32", "bfloat16", "float16")


def objections(case: Case) -> list[str]:
    """Why these kernels cannot serve `case`."""
    if _cpu is None:
        return [f"the extension is not built: {_missing}; install a C++17 compiler and pagedkv again"]
    if case.op in ("merge_states", "copy_frames"):
        return []
    if case.dtype not in (None, *FLOATS):
        return [f"{'q' if case.op == 'paged_attention' else 'k'} is {case.dtype}; it takes {', '.join(FLOATS)}"]
    if case.op == "write_kv" and max(case.head_dim or 0, case.head_dim_v or 0) > _LARGEST_WRITE:
        return [f"head_dim is {max(case.head_dim or 0, case.head_dim_v or 0)}; write_kv takes at most {_LARGEST_WRITE}"]
    return []


_LARGEST_WRITE: Final = 4096  # elements of the buffer on the stack in write.hpp


def isa() -> str:
    """The instruction set in use: the best that this processor has, or PAGEDKV_CPU_ISA. Raises: InvalidRequest if it has not that one."""
    sets: tuple[str, ...] = _extension().sets()
    wish = debug.forced_cpu_isa()
    if wish is not None and wish not in sets:
        raise InvalidRequest(f"PAGEDKV_CPU_ISA is {wish!r}; this processor and build have: {', '.join(sets)}")
    return wish or sets[0]


def num_threads() -> int:
    """PAGEDKV_NUM_THREADS, or as many as torch uses."""
    return debug.forced_num_threads() or torch.get_num_threads()


def paged_attention(call: AttentionCall) -> None:
    """Attend. Modifies: call.out, call.lse."""
    _extension().attention(*_FIELDS(call), isa(), num_threads())


def write_kv(call: WriteCall) -> None:
    """Store each new token's K and V at its slot. Modifies: call.k, call.v, and per-(token, head) scales."""
    slots, S, K = view(call.slots), call.k.shape[1], call.k.shape[2]
    half = 0 if call.cos is None else call.cos.shape[1]
    angles = (view(call.cos), view(call.sin), view(call.positions)) if half else ()
    for new, pool, scale, turns in ((call.k_new, call.k, call.k_scale, half), (call.v_new, call.v, call.v_scale, 0)):
        dtypes = (CODES[quant.NAMES[new.dtype]], CODES[quant.NAMES[pool.dtype]])
        sizes = (new.shape[0], K, new.shape[2], S, *dtypes, int(scale is not None and scale.dim() == 3), turns, int(call.interleaved))
        _extension().write(isa(), num_threads(), sizes, view(new), view(pool), scales(scale), slots, angles)


def copy_frames(storage: Tensor, copies: Tensor) -> None:
    """`storage[dst] = storage[src]` for each row of `copies`, every source read first; memcpy where a frame is one run of bytes."""
    if not len(storage) or not storage[0].is_contiguous() or (len(copies) and copies.stride(1) != 1):
        return reference.copy_frames(storage, copies)
    size = storage.element_size()
    _extension().copy(view(storage), storage[0].numel() * size, view(copies), len(copies), num_threads())
    return None


merge_states = reference.merge_states  # a few vectors per row: torch does it as fast as its calls allow


def view(x: Tensor | None) -> tuple[int, ...]:
    """Address, and strides in bytes without that of the last dim if there are several; () for None."""
    if x is None:
        return ()
    size = x.element_size()
    return (x.data_ptr(), *[stride * size for stride in x.stride()[:3]])


def scales(x: Tensor | None) -> tuple[int, ...]:
    """As `view`; one scale for all is one whose strides are 0."""
    return (x.data_ptr(), 0, 0, 0) if x is not None and x.dim() == 0 else view(x)


def _extension() -> ModuleType:
    assert _cpu is not None, "the registry asks objections() first"
    return cast(ModuleType, _cpu)
