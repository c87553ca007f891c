"""Launches of attention: which specialisations of csrc/cuda serve a checked call, on how many CTAs, with which
parameters.

This file knows geometry and the layout of `AttentionParams` in csrc/cuda/params.h. It does not know CUDA: a `Machine`
runs the launches, either the driver of driver.py or, in the tests, an emulator on the host.

A sequence with few query rows (queries x G) and a sequence with many need different specialisations. Each launch takes
the sequences of its class and passes over the others, whatever lengths the device holds. So the launches of a call
follow from host integers alone, and a captured graph stays right.
"""

from __future__ import annotations

import hashlib
import math
import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import torch

from pagedkv.kernels import quant
from pagedkv.kernels.args import AttentionCall, AttentionOptions, KVLayer
from pagedkv.kernels.cuda.specialisation import (
    AttentionSpecialisation,
    KeyLayout,
    RowClass,
    Specialisation,
    specialise,
)
from pagedkv.kernels.layout import FARTHEST, bounds, is_v_in_k, scale_strides

if TYPE_CHECKING:
    from torch import Tensor

_POINTERS = (
    "q k v k_scale v_scale k_factor v_factor calibration block_table rows seq_lens cu_seqlens_q sinks slopes tree_mask "
    "causal_of out lse partials kept"
)
_STRIDES = (
    "q_token q_head k_frame k_slot k_head v_frame v_slot v_head k_scale_frame k_scale_slot k_scale_head "
    "v_scale_frame v_scale_slot v_scale_head table_row table_entries tree_row causal_step out_token out_head "
    "max_partials partition_key"
)
_INTEGERS = (
    "num_sequences num_heads num_kv_heads block_size causal window right split_tokens spread min_rows max_rows "
    "q_vectors"
)
_FLOATS = "scale softcap"
PARAMS: Final = (*_POINTERS.split(), *_STRIDES.split(), *_INTEGERS.split(), *_FLOATS.split())
"""The fields of `AttentionParams`, in order."""

LAYOUT: Final = struct.Struct(
    f"@{len(_POINTERS.split())}Q{len(_STRIDES.split())}q{len(_INTEGERS.split())}i{len(_FLOATS.split())}f"
)
POINTERS: Final = struct.Struct(f"@{len(_POINTERS.split())}Q")
REST: Final = struct.Struct(LAYOUT.format.replace(POINTERS.format[1:], ""))
"""LAYOUT is the whole of it: POINTERS, and REST after them."""

RECORD_WORDS: Final = 16
"""Words of 8 bytes that each CTA keeps from launch to launch: `Record` in csrc/cuda/partition.cuh."""

NO_CAP: Final = 1e30
"""A larger soft cap changes no bit of a float32 score, and its product with log2(e) may overflow."""

LEAST_CAP: Final = 1e-30
"""A smaller soft cap makes all scores as good as equal, too, and float32 may hold 0 in its place, which is no cap."""

FLOAT_MAX: Final = 3.4028234663852886e38
"""The largest float32."""

MOST_PARTIALS: Final = 1 << 30
"""The most bytes of partial states.

Short chunks of long sequences need more: then one CTA folds all chunks of a unit, to the same bits.
"""

MOST_LAUNCHES: Final = 256
"""Entries of a launcher's cache: the lengths of a prefill differ from step to step."""


