"""The minimal reference engine: a prompt in, text out, every key and value through paged memory.

    serve         HTTP, and streams for the tasks of an event loop     floors, top to bottom:
    step          the loop: schedule, plan, forward, sample, commit    a file imports files of
    drafts        guesses of the next tokens                           its own floor and of
    requests      prompts, completions, sequences, beams               those below, never above
    model         the forward pass of a decoder
    sampling      from logits to tokens
    checkpoint    a model as files

The public names load on first use; all other modules are written to be read, and may change. It may import core, cache,
kernels and tiers; serve also imports two integrations.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedkv.engine.requests.limits import Limits
    from pagedkv.engine.requests.request import Completion, Request
    from pagedkv.engine.sampling.params import SamplingParams
    from pagedkv.engine.step.engine import Engine

_HOME = {
    "Completion": "pagedkv.engine.requests.request",
    "Engine": "pagedkv.engine.step.engine",
    "Limits": "pagedkv.engine.requests.limits",
    "Request": "pagedkv.engine.requests.request",
    "SamplingParams": "pagedkv.engine.sampling.params",
}

__all__ = ["Completion", "Engine", "Limits", "Request", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its names are {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value
