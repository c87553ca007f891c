"""pagedkv: virtual memory for the KV cache of language models, and the attention kernels that read through it.

The public names load on first use (PEP 562), so that `import pagedkv` is quick and `import pagedkv.core` never imports
torch.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # as typing.TYPE_CHECKING, whose import takes longer than the rest of this module
if TYPE_CHECKING:
    from typing import Any

    from pagedkv.cache.paged import PagedKVCache
    from pagedkv.cache.states import StateSpec
    from pagedkv.core.handles import AddressSpace
    from pagedkv.errors import InvariantViolation, KernelUnavailable, OutOfFrames, PagedKVError
    from pagedkv.kernels.args import KVLayer, PagedBatch
    from pagedkv.kernels.bound import bind_attention, bind_write
    from pagedkv.kernels.linear import linear
    from pagedkv.kernels.ops import copy_frames, explain, gather_kv, merge_states, paged_attention, write_kv
    from pagedkv.spec import KVSpec

__version__ = "0.1.0"

_HOME = {
    "AddressSpace": "pagedkv.core.handles",
    "InvariantViolation": "pagedkv.errors",
    "KVLayer": "pagedkv.kernels.args",
    "KVSpec": "pagedkv.spec",
    "KernelUnavailable": "pagedkv.errors",
    "OutOfFrames": "pagedkv.errors",
    "PagedBatch": "pagedkv.kernels.args",
    "PagedKVCache": "pagedkv.cache.paged",
    "PagedKVError": "pagedkv.errors",
    "StateSpec": "pagedkv.cache.states",
    "bind_attention": "pagedkv.kernels.bound",
    "bind_write": "pagedkv.kernels.bound",
    "copy_frames": "pagedkv.kernels.ops",
    "explain": "pagedkv.kernels.ops",
    "gather_kv": "pagedkv.kernels.ops",
    "linear": "pagedkv.kernels.linear",
    "merge_states": "pagedkv.kernels.ops",
    "paged_attention": "pagedkv.kernels.ops",
    "write_kv": "pagedkv.kernels.ops",
}

__all__ = [
    "AddressSpace",
    "InvariantViolation",
    "KVLayer",
    "KVSpec",
    "KernelUnavailable",
    "OutOfFrames",
    "PagedBatch",
    "PagedKVCache",
    "PagedKVError",
    "StateSpec",
    "bind_attention",
    "bind_write",
    "copy_frames",
    "explain",
    "gather_kv",
    "linear",
    "merge_states",
    "paged_attention",
    "write_kv",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pagedkv' has no attribute {name!r}; the public names are {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
