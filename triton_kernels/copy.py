"""copy_frames: copy whole frames inside the pool; all sources are read before any destination is written.

    scratch[c] = storage[copies[c, 0]]   then   storage[copies[c, 1]] = scratch[c]

Grid      (copies * runs of BLOCK bytes of a frame), in one dim: the other dims end at 65535. A program moves one run.
          The two assignments are two launches of one kernel, in order on the stream.
Bytes     4 * frame_bytes per copy, twice the traffic of a direct copy. Chains and cycles of frames need the scratch
          buffer, and only the device knows whether there are any. A step copies at most one frame per forked sequence.
Tuned     not on any GPU yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pagedkv.kernels import reference

if TYPE_CHECKING:
    from torch import Tensor


BLOCK = 8192


@triton.jit
def _copy_kernel(
    pool, scratch, copies, num_frames, copy_stride, frame_stride, count,
    OUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Move one run of copy c between its frame and its row of `scratch`: to `scratch` if OUT, otherwise to the frame.

    copies: the column of `copies` that names the frames. A frame beyond the pool is neither read nor written.
    """
    runs = tl.cdiv(count, BLOCK)
    c, run = (tl.program_id(0) // runs).to(tl.int64), (tl.program_id(0) % runs).to(tl.int64)
    at = run * BLOCK + tl.arange(0, BLOCK)
    frame = tl.load(copies + c * copy_stride).to(tl.int64)
    if (frame < 0) | (frame >= num_frames):
        return
    inside, saved = pool + frame * frame_stride + at, scratch + c * count + at
    if OUT:
        tl.store(saved, tl.load(inside, mask=at < count, other=0), mask=at < count)
    else:
        tl.store(inside, tl.load(saved, mask=at < count, other=0), mask=at < count)


def copy_frames(storage: Tensor, copies: Tensor) -> None:
    """Do `storage[dst] = storage[src]` for each row (src, dst) of `copies`. Modifies: the destination frames."""
    if not len(copies) or not storage.numel():
        return
    if not storage[0].is_contiguous():
        return reference.copy_frames(storage, copies)  # a view across frames: torch's indexing copies it
    words = storage.as_strided((len(storage), storage[0].numel()), (storage.stride(0), 1)).view(torch.uint8)
    count = words.shape[1]
    scratch = words.new_empty((len(copies), count))
    for out, column in ((True, copies[:, 0]), (False, copies[:, 1])):
        _copy_kernel[(len(copies) * triton.cdiv(count, BLOCK),)](
            words, scratch, column, len(words), copies.stride(0), words.stride(0), count, OUT=out, BLOCK=BLOCK
        )
    return None
