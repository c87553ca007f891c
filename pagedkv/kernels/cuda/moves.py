"""Launches of write_kv, merge_states and copy_frames: the kernels of csrc/cuda that move rows and frames.

This file knows geometry and the layouts of `WriteParams`, `MergeParams` and `CopyParams` in
csrc/cuda/params.h. It does not know CUDA: a `Machine` (attention.py) runs the launches.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final

import torch

from pagedkv.kernels import quant, reference
from pagedkv.kernels.args import KVLayer, RotaryTable, WriteCall, bound_fields
from pagedkv.kernels.cuda.attention import MOST_LAUNCHES, _address
from pagedkv.kernels.cuda.specialisation import (
    COPY_RUN,
    CopySpecialisation,
    MergeSpecialisation,
    WriteSpecialisation,
    vectors_of,
)
from pagedkv.kernels.layout import scale_kind, scale_strides

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.kernels.cuda.attention import Machine

WRITE_POINTERS: Final = struct.Struct("@11Q")
WRITE_REST: Final = struct.Struct("@21q9i4x")
WRITE_LAYOUT: Final = struct.Struct("@11Q21q9i4x")  # both
COPY_LAYOUT: Final = struct.Struct("@4Q4q4i")
MERGE_LAYOUT: Final = struct.Struct("@6Q8q3i4x")

MOST_SCRATCH: Final = 64 << 20
"""Bytes of the scratch buffer for copies that are too many for shared memory. Such copies happen when memory is short.
"""

_DTYPES: Final = tuple(quant.DTYPES[name] for name in quant.FLOATS)


class WriteLauncher:
    """Launches writes into one layer on one machine: what the backend returns from `bind_write`.

    All writes have new tokens of the same dtypes. The launches follow from the integers in the key of `_launches`; they
    are computed once per key. Pointers belong to each call, so threads may share a launcher.
    """

    def __init__(self, layer: KVLayer, rope: RotaryTable | None, machine: Machine) -> None:
        self._fixed, self._machine = bound_fields(layer, rope), machine
        addresses = tuple(map(_address, self._fixed[:7]))
        self._pool, self._angles = addresses[:5], addresses[5:]
        self._launches: dict[tuple[Any, ...], list[tuple[WriteSpecialisation, int, bytes]]] = {}

    def __call__(self, k_new: Tensor, v_new: Tensor, slots: Tensor, positions: Tensor | None) -> None:
        """Store. Modifies: the layer's k, v and scales at the slots."""
        if v_new.dtype not in _DTYPES:
            v_new = v_new.float()
        k_from, v_from, step = k_new.data_ptr(), v_new.data_ptr(), 0 if positions is None else positions.stride()
        key = (k_from & 15, v_from & 15, k_new.shape, k_new.stride(), v_new.stride(), slots.stride(), step)
        launches = self._launches.get(key)
        if launches is None:
            launches = self._compute(key, k_new, v_new, slots, positions)
        tables = (slots.data_ptr(), _address(positions), *self._angles)
        pointers = WRITE_POINTERS.pack(k_from, v_from, *self._pool, *tables)
        for kernel, blocks, rest in launches:
            self._machine.launch(kernel, blocks, pointers + rest)

    def _compute(self, key: tuple[Any, ...], *arguments: Any) -> Any:
        if len(self._launches) >= MOST_LAUNCHES:
            self._launches.clear()
        launches = self._launches[key] = _writes_of(WriteCall(*self._fixed, *arguments))
        return launches


def write_kv(call: WriteCall, machine: Machine) -> None:
    """Store each new token's K, turned if there are angles, and V.

    Modifies: call.k, call.v at the slots, and per-(token, head) scales.
    """
    layer, rope, arguments = call.split()
    WriteLauncher(layer, rope, machine)(*arguments)


