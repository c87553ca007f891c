"""Calls that need no second check: one of the same signature was checked before, and the C++ kernels can serve it at once.

What `checks` looks at without PAGEDKV_DEBUG, and what `registry` chooses by, is the **signature** of a call: dtypes, devices, shapes and
strides of its tensors, its options, the registry and the PAGEDKV_* variables. csrc/cpu/calls.cpp remembers the signatures that were found
good and compares them whole; a call that differs in anything goes through the checks. With PAGEDKV_DEBUG >= 1 nothing is remembered.

    public function, nobody watches   ->  again(...)  ->  results                      a few microseconds, no dispatcher of torch
    else, or not known                ->  torch operator  ->  again(...), or checks, choice, kernel, remember(...)

Knows nothing of what a good call is. Where the extension was not built, nothing is ever known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import profiler

from pagedkv import debug
from pagedkv.kernels import cpu

if TYPE_CHECKING:
    from torch import Tensor

again: Any = cpu._cpu.again if cpu._cpu is not None else lambda *args: None
"""The results of a call of the operator's arguments and the registry, or None if its signature is not known.

out: None makes one, and it is returned. lse: None is not wanted; True makes one, and (out, lse) is returned.
"""


def remember(*args: Any) -> None:
    """The arguments of `again`, after a call of the C++ kernels that was checked and went well."""
    if cpu._cpu is not None and debug.level() == 0:
        cpu._cpu.remember(*args, cpu.isa(), debug.forced_num_threads() or 0)


def unwatched(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether torch's dispatcher would have nothing to do with a call but to hand it on.

    It has to where a graph is made (compile, export, trace), where a mode or transform takes operators for its own (fake tensors,
    functorch, torch functions), where the profiler wants a name, or where autograd should say that there is no derivative. Subclasses of
    Tensor are refused by `again` itself.
    """
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or profiler._is_profiler_enabled
        or (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
    )
