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

from collections import deque
from collections.abc import Callable
from copy import copy
from functools import partial
from itertools import starmap
from operator import setitem
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import numba
import numba.extending
import numpy as np
from numba import types
from numba.core.cgutils import get_item_pointer, ir
from numba.core.registry import CPUDispatcher
from numba.np.arrayobj import make_array

from pagedkv.core import background
from pagedkv.core.state import State, copied
from pagedkv.machine_code import MachineCode

MACHINE_CODE: Final = MachineCode(
    Path(__file__).parent, numba, "pagedkv's memory manager for this machine (a quarter of a minute)"
)

Result = TypeVar("Result")


class _Compiler(Protocol):
    """The type of numba's decorators. Arguments are not checked: numba takes an np.int64 for an int."""

    def __call__(self, function: Callable[..., Result], /) -> Callable[..., Result]:
        """Return the compiled function."""


class _Inner(CPUDispatcher):
    """A function that only compiled functions call; its machine code is part of theirs. In Python it runs uncompiled.

    Numba would compile it for each width of an integer and for each constant that a caller passes. All of them are
    passed as int64, so it is compiled once. Numba would also optimise it and emit its code, with that of all functions
    below it, although only the code within its callers runs.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """Arguments: numba's."""
        super().__init__(*args, **options)
        self._compiler._customize_flags = _without_code

    def add_overload(self, cres: Any) -> None:
        """Let callers link the function, which has no address."""
        cres.library.finalize = partial(_link, cres.library)
        named = cres._replace(entry_point=object())
        self.targetctx.insert_user_function(named.entry_point, cres.fndesc, [cres.library])
        self.overloads[tuple(cres.signature.args)] = named

    def __call__(self, *args: Any) -> Any:
        """Return the result of the Python function."""
        return self.py_func(*args)

    def get_call_template(self, args: tuple[Any, ...], kws: dict[str, Any]) -> Any:
        """Return numba's description of a call with arguments of these types."""
        return super().get_call_template(tuple(_widest(arg) for arg in args), kws)


def _without_code(flags: Any) -> Any:
    flags.no_compile = True
    return flags


def _link(library: Any) -> None:
    """Add the functions that a library calls, and inline: the rest of numba's CPUCodeLibrary.finalize is needless."""
    for other in dict.fromkeys(library._linking_libraries):
        library._reload_init.update(other._reload_init)
        library._final_module.link_in(other._get_module_for_linking(), preserve=True)
    passes, builder = library._codegen._module_pass_manager(loop_vectorize=False, opt=0, cost="cheap")
    passes.run(library._final_module, builder)
    library._finalize_dynamic_globals()
    library._finalized = True


class _Outer(CPUDispatcher):
    """A function that Python calls. While another process compiles it (background.py), it runs uncompiled."""

    def _compile_for_args(self, *args: Any, **kws: Any) -> Any:
        """Return the function to call: numba's C code asks for it if nothing is compiled for `args` in this process."""
        if self.__name__ in background.STEP and background.begin(MACHINE_CODE):
            self._types_active_call.clear()
            return partial(_run_uncompiled, self.py_func)
        if not MACHINE_CODE.has(self.__name__):
            MACHINE_CODE.say("", again=self.__name__ in background.STEP)  # the process was stopped
        return super()._compile_for_args(*args, **kws)


def _run_uncompiled(function: Callable[..., Any], *args: Any) -> Any:
    """Run the function of a step in Python as its machine code runs: an interrupt comes before its change, or after it.

    An interrupt may end the function anywhere, so it changes copies of the arrays. One call of C functions copies them
    back. O(frames + rows x pages of the longest row)
    """
    mine = [copied(arg) if isinstance(arg, State) else copy(arg) for arg in args]
    with np.errstate(over="ignore"):  # hashes overflow, as they do in machine code
        result = function(*mine)
    changes = list[tuple[Any, Any, Any]]()
    for old, new in zip(args, mine, strict=True):
        if isinstance(old, State):  # entries behind the pages of a row mean nothing, and need no memory
            rows, pages = np.flatnonzero(new.spaces["num_pages"]), slice(new.spaces["num_pages"].max())
            changes.append((old.table, (rows, pages), new.table[rows, pages]))
            changes += [(ours, ..., array) for ours, array in zip(old, new, strict=True) if ours is not old.table]
        elif isinstance(old, np.ndarray) and old.flags.writeable:
            changes.append((old, ..., new))
    deque(starmap(setitem, changes), maxlen=0)
    return tuple(map(_plain, result)) if isinstance(result, tuple) else _plain(result)


def _plain(number: Any) -> Any:
    """Return a number of Python, as machine code does, in place of one of numpy."""
    return number.item() if isinstance(number, np.generic) else number


def _widest(kind: Any) -> Any:
    """Return int64 for the type of an integer or constant that an int64 can hold, and every other type as it is."""
    plain = types.unliteral(kind)
    return types.int64 if isinstance(plain, types.Integer) and plain.bitwidth < 64 else plain


def _made(kind: Callable[..., Any], *, cache: bool = False, **options: Any) -> _Compiler:
    def decorate(function: Any) -> Any:
        if numba.config.DISABLE_JIT:
            return function
        dispatcher = kind(function, targetoptions={"nopython": True, "no_cfunc_wrapper": True, **options})
        if cache:
            dispatcher.enable_caching()
        return dispatcher

    return decorate


_WITHOUT_COUNTS: Final[dict[str, Any]] = {"_nrt": False, "error_model": "numpy"}

compiled: _Compiler = MACHINE_CODE.keep(partial(_made, _Outer), **_WITHOUT_COUNTS)
"""Decorator of functions that Python calls, and that allocate nothing."""

inner: _Compiler = _made(_Inner, no_cpython_wrapper=True, **_WITHOUT_COUNTS)
"""Decorator of functions that compiled functions call."""

inlined: _Compiler = _made(_Inner, forceinline=True, no_cpython_wrapper=True, **_WITHOUT_COUNTS)
"""Decorator of inner functions that run for each frame or space: a call passes 80 words of `State` on the stack."""

allocating: _Compiler = MACHINE_CODE.keep(partial(_made, _Outer), error_model="numpy")
"""Decorator of functions that Python calls, and that make arrays."""


@numba.extending.intrinsic
def prefetch(_context: Any, array: Any, at: Any) -> Any:
    """Ask the processor to load the cache line where array[at] begins, without waiting: an instruction of LLVM."""

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
    """An intrinsic that Python may call as well: functions of a step run uncompiled at first."""

    def __call__(self, array: Any, at: Any) -> None:
        """Do nothing."""


prefetch.__class__ = _Prefetch
