"""From checked calls of write_kv, merge_states and copy_frames to launches of csrc/cuda: the kernels that move rows and frames.

This file knows geometry and the layouts of `WriteParams`, `MergeParams` and `CopyParams` in csrc/cuda/params.h. It knows no CUDA: what runs
a launch is a `Machine` (cuda_launch.py).
"""

from __future__ import annotations

import struct
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import torch

from pagedkv.kernels import quant, reference
from pagedkv.kernels.args import WriteCall
from pagedkv.kernels.cuda.attention import of_signature, scale_strides
from pagedkv.kernels.cuda.specialisation import (
    COPY_RUN,
    KINDS,
    CopySpecialisation,
    MergeSpecialisation,
    WriteSpecialisation,
    vectors_of,
)

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.kernels.cuda.attention import Machine

WRITE_POINTERS: Final = struct.Struct("@10Q")
WRITE_REST: Final = struct.Struct("@20q9i4x")
WRITE_LAYOUT: Final = struct.Struct("@10Q20q9i4x")  # both
COPY_LAYOUT: Final = struct.Struct("@4Q4q3i4x")
MERGE_LAYOUT: Final = struct.Struct("@6Q8q3i4x")

MOST_ROOM: Final = 64 << 20
"""Bytes by way of which copies go that are too many for shared memory: they come where memory is short."""

_WRITE_FIELDS: Final = attrgetter(*WriteCall.__slots__)
FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32)


class ReadyWrite:
    """Launches writes of one signature (known.py) on one machine, as `cuda_launch.Ready` does: pointers are each call's own.

    Not in a signature: how addresses are aligned, and whether rows of V lie in rows of K.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._last: tuple[tuple[int, ...], list[tuple[WriteSpecialisation, int, bytes]]] = ((), [])

    def __call__(self, *fields: Any) -> None:
        """Store. fields: of a WriteCall, in order. Modifies: k, v and scales at the slots."""
        k_new, v_new, k, v, *tables, _ = fields
        if v_new.dtype not in FLOATS:
            v_new = v_new.float()
        k_from, v_from, k_at, v_at = k_new.data_ptr(), v_new.data_ptr(), k.data_ptr(), v.data_ptr()
        now = (k_from & 15, v_from & 15, k_at & 15, v_at & 15, _overlap(k, v_at - k_at, v))
        decided, launches = self._last  # both at once: another thread may replace them
        if decided != now:
            launches = writes_of(WriteCall(k_new, v_new, *fields[2:]))
            self._last = (now, launches)
        pointers = WRITE_POINTERS.pack(k_from, v_from, k_at, v_at, *[0 if x is None else x.data_ptr() for x in tables])
        for shape, blocks, rest in launches:
            self._machine.launch(shape, blocks, pointers + rest)


def write_kv(call: WriteCall, machine: Machine) -> None:
    """Store each new token's K, turned if there are angles, and V. Modifies: call.k, call.v at the slots, and per-(token, head) scales."""
    ready(call, machine)(*_WRITE_FIELDS(call))


def ready(call: WriteCall, machine: Machine) -> ReadyWrite:
    """What launches writes of this one's signature."""
    *tensors, interleaved = _WRITE_FIELDS(call)
    found: ReadyWrite = of_signature(machine, tensors, ("write", interleaved), lambda: ReadyWrite(machine))
    return found