class Machine(Protocol):
    """A GPU or its emulator: memory for launches, and launches."""

    num_sms: int
    shared_per_block: int
    shared_per_sm: int

    def workspace(self, floats: int, like: Tensor) -> Tensor:
        """Return float32 [>= floats] with any content on the device of `like`. It is reused as `scratch` is."""

    def kept(self, kind: int, words: int, like: Tensor) -> Tensor:
        """Return int64 [>= words] on the device of `like` for the next launch: zeros, or what the launch of this kind
        before it left there. No two launches of one kind that may run at once get the same memory.
        """

    def scratch(self, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
        """Return a tensor with any content on the device of `like`.

        It is reused once it is dropped and the launches so far have run.
        """

    def launch(self, kernel: Specialisation, blocks: int, params: bytes) -> None:
        """Run a kernel on the current stream."""


class _Launch(NamedTuple):
    """One launch without its pointers.

    floats:  float32 elements of workspace
    kind:    launches of a kind have equal grids, and the layers of a step are of one kind
    words:   8-byte words kept for all launches of this kind: one record per CTA, and the tickets
    rest:    the parameters after the pointers
    """

    kernel: AttentionSpecialisation
    blocks: int
    floats: int
    kind: int
    words: int
    rest: bytes


class AttentionLauncher:
    """Launches attention calls on one layer with fixed options, on one machine: what the backend returns from
    `bind_attention`.

    All calls have queries of one dtype. The launches follow from the integers in the key of `_launches`; they are
    computed once per key. Pointers and workspace belong to each call, so threads may share a launcher.
    """

    def __init__(self, layer: KVLayer, options: AttentionOptions, machine: Machine) -> None:
        self._layer, self._options, self._machine = layer, options, machine
        self._scales = _scales_of(layer)
        pool = (layer.k, layer.v, *self._scales, layer.calibration)
        self._pool = tuple(map(_address, pool))
        heads = (options.sinks, options.alibi_slopes)
        self._heads_at = tuple(map(_address, heads)) if all(x is None or x.is_contiguous() for x in heads) else ()
        self._launches: dict[tuple[Any, ...], tuple[_Launch, ...]] = {}

    def __call__(
        self, q: Tensor, table: Tensor, rows: Tensor | None, seq_lens: Tensor, starts: Tensor,
        max_q: int, max_k: int, tree: Tensor | None, causal_of: Tensor | None, out: Tensor, lse: Tensor | None,
    ) -> None:  # fmt: skip
        """Attend. An LSE of None goes to the workspace. Modifies: out, lse."""
        machine, on = self._machine, self._options
        q_at, shape, split = q.data_ptr(), q.shape, on.split_tokens
        key = (
            q_at & 15, shape, q.stride(), out.stride(), table.shape, table.stride(), seq_lens.shape, max_q,
            -(-max(max_k, 1) // split) if split else 0, None if tree is None else (tree.shape[1], tree.stride()),
            None if causal_of is None else causal_of.stride(),
        )  # fmt: skip
        launches = self._launches.get(key)
        if launches is None:
            arguments = (q, table, rows, seq_lens, starts, max_q, max_k, tree, causal_of, out, lse)
            launches = self._compute(key, *arguments)
        # The conditions stand here, not in a function: a call costs the host more than the condition.
        heads_at = self._heads_at
        if not heads_at:
            heads = [_dense(x, machine) for x in (on.sinks, on.alibi_slopes)]  # a copy must outlive the launch
            heads_at = tuple(map(_address, heads))
        if rows is not None and not rows.is_contiguous():
            rows = _copy_of(rows, machine)
        into = lse if lse is None or lse.is_contiguous() else _copy_of(lse, machine)
        scratch = shape[0] * shape[1] if into is None else 0
        if tree is not None and tree.stride(1) != 1:
            tree = _copy_of(tree, machine)
        pointers = (
            q_at, *self._pool, table.data_ptr(), 0 if rows is None else rows.data_ptr(), seq_lens.data_ptr(),
            starts.data_ptr(), *heads_at, 0 if tree is None else tree.data_ptr(),
            0 if causal_of is None else causal_of.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        for kernel, blocks, floats, kind, words, rest in launches:
            partials, kept = machine.workspace(floats + scratch, q), machine.kept(kind, words, q)
            at = partials.data_ptr()
            lse_at = at + 4 * floats if into is None else into.data_ptr()
            params = POINTERS.pack(*pointers, lse_at, at, kept.data_ptr()) + rest
            machine.launch(kernel, blocks, params)
        if lse is not None and into is not None and into is not lse:
            lse.copy_(into)  # padding stays

    def _compute(self, key: tuple[Any, ...], *arguments: Any) -> tuple[_Launch, ...]:
        if len(self._launches) >= MOST_LAUNCHES:
            self._launches.clear()
        layer, scales = self._layer, self._scales[:2]
        fixed: tuple[Any, ...] = (layer.k, layer.v, *scales, layer.calibration, *self._options)
        call = AttentionCall(*fixed, *arguments)
        launches = self._launches[key] = _launches_of(call, self._machine)
        return launches


def attend(call: AttentionCall, machine: Machine) -> None:
    """Launch the kernels that serve `call`. Modifies: call.out, call.lse."""
    layer, options, arguments = call.split()
    AttentionLauncher(layer, options, machine)(*arguments)


def _launches_of(call: AttentionCall, machine: Machine) -> tuple[_Launch, ...]:
    """Return the launches that serve calls like this one; their scales are None or per (token, head).

    Raises InvalidRequest if shared memory is too small.
    """
    group = call.q.shape[1] // call.k.shape[2]
    kinds = (quant.number_of(call.q), quant.number_of(call.k), quant.number_of(call.v, is_value=True))
    dims, shared = (call.q.shape[2], call.out.shape[2]), (machine.shared_per_block, machine.shared_per_sm)
    runs, v_in_k = _page_runs(call), is_v_in_k(call.k, call.v)
    keys = KeyLayout(_copy_bytes(call, runs), int(call.k_scale is not None), int(v_in_k), runs)
    rows = call.max_seqlen_q * group
    return tuple(
        _launch(call, machine, specialise(kinds, dims, row_class, keys, shared), row_class)
        for row_class in RowClass.of(kinds, dims)
        if group <= row_class.most and rows >= row_class.least and call.q.shape[0]
    )


def _launch(call: AttentionCall, machine: Machine, kernel: AttentionSpecialisation, row_class: RowClass) -> _Launch:
    (T, H, _), (_, S, K, _), B = call.q.shape, call.k.shape, call.seq_lens.shape[0]
    blocks, floats = machine.num_sms * kernel.blocks, kernel.rows * (kernel.head_dim_v + 2)
    spread, slots, split = 0, 2 * blocks, min(call.split_tokens or 0, FARTHEST)
    if split:
        units = (T * (H // K) // kernel.rows + B) * K
        chunks = -(-max(call.max_seqlen_k, 1) // split)
        spread = int(units < blocks and chunks > 1 and 4 * floats * units * (chunks + 2) <= MOST_PARTIALS)
        slots = units * (chunks + 2) if spread else blocks
    is_shared = bool(spread or not split)  # else one CTA owns each unit
    q, size, tree = call.q, call.q.element_size(), call.tree_mask
    q_token, q_head = q.stride(0) * size, q.stride(1) * size
    pools = [stride * call.k.element_size() for pool in (call.k, call.v) for stride in pool.stride()[:3]]
    scales = (*scale_strides(call.k_scale), *scale_strides(call.v_scale))
    tree_row = 0 if tree is None else tree.stride(0) if tree.stride(1) == 1 else tree.shape[1]
    causal_step = 0 if call.causal_of is None else call.causal_of.stride(0)
    (A, P), table_row = call.block_table.shape, call.block_table.stride(0)
    table = (table_row, (A - 1) * table_row + P if A else 0)
    strides = (q_token, q_head, *pools, *scales, *table, tree_row, causal_step)
    rows = (row_class.least, row_class.most)
    q_vectors = (q.data_ptr() | q_token | q_head) % (4 * size) == 0
    options = (kernel, blocks, *rows, H, K, call.causal, *bounds(call.window, call.right), split)
    lengths = (B, spread, tree is None, call.causal_of is None)
    rest = REST.pack(
        *strides, call.out.stride(0) * size, call.out.stride(1) * size, slots, _digest(options, lengths),
        B, H, K, S, call.causal, *bounds(call.window, call.right), split, spread, *rows, q_vectors,
        *_scale_and_cap(call.scale, call.softcap),
    )  # fmt: skip
    words = RECORD_WORDS * blocks + (slots if is_shared else 0)
    return _Launch(kernel, blocks, slots * floats, _digest(options), words, rest)


def _scale_and_cap(scale: float, softcap: float) -> tuple[float, float]:
    """Return the last two fields of `AttentionParams`. The host divides: a GPU's division by 0 takes a slow way."""
    cap = max(softcap, LEAST_CAP) if 0.0 < softcap < NO_CAP else 0.0
    return max(-FLOAT_MAX, min(scale / (cap or math.log(2.0)), FLOAT_MAX)), cap


def _digest(*facts: object) -> int:
    """Return a hash of 63 bits, equal in all processes."""
    return int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=8).digest(), "little") >> 1


def _copy_of(x: Tensor, machine: Machine) -> Tensor:
    return machine.scratch(x.shape, x.dtype, x).copy_(x)


def _dense(x: Tensor | None, machine: Machine) -> Tensor | None:
    return x if x is None or x.is_contiguous() else _copy_of(x, machine)


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _scales_of(layer: KVLayer) -> list[Tensor | None]:
    """Return the scales of K and of V per (token, head), then those for all. If one is per (token, head), the other is
    a 1 of strides 0."""
    scales = (layer.k_scale, layer.v_scale)
    of_tokens = [x if x is not None and x.dim() else None for x in scales]
    for_all = [x if x is not None and not x.dim() else None for x in scales]
    if any(x is not None for x in of_tokens):
        one = torch.ones((), dtype=torch.float16, device=layer.k.device)
        of_tokens = [one if x is None else x for x in of_tokens]
    return [*of_tokens, *for_all]


def _copy_bytes(call: AttentionCall, runs: int) -> int:
    """Return the largest copy (16, 8 or 4 bytes) that divides the length and the address of every row of K and V; or 2,
    for any address. runs: `_page_runs`; of int5 then 16 rows of a plane are one."""
    bits = 0
    for pool in (*(quant.planes(call.k) if call.k.dtype == torch.uint8 else (call.k,)), call.v):
        shape, strides = tuple(pool.shape), pool.stride()
        if runs and call.k.dtype == torch.uint8 and pool is not call.v:
            (F, S, K, row), (frame, _, head, _) = shape, strides
            shape, strides = (F, S // 16, K, 16 * row), (frame, 16 * row, head, 1)
        bits |= pool.data_ptr() | _steps(shape, strides, pool.element_size())
    copy = min(16, bits & -bits)
    return copy if copy >= 4 else 2


def _page_runs(call: AttentionCall) -> int:
    """Return `PAGE_RUNS` of csrc/cuda/stages.cuh: 0, 1 if 16 keys lie in one page, 2 if its rows leave no gaps too."""
    if call.k.shape[1] % 16 or (call.split_tokens or 0) % 16:
        return 0
    return 2 if all(pool.stride(1) == pool.shape[3] for pool in (call.k, call.v)) else 1


@lru_cache(maxsize=1024)
def _steps(shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> int:
    """Return the bitwise or of all steps between rows of a pool, and of a row's length, in bytes."""
    bits = shape[3] * size
    for count, stride in zip(shape[:3], strides[:3], strict=True):
        if count > 1:
            bits |= stride * size
    return bits
