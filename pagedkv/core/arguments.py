"""Arguments: what callers give, as contiguous int32 arrays, or a refusal in words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pagedkv.core.state import I32
from pagedkv.errors import InvalidRequest


def token_row(token_ids: Sequence[int] | npt.NDArray[np.integer]) -> I32:
    """int32 [n]: token ids."""
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or (len(ids) and not np.issubdtype(ids.dtype, np.integer)):
        raise InvalidRequest(f"token ids of shape {list(ids.shape)} and dtype {ids.dtype}; give one row of integers")
    if len(ids) and ids.dtype != np.int32 and (ids.min() < -(2**31) or ids.max() >= 2**31):
        raise InvalidRequest("a token id does not fit int32")
    return np.ascontiguousarray(ids, np.int32)


def frame_row(frames: npt.NDArray[np.integer], num_frames: int) -> I32:
    """int32 [n]: numbers of frames in a pool of `num_frames`."""
    wanted = np.asarray(frames)
    numbers = wanted.ndim == 1 and (len(wanted) == 0 or np.issubdtype(wanted.dtype, np.integer))
    if not numbers or (len(wanted) and not 0 <= wanted.min() <= wanted.max() < num_frames):
        raise InvalidRequest(f"frames of shape {list(wanted.shape)}; give one row of frame numbers, 0 to {num_frames - 1}")
    return np.ascontiguousarray(wanted, np.int32)