def writes_of(call: WriteCall) -> list[tuple[WriteSpecialisation, int, bytes]]:
    """What serves writes like this one: kernels, their CTAs, and the parameters after the pointers."""
    T, K, D = call.k_new.shape
    Dv = call.v_new.shape[2]
    if not T or not K:
        return []
    half = 0 if call.cos is None else call.cos.shape[1]
    kinds = [KINDS[quant.NAMES[x.dtype]] for x in (call.k, call.k_new, call.v_new)]
    rope = 0 if not half else 2 if call.interleaved else 1
    shape = WriteSpecialisation(
        kinds[0], kinds[1], kinds[2], D, Dv, _kind(call.k_scale), _kind(call.v_scale), rope, half
    )
    blocks = -(-T * K // vectors_of(max(D, Dv)))
    # K and V are stored at once, unless rows of one lie in rows of the other (MLA): then K first, as everywhere
    parts = ((0, 1), (1, 1)) if _overlap(call.k, call.v.data_ptr() - call.k.data_ptr(), call.v) else ((0, 2),)
    tables = (call.slots, call.positions, call.cos, call.sin)
    strides = [stride * x.element_size() for x in (call.k_new, call.v_new) for stride in x.stride()[:2]]
    strides += [stride * x.element_size() for x in (call.k, call.v) for stride in x.stride()[:3]]
    strides += [
        *scale_strides(call.k_scale),
        *scale_strides(call.v_scale),
        *(0 if x is None else x.stride(0) for x in tables),
    ]
    quads = [_aligned(x, 4 * x.element_size()) for x in (call.k_new, call.v_new)]
    quads += [_aligned(x, 2 if x.dtype == torch.uint8 else 4 * x.element_size()) for x in (call.k, call.v)]
    rests = (WRITE_REST.pack(*strides, T, K, call.k.shape[1], first, count, *quads) for first, count in parts)
    return [(shape, blocks * count, rest) for (_, count), rest in zip(parts, rests, strict=True)]


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, machine: Machine) -> tuple[Tensor, Tensor]:
    """Out of `out_a`'s dtype and lse over the keys of both."""
    T, H, Dv = out_a.shape
    out_a, out_b = (x if x.stride(2) == 1 or Dv == 1 else x.contiguous() for x in (out_a, out_b))
    out, lse = machine.scratch((T, H, Dv), out_a.dtype, out_a), machine.scratch((T, H), torch.float32, out_a)
    if T and H and Dv:
        size, addresses = out.element_size(), [x.data_ptr() for x in (out_a, out_b, lse_a, lse_b, out, lse)]
        (a_token, a_head, _), (b_token, b_head, _) = out_a.stride(), out_b.stride()
        bits = (a_token | a_head | b_token | b_head | Dv) * size | addresses[0] | addresses[1] | addresses[4]
        steps = (a_token * size, a_head * size, b_token * size, b_head * size, *lse_a.stride(), *lse_b.stride())
        params = MERGE_LAYOUT.pack(*addresses, *steps, T * H, H, bits % (4 * size) == 0)
        machine.launch(MergeSpecialisation(KINDS[quant.NAMES[out.dtype]], Dv), -(-T * H // vectors_of(Dv)), params)
    return out, lse


def copy_frames(storage: Tensor, copies: Tensor, machine: Machine) -> None:
    """`storage[dst] = storage[src]` for each row of `copies`, every source read first. Modifies: the destination frames."""
    C = len(copies)
    if not C or not storage.numel():
        return
    if not storage[0].is_contiguous():
        return reference.copy_frames(
            storage, copies
        )  # a view across frames: no engine's pool, and torch's indexing knows how
    size = storage.element_size()
    frame_bytes, stride = storage[0].numel() * size, storage.stride(0) * size if storage.shape[0] > 1 else 0
    word = min(16, (bits := storage.data_ptr() | frame_bytes | stride) & -bits)
    small, large = CopySpecialisation(word, COPY_RUN), CopySpecialisation(word, min(machine.shared_per_block, 96 << 10))
    numbers, addresses = (copies[:, 0].data_ptr(), copies[:, 1].data_ptr()), (storage.data_ptr(),) * 2
    words, step = frame_bytes // word, copies.stride(0)
    for shape, least in (
        (small, 5),
        (large, 3),
    ):  # runs of at least so many words (2 to the power of it), if frames are that long
        whole = (words - 1).bit_length()
        width = min((shape.shared_bytes // shape.shared_word // C).bit_length() - 1, whole, 10)
        if width >= min(least, whole):
            params = COPY_LAYOUT.pack(*addresses, *numbers, stride, stride, words, step, C, width, C)
            return machine.launch(shape, -(-words >> width), params)
    wide = min(words, max(32, MOST_ROOM // (C * word)))  # words of each frame that go by way of the room at a time
    room = machine.scratch((C * wide * word,), torch.uint8, storage)
    at_once = small.shared_bytes // small.shared_word >> 5
    for first in range(0, words, wide):
        count, at = min(wide, words - first), addresses[0] + first * word
        for ends, by, strides in (
            ((at, room.data_ptr()), (numbers[0], 0), (stride, wide * word)),
            ((room.data_ptr(), at), (0, numbers[1]), (wide * word, stride)),
        ):
            machine.launch(small, -(-count >> 5), COPY_LAYOUT.pack(*ends, *by, *strides, count, step, C, 5, at_once))
    return None


def _kind(scale: Tensor | None) -> int:
    return 0 if scale is None else 1 if scale.dim() == 0 else 2


def _aligned(x: Tensor, size: int) -> bool:
    """Does every row along the last dim begin at a multiple of `size` bytes?"""
    strides = (
        stride * x.element_size() for stride, count in zip(x.stride()[:-1], x.shape[:-1], strict=True) if count > 1
    )
    return not any(at % size for at in (x.data_ptr(), *strides))


def _overlap(k: Tensor, apart: int, v: Tensor) -> bool:
    """Do rows of V, whose memory begins `apart` bytes after that of K, lie in rows of K?"""
    size = k.element_size()
    return -v.shape[3] * size < apart < k.shape[3] * size
