"""Case (the facts by which a kernel is chosen) and Kernel (an entry of the registry).

This file defines the words that the registry and the backends share. It imports no backend: a backend is imported when
it is asked.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, cast

from pagedkv.kernels import quant

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.kernels.args import AttentionCall, AttentionOptions, GatherCall, GatherSource, KVLayer, WriteCall
    from pagedkv.spec import KVSpec


class Case(NamedTuple):
    """The facts that a kernel may object to. None: a fact that is not known yet. Dtypes go by their names in KVSpec.

    device_index: which device of its type; None: the current one. A machine may have two kinds of GPUs.
    features: a set of "window", "softcap", "sinks", "alibi_slopes", "tree_mask", "non_causal", "split_tokens",
              "tensor_scale" and "token_head_scale"; for a write, "rope"; for a call on a GPU, "prefill" or
              "long_prefill" (`prefill_of`): no kernel objects to these, but they change the order of preference; and
              "in_pages", to which a kernel objects that would copy the keys first
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
    device_index: int | None = None

    @property
    def place(self) -> str:
        """The name of the device: "cuda:1", or "cuda" for the current one."""
        return self.device if self.device_index is None else f"{self.device}:{self.device_index}"

    def not_a_float(self) -> list[str]:
        """Return the objection of kernels that compute with quant.FLOATS to another dtype, as a list."""
        if self.dtype in (None, *quant.FLOATS):
            return []
        subject = {"paged_attention": "q", "write_kv": "k"}.get(self.op, "out")
        return [f"{subject} is {self.dtype}; it takes {', '.join(quant.FLOATS)}"]

    def __str__(self) -> str:
        pairs = zip(self._fields[2:-2], self[2:-2], strict=True)
        facts = [f"{name}={value}" for name, value in pairs if value is not None]
        return " ".join([self.op, "on", self.place, *facts, *sorted(self.features)])

    @classmethod
    def of_device(cls, device: str) -> Case:
        """Return the case of a device: "cuda:1", or "cuda" for the current one."""
        kind, _, index = device.partition(":")
        return cls(device=kind, device_index=int(index) if index else None)

    @classmethod
    def of_spec(cls, spec: KVSpec, device: str = "cpu") -> Case:
        """Return the case of every attention call on a cache of this geometry.

        `device` is a type ("cuda") or a name ("cuda:1").
        """
        features = frozenset([*(["window"] if spec.window else []), *(["token_head_scale"] if spec.quantised else [])])
        return cls.of_device(device)._replace(
            dtype=spec.dtype,
            kv_dtype=spec.stored_dtype,
            head_dim=spec.head_dim,
            head_dim_v=spec.value_dim,
            num_kv_heads=spec.num_kv_heads,
            block_size=spec.block_size,
            features=features,
        )

    @classmethod
    def of_attention(
        cls,
        layer: KVLayer | AttentionCall,
        options: AttentionOptions | AttentionCall,
        q: Tensor | None = None,
        masks: tuple[Tensor | None, Tensor | None] = (None, None),
        batch: tuple[Tensor, int] | None = None,
    ) -> Case:
        """Return the case of an attention call on `layer`.

        masks:  tree_mask and causal_of of the call
        batch:  seq_lens and max_seqlen_k of the call; None: the batch is not known yet
        q None: the case covers all calls with these options, with any queries.
        """
        given = ("sinks", "alibi_slopes", "split_tokens")
        features = {name for name in given if getattr(options, name) is not None} | _scales(layer)
        tree_mask, causal_of = masks
        flags = (
            ("window", options.window is not None or options.right is not None),
            ("softcap", options.softcap),
            ("non_causal", not options.causal or causal_of is not None),
            ("tree_mask", tree_mask is not None),
        )
        # with split_tokens, which kernel serves must not depend on the rest of the batch
        if q is not None and batch is not None and options.split_tokens is None and (prefill := prefill_of(q, *batch)):
            features.add(prefill)
        geometry = _geometry(layer) | {"features": frozenset(features | {name for name, is_on in flags if is_on})}
        if q is None:
            heads = [len(x) for x in (options.sinks, options.alibi_slopes) if x is not None]
            dtype = None if layer.k.dtype in quant.QMAX else quant.NAMES[layer.k.dtype]
            return cls("paged_attention", layer.k.device.type, dtype, num_heads=heads[0] if heads else None, **geometry)
        return cls("paged_attention", q.device.type, quant.NAMES[q.dtype], num_heads=q.shape[1], **geometry)

    @classmethod
    def of_write(cls, layer: KVLayer | WriteCall, has_rope: bool, new: tuple[Tensor, Tensor] | None) -> Case:
        """Return the case of a write into `layer`.

        new: K and V of the new tokens; None: the case covers writes of every dtype.
        """
        features = _scales(layer) | ({"rope"} if has_rope else set())
        widest = None if new is None else quant.NAMES[max((x.dtype for x in new), key=lambda dtype: dtype.itemsize)]
        return cls("write_kv", layer.k.device.type, widest, features=features, **_geometry(layer))

    @classmethod
    def of_gather(cls, call: GatherCall) -> Case:
        """Return the case of a gather; `dtype` is that of the results."""
        pool, into = call.source, call.k_out
        return cls("gather_kv", into.device.type, quant.NAMES[into.dtype], features=_scales(pool), **_geometry(pool))

    @classmethod
    def of_merge(cls, out: Tensor) -> Case:
        """Return the case of `merge_states` of two states like `out`."""
        return cls(
            "merge_states",
            out.device.type,
            quant.NAMES[out.dtype],
            head_dim_v=out.shape[-1],
            device_index=out.device.index,
        )

    @classmethod
    def of_copy(cls, storage: Tensor) -> Case:
        """Return the case of `copy_frames` in `storage`."""
        return cls("copy_frames", storage.device.type, device_index=storage.device.index)


