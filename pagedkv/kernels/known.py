"""Calls that need no second check: one of the same signature was checked before, and the C++ kernels, or CUDA's, can serve it at once.

What `checks` looks at without PAGEDKV_DEBUG, and what `registry` chooses by, is the **signature** of a call: dtypes, devices, shapes and
strides of its tensors, its options, the registry and the PAGEDKV_* variables. csrc/cpu/known.hpp remembers the signatures that were found
good and compares them whole; a call that differs in anything goes through the checks. With PAGEDKV_DEBUG >= 1 nothing is remembered.

    public function  ->  at_once(...)  ->  results                           a few microseconds, and no dispatcher of torch
    watched, or not known  ->  torch operator  ->  again(...), or checks, choice, kernel, remember(...)

torch's dispatcher must have a call where a graph is made of it (compile, export, trace), where a mode or a transform takes operators for
its own (fake tensors, functorch, torch functions), the profiler wants a name, or where autograd must hear that there is no derivative.
Tensors of a subclass are never known. This file knows who watches, and nothing of what a good call is. Without the extension, or with a
torch that does not tell who watches, every call goes through the operator.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import torch

from pagedkv import debug
from pagedkv.kernels import cpu

if TYPE_CHECKING:
    from collections.abc import Callable


def _nothing(*args: Any) -> None:
    """Without the extension no call is known."""


def _watchers() -> tuple[Any, ...]:
    """Functions without arguments, all in C: each says something truthy while its part of torch watches. () if this torch lacks one."""
    modes = ("_len_torch_dispatch_stack", "_len_torch_function_stack", "_functorch.peek_interpreter_stack")
    try:
        return tuple(attrgetter(name)(torch._C) for name in (*modes, "_is_tracing", "_autograd._profiler_enabled"))
    except AttributeError:
        return ()


_WATCHERS: Final = _watchers()


def meet(*, by_table: bool = True) -> None:
    """Tell the extension what tensors are. by_table: describe them by DLPack's functions where torch has them, else by attributes."""
    cpu._cpu.meet(torch.Tensor, torch.float32, by_table, torch.get_num_threads, torch.is_grad_enabled, _WATCHERS)


if cpu._cpu is not None:
    meet()

again: Final[Any] = getattr(cpu._cpu, "again", _nothing)
"""The results of a call of the operator's arguments and the registry, or None if its signature is not known.

out: None makes one, and it is returned. lse: None is not wanted; True makes one, and (out, lse) is returned.
"""

at_once: Final[Any] = getattr(cpu._cpu if _WATCHERS else None, "at_once", _nothing)
"""As `again`; None also if something watches that the dispatcher tells. Not while Dynamo traces, which cannot look inside."""

write_again: Final[Any] = getattr(cpu._cpu, "write_again", _nothing)
write_at_once: Final[Any] = getattr(cpu._cpu if _WATCHERS else None, "write_at_once", _nothing)
copy_again: Final[Any] = getattr(cpu._cpu, "copy_again", _nothing)
copy_at_once: Final[Any] = getattr(cpu._cpu if _WATCHERS else None, "copy_at_once", _nothing)
"""The same for the operators that only write: True where it was done. Which frames are copied is looked at each time."""
merge_again: Final[Any] = getattr(cpu._cpu, "merge_again", _nothing)
merge_at_once: Final[Any] = getattr(cpu._cpu if _WATCHERS else None, "merge_at_once", _nothing)
"""The same for `merge_states`, whose operator has no backend: (out, lse), or None."""


def remembers() -> bool:
    """Are calls remembered at all?"""
    return cpu._cpu is not None and debug.level() == 0


def remember(*args: Any, serve: Callable[..., None] | None = None) -> None:
    """The arguments of `again`, after a call that was checked and went well. serve: takes a call's fields; None: the C++ kernels served."""
    if remembers():
        cpu._cpu.remember(*args, *_server(serve))


def remember_write(*args: Any, serve: Callable[..., None] | None = None) -> None:
    """The arguments of `write_again`, likewise."""
    if remembers():
        cpu._cpu.remember_write(*args, *_server(serve))


def remember_copy(*args: Any) -> None:
    """The arguments of `copy_again`, likewise, of frames that are runs of bytes."""
    if remembers():
        cpu._cpu.remember_copy(*args, *_server(None))


def remember_merge(*args: Any) -> None:
    """The arguments of `merge_again`, likewise."""
    if remembers():
        cpu._cpu.remember_merge(*args, *_server(None))


def _server(serve: Callable[..., None] | None) -> tuple[str, int, Callable[..., None] | None]:
    return (cpu.isa(), debug.forced_num_threads() or 0, None) if serve is None else ("", 0, serve)
