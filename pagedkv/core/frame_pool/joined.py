"""Joined keys: a list of bytes objects as one row of memory, copied by compiled code that asks CPython for each key.

Python takes 33 ns a key to join a list and look at its lengths; this takes 10 ns. The compiled function gets
the address of the list and calls CPython's own functions. They need the GIL, which a compiled function keeps. rows.py
has the twin, which also takes other sequences and says what is wrong.
"""

from __future__ import annotations

import numba

from pagedkv.core.compiled import compiled
from pagedkv.core.state import U8

_address = numba.types.intp
_item = numba.types.ExternalFunction("PyList_GetItem", _address(_address, _address))
_size = numba.types.ExternalFunction("PyBytes_Size", _address(_address))
_memory = numba.types.ExternalFunction("PyBytes_AsString", _address(_address))
_clear_error = numba.types.ExternalFunction("PyErr_Clear", numba.types.void())
_copy = numba.types.ExternalFunction("memcpy", _address(_address, _address, _address))


@compiled
def _join(keys: int, key_bytes: int, row: U8) -> bool:
    width = key_bytes + -key_bytes % 4
    for i in range(len(row) // width):
        key = _item(keys, i)
        if key == 0 or _size(key) != key_bytes:
            _clear_error()
            return False
        _copy(row.ctypes.data + i * width, _memory(key), key_bytes)
        for j in range(key_bytes, width):
            row[i * width + j] = 0
    return True


def join(keys: list[bytes], key_bytes: int, row: U8) -> bool:
    """Write each key to `row`, filled up with zeros to whole words of 4 bytes.

    Returns: False if an item is not of type bytes, or has not `key_bytes` bytes, or if functions run uncompiled: only
             compiled code can call CPython's functions
    Modifies: row (uint8 [n * width])
    """
    return not numba.config.DISABLE_JIT and _join(id(keys), key_bytes, row)
