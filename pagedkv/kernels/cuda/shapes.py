"""The specialisations of the kernels in csrc/cuda: what the compiler is told, and what a launch of each needs.

This file knows geometry and the sizes of csrc/cuda/shape.cuh. It knows neither tensors nor CUDA, and imports neither torch nor numpy, so
that setup.py can compile the most used ones ahead.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple, Protocol

from pagedkv.errors import InvalidRequest

KINDS: Final = {"bfloat16": 0, "float16": 1, "float32": 2, "fp8_e4m3": 3, "fp8_e5m2": 4, "int8": 5, "int4": 6}
"""`Kind` in csrc/cuda/elements.cuh."""

BITS: Final = (16, 16, 32, 8, 8, 8, 4)
LARGEST_HEAD_DIM: Final = 576
"""Of K and of V in attention: results stay in registers."""


def parts_of(dims: tuple[int, int], kinds: tuple[int, int]) -> int:
    """Warps that share 16 rows (`WARPS_D`): as many as it takes for results, and float32 operands of three pieces each, to fit."""
    if kinds[0] == KINDS["float32"]:
        return 1 if max(dims) <= 128 else 2 if max(dims) <= 192 else 4
    return 1 if max(dims) <= 256 else 4


class Keys(NamedTuple):
    """How a call's keys lie and are copied, and pieces merged: bytes of a copy, `TOKEN_SCALES`, `V_IN_K`, `BULK`, `SECOND_LAUNCH`."""

    copy: int = 16
    token_scales: int = 0
    v_in_k: int = 0
    bulk: int = 0
    second_launch: int = 0


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
    warps_d: int
    v_in_k: int
    bulk: int
    second_launch: int

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
        return 32 * self.warps_m * self.warps_d * self.warps_n

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA: `SHARED_BYTES` in csrc/cuda/shape.cuh."""
        rows = [-(-self.row_bytes(d) // 16) * 16 + 16 for d in (self.head_dim, self.head_dim_v)]
        stage = self.tile * (sum(rows[: 2 - self.v_in_k]) + 8 * self.token_scales) + 16
        queries = self.rows * (2 * self.head_dim + 16) * (3 if self.q_kind == KINDS["float32"] else 1)
        stats = 8 * self.rows * (self.warps_n + 1) + 16
        scores = self.warps_n * 4 * self.warps_m * self.warps_d * 16 * self.tile if self.warps_d > 1 else 0
        barriers = 8 * self.warps_n * self.stages * self.bulk
        sums = 4 * self.rows * (self.head_dim_v + 8)
        return -(-(queries + stats + scores + barriers) // 128) * 128 + self.warps_n * max(self.stages * stage, sums)

    def row_bytes(self, dim: int) -> int:
        """One key, or value, of one head in the pool."""
        return dim * BITS[self.kv_kind] // 8


@dataclass(frozen=True, slots=True)
class PiecesShape:
    """The specialisation of csrc/cuda/merge_pieces.cuh that merges what an attention kernel of shape `of` leaves."""

    of: Shape

    kernel = "merge_pieces"
    shared_bytes = 0

    @property
    def macros(self) -> dict[str, int]:
        """What the compiler is told."""
        return self.of.macros

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return self.of.threads


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


_FITS: Final = ((2, 4), (2, 3), (1, 4), (1, 3), (1, 2))
"""(CTAs on an SM, stages), best first. Two CTAs hide each other's beginnings and ends."""

MOST_WARPS, MOST_THREADS = 8, 256
"""Of a CTA, and of an SM: each may then have 255 registers."""

RESERVED: Final = 1024
"""Bytes of shared memory that the driver takes for each CTA."""


