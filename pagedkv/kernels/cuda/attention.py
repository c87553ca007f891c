"""From a checked call to launches: which specialisations of csrc/cuda serve it, on how many CTAs, with which parameters.

This file knows geometry and the layout of `AttentionParams` in csrc/cuda/params.h. It knows no CUDA: what runs a launch is a `Machine`,
the driver of cuda_driver.py or, in the tests, an emulator on the host.

A sequence with few query rows (queries x G) and one with many want different shapes; each launch takes the sequences of its class and
passes over the others, whatever lengths the device holds. So the launches of a call follow from host integers alone: a captured graph
stays right.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import torch

from pagedkv.errors import InvalidRequest
from pagedkv.kernels import quant
from pagedkv.kernels.args import AttentionCall
from pagedkv.kernels.cuda.specialisation import (
    CLASSES,
    KINDS,
    AttentionSpecialisation,
    Keys,
    PiecesSpecialisation,
    RowClass,
    Specialisation,
    specialise,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

_POINTERS = (
    "q k v k_scale v_scale block_table rows seq_lens cu_seqlens_q sinks slopes tree_mask out lse partials tickets"
)
_STRIDES = (
    "q_token q_head k_frame k_slot k_head v_frame v_slot v_head k_scale_frame k_scale_slot k_scale_head v_scale_frame v_scale_slot "
    "v_scale_head table_row tree_row out_token out_head max_partials"
)
_INTEGERS = (
    "num_sequences num_heads num_kv_heads block_size causal window split_tokens spread min_rows max_rows q_vectors"
)
_FLOATS = "scale softcap"
PARAMS: Final = (*_POINTERS.split(), *_STRIDES.split(), *_INTEGERS.split(), *_FLOATS.split())
"""The fields of `AttentionParams`, in order."""

LAYOUT: Final = struct.Struct(
    f"@{len(_POINTERS.split())}Q{len(_STRIDES.split())}q{len(_INTEGERS.split())}i{len(_FLOATS.split())}f4x"
)
POINTERS: Final = struct.Struct(f"@{len(_POINTERS.split())}Q")
REST: Final = struct.Struct(LAYOUT.format.replace(POINTERS.format[1:], ""))
"""All of it; the pointers, and what follows them."""

FARTHEST: Final = 1 << 30
"""No sequence is so long: a wider window hides nothing, and a longer chunk holds all. Sums of it fit into 32 bits."""

NO_CAP: Final = 1e30
"""A soft cap from here on changes no bit of a score that float32 holds, and its product with log2(e) might not be one."""

MOST_PARTIALS: Final = 1 << 30
"""Bytes of partial states. Short chunks of long sequences would leave more: then one CTA folds all chunks of a unit, to the same bits."""

MOST_READY: Final = 1024
"""Signatures that a machine remembers: those of a prefill differ from step to step."""

_FIELDS: Final = attrgetter(*AttentionCall.__slots__)


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
    ready: dict[Any, Any]  # what launches calls, by signature

    def workspace(self, floats: int, like: Tensor) -> Tensor:
        """Float32 [>= floats], any content, on the device of `like`; as scratch is, free again for others."""

    def tickets(self, count: int, like: Tensor) -> Tensor:
        """int32 [>= count] of zeros on the device of `like`, which the next launch alone uses, or launches in order; they leave zeros."""

    def scratch(self, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
        """Any content, on the device of `like`; free again for others when it is dropped and the launches so far have run."""

    def launch(self, kernel: Specialisation, blocks: int, params: bytes, *, early: bool = False) -> None:
        """Run the kernel on the current stream. early: it may begin before the launch before it has ended."""


class Launch(NamedTuple):
    """What one launch is, whatever its tensors hold and wherever they lie.

    floats:  of the workspace          slots: tickets it counts in; 0: nobody does
    rest:    the parameters after the pointers
    merge:   what is launched after it, if anything is
    """

    shape: AttentionSpecialisation
    blocks: int
    floats: int
    slots: int
    rest: bytes
    merge: PiecesSpecialisation | None


class Ready:
    """Launches calls of one signature (known.py) on one machine; what follows from the signature is computed once.

    Three things that decide are not in a signature: how addresses are aligned, whether K and V are one memory, and how many chunks
    `split_tokens` may make of the longest sequence. They are looked at in each call; where they differ, all is computed anew. Pointers are
    each call's own, so are workspace and tickets. Threads may share it.
    """

    def __init__(self, machine: Machine, ways: Ways = PLAIN) -> None:
        self._machine, self._ways = machine, ways
        self._last: tuple[tuple[int, ...], tuple[Launch, ...]] = ((), ())

    def __call__(self, *fields: Any) -> None:
        """Attend. fields: of an AttentionCall, in order. Modifies: out, lse."""
        (
            q,
            k,
            v,
            k_scale,
            v_scale,
            table,
            rows,
            seq_lens,
            starts,
            _,
            max_k,
            _,
            _,
            _,
            _,
            sinks,
            slopes,
            tree,
            split,
            out,
            lse,
        ) = fields
        q_at, k_at, v_at = q.data_ptr(), k.data_ptr(), v.data_ptr()
        now = (q_at & 15, (k_at | v_at) & 15, k_at == v_at, -(-max(max_k, 1) // split) if split else 0)
        decided, launches = self._last  # both at once: another thread may replace them
        if decided != now:
            launches = launches_of(AttentionCall(*fields), self._machine, self._ways)
            self._last = (now, launches)
        if (k_scale is None) != (v_scale is None):
            k_scale, v_scale = _both_scales(k_scale, v_scale, q)
        machine = self._machine
        rows, sinks, slopes, into = (
            x if x is None or x.is_contiguous() else _dense(x, machine) for x in (rows, sinks, slopes, lse)
        )
        if tree is not None and tree.stride(1) != 1:
            tree = _dense(tree, machine)
        pointers = (
            q_at,
            k_at,
            v_at,
            *map(_address, (k_scale, v_scale, table, rows, seq_lens, starts, sinks, slopes, tree, out, into)),
        )
        for shape, blocks, floats, slots, rest, merge in launches:
            partials, tickets = machine.workspace(floats, q), machine.tickets(slots, q) if slots else None
            params = POINTERS.pack(*pointers, partials.data_ptr(), _address(tickets)) + rest
            machine.launch(shape, blocks, params)
            if merge is not None:
                machine.launch(merge, blocks, params, early=True)
        if into is not lse:
            lse.copy_(into)


def attend(call: AttentionCall, machine: Machine, ways: Ways = PLAIN) -> None:
    """Launch what serves `call`. Modifies: call.out, call.lse."""
    ready(call, machine, ways)(*_FIELDS(call))


def ready(call: AttentionCall, machine: Machine, ways: Ways = PLAIN) -> Ready:
    """What launches calls of this one's signature: the same one for equal ones, as long as they are not too many."""
    tensors = (
        call.q,
        call.k,
        call.v,
        call.k_scale,
        call.v_scale,
        call.block_table,
        call.seq_lens,
        call.tree_mask,
        call.out,
    )
    options = (ways, call.max_seqlen_q, call.scale, call.causal, call.window, call.softcap, call.split_tokens)
    found: Ready = of_signature(machine, tensors, options, lambda: Ready(machine, ways))
    return found


