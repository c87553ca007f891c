"""Arguments: convert the values that callers pass to ints, bytes and contiguous arrays, or raise InvalidRequest.

Every object with `__index__` is an int here, so numpy's and torch's integers are accepted. A bool is refused: True as a
number is a mistake of the caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from pagedkv.core.state import I32, I64
from pagedkv.errors import InvalidRequest

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)


def whole(value: Any, what: str, least: int = 0, end: int = 2**63) -> int:
    """Return `value` as an int in `least` .. `end` - 1. `what` names the argument in the error."""
    try:
        number = least - 1 if isinstance(value, bool | np.bool_) else index(value)
    except TypeError:
        number = least - 1
    if not least <= number < end:
        raise InvalidRequest(
            f"{what} is {value!r}; give an int of {least} or more, below {end if end < 2**31 else _power(end)}"
        )
    return number


def _power(end: int) -> str:
    return f"2**{end.bit_length() - 1}" if end & (end - 1) == 0 else str(end)


def real(value: Any, what: str) -> float:
    """Return `value` as a float that is not NaN. `what` names the argument in the error."""
    if type(value) is float and value == value:
        return value
    if isinstance(value, str | bytes | bool | np.bool_):
        raise InvalidRequest(f"{what} is {value!r}; give a number")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if number != number:
        raise InvalidRequest(f"{what} is {value!r}; give a number")
    return number


def flag(value: Any, what: str) -> bool:
    """Return `value` as a bool. `what` names the argument in the error."""
    if value is True or value is False:
        return value
    if not isinstance(value, np.bool_):
        raise InvalidRequest(f"{what} is {value!r}; give True or False")
    return bool(value)


def tenant_name(tenant: Any) -> bytes:
    """Return `tenant`, a tenant's name, if it is bytes."""
    if type(tenant) is not bytes:
        raise InvalidRequest(f"tenant is {tenant!r}; a tenant's name is bytes, such as b'acme' or a digest")
    return tenant


def salt_row(salt: Any) -> tuple[tuple[int, bytes], ...]:
    """Return the positions and digests of `salt` in order: bytes count from position 0 on, and b"" is no salt."""
    if type(salt) is bytes:
        return ((0, salt),) if salt else ()
    if not isinstance(salt, Mapping) or not all(type(digest) is bytes and digest for digest in salt.values()):
        raise InvalidRequest(f"salt is {salt!r}; give bytes, or {{position: bytes}} with a digest for each position")
    return tuple(sorted((whole(position, "position of a salt", 0, 2**31), salt[position]) for position in salt))


def token_row(token_ids: Sequence[int] | npt.NDArray[np.integer]) -> I32:
    """int32 [n]: the token ids; the caller's own array if it has this form already."""
    if type(token_ids) is np.ndarray and token_ids.dtype is _INT32 and token_ids.ndim == 1 and token_ids.flags.carray:
        return cast(I32, token_ids)  # the conversions below take microseconds
    try:
        ids = np.asarray(token_ids)
    except Exception as why:  # an object, such as a tensor on another device, may raise any
        raise InvalidRequest(f"token ids are not a row of numbers ({why}); give one row of integers") from None
    if ids.ndim != 1 or (len(ids) and not np.issubdtype(ids.dtype, np.integer)):
        raise InvalidRequest(f"token ids of shape {list(ids.shape)} and dtype {ids.dtype}; give one row of integers")
    if len(ids) and ids.dtype != np.int32 and (ids.min() < -(2**31) or ids.max() >= 2**31):
        raise InvalidRequest(
            f"token ids go from {ids.min()} to {ids.max()}, which does not fit int32; give smaller ids"
        )
    # numba takes a read-only array for another type, and would compile every function anew
    return np.require(ids, np.int32, ("C", "A", "W"))


def unnamed_row(counts: npt.NDArray[np.int64], most: int) -> I32:
    """int32 [sum(counts)]: -1 for each token, at most `most` of them. A larger sum is an error of the caller."""
    return np.full(max(0, min(int(counts.sum()), most)), -1, np.int32)


def asid_row(asids: npt.NDArray[np.integer]) -> I32:
    """int32 [B]: a copy of the asids, which the plan keeps.

    An asid carries no generation: the caller makes sure that it still names the space that is meant.
    """
    if asids.dtype is _INT32 and asids.ndim == 1:
        return cast(I32, asids.copy())
    if asids.ndim != 1 or not np.issubdtype(asids.dtype, np.integer):
        raise InvalidRequest(
            f"address spaces of shape {list(asids.shape)} and dtype {asids.dtype}; "
            "give one row of integers, or AddressSpaces"
        )
    if asids.dtype != np.int32 and len(asids) and not -(2**31) <= asids.min() <= asids.max() < 2**31:
        raise InvalidRequest(
            f"asids go from {asids.min()} to {asids.max()}, which does not fit int32; give asids of this manager"
        )
    return asids.astype(np.int32)


def count_row(counts: Sequence[int] | npt.NDArray[np.integer], batch: int) -> I64:
    """int64 [B]: a copy of the number of tokens of each of `batch` spaces, which the plan keeps."""
    if type(counts) is np.ndarray and counts.dtype is _INT64 and counts.shape == (batch,):
        return cast(I64, counts.copy())
    try:
        given = np.asarray(counts)
    except ValueError:
        raise InvalidRequest(f"counts are not a row of numbers; give one int for each of the {batch} spaces") from None
    if given.shape != (batch,) or (batch and not np.issubdtype(given.dtype, np.integer)):
        raise InvalidRequest(
            f"there are {batch} spaces, and counts of shape {list(given.shape)} and {given.dtype}; "
            "give one int for each"
        )
    if given.dtype == np.uint64 and batch and given.max() >= 2**63:
        raise InvalidRequest(f"a count is {given.max()}; give counts below 2**63")
    return given.astype(np.int64)


def frame_row(frames: npt.NDArray[np.integer], num_frames: int) -> I32:
    """int32 [n]: the frame numbers, each in 0 .. `num_frames` - 1."""
    try:
        wanted = np.asarray(frames)
    except ValueError:
        raise InvalidRequest("frames are not a row of numbers; give one row of frame numbers") from None
    is_row = wanted.ndim == 1 and (len(wanted) == 0 or np.issubdtype(wanted.dtype, np.integer))
    if not is_row or (len(wanted) and not 0 <= wanted.min() <= wanted.max() < num_frames):
        raise InvalidRequest(
            f"frames of shape {list(wanted.shape)}; give one row of frame numbers, 0 to {num_frames - 1}"
        )
    return np.require(wanted, np.int32, ("C", "A", "W"))  # see token_row
