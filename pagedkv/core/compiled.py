"""The decorators that compile the functions of core: with numba, once per machine, and without its reference counts.

Numba counts references to the arrays that a function receives, by atomic additions. Counting costs 100 ns for each call
with the whole `State`, and 5 to 20 ns for a field of a record between branches where numba cannot prove it needless.
The functions of core only borrow arrays for the time of a call. A function that allocates nothing is compiled without
the counts (`_nrt=False`), which made matching and publishing three times as fast. A function that allocates does little
else, and hands its arrays to one that does not.

An integer divided by 0 gives 0 (`error_model`): the test for 0 costs more than the division, and a block_size is never
0.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import numba
import numba.extending
from numba import types
from numba.core.cgutils import get_item_pointer, ir
from numba.core.registry import CPUDispatcher
from numba.np.arrayobj import make_array

from pagedkv.machine_code import MachineCode

MACHINE_CODE: Final = MachineCode(Path(__file__).parent, numba.config)

Result = TypeVar("Result")


class _Compiler(Protocol):
    """The type of numba's decorators. Arguments are not checked: numba takes an np.int64 for an int."""

    def __call__(self, function: Callable[..., Result], /) -> Callable[..., Result]:
        """Return the compiled function."""


_WITHOUT_COUNTS: Final[dict[str, Any]] = {"_nrt": False, "error_model": "numpy"}


class _Inner(CPUDispatcher):
    """A function that only compiled functions call; its machine code is part of theirs. In Python it runs uncompiled.

    Numba would compile it for each width of an integer and for each constant that a caller passes. All of them are
    passed as int64, so it is compiled once.
    """

    def __call__(self, *args: Any) -> Any:
        """Return the result of the Python function."""
        return self.py_func(*args)

    def get_call_template(self, args: tuple[Any, ...], kws: dict[str, Any]) -> Any:
        """Return numba's description of a call with arguments of these types."""
        return super().get_call_template(tuple(_widest(arg) for arg in args), kws)


def _widest(kind: Any) -> Any:
    """Return int64 for the type of an integer or constant that an int64 can hold, and every other type as it is."""
    plain = types.unliteral(kind)
    return types.int64 if isinstance(plain, types.Integer) and plain.bitwidth < 64 else plain


def _inner(**options: Any) -> _Compiler:
    def decorate(function: Any) -> Any:
        if numba.config.DISABLE_JIT:
            return function
        return _Inner(function, targetoptions={**_WITHOUT_COUNTS, **_NO_ENTRIES, "nopython": True, **options})

    return decorate


_NO_ENTRIES: Final[dict[str, Any]] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}

compiled: _Compiler = MACHINE_CODE.keep(numba.njit, **_WITHOUT_COUNTS, no_cfunc_wrapper=True)
"""Decorator of functions that Python calls, and that allocate nothing."""

inner: _Compiler = _inner()
"""Decorator of functions that compiled functions call."""

inlined: _Compiler = _inner(forceinline=True)
"""Decorator of inner functions that run for each frame or space: a call passes 80 words of `State` on the stack."""

allocating: _Compiler = MACHINE_CODE.keep(numba.njit, error_model="numpy", no_cfunc_wrapper=True)
"""Decorator of functions that Python calls, and that make arrays."""


def _prefetch(array: Any, at: Any) -> None:
    """Ask the processor to load the cache line where array[at] begins, without waiting. In plain Python: do nothing."""


if numba.config.DISABLE_JIT:
    prefetch = _prefetch
else:

    @numba.extending.intrinsic
    def prefetch(_context: Any, array: Any, at: Any) -> Any:
        """The same as _prefetch, by LLVM's instruction, which numba does not offer."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            zero = arguments[1].type(0)
            struct = make_array(signature.args[0])(context, builder, arguments[0])
            element = get_item_pointer(
                context, builder, signature.args[0], struct, [arguments[1]] + [zero] * (array.ndim - 1)
            )
            address = builder.bitcast(element, ir.IntType(8).as_pointer())
            i32 = ir.IntType(32)
            llvm_prefetch = builder.module.declare_intrinsic(
                "llvm.prefetch", [address.type], ir.FunctionType(ir.VoidType(), [address.type, i32, i32, i32])
            )
            # for reading, kept in all cache levels, data
            builder.call(llvm_prefetch, [address, i32(0), i32(3), i32(1)])
            return context.get_dummy_value()

        return numba.types.void(array, numba.types.intp), generate

    class _Prefetch(type(prefetch)):  # type: ignore[misc]
        """An intrinsic that Python may call as well: functions of a step run uncompiled at first (warm.py)."""

        def __call__(self, array: Any, at: Any) -> None:
            """Do nothing."""

    prefetch.__class__ = _Prefetch