def of_signature(
    machine: Machine, tensors: Sequence[Tensor | None], options: tuple[object, ...], make: Callable[[], Any]
) -> Any:
    """What `make` returned for tensors of the same dtypes, shapes and strides, and for equal options."""
    signature = (options, *[None if x is None else (x.dtype, x.shape, x.stride()) for x in tensors])
    found = machine.ready.get(signature)
    if found is None:
        if len(machine.ready) >= MOST_READY:
            machine.ready.clear()
        found = machine.ready[signature] = make()
    return found


def launches_of(call: AttentionCall, machine: Machine, ways: Ways = PLAIN) -> tuple[Launch, ...]:
    """What serves calls like this one. Raises: InvalidRequest where rows are not aligned, or shared memory does not suffice."""
    group = call.q.shape[1] // call.k.shape[2]
    kinds = (KINDS[quant.NAMES[call.q.dtype]], KINDS[quant.NAMES[call.k.dtype]])
    dims, shared = (call.q.shape[2], call.out.shape[2]), (machine.shared_per_block, machine.shared_per_sm)
    copy, token_scales = (
        _copy_bytes(call),
        int(any(scale is not None and scale.dim() for scale in (call.k_scale, call.v_scale))),
    )
    keys = Keys(copy, token_scales, int(_v_in_k(call)), int(ways.bulk and copy == 16), int(ways.second_launch))
    rows = call.max_seqlen_q * group
    return tuple(
        _launch(call, machine, specialise(kinds, dims, row_class, keys, shared), row_class)
        for row_class in CLASSES
        if group <= row_class.most and rows >= row_class.least and call.q.shape[0]
    )


