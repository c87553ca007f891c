"""copy_frames: whole frames inside the pool, every source read before one destination is written, even if a frame is both.

    room[c] = storage[copies[c, 0]]   then   storage[copies[c, 1]] = room[c]        two launches of one kernel, in order on the stream

Grid      (copies, runs of BLOCK bytes of a frame). A program moves one run.
Bytes     4 * frame_bytes per copy. The way through `room` costs twice the traffic of a direct copy: chains and cycles of frames need it,
          and whether there are any only the device knows. A step copies a frame a forked sequence, not more.
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
def copy_kernel(source, target, from_frame, to_frame, source_bytes, target_bytes, frame_bytes, stride, BLOCK: tl.constexpr):
    """One run. from_frame, to_frame: where the numbers of frames are, `stride` apart; None: frame c is number c."""
    c = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    read = c if from_frame is None else tl.load(from_frame + c * stride).to(tl.int64)
    write = c if to_frame is None else tl.load(to_frame + c * stride).to(tl.int64)
    run = tl.load(source + read * source_bytes + at, mask=at < frame_bytes, other=0)
    tl.store(target + write * target_bytes + at, run, mask=at < frame_bytes)


def copy_frames(storage: Tensor, copies: Tensor) -> None:
    """`storage[dst] = storage[src]` for each row of `copies`. Modifies: the destination frames."""
    if not len(copies) or not storage.numel():
        return
    if not storage[0].is_contiguous():
        return reference.copy_frames(storage, copies)  # a view across frames: no engine's pool, and torch's indexing knows how
    size = storage.element_size()
    frame_bytes, stride_bytes, C = storage[0].numel() * size, storage.stride(0) * size, len(copies)
    words = storage.as_strided((storage.shape[0], storage[0].numel()), (storage.stride(0), 1)).view(torch.uint8)
    room = words.new_empty((C, frame_bytes))
    grid, step = (C, triton.cdiv(frame_bytes, BLOCK)), copies.stride(0)
    copy_kernel[grid](words, room, copies[:, 0], None, stride_bytes, frame_bytes, frame_bytes, step, BLOCK=BLOCK)
    copy_kernel[grid](room, words, None, copies[:, 1], frame_bytes, stride_bytes, frame_bytes, step, BLOCK=BLOCK)
    return None