@lru_cache(maxsize=1024)
def shape_for(
    kinds: tuple[int, int], dims: tuple[int, int], row_class: RowClass, keys: Keys, shared: tuple[int, int]
) -> Shape:
    """The specialisation for (Q, KV) kinds and (D, Dv); shared: bytes per CTA and per SM.

    Raises: InvalidRequest if not even two stages fit.
    """
    narrow = max(dims) > 128 or kinds[0] == KINDS["float32"]  # registers for the scores of 16 keys only
    tile = 16 if narrow else row_class.tile
    if kinds[0] == KINDS["float32"] and row_class.least >= 33:
        keys = keys._replace(bulk=0)  # a prefill in float32 is bound by arithmetic, and has no registers left for it
    parts = parts_of(dims, kinds)
    warps_m = min(row_class.warps_m, MOST_WARPS // parts)
    warps = (warps_m, min(row_class.warps_n, MOST_WARPS // parts // warps_m))
    while True:
        for blocks, stages in _FITS:
            shape = Shape(*kinds, *dims, *warps, tile, stages, *keys[:2], blocks, parts, *keys[2:])
            if (
                blocks * shape.threads <= MOST_THREADS
                and shape.shared_bytes <= shared[0]
                and blocks * (shape.shared_bytes + RESERVED) <= shared[1]
            ):
                return shape
        if warps == (1, 1):
            break
        warps = (warps[0], warps[1] // 2) if warps[1] > 1 else (warps[0] // 2, 1)  # fewer teams, then fewer rows
    raise InvalidRequest(
        f"head dims {dims} need more shared memory than the {shared[0]} bytes of this GPU; use backend='reference'"
    )


LONGEST_ROW: Final = 1024
"""A vector's elements stay in the registers of a warp."""

ROW_WARPS: Final = 4


def _macros(shape: object) -> dict[str, int]:
    return {name.upper(): getattr(shape, name) for name in type(shape).__slots__}  # type: ignore[attr-defined]


def vectors_of(head_dim: int) -> int:
    """Vectors of a CTA: `LANES_OF` in csrc/cuda/rows.cuh."""
    return ROW_WARPS * (1 if head_dim > 64 else 2 if head_dim > 32 else 4)


@dataclass(frozen=True, slots=True)
class WriteShape:
    """One specialisation of csrc/cuda/write_kv.cuh, whose head says what the fields mean."""

    kv_kind: int
    k_new_kind: int
    v_new_kind: int
    head_dim: int
    head_dim_v: int
    k_scale: int
    v_scale: int
    rope: int
    rope_pairs: int

    kernel = "write_kv"
    threads = 32 * ROW_WARPS
    shared_bytes = 0

    @property
    def macros(self) -> dict[str, int]:
        """The #defines of this specialisation."""
        return _macros(self)


@dataclass(frozen=True, slots=True)
class MergeShape:
    """One specialisation of csrc/cuda/merge_states.cuh."""

    q_kind: int
    head_dim_v: int

    kernel = "merge_states"
    threads = 32 * ROW_WARPS
    shared_bytes = 0

    @property
    def macros(self) -> dict[str, int]:
        """The #defines of this specialisation."""
        return _macros(self)


@dataclass(frozen=True, slots=True)
class CopyShape:
    """One specialisation of csrc/cuda/copy_frames.cuh: bytes of an access. Its shared memory is the caller's choice."""

    word: int
    shared_bytes: int

    kernel = "copy_frames"
    threads = 128

    @property
    def macros(self) -> dict[str, int]:
        """What the compiler is told."""
        return {"WORD": self.word}

    @property
    def place(self) -> int:
        """Bytes of a word in shared memory."""
        return max(self.word, 2)


COPY_RUN: Final = 32 << 10
"""Shared memory of a CTA that copies frames, unless the copies are very many: several CTAs then share an SM."""

_COMMON: Final = (
    ("bfloat16", "bfloat16", 128),
    ("bfloat16", "fp8_e4m3", 128),
    ("float16", "float16", 128),
    ("bfloat16", "bfloat16", 64),
)


def common(shared: tuple[int, int]) -> list[Specialisation]:
    """What most models ask for, on a GPU with so much shared memory per CTA and per SM: worth compiling before anyone asks."""
    found: list[Specialisation] = []
    for q, kv, dim in _COMMON:
        kinds, scaled = (KINDS[q], KINDS[kv]), int(q != kv)
        found += [shape_for(kinds, (dim, dim), rows, Keys(token_scales=scaled), shared) for rows in CLASSES]
        found += [
            WriteShape(kinds[1], kinds[0], kinds[0], dim, dim, 2 * scaled, 2 * scaled, 0, 0),
            MergeShape(kinds[0], dim),
        ]
    return [*dict.fromkeys(found), CopyShape(16, COPY_RUN)]
