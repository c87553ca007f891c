"""Graph breaks: calls that torch.compile steps over and never traces.

The memory manager works on numpy records and functions of numba, which dynamo cannot trace. A function gets two marks:

    _torchdynamo_disable    where dynamo traces a call of the function, it ends the graph; a whole graph is refused
    a skipped code object   dynamo then runs the function as it is, with everything that the function calls

A mark costs a call nothing. `torch.compiler.disable` costs 1 us a call, also where nothing is compiled; it serves a
torch without the private function that skips a code object.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import FunctionType
from typing import Any, Final, TypeVar

import torch

from pagedkv.core import FramePool, MemoryManager, Pin, Plan
from pagedkv.core.handles import AddressSpace

set_code_exec_strategy: Callable[[Any, Any], None] | None = None
with suppress(ImportError):
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy


CORE: Final = (MemoryManager, FramePool, AddressSpace, Plan, Pin)
"""The classes of core whose methods and properties break a graph."""

Method = TypeVar("Method", bound=Callable[..., Any])


def breaks_graph(method: Method) -> Method:
    """Decorate a method so that dynamo calls it outside of any graph, with everything that it calls."""
    if set_code_exec_strategy is None:
        public: Method = torch.compiler.disable(method)  # type: ignore[no-untyped-call]
        return public
    skip = _FrameAction.SKIP
    set_code_exec_strategy(method.__code__, _FrameExecStrategy(skip, skip))  # its frame, and those that it calls
    vars(method).update(
        _torchdynamo_disable=True, _torchdynamo_disable_msg=f"{method.__name__} of a KV cache is no part of a graph"
    )
    return method


def mark_core() -> None:
    """Mark the methods and properties of core, which does not import torch, where they are."""
    members = [member for kind in CORE for part in kind.__mro__ for member in vars(part).values()]
    for member in members if set_code_exec_strategy is not None else ():
        method = member.fget if isinstance(member, property) else member
        # the code must be that of core: a context manager is a function of contextlib, whose code serves all of them
        if isinstance(method, FunctionType) and method.__globals__["__name__"].startswith("pagedkv.core."):
            breaks_graph(method)
