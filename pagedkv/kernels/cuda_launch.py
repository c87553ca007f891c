"""From a checked call to launches: which specialisations of csrc/cuda serve it, on how many CTAs, with which parameters.

This file knows geometry and the layout of `AttentionParams` in csrc/cuda/params.h. It knows no CUDA: what runs a launch is a `Machine`,
the driver of cuda_driver.py or, in the tests, an emulator on the host.

A sequence with few query rows (queries x G) and one with many want different shapes; each launch takes the sequences of its class and
passes over the others, whatever lengths the device holds. So the launches of a call follow from host integers alone: a captured graph
stays right.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import torch

from pagedkv.errors import InvalidRequest
from pagedkv.kernels import quant

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.kernels.args import AttentionCall

KINDS: Final = {"bfloat16": 0, "float16": 1, "float32": 2, "fp8_e4m3": 3, "fp8_e5m2": 4, "int8": 5, "int4": 6}
"""`Kind` in csrc/cuda/elements.cuh."""

BITS: Final = (16, 16, 32, 8, 8, 8, 4)
LARGEST_HEAD_DIM: Final = {"float32": 128}
"""Of K and of V, by the dtype of q; 256 for all others. Results stay in registers, and float32 operands are three each."""

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


class RowClass(NamedTuple):
    """Sequences of `least` to `most` query rows, and the warps that serve them: 16 rows each, and teams of these over the keys."""

    least: int
    most: int
    warps_m: int
    warps_n: int
    tile: int


CLASSES: Final = (RowClass(1, 16, 1, 4, 16), RowClass(17, 32, 2, 2, 32), RowClass(33, 2**31 - 1, 4, 1, 32))


@dataclass(frozen=True, slots=True)
class Shape:
    """One specialisation of the kernel: the -D of csrc/cuda/shape.cuh, which says what they mean."""

    q_kind: int
    kv_kind: int
    head_dim: int
    head_dim_v: int
    warps_m: int
    warps_n: int
    tile: int
    stages: int
    copy: int
    token_scales: int
    blocks: int

    kernel = "paged_attention"

    @property
    def macros(self) -> dict[str, int]:
        """What the compiler is told."""
        return {name.upper(): getattr(self, name) for name in self.__slots__}

    @property
    def rows(self) -> int:
        """Query rows of a CTA."""
        return 16 * self.warps_m

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return 32 * self.warps_m * self.warps_n

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA: `SHARED_BYTES` in csrc/cuda/shape.cuh."""
        rows = [-(-self.row_bytes(d) // 16) * 16 + 16 for d in (self.head_dim, self.head_dim_v)]
        stage = self.tile * (sum(rows) + 8 * self.token_scales) + 16
        queries = self.rows * (2 * self.head_dim + 16) * (3 if self.q_kind == KINDS["float32"] else 1)
        stats = 8 * self.rows * (self.warps_n + 1) + 16
        sums = 4 * self.rows * (self.head_dim_v + 8)
        return -(-(queries + stats) // 128) * 128 + self.warps_n * max(self.stages * stage, sums)

    def row_bytes(self, dim: int) -> int:
        """One key, or value, of one head in the pool."""
        return dim * BITS[self.kv_kind] // 8


class Specialisation(Protocol):
    """A kernel of csrc/cuda, compiled for one purpose: equal ones are one. kernel: its name, and of its file."""

    @property
    def kernel(self) -> str: ...  # noqa: D102
    @property
    def macros(self) -> dict[str, int]: ...  # noqa: D102
    @property
    def threads(self) -> int: ...  # noqa: D102
    @property
    def shared_bytes(self) -> int: ...  # noqa: D102


class Machine(Protocol):
    """What runs a launch."""

    num_sms: int
    shared_per_block: int
    shared_per_sm: int

    def workspace(self, slots: int, floats: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Float32 [>= slots * floats], any content, and int32 [>= slots] of zeros, which launches leave zero; on the device of `like`."""

    def room(self, size: int, like: Tensor) -> Tensor:
        """uint8 [size], any content, on the device of `like`; free again for others when it is dropped and the launches so far have run."""

    def launch(self, shape: Specialisation, blocks: int, params: bytes) -> None:
        """Run the kernel of that shape, on the current stream."""


_FITS: Final = ((2, 4), (2, 3), (1, 4), (1, 3), (1, 2))
"""(CTAs on an SM, stages), best first. Two CTAs hide each other's beginnings and ends."""

RESERVED: Final = 1024
"""Bytes of shared memory that the driver takes for each CTA."""


@lru_cache(maxsize=1024)
def shape_for(kinds: tuple[int, int], dims: tuple[int, int], row_class: RowClass, keys: tuple[int, int], shared: tuple[int, int]) -> Shape:
    """The specialisation for (Q, KV) kinds and (D, Dv); keys: bytes of a copy and TOKEN_SCALES; shared: bytes per CTA and per SM.

    Raises: InvalidRequest if not even two stages fit.
    """
    narrow = max(dims) > 128 or kinds[0] == KINDS["float32"]  # registers for the scores of 16 keys only
    tile = 16 if narrow else row_class.tile
    warps = (row_class.warps_m, row_class.warps_n)
    while True:
        for blocks, stages in _FITS:
            shape = Shape(*kinds, *dims, *warps, tile, stages, *keys, blocks)
            if shape.shared_bytes <= shared[0] and blocks * (shape.shared_bytes + RESERVED) <= shared[1]:
                return shape
        if warps == (1, 1):
            break
        warps = (warps[0], warps[1] // 2) if warps[1] > 1 else (warps[0] // 2, 1)  # fewer teams, then fewer rows
    raise InvalidRequest(f"head dims {dims} need more shared memory than the {shared[0]} bytes of this GPU; use backend='reference'")


def attend(call: AttentionCall, machine: Machine) -> None:
    """Launch what serves `call`. Modifies: call.out, call.lse (which must be contiguous)."""
    group = call.q.shape[1] // call.k.shape[2]
    kinds = (KINDS[quant.NAMES[call.q.dtype]], KINDS[quant.NAMES[call.k.dtype]])
    dims, shared = (call.q.shape[2], call.out.shape[2]), (machine.shared_per_block, machine.shared_per_sm)
    scales, token_scales = _scales(call)
    keys = (_copy_bytes(call), token_scales)
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
    partials, tickets = machine.workspace(slots, shape.rows * (shape.head_dim_v + 2), call.q)
    q, k, v, out, tree = call.q, call.k, call.v, call.out, call.tree_mask
    size, stored = q.element_size(), k.element_size()
    tree = tree.contiguous() if tree is not None and tree.stride(1) != 1 else tree
    rows, sinks, slopes = (x if x is None else x.contiguous() for x in (call.rows, call.sinks, call.alibi_slopes))
    tables = (call.block_table, rows, call.seq_lens, call.cu_seqlens_q)
    q_token, q_head = (stride * size for stride in q.stride()[:2])
    strides = (*(x * stored for x in (*k.stride()[:3], *v.stride()[:3])), *scale_strides(scales[0]), *scale_strides(scales[1]))
    rules = (call.causal, call.window or 0, call.split_tokens or 0, spread, row_class.least, row_class.most)
    params = LAYOUT.pack(
        *(0 if x is None else x.data_ptr() for x in (q, k, v, *scales, *tables, sinks, slopes, tree, out, call.lse, partials, tickets)),
        *(q_token, q_head, *strides, call.block_table.stride(0), 0 if tree is None else tree.stride(0)),
        *(out.stride(0) * size, out.stride(1) * size, slots, B, H, K, k.shape[1], *rules),
        *((q.data_ptr() | q_token | q_head) % (4 * size) == 0, call.scale, call.softcap),
    )
    machine.launch(shape, blocks, params)


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


def _copy_bytes(call: AttentionCall) -> int:
    """The largest copy (16, 8 or 4 bytes) that every row of K and V is a multiple of, and begins at one. Raises: InvalidRequest."""
    bits = 0
    for pool in (call.k, call.v):
        size = pool.element_size()
        bits |= pool.data_ptr() | pool.shape[3] * size
        for stride in pool.stride()[:3]:
            bits |= stride * size
    copy = min(16, bits & -bits)
    if copy < 4:
        raise InvalidRequest(
            "rows of layer.k and layer.v begin at addresses that are no multiple of 4 bytes; align the strides of the pool"
        )
    return copy