def _writes_of(call: WriteCall) -> list[tuple[WriteSpecialisation, int, bytes]]:
    """Return the launches that serve writes like this one: kernel, CTAs, and the parameters after the pointers."""
    T, K, D = call.k_new.shape
    Dv = call.v_new.shape[2]
    if not T or not K:
        return []
    half = 0 if call.cos is None else call.cos.shape[1]
    stored = (quant.number_of(call.k), quant.number_of(call.v, is_value=True))
    new = (quant.number_of(call.k_new), quant.number_of(call.v_new))
    rope = 0 if not half else 2 if call.interleaved else 1
    scales = (scale_kind(call.k_scale), scale_kind(call.v_scale))
    kernel = WriteSpecialisation(*stored, *new, D, Dv or D, *scales, rope, half)
    blocks = -(-T * K // vectors_of(max(D, Dv)))
    # One launch stores K and V, unless rows of one lie in rows of the other (MLA): then K first, as in every backend.
    # Values of no elements lie in keys, which are stored alone.
    parts = ((0, 1),) if not Dv else ((0, 1), (1, 1)) if _overlap(call.k, call.v) else ((0, 2),)
    tables = (call.slots, call.positions, call.cos, call.sin)
    strides = [stride * x.element_size() for x in (call.k_new, call.v_new) for stride in x.stride()[:2]]
    strides += [stride * x.element_size() for x in (call.k, call.v) for stride in x.stride()[:3]]
    strides += [*scale_strides(call.k_scale), *scale_strides(call.v_scale)]
    strides += [0 if x is None else x.stride(0) for x in tables]
    strides += [call.k.shape[0] * call.k.shape[1]]  # num_slots
    quads = [_aligned(x, 4 * x.element_size()) for x in (call.k_new, call.v_new)]
    k = quant.planes(call.k)[0] if call.k.dtype == torch.uint8 else call.k
    quads += [_aligned(x, 2 if x.dtype == torch.uint8 else 4 * x.element_size()) for x in (k, call.v)]
    rests = (WRITE_REST.pack(*strides, T, K, call.k.shape[1], first, count, *quads) for first, count in parts)
    return [(kernel, blocks * count, rest) for (_, count), rest in zip(parts, rests, strict=True)]


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, machine: Machine) -> tuple[Tensor, Tensor]:
    """Return out of `out_a`'s dtype, and lse, over the keys of both."""
    T, H, Dv = out_a.shape
    out_a, out_b = (x if x.stride(2) == 1 or Dv == 1 else x.contiguous() for x in (out_a, out_b))
    out, lse = machine.scratch((T, H, Dv), out_a.dtype, out_a), machine.scratch((T, H), torch.float32, out_a)
    if T and H and Dv:
        size, addresses = out.element_size(), [x.data_ptr() for x in (out_a, out_b, lse_a, lse_b, out, lse)]
        (a_token, a_head, _), (b_token, b_head, _) = out_a.stride(), out_b.stride()
        bits = (a_token | a_head | b_token | b_head | Dv) * size | addresses[0] | addresses[1] | addresses[4]
        steps = (a_token * size, a_head * size, b_token * size, b_head * size, *lse_a.stride(), *lse_b.stride())
        params = MERGE_LAYOUT.pack(*addresses, *steps, T * H, H, bits % (4 * size) == 0)
        machine.launch(MergeSpecialisation(quant.number_of(out), Dv), -(-T * H // vectors_of(Dv)), params)
    return out, lse


def copy_frames(storage: Tensor, copies: Tensor, machine: Machine) -> None:
    """Run `storage[dst] = storage[src]` for each row of `copies`, every source read first.

    Modifies: the destination frames.
    """
    C = len(copies)
    if not C or not storage.numel():
        return
    if not storage[0].is_contiguous():
        return reference.copy_frames(storage, copies)  # a view across frames: torch's indexing copies it
    size = storage.element_size()
    frame_bytes, stride = storage[0].numel() * size, storage.stride(0) * size if storage.shape[0] > 1 else 0
    word = min(16, (bits := storage.data_ptr() | frame_bytes | stride) & -bits)
    small, large = CopySpecialisation(word, COPY_RUN), CopySpecialisation(word, min(machine.shared_per_block, 96 << 10))
    numbers, addresses = (copies[:, 0].data_ptr(), copies[:, 1].data_ptr()), (storage.data_ptr(),) * 2
    words, step = frame_bytes // word, copies.stride(0)
    # A run has 2 ** width words: at least 2 ** least, if frames are that long.
    for kernel, least in ((small, 5), (large, 3)):
        whole = (words - 1).bit_length()
        width = min((kernel.shared_bytes // kernel.shared_word // C).bit_length() - 1, whole, 10)
        if width >= min(least, whole):
            params = COPY_LAYOUT.pack(*addresses, *numbers, stride, stride, words, step, C, width, C, len(storage))
            return machine.launch(kernel, -(-words >> width), params)
    wide = min(
        words, max(32, MOST_SCRATCH // (C * word))
    )  # words of each frame that pass through the scratch buffer at a time
    scratch = machine.scratch((C * wide * word,), torch.uint8, storage)
    most_runs = small.shared_bytes // small.shared_word >> 5
    for first in range(0, words, wide):
        count, at = min(wide, words - first), addresses[0] + first * word
        gather = ((at, scratch.data_ptr()), (numbers[0], 0), (stride, wide * word))
        scatter = ((scratch.data_ptr(), at), (0, numbers[1]), (wide * word, stride))
        for ends, by, strides in (gather, scatter):
            params = COPY_LAYOUT.pack(*ends, *by, *strides, count, step, C, 5, most_runs, len(storage))
            machine.launch(small, -(-count >> 5), params)
    return None


def _aligned(x: Tensor, size: int) -> bool:
    """Return True if every row along the last dim begins at a multiple of `size` bytes."""
    dims = zip(x.stride()[:-1], x.shape[:-1], strict=True)
    strides = (stride * x.element_size() for stride, count in dims if count > 1)
    return not any(at % size for at in (x.data_ptr(), *strides))


def _overlap(k: Tensor, v: Tensor) -> bool:
    """Return True if rows of V lie in rows of K."""
    size, apart = k.element_size(), v.data_ptr() - k.data_ptr()
    return -v.shape[3] * size < apart < k.shape[3] * size
