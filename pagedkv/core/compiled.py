"""How the functions of core are compiled: by numba, once per machine, and without its reference counts.

Numba counts references to the arrays that a function is handed, by atomic additions: 100 ns for each call with the whole `State`, and
between branches, where it cannot prove them needless, 5 to 20 ns for a field of a record. These functions borrow arrays for the time of a
call. Those that allocate nothing do without (`_nrt=False`), which made matching and publishing three times as fast; those that do allocate
do little else, and hand their arrays to one that does not.

An integer divided by 0 gives 0 (`error_model`): looking for it costs more than the division, and a block_size is never 0.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numba
import numba.extending
from numba.core.cgutils import get_item_pointer, ir
from numba.np.arrayobj import make_array

from pagedkv.machine_code import forget_stale

forget_stale(Path(__file__).parent)

Result = TypeVar("Result")


class Compiler(Protocol):
    """The type of numba's decorators. Arguments are not checked: numba takes an np.int64 for an int."""

    def __call__(self, function: Callable[..., Result], /) -> Callable[..., Result]:
        """Return the compiled function."""


compiled: Compiler = numba.njit(cache=True, _nrt=False, error_model="numpy")  # type: ignore[call-overload]  # `_nrt` is not in its annotations
"""For functions that allocate nothing."""

inlined: Compiler = numba.njit(cache=True, _nrt=False, error_model="numpy", forceinline=True)  # type: ignore[call-overload]
"""For those that are called for each frame or space: a call passes the 80 words of `State` on the stack."""

allocating: Compiler = numba.njit(cache=True, error_model="numpy")
"""For those that make arrays."""


def _prefetch(array: Any, at: Any) -> None:
    """Ask for the line of the processor's cache where array[at] begins. Nothing waits for it."""


if numba.config.DISABLE_JIT:
    prefetch = _prefetch
else:

    @numba.extending.intrinsic
    def prefetch(_context: Any, array: Any, at: Any) -> Any:
        """See _prefetch: LLVM's own, which numba has no word for."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            zero = arguments[1].type(0)
            held = make_array(signature.args[0])(context, builder, arguments[0])
            first = get_item_pointer(
                context, builder, signature.args[0], held, [arguments[1]] + [zero] * (array.ndim - 1)
            )
            place = builder.bitcast(first, ir.IntType(8).as_pointer())
            number = ir.IntType(32)
            word = builder.module.declare_intrinsic(
                "llvm.prefetch", [place.type], ir.FunctionType(ir.VoidType(), [place.type, number, number, number])
            )
            builder.call(word, [place, number(0), number(3), number(1)])  # to be read, kept in all levels, data
            return context.get_dummy_value()

        return numba.types.void(array, numba.types.intp), generate
