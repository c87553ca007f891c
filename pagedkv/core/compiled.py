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
from numba.core.cgutils import get_item_pointer, ir
from numba.np.arrayobj import make_array

from pagedkv.machine_code import MachineCode

MACHINE_CODE: Final = MachineCode(Path(__file__).parent, numba.config)

Result = TypeVar("Result")


class Compiler(Protocol):
    """The type of numba's decorators. Arguments are not checked: numba takes an np.int64 for an int."""

    def __call__(self, function: Callable[..., Result], /) -> Callable[..., Result]:
        """Return the compiled function."""


_WITHOUT_COUNTS: Final[dict[str, Any]] = {"_nrt": False, "error_model": "numpy"}

compiled: Compiler = MACHINE_CODE.keep(numba.njit, **_WITHOUT_COUNTS)
"""Decorator of functions that allocate nothing."""

inlined: Compiler = MACHINE_CODE.keep(numba.njit, **_WITHOUT_COUNTS, forceinline=True)
"""Decorator of functions that run for each frame or space: a real call passes 80 words of `State` on the stack."""

allocating: Compiler = MACHINE_CODE.keep(numba.njit, error_model="numpy")
"""Decorator of functions that make arrays."""


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
