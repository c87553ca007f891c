"""Which kernel serves a call: an ordered tuple of candidates, the fastest first, each of which says what it objects to.

This file knows names and reasons. It imports no implementation: an entry is loaded when it is chosen, so a machine without Triton, CuPy or
a compiler pays nothing for their entries. To add a backend: a module with the functions of `Backend`, and one `Kernel` in KERNELS.

    name given ("numba", or PAGEDKV_KERNELS)  ->  that kernel, or KernelUnavailable if it objects: nothing falls back silently
    None or "auto"                            ->  the first kernel that does not object; "reference", the last, never does
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, cast

from pagedkv import debug
from pagedkv.errors import InvalidRequest, KernelUnavailable

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.kernels.args import AttentionCall, WriteCall
    from pagedkv.spec import KVSpec


class Backend(Protocol):
    """What the module of a kernel offers. Its arguments have been checked.

    It may offer `ready(call)` and `ready_write(call)`, too: callables that take the fields of calls of the same signature (known.py).
    """

    def paged_attention(self, call: AttentionCall) -> None:
        """Fill call.out and call.lse."""

    def write_kv(self, call: WriteCall) -> None:
        """Store call.k_new and call.v_new."""

    def merge_states(self, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
        """Out and lse over the keys of both."""

    def copy_frames(self, storage: Tensor, copies: Tensor) -> None:
        """Copy frames inside `storage`, every source read first."""


class Case(NamedTuple):
    """What a kernel is judged by. None: not known yet, so nothing can be objected to it. Dtypes go by their names in KVSpec.

    features: of "window", "softcap", "sinks", "alibi_slopes", "tree_mask", "non_causal", "split_tokens", "tensor_scale" and
    "token_head_scale"; of a write, "rope".
    """

    op: str = "paged_attention"
    device: str = "cpu"
    dtype: str | None = None
    kv_dtype: str | None = None
    head_dim: int | None = None
    head_dim_v: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    block_size: int | None = None
    features: frozenset[str] = frozenset()

    def __str__(self) -> str:
        known = [f"{name}={value}" for name, value in zip(self._fields[2:-1], self[2:-1], strict=True) if value is not None]
        return " ".join([self.op, "on", self.device, *known, *sorted(self.features)])


def no_objections(case: Case) -> list[str]:
    """For kernels that serve everything where they run."""
    return []


@dataclass(frozen=True)
class Kernel:
    """One candidate.

    name:       what `backend=` and PAGEDKV_KERNELS call it.
    where:      the device types it runs on; None for all.
    objections: why it cannot serve a case: parts missing on this machine, shapes, dtypes, features. Must not import what is heavy.
    module:     where its functions are (`Backend`); imported when it is first used.
    """

    name: str
    where: tuple[str, ...] | None
    objections: Callable[[Case], list[str]]
    module: str

    def refuse(self, case: Case) -> list[str]:
        """All reasons why this kernel cannot serve `case`; empty if it can."""
        if self.where is not None and case.device not in self.where:
            return [f"it runs on {' and '.join(self.where)}, the tensors are on {case.device}", *self.objections(case)]
        return self.objections(case)

    def load(self) -> Backend:
        """The module with its functions."""
        return cast("Backend", importlib.import_module(self.module))


def _cpu_objections(case: Case) -> list[str]:
    return importlib.import_module("pagedkv.kernels.cpu").objections(case)  # type: ignore[no-any-return]


def _numba_objections(case: Case) -> list[str]:
    return importlib.import_module("pagedkv.kernels.numba").objections(case)  # type: ignore[no-any-return]


def _triton_objections(case: Case) -> list[str]:
    if importlib.util.find_spec("triton") is None:
        return ["triton is not installed: pip install 'pagedkv[triton]' (Linux)"]
    if case.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return ["it runs on GPUs; on the CPU only Triton's interpreter can, for tests: TRITON_INTERPRET=1"]
    if case.device == "cuda" and not importlib.import_module("torch").cuda.is_available():
        return ["torch finds no GPU on this machine"]
    return importlib.import_module("pagedkv.kernels.triton.backend").objections(case)  # type: ignore[no-any-return]


def _cuda_objections(case: Case) -> list[str]:
    return importlib.import_module("pagedkv.kernels.cuda").objections(case)  # type: ignore[no-any-return]


def _cuda_bulk_objections(case: Case) -> list[str]:
    return importlib.import_module("pagedkv.kernels.cuda_bulk").objections(case)  # type: ignore[no-any-return]


def _cuda_pieces_objections(case: Case) -> list[str]:
    return importlib.import_module("pagedkv.kernels.cuda_pieces").objections(case)  # type: ignore[no-any-return]


KERNELS: tuple[Kernel, ...] = (
    Kernel("cpu", where=("cpu",), objections=_cpu_objections, module="pagedkv.kernels.cpu"),
    Kernel("numba", where=("cpu",), objections=_numba_objections, module="pagedkv.kernels.numba"),
    Kernel("triton", where=("cuda", "cpu"), objections=_triton_objections, module="pagedkv.kernels.triton.backend"),
    Kernel("cuda", where=("cuda",), objections=_cuda_objections, module="pagedkv.kernels.cuda"),  # first, once a GPU has shown it faster
    Kernel("cuda-bulk", where=("cuda",), objections=_cuda_bulk_objections, module="pagedkv.kernels.cuda_bulk"),  # to be measured beside it,
    Kernel("cuda-pieces", where=("cuda",), objections=_cuda_pieces_objections, module="pagedkv.kernels.cuda_pieces"),  # and this
    Kernel("reference", where=None, objections=no_objections, module="pagedkv.kernels.reference"),
)
"""In the order of preference."""

AUTO: Final = "auto"


def resolve(case: Case, backend: str | None = None) -> Kernel:
    """The kernel that serves `case`.

    Raises: KernelUnavailable with every reason if the named kernel objects; InvalidRequest if there is none of that name.
    """
    if backend is None or backend == AUTO:
        backend = debug.forced_backend() or AUTO
    return _resolve(case, backend, KERNELS)


@lru_cache(maxsize=1024)
def _resolve(case: Case, backend: str, kernels: tuple[Kernel, ...]) -> Kernel:
    candidates = kernels if backend == AUTO else [kernel for kernel in kernels if kernel.name == backend]
    if not candidates:
        raise InvalidRequest(f"there is no kernel {backend!r}; there are: {', '.join(k.name for k in kernels)}, or 'auto' to choose")
    reasons = {}
    for kernel in candidates:
        reasons[kernel.name] = kernel.refuse(case)
        if not reasons[kernel.name]:
            return kernel
    raise KernelUnavailable(str(case), reasons)


def choose(spec: KVSpec, device: str = "cpu", name: str | None = AUTO) -> Kernel:
    """The kernel for a cache of this geometry: resolved once, when the cache is built. Raises: as `resolve`."""
    return resolve(case_of(spec, device), name)


def case_of(spec: KVSpec, device: str = "cpu") -> Case:
    """What is known of every call on a cache of this geometry. `device` is a type ("cuda") or a name ("cuda:1")."""
    features = frozenset([*(["window"] if spec.window else []), *(["token_head_scale"] if spec.quantised else [])])
    return Case(
        device=device.split(":")[0],
        dtype=spec.dtype,
        kv_dtype=spec.stored_dtype,
        head_dim=spec.head_dim,
        head_dim_v=spec.value_dim,
        num_kv_heads=spec.num_kv_heads,
        block_size=spec.block_size,
        features=features,
    )
