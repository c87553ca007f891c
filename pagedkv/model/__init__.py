"""The minimal reference model and its loop: a prompt in, text out, every key and value through paged memory.

    config ─▶ rope ─┐
    weights ────────┴▶ decoder ─▶ logits ─▶ sampler ─▶ tokens        tokenizer: text ◀─▶ token ids

The public names load on first use: `pagedkv.model.hub` and others are imported without torch. May import cache, core
and kernels; never cli, serve or integrations.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedkv.model.engine import Engine
    from pagedkv.model.request import Completion, Request
    from pagedkv.model.sampling.params import SamplingParams
    from pagedkv.model.scheduler import Limits

_HOME = {
    "Completion": "pagedkv.model.request",
    "Engine": "pagedkv.model.engine",
    "Limits": "pagedkv.model.scheduler",
    "Request": "pagedkv.model.request",
    "SamplingParams": "pagedkv.model.sampling.params",
}

__all__ = ["Completion", "Engine", "Limits", "Request", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its names are {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value