def _launch(call: AttentionCall, machine: Machine, shape: AttentionSpecialisation, row_class: RowClass) -> Launch:
    (T, H, _), (_, S, K, _), B = call.q.shape, call.k.shape, call.seq_lens.shape[0]
    blocks, floats = machine.num_sms * shape.blocks, shape.rows * (shape.head_dim_v + 2)
    spread, slots, split = 0, 2 * blocks, min(call.split_tokens or 0, FARTHEST)
    if split:
        units = (T * (H // K) // shape.rows + B) * K
        chunks = -(-max(call.max_seqlen_k, 1) // split)
        spread = int(units < blocks and chunks > 1 and 4 * floats * units * (chunks + 2) <= MOST_PARTIALS)
        slots = units * (chunks + 2) if spread else blocks
    shared = bool(spread or not split)  # else no unit is anybody's but one CTA's
    q, size = call.q, call.q.element_size()
    q_token, q_head = q.stride(0) * size, q.stride(1) * size
    pools = [stride * call.k.element_size() for pool in (call.k, call.v) for stride in pool.stride()[:3]]
    tree_row = (
        0
        if call.tree_mask is None
        else call.tree_mask.stride(0)
        if call.tree_mask.stride(1) == 1
        else call.tree_mask.shape[1]
    )
    rest = REST.pack(
        *(
            q_token,
            q_head,
            *pools,
            *scale_strides(call.k_scale),
            *scale_strides(call.v_scale),
            call.block_table.stride(0),
            tree_row,
        ),
        *(call.out.stride(0) * size, call.out.stride(1) * size, slots),
        *(B, H, K, S, call.causal, min(call.window or 0, FARTHEST), split, spread, row_class.least, row_class.most),
        *(
            (q.data_ptr() | q_token | q_head) % (4 * size) == 0,
            call.scale,
            call.softcap if call.softcap < NO_CAP else 0.0,
        ),
    )
    merge = PiecesSpecialisation(shape) if shared and shape.second_launch else None
    return Launch(shape, blocks, slots * floats, slots if shared and not merge else 0, rest, merge)


def _dense(x: Tensor, machine: Machine) -> Tensor:
    return machine.scratch(x.shape, x.dtype, x).copy_(x)


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _both_scales(k_scale: Tensor | None, v_scale: Tensor | None, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Of two of which one is None, as the kernel takes them: one per (token, head) needs another beside it."""
    if not any(scale is not None and scale.dim() for scale in (k_scale, v_scale)):
        return k_scale, v_scale
    ones = torch.ones((), device=like.device)
    return ones if k_scale is None else k_scale, ones if v_scale is None else v_scale


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
        bits |= pool.data_ptr() | _steps(pool.shape, pool.stride(), pool.element_size())
    copy = min(16, bits & -bits)
    if copy < 4:
        raise InvalidRequest(
            "rows of layer.k and layer.v begin at addresses that are no multiple of 4 bytes; align the strides of the pool"
        )
    return copy


@lru_cache(maxsize=1024)
def _steps(shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> int:
    """The bits of all steps, in bytes, that there are from a row of a pool to another, and of a row's length."""
    bits = shape[3] * size
    for count, stride in zip(shape[:3], strides[:3], strict=True):
        if count > 1:
            bits |= stride * size
    return bits
