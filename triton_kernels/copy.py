"""copy_frames: copy whole frames inside the pool; all sources are read before any destination is written.

A frame may be source and destination.

    scratch[c] = storage[copies[c, 0]]   then   storage[copies[c, 1]] = scratch[c]

Grid      (copies * runs of BLOCK words of a frame), in one dim: the other dims end at 65535. A program moves one run.
          The two assignments are two launches of one kernel, in order on the stream.
Words     A contiguous frame, the usual layout of a pool, is a run of bytes. Any other frame (a view across layers,
          every second head) is a box: dims are merged where their strides allow, and the address of an element comes
          from dividing its index by the sizes.
Bytes     4 * frame_bytes per copy, twice the traffic of a direct copy. Chains and cycles of frames need the scratch
          buffer, and only the device knows whether there are any. A step copies at most one frame per forked sequence.
Tuned     not on any GPU yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor


BLOCK = 8192
WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer type that elements are moved as, by their size in bytes."""


@triton.jit
def offsets(at, sizes, strides):
    """Return the offsets of words of a box. `at` numbers the words; the last dim varies fastest."""
    offset = at * 0
    for i in tl.static_range(len(sizes) - 1):
        d: tl.constexpr = len(sizes) - 1 - i
        offset += at % sizes[d] * strides[d]
        at = at // sizes[d]
    return offset + at * strides[0]


@triton.jit
def copy_kernel(
    pool, scratch, copies, num_frames, copy_stride, frame_stride, sizes, strides, count,
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
    inside = pool + frame * frame_stride + offsets(at, sizes, strides)
    saved = scratch + c * count + at
    if OUT:
        tl.store(saved, tl.load(inside, mask=at < count, other=0), mask=at < count)
    else:
        tl.store(inside, tl.load(saved, mask=at < count, other=0), mask=at < count)


def copy_frames(storage: Tensor, copies: Tensor) -> None:
    """Do `storage[dst] = storage[src]` for each row (src, dst) of `copies`. Modifies: the destination frames."""
    if not len(copies) or not storage.numel():
        return
    words = _words(storage)
    sizes, strides = _box(words)
    count = words[0].numel()
    scratch = words.new_empty((len(copies), count))
    for out, column in ((True, copies[:, 0]), (False, copies[:, 1])):
        copy_kernel[(len(copies) * triton.cdiv(count, BLOCK),)](
            words, scratch, column, len(words), copies.stride(0), words.stride(0), sizes, strides, count,
            OUT=out, BLOCK=BLOCK,
        )  # fmt: skip


def _words(storage: Tensor) -> Tensor:
    """Return [F, ...]: bytes if frames are contiguous, otherwise integers as large as the elements."""
    if storage[0].is_contiguous():
        runs = storage.as_strided((len(storage), storage[0].numel()), (storage.stride(0), 1))
        return runs.view(torch.uint8)
    if storage.is_complex():
        storage = torch.view_as_real(storage)
    return storage.view(WORDS[storage.element_size()])


def _box(words: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return sizes and strides of a frame's dims, without dims of size 1.

    Two neighbouring dims are merged if the outer stride is the whole extent of the inner dim.
    """
    dims: list[tuple[int, int]] = []
    for size, stride in zip(words.shape[1:], words.stride()[1:], strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    dims = dims or [(1, 1)]
    return tuple(size for size, _ in dims), tuple(stride for _, stride in dims)
