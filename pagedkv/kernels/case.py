"""The case that a kernel is judged by, and a kernel as the registry lists it: its name, where it runs, and where its functions are.

This file defines the words that the registry and the backends share. It imports no backend: a backend is imported when it is asked.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.kernels.args import AttentionCall, WriteCall
    from pagedkv.spec import KVSpec


class Case(NamedTuple):
    """The facts that a kernel may object to. None: a fact that is not known yet. Dtypes go by their names in KVSpec.

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
        facts = zip(self._fields[2:-1], self[2:-1], strict=True)
        known = [f"{name}={value}" for name, value in facts if value is not None]
        return " ".join([self.op, "on", self.device, *known, *sorted(self.features)])


def case_of(spec: KVSpec, device: str = "cpu") -> Case:
    """Return the case of every attention call on a cache of this geometry. `device` is a type ("cuda") or a name ("cuda:1")."""
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


class Backend(Protocol):
    """The functions that a kernel offers. Their arguments have been checked.

    A backend may also offer `ready(call)` and `ready_write(call)`: callables that take the fields of calls of the same signature (known.py).
    """

    def objections(self, case: Case) -> list[str]:
        """Return all reasons why this backend cannot serve `case`; an empty list if it can."""

    def paged_attention(self, call: AttentionCall) -> None:
        """Fill call.out and call.lse."""

    def write_kv(self, call: WriteCall) -> None:
        """Store call.k_new and call.v_new."""

    def merge_states(self, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
        """Return out and lse over the keys of both states."""

    def copy_frames(self, storage: Tensor, copies: Tensor) -> None:
        """Copy frames inside `storage`. Every source is read before a target is written."""


@dataclass(frozen=True)
class Kernel:
    """One candidate of the registry.

    name:       the word that `backend=` and PAGEDKV_KERNELS take.
    where:      the device types that the kernel runs on; None for all.
    backend:    where its functions are: a module, or "module:NAME" for an object in it. Imported when it is first used.
    objections: the function that says why the kernel cannot serve a case, or where it is: a module. None: the backend's own. That import
                happens on every machine, so it must not need an optional package.
    """

    name: str
    where: tuple[str, ...] | None
    backend: str
    objections: Callable[[Case], list[str]] | str | None = None

    def refuse(self, case: Case) -> list[str]:
        """Return all reasons why this kernel cannot serve `case`; an empty list if it can."""
        asked = self.objections
        reasons = asked(case) if callable(asked) else _object_at(asked or self.backend).objections(case)
        if self.where is not None and case.device not in self.where:
            return [f"it runs on {' and '.join(self.where)}, the tensors are on {case.device}", *reasons]
        return list(reasons)

    def load(self) -> Backend:
        """Import the backend."""
        return cast("Backend", _object_at(self.backend))


def _object_at(path: str) -> Any:
    module, _, name = path.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found
