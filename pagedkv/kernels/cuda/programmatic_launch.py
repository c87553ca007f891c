"""The two calls of CUDA's driver that CuPy does not have: `cuLaunchKernelEx`, for a launch that begins before the one before it has ended,
and `cuThreadExchangeStreamCaptureMode`, so that memory may be taken while another thread captures a graph.

    CUlaunchConfig      7 numbers of 32 bits: grid, block, shared memory; stream; attributes and how many          56 bytes
    CUlaunchAttribute   its number, 4 bytes of nothing, a value in 64                                             72 bytes

It knows the layout of these two and no kernel.
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
        ("_nothing", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("_rest", ctypes.c_char * 60),
    )


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((f"{what}_{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


def launch_early(function: int, *arguments: int) -> None:
    """As cupy.cuda.driver.launchKernel: grid and block by axes, shared memory, stream, arguments, 0. Raises: CUDADriverError."""
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
    """Inside, this thread may do what a capture of another thread forbids to all (torch captures so). Raises: CUDADriverError."""
    from cupy.cuda import driver

    mode, exchange = ctypes.c_int(RELAXED), library().cuThreadExchangeStreamCaptureMode
    driver.check_status(exchange(ctypes.byref(mode)))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))  # which holds what the thread had before


@cache
def library() -> ctypes.CDLL:
    """The driver, which CuPy has loaded already."""
    return ctypes.CDLL("libcuda.so.1")