MOST_DRAFTS: Final = 8
"""New tokens of a sequence, on average, up to which a call is a decode; twice as many in a batch of this size."""

LONG_PREFILL: Final = 512
"""New tokens of a sequence, on average, from which a call on a GPU is a long prefill."""

MOST_GATHERED: Final = 1 << 18
"""Tokens of a long prefill at most: 1 GiB of keys and values of 8 heads of 128 in bfloat16."""


def prefill_of(q: Tensor, seq_lens: Tensor, max_seqlen_k: int) -> str:
    """Return "prefill" or "long_prefill" if a call on a GPU has many queries, by what the host knows; else "".

    A prefill is bound by products. On an H200 "cuda" is faster than "triton" with 16 new tokens of each of 8 sequences
    (82 to 133 us at 4096 tokens), slower with 32 (127 to 98), and slower with 16 of one sequence (74 to 36).

    The keys of a long prefill are worth a copy. The copy moves 12 K D bytes a token (read, written, read again), and m
    queries of H heads multiply 4 m H D times. So at 4.4 TB/s and 600 TFLOP/s it costs about 100 / m of the products
    with 4 heads in a group: a fifth at 512, less than the gain. "library" then took 0.57 of the time of "triton" with
    one sequence of 8192 tokens, and 0.86 with 8 of 4096; with 256 new tokens, 0.94.

    Few queries beside many sequences of long contexts are no long prefill.
    """
    B, num_tokens = seq_lens.shape[0], q.shape[0]
    few = MOST_DRAFTS * (2 if B >= MOST_DRAFTS else 1)
    if q.device.type != "cuda" or num_tokens <= B * few:
        return ""
    return "long_prefill" if num_tokens >= LONG_PREFILL * B > 0 and B * max_seqlen_k <= MOST_GATHERED else "prefill"


def _geometry(layer: KVLayer | AttentionCall | WriteCall | GatherSource) -> dict[str, Any]:
    return {
        "device_index": layer.k.device.index,
        "kv_dtype": quant.kind_name(layer.k, layer.v),
        "block_size": layer.k.shape[1],
        "num_kv_heads": layer.k.shape[2],
        "head_dim": quant.head_dim(layer.k),
        "head_dim_v": quant.head_dim(layer.v, is_value=True),
    }


def _scales(layer: KVLayer | AttentionCall | WriteCall | GatherSource) -> frozenset[str]:
    kinds = {0: "tensor_scale", 3: "token_head_scale"}
    return frozenset(kinds[scale.dim()] for scale in (layer.k_scale, layer.v_scale) if scale is not None)


class Backend(Protocol):
    """The functions that a kernel offers. Their arguments have been checked.

    A backend may also prepare bound calls (bound.py), which otherwise make an AttentionCall or a WriteCall each time:

        bind_attention(layer, options)   a function of the fields of an AttentionCall from q on; `lse` is None if it is
                                         not asked for. Its calls have queries of one dtype and one number of heads,
                                         and all or none have a tree mask
        bind_write(layer, rope)          a function of the fields of a WriteCall from k_new on, of one dtype each
    """

    def objections(self, case: Case) -> list[str]:
        """Return all reasons why this backend cannot serve `case`; an empty list if it can."""

    def paged_attention(self, call: AttentionCall) -> None:
        """Fill call.out and call.lse."""

    def write_kv(self, call: WriteCall) -> None:
        """Store call.k_new and call.v_new."""

    def gather_kv(self, call: GatherCall) -> None:
        """Fill call.k_out and call.v_out."""

    def merge_states(self, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
        """Return out and lse over the keys of both states."""

    def copy_frames(self, storage: Tensor, copies: Tensor) -> None:
        """Copy frames inside `storage`. Every source is read before a target is written."""


@dataclass(frozen=True)
class Kernel:
    """One candidate of the registry.

    name:       the word that `backend=` and PAGEDKV_KERNELS take.
    where:      the device types that the kernel runs on; None for all.
    backend:    the place of its functions: a module, or "module:NAME" for an object in it. Imported when it is first
                used.
    objections: the function that says why the kernel cannot serve a case, or the module that has it. None: the
                backend's own. The module is imported on every machine, so it must not need an optional package.
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
