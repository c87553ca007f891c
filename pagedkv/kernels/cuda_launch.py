"""From a checked call to launches: which specialisations of csrc/cuda serve it, on how many CTAs, with which parameters.

This file knows geometry and the layout of `AttentionParams` in csrc/cuda/params.h. It knows no CUDA: what runs a launch is a `Machine`,
the driver of cuda_driver.py or, in the tests, an emulator on the host.

A sequence with few query rows (queries x G) and one with many want different shapes; each launch takes the sequences of its class and
passes over the others, whatever lengths the device holds. So the launches of a call follow from host integers alone: a captured graph
stays right.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import torch

from pagedkv.errors import InvalidRequest
from pagedkv.kernels import quant
from pagedkv.kernels.cuda_shapes import CLASSES, KINDS, Keys, PiecesShape, RowClass, Shape, Specialisation, shape_for

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.kernels.args import AttentionCall

_POINTERS = "q k v k_scale v_scale block_table rows seq_lens cu_seqlens_q sinks slopes tree_mask out lse partials tickets"
_STRIDES = (
    "q_token q_head k_frame k_slot k_head v_frame v_slot v_head k_scale_frame k_scale_slot k_scale_head v_scale_frame v_scale_slot "
    "v_scale_head table_row tree_row out_token out_head num_slots"
)
_INTEGERS = "num_sequences num_heads num_kv_heads block_size causal window split_tokens spread min_rows max_rows q_vectors"
_FLOATS = "scale softcap"
PARAMS: Final = (*_POINTERS.split(), *_STRIDES.split(), *_INTEGERS.split(), *_FLOATS.split())
"""The fields of `AttentionParams`, in order."""

LAYOUT: Final = struct.Struct(f"@{len(_POINTERS.split())}Q{len(_STRIDES.split())}q{len(_INTEGERS.split())}i{len(_FLOATS.split())}f4x")


class Ways(NamedTuple):
    """What may be done in more than one way, with equal results; on sm_90 and later only.

    bulk:          rows are copied in bulk where they may be.
    second_launch: partial results are merged by a second launch that begins early, not by the last CTA to arrive.
    """

    bulk: bool = False
    second_launch: bool = False


PLAIN: Final = Ways()


class Machine(Protocol):
    """What runs a launch."""

    num_sms: int
    shared_per_block: int
    shared_per_sm: int

    def workspace(self, floats: int, like: Tensor) -> Tensor:
        """Float32 [>= floats], any content, on the device of `like`; as a room is, free again for others."""

    def tickets(self, count: int, like: Tensor) -> Tensor:
        """int32 [>= count] of zeros on the device of `like`, which the next launch alone uses, or launches in order; they leave zeros."""

    def room(self, size: int, like: Tensor) -> Tensor:
        """uint8 [size], any content, on the device of `like`; free again for others when it is dropped and the launches so far have run."""

    def launch(self, shape: Specialisation, blocks: int, params: bytes, *, early: bool = False) -> None:
        """Run the kernel of that shape, on the current stream. early: it may begin before the launch before it has ended."""


def attend(call: AttentionCall, machine: Machine, ways: Ways = PLAIN) -> None:
    """Launch what serves `call`. Modifies: call.out, call.lse (which must be contiguous)."""
    group = call.q.shape[1] // call.k.shape[2]
    kinds = (KINDS[quant.NAMES[call.q.dtype]], KINDS[quant.NAMES[call.k.dtype]])
    dims, shared = (call.q.shape[2], call.out.shape[2]), (machine.shared_per_block, machine.shared_per_sm)
    scales, token_scales = _scales(call)
    copy = _copy_bytes(call)
    keys = Keys(copy, token_scales, int(_v_in_k(call)), int(ways.bulk and copy == 16), int(ways.second_launch))
    rows = call.max_seqlen_q * group
    for row_class in CLASSES:
        if group <= row_class.most and rows >= row_class.least and call.q.shape[0]:
            _launch(call, machine, shape_for(kinds, dims, row_class, keys, shared), row_class, scales)


def _launch(call: AttentionCall, machine: Machine, shape: Shape, row_class: RowClass, scales: tuple[Tensor | None, Tensor | None]) -> None:
    (T, H, _), K, B = call.q.shape, call.k.shape[2], call.seq_lens.shape[0]
    blocks = machine.num_sms * shape.blocks
    spread, slots = 0, 2 * blocks
    if call.split_tokens:
        units = (T * (H // K) // shape.rows + B) * K
        chunks = -(-max(call.max_seqlen_k, 1) // call.split_tokens)
        spread = int(units < blocks and chunks > 1)
        slots = units * (chunks + 2) if spread else blocks
    shared = bool(spread or not call.split_tokens)  # else no unit is anybody's but one CTA's
    partials = machine.workspace(slots * shape.rows * (shape.head_dim_v + 2), call.q)
    tickets = machine.tickets(slots, call.q) if shared and not shape.second_launch else None
    q, k, v, out, tree = call.q, call.k, call.v, call.out, call.tree_mask
    size, stored = q.element_size(), k.element_size()
    tree = tree.contiguous() if tree is not None and tree.stride(1) != 1 else tree
    rows, sinks, slopes = (x if x is None else x.contiguous() for x in (call.rows, call.sinks, call.alibi_slopes))
    q_at, q_token, q_head = q.data_ptr(), q.stride(0) * size, q.stride(1) * size
    k_frame, k_slot, k_head, _ = k.stride()
    v_frame, v_slot, v_head, _ = v.stride()
    params = LAYOUT.pack(
        *(q_at, k.data_ptr(), v.data_ptr(), _address(scales[0]), _address(scales[1]), call.block_table.data_ptr(), _address(rows)),
        *(call.seq_lens.data_ptr(), call.cu_seqlens_q.data_ptr(), _address(sinks), _address(slopes), _address(tree), out.data_ptr()),
        *(call.lse.data_ptr(), partials.data_ptr(), _address(tickets)),
        *(q_token, q_head, k_frame * stored, k_slot * stored, k_head * stored, v_frame * stored, v_slot * stored, v_head * stored),
        *(*scale_strides(scales[0]), *scale_strides(scales[1]), call.block_table.stride(0), 0 if tree is None else tree.stride(0)),
        *(out.stride(0) * size, out.stride(1) * size, slots),
        *(B, H, K, k.shape[1], call.causal, call.window or 0, call.split_tokens or 0, spread, row_class.least, row_class.most),
        *((q_at | q_token | q_head) % (4 * size) == 0, call.scale, call.softcap),
    )
    machine.launch(shape, blocks, params)
    if shared and shape.second_launch:
        machine.launch(PiecesShape(shape), blocks, params, early=True)


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _scales(call: AttentionCall) -> tuple[tuple[Tensor | None, Tensor | None], int]:
    """The scales as the kernel takes them, and whether they are per (token, head)."""
    pair = (call.k_scale, call.v_scale)
    if not any(scale is not None and scale.dim() for scale in pair):
        return pair, 0
    k_scale, v_scale = (torch.ones((), device=call.q.device) if scale is None else scale for scale in pair)
    return (k_scale, v_scale), 1


def scale_strides(scale: Tensor | None) -> tuple[int, int, int]:
    """In elements; one scale for all is one whose strides are 0."""
    if scale is None or not scale.dim():
        return (0, 0, 0)
    frame, slot, head = scale.stride()
    return (frame, slot, head)


def _v_in_k(call: AttentionCall) -> bool:
    """Is V the first part of K in the same memory, as in MLA?"""
    k, v = call.k, call.v
    return k.data_ptr() == v.data_ptr() and v.shape[3] <= k.shape[3] and k.stride()[:3] == v.stride()[:3]


def _copy_bytes(call: AttentionCall) -> int:
    """The largest copy (16, 8 or 4 bytes) that every row of K and V is a multiple of, and begins at one. Raises: InvalidRequest."""
    bits = 0
    for pool in (call.k, call.v):
        size, shape, strides = pool.element_size(), pool.shape, pool.stride()
        bits |= pool.data_ptr() | shape[3] * size
        for count, stride in zip(shape[:3], strides[:3], strict=True):
            if count > 1:
                bits |= stride * size
    copy = min(16, bits & -bits)
    if copy < 4:
        raise InvalidRequest(
            "rows of layer.k and layer.v begin at addresses that are no multiple of 4 bytes; align the strides of the pool"
        )
    return copy
