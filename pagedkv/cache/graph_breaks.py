"""Graph breaks: methods that torch.compile calls and never traces.

The memory manager works on numpy records and functions of numba, which dynamo cannot trace. `torch.compiler.disable`
costs 1 us a call, also where nothing is compiled; these few lines cost 0.2 us. They use a private function of torch,
and the public decorator serves a torch without it. A compiled function that plans, opens or commits is split there,
and runs the call as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

set_eval_frame: Callable[[Any], Any] | None = None
with suppress(ImportError):
    from torch._C._dynamo.eval_frame import set_eval_frame

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def breaks_graph(method: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorate a method so that dynamo calls it outside of any graph, with everything that it calls."""
    if set_eval_frame is None:
        public: Callable[Parameters, Result] = torch.compiler.disable(method)  # type: ignore[no-untyped-call]
        return public

    @wraps(method)
    def untraced(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        compiler = set_eval_frame(None)
        if compiler is None:  # nothing is being compiled
            return method(*args, **kwargs)
        try:
            return method(*args, **kwargs)
        finally:
            set_eval_frame(compiler)

    vars(untraced).update(
        _torchdynamo_disable=True,
        _torchdynamo_disable_msg=f"{method.__name__} of a KV cache is no part of a graph",
    )
    return untraced
