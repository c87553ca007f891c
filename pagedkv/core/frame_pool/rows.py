"""Rows: convert the frames and keys that callers of FramePool pass to int32 arrays, or raise InvalidRequest.

The compiled functions have one form for each argument: numba would compile them anew for a read-only array, or one with
gaps. An array that has the form is passed on as it is, without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from pagedkv.core.state import I32, I64, U8
from pagedkv.errors import InvalidRequest

Frames = int | Sequence[int] | npt.NDArray[np.integer]
Keys = Sequence[bytes] | npt.NDArray[Any]

_INT32: Final = np.dtype(np.int32)
_UINT8: Final = np.dtype(np.uint8)


def frame_numbers(frames: Frames) -> I32:
    """int32 [n]: the frame numbers; the caller's own array if it has this form already."""
    if type(frames) is np.ndarray and frames.dtype is _INT32 and frames.ndim == 1 and frames.flags.carray:
        return cast(I32, frames)
    try:
        numbers = np.atleast_1d(np.asarray(frames))
    except ValueError:
        numbers = np.empty((0, 0))
    if numbers.ndim != 1 or (len(numbers) and numbers.dtype.kind not in "iu"):
        raise InvalidRequest(f"frames are {frames!r:.60}; give a frame number, or one row of frame numbers")
    if len(numbers) and not -(2**31) <= numbers.min() <= numbers.max() < 2**31:
        raise InvalidRequest(f"a frame number is {numbers.max()}; give numbers of frames of this pool")
    return np.require(numbers, np.int32, ("C", "A", "W"))


def token_positions(positions: Sequence[int] | npt.NDArray[np.integer], count: int) -> I64:
    """int64 [count]: the positions."""
    row = np.asarray(positions)
    if row.shape != (count,) or (count and (row.dtype.kind not in "iu" or row.min() < 0 or row.max() >= 2**62)):
        raise InvalidRequest(
            f"positions of shape {list(row.shape)} and dtype {row.dtype}; give one for each of the {count} frames, "
            "0 or more"
        )
    return np.require(row, np.int64, ("C", "A", "W"))


def key_row(keys: Keys, key_bytes: int) -> U8:
    """uint8 [n * words * 4]: the keys one after another, each filled up with zeros to whole words of 4 bytes."""
    if type(keys) is np.ndarray:
        if keys.dtype is _UINT8 and keys.ndim == 2 and keys.shape[1] == key_bytes and keys.flags.carray:
            return _filled(keys.reshape(-1), key_bytes)
        return _filled(_bytes_of(keys, key_bytes), key_bytes)
    try:
        are_bytes = set(map(type, keys)) <= {bytes}  # len() of another object may count items of several bytes
        lengths = set(map(len, keys)) if are_bytes else {memoryview(key).nbytes for key in keys}
        joined, count = bytearray().join(keys), len(keys)
    except (TypeError, BufferError):
        raise InvalidRequest(
            f"keys are {keys!r:.60}; give a list of bytes, or an array uint8 [n, {key_bytes}]"
        ) from None
    if (count and lengths != {key_bytes}) or len(joined) != count * key_bytes:
        raise InvalidRequest(
            f"keys are of {sorted(lengths)} bytes; give keys of {key_bytes} bytes, "
            "or make the pool with another key_bytes"
        )
    return _filled(np.frombuffer(joined, np.uint8) if count else np.empty(0, np.uint8), key_bytes)


def _bytes_of(keys: npt.NDArray[Any], key_bytes: int) -> U8:
    """uint8 [n * key_bytes]: the memory of an array whose rows have so many bytes."""
    if keys.ndim not in (1, 2) or keys.dtype.kind not in "iuS" or keys.nbytes != len(keys) * key_bytes:
        raise InvalidRequest(
            f"keys of shape {list(keys.shape)} and dtype {keys.dtype}; give rows of {key_bytes} bytes, "
            f"such as uint8 [n, {key_bytes}], or a list of bytes"
        )
    return np.require(keys, requirements=("C", "A", "W")).view(np.uint8).reshape(-1)


def _filled(row: U8, key_bytes: int) -> U8:
    if key_bytes % 4 == 0:
        return row
    filled = np.zeros((len(row) // key_bytes, key_bytes + -key_bytes % 4), np.uint8)
    filled[:, :key_bytes] = row.reshape(-1, key_bytes)
    return filled.reshape(-1)
