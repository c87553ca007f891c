"""Functions of CUDA's driver that CuPy lacks.

`cuLaunchKernelEx` launches a kernel that begins before the previous one has ended. `cuThreadExchangeStreamCaptureMode`
allows a thread to allocate device memory while another thread captures a graph. `cuStreamGetId` and
`cuStreamGetCaptureInfo` number streams and captures.

    CUlaunchConfig      56 bytes: 7 numbers of 32 bits (grid, block, shared memory); stream; attributes and their number
    CUlaunchAttribute   72 bytes: its number, 4 bytes of padding, a value in 64 bytes

This file knows the layout of these two structures and no kernel.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

MAY_BEGIN_EARLY: Final = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""

RELAXED: Final = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""


class Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (
        ("number", ctypes.c_int),
        ("_padding", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("_rest", ctypes.c_char * 60),
    )


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((f"{size}_{axis}", ctypes.c_uint) for size in ("grid", "block") for axis in "xyz"),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


def launch_early(function: int, *arguments: int) -> None:
    """Launch a kernel that may begin before the previous one has ended. Raises: CUDADriverError.

    arguments: as cupy.cuda.driver.launchKernel takes them: grid x y z, block x y z, shared memory, stream, parameters,
    0.
    """
    from cupy.cuda import driver

    *sizes, stream, pointers, extra = arguments
    attribute = Attribute(number=MAY_BEGIN_EARLY, value=1)
    config = Config(*sizes, stream, ctypes.pointer(attribute), 1)
    launch = library().cuLaunchKernelEx
    driver.check_status(
        launch(ctypes.byref(config), ctypes.c_void_p(function), ctypes.c_void_p(pointers), ctypes.c_void_p(extra))
    )


@contextmanager
def beside_captures() -> Iterator[None]:
    """Let this thread allocate device memory although another thread captures a graph in the mode that forbids this to
    all threads, as torch does. Raises: CUDADriverError."""
    from cupy.cuda import driver

    mode, exchange = ctypes.c_int(RELAXED), library().cuThreadExchangeStreamCaptureMode
    driver.check_status(exchange(ctypes.byref(mode)))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))  # `mode` holds the mode that the thread had before


def capture_of(stream: int) -> int:
    """Return the number of the capture that records this stream. Raises: CUDADriverError."""
    from cupy.cuda import driver

    status, number = ctypes.c_int(), ctypes.c_uint64()
    ask = library().cuStreamGetCaptureInfo
    driver.check_status(ask(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number)))
    return number.value


def number_of(stream: int) -> int:
    """Return the number of a stream, which no other stream of the process gets; its handle with a driver before 12.0.

    Raises: CUDADriverError.
    """
    from cupy.cuda import driver

    ask = getattr(library(), "cuStreamGetId", None)
    if ask is None:
        return stream
    number = ctypes.c_uint64()
    driver.check_status(ask(ctypes.c_void_p(stream), ctypes.byref(number)))
    return number.value


@cache
def library() -> ctypes.CDLL:
    """Return the driver's library, which CuPy has loaded already."""
    return ctypes.CDLL("libcuda.so.1")
