"""Functions of CUDA's driver about streams and captures that CuPy lacks.

`cuThreadExchangeStreamCaptureMode` allows a thread to allocate device memory while another thread captures a graph.
`cuStreamGetId` and `cuStreamGetCaptureInfo` number streams and captures. This file knows no kernel.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

RELAXED: Final = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""


@contextmanager
def beside_captures() -> Iterator[None]:
    """Let this thread allocate device memory although another thread captures a graph in the mode that forbids this to
    all threads, as torch does. Raises: CUDADriverError."""
    from cupy.cuda import driver

    mode, exchange = ctypes.c_int(RELAXED), _library().cuThreadExchangeStreamCaptureMode
    driver.check_status(exchange(ctypes.byref(mode)))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))  # `mode` holds the mode that the thread had before


def capture_of(stream: int) -> int:
    """Return the number of the capture that records this stream. Raises: CUDADriverError."""
    from cupy.cuda import driver

    status, number = ctypes.c_int(), ctypes.c_uint64()
    ask = _library().cuStreamGetCaptureInfo
    driver.check_status(ask(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number)))
    return number.value


def number_of(stream: int) -> int:
    """Return the number of a stream, which no other stream of the process gets; its handle with a driver before 12.0.

    Raises: CUDADriverError.
    """
    from cupy.cuda import driver

    ask = getattr(_library(), "cuStreamGetId", None)
    if ask is None:
        return stream
    number = ctypes.c_uint64()
    driver.check_status(ask(ctypes.c_void_p(stream), ctypes.byref(number)))
    return number.value


@cache
def _library() -> ctypes.CDLL:
    """Return the driver's library, which CuPy has loaded already."""
    return ctypes.CDLL("libcuda.so.1")
