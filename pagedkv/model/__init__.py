"""The minimal reference model and its loop: a prompt in, text out, every key and value through paged memory.

    decoder, rope        token ids in, logits out
    engine, scheduler    the loop: which sequences compute which tokens, step by step
    loop                 the parts of a step
    ways                 speculation, beams and more: each way of decoding is one file
    request              what a caller keeps: a prompt, and its output so far

Files of a model are read by pagedkv.checkpoint; pagedkv.sampling makes tokens of logits. The public names load on first
use. May import these two, cache, core and kernels; never cli, serve or integrations.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedkv.model.engine import Engine
    from pagedkv.model.request import Completion, Request
    from pagedkv.model.scheduler import Limits
    from pagedkv.sampling.params import SamplingParams

_HOME = {
    "Completion": "pagedkv.model.request",
    "Engine": "pagedkv.model.engine",
    "Limits": "pagedkv.model.scheduler",
    "Request": "pagedkv.model.request",
    "SamplingParams": "pagedkv.sampling.params",
}

__all__ = ["Completion", "Engine", "Limits", "Request", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its names are {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value
