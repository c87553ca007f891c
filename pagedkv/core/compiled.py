"""How the functions of core are compiled: by numba, once per machine, and without its reference counts.

Numba counts references to the arrays that a function is handed, by atomic additions: 100 ns for each call with the whole `State`, and
between branches, where it cannot prove them needless, 5 to 20 ns for a field of a record. These functions borrow arrays for the time of a
call. Those that allocate nothing do without (`_nrt=False`), which made matching and publishing three times as fast; those that do allocate
do little else, and hand their arrays to one that does not.

An integer divided by 0 gives 0 (`error_model`): looking for it costs more than the division, and a block_size is never 0.
"""

from __future__ import annotations

import numba

compiled = numba.njit(cache=True, _nrt=False, error_model="numpy")  # type: ignore[call-overload]  # `_nrt` is not in its annotations
"""For functions that allocate nothing."""

inlined = numba.njit(cache=True, _nrt=False, error_model="numpy", forceinline=True)  # type: ignore[call-overload]
"""For those that are called for each frame or space: a call passes the 80 words of `State` on the stack."""

allocating = numba.njit(cache=True, error_model="numpy")
"""For those that make arrays."""
