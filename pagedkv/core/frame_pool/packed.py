"""Packed arguments, for compiled functions that are called for a frame or a few: a State as one array, keys as bytes.

A call from Python with a State takes 2 us, more than the work, as numba unpacks each of its arrays. A packed state is
one array that holds the State in numba's own form: addresses, shapes and strides. A function that gets a packed state,
and begins with `s = unpacked(packed)`, is called in 0.2 us. The arrays of the State must live as long as the packed
form, so FramePool replaces both at once.

Keys come as bytes in a row, since to make an int32 array of them in Python takes 1 us. `words_of` makes it inside of a
function.

Where functions run uncompiled (NUMBA_DISABLE_JIT=1), the packed form of a State is the State itself.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numba
import numba.extending
import numpy as np
from numba.core.cgutils import ir
from numba.np.arrayobj import populate_array

from pagedkv.core.compiled import compiled
from pagedkv.core.state import I32, I64, U8, State, new_state

Packed = I64 | State

_WORDS: Final = 128


def _as_it_is(packed: Packed) -> State:
    """Return the State whose packed form is `packed`."""
    assert isinstance(packed, State)
    return packed


def _words_in(row: U8, width: int) -> I32:
    """int32 [n, width]: the memory of `row`, uint8 [4 * n * width]."""
    return row.view(np.int32).reshape(-1, width)


if numba.config.DISABLE_JIT:
    unpacked, words_of = _as_it_is, _words_in
else:

    @cache
    def _type_of_state() -> Any:
        """Return numba's type of a State, which is the same for all of them."""
        return numba.typeof(new_state(1, np.zeros((1, 4), np.int64), block_size=1, publishing=True))

    def _address(context: Any, builder: Any, kind: Any, packed: Any) -> Any:
        """Return the address of the array `packed`, as that of a State."""
        array = context.make_array(kind)(context, builder, packed)
        return builder.bitcast(array.data, context.get_value_type(_type_of_state()).as_pointer())

    @numba.extending.intrinsic
    def unpacked(_context: Any, packed: Any) -> Any:
        """The same as _as_it_is, for the array that `pack` returned."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.load(_address(context, builder, signature.args[0], arguments[0]))

        return _type_of_state()(packed), generate

    @numba.extending.intrinsic
    def words_of(_context: Any, row: Any, width: Any) -> Any:
        """The same as _words_in, without a copy and without a reference to `row`, which outlives the call."""
        words = numba.types.Array(numba.types.int32, 2, "C")

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            memory = context.make_array(signature.args[0])(context, builder, arguments[0])
            array, four = context.make_array(words)(context, builder), ir.Constant(memory.itemsize.type, 4)
            width = arguments[1]
            stride = builder.mul(width, four)
            populate_array(
                array,
                data=builder.bitcast(memory.data, array.data.type),
                shape=[builder.sdiv(memory.nitems, stride), width],
                strides=[stride, four],
                itemsize=four,
                meminfo=None,
            )
            return array._getvalue()

        return words(row, numba.types.intp), generate

    @numba.extending.intrinsic
    def _store(_context: Any, state: Any, packed: Any) -> Any:
        """Write a State to the array `packed`."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            builder.store(arguments[0], _address(context, builder, signature.args[1], arguments[1]))
            return context.get_dummy_value()

        return numba.types.void(state, packed), generate

    @compiled
    def _pack(state: State, packed: I64) -> None:
        _store(state, packed)


def pack(state: State) -> Packed:
    """Return the packed form of `state`: int64 [128]."""
    if numba.config.DISABLE_JIT:
        return state
    assert numba.typeof(state) == _type_of_state(), "an array of the State is not contiguous"
    packed = np.zeros(_WORDS, np.int64)
    _pack(state, packed)
    return packed
