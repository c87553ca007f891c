"""The specialisations of the kernels in csrc/cuda: the macros each is compiled with, and the threads and shared memory
it is launched with.

This file knows geometry and the sizes of csrc/cuda/specialisation.cuh. It knows neither tensors nor CUDA, and imports
neither torch nor numpy, so that setup.py can compile the most used specialisations ahead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, NamedTuple, Protocol

from pagedkv.errors import InvalidRequest
from pagedkv.spec import BITS, NUMBERS

_BITS: Final = tuple(BITS.values())
LARGEST_HEAD_DIM: Final = 576
"""The largest head dim of K and of V in attention: the result stays in registers."""
LARGEST_ROTATED: Final = (256, 128)
"""The same of K and V that are stored rotated, where warps share no rows; the second with float32 queries."""


def parts_of(dims: tuple[int, int], kinds: tuple[int, ...]) -> int:
    """Return how many warps share their rows (`WARPS_D`): enough that results and operands fit into registers.

    A float32 operand has three terms, so it takes more warps.
    """
    if kinds[0] == NUMBERS["float32"]:
        return 1 if max(dims) <= 128 else 2 if max(dims) <= 192 else 4
    return 1 if max(dims) <= 256 else 4


class KeyLayout(NamedTuple):
    """The layout of a call's keys, and the way they are copied.

    copy: bytes of one copy. The other fields are macros of csrc/cuda/specialisation.cuh.
    """

    copy: int = 16
    token_scales: int = 0
    v_in_k: int = 0
    page_runs: int = 0


class RowClass(NamedTuple):
    """Sequences of `least` to `most` query rows, and the CTA that serves them: `warps_m` warps of 16 rows in `warps_n`
    teams over the keys, `tile` keys at a time. If keys are the rows of its products, a warp has 8 query rows."""

    least: int
    most: int
    warps_m: int
    warps_n: int
    tile: int
    keys_as_rows: int = 0

    @staticmethod
    def of(kinds: tuple[int, int, int], dims: tuple[int, int]) -> tuple[RowClass, ...]:
        """Return the classes of sequences for (Q, K, V) kinds and (D, Dv).

        No kernel for float32 queries, or for heads that several warps share, has keys as rows.
        """
        few: tuple[RowClass, ...] = (RowClass(1, 16, 1, 4, 16),)
        if kinds[0] != NUMBERS["float32"] and parts_of(dims, kinds) == 1:
            few = (RowClass(1, 8, 1, 4, 16, keys_as_rows=1), RowClass(9, 16, 1, 4, 16))
        return (*few, RowClass(17, 32, 2, 2, 32), RowClass(33, 2**31 - 1, 4, 1, 32))


@dataclass(frozen=True, slots=True)
class AttentionSpecialisation:
    """A specialisation of paged_attention. csrc/cuda/specialisation.cuh explains the fields, which are its macros."""

    q_kind: int
    k_kind: int
    v_kind: int
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
    page_runs: int
    keys_as_rows: int

    name = "paged_attention"

    @property
    def macros(self) -> dict[str, int]:
        """The macros that the kernel is compiled with."""
        return _macros(self)

    @property
    def rows(self) -> int:
        """Query rows of a CTA."""
        return 8 if self.keys_as_rows else 16 * self.warps_m

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.warps_m * self.warps_d * self.warps_n

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA: `SHARED_BYTES` in csrc/cuda/specialisation.cuh."""
        columns = -(-self.head_dim // 32) * 32 if self.k_kind == NUMBERS["int5"] else self.head_dim
        queries = self.rows * (2 * columns + 16) * (3 if self.q_kind == NUMBERS["float32"] else 1)
        of_row = 12 if self.v_kind == NUMBERS["code4"] else 4
        stats = 8 * self.rows * (self.warps_n + 1) + of_row * self.rows + 16 + -(-self.threads // 128) * 16
        scores = self.warps_n * 4 * self.warps_d * self.rows * self.tile if self.warps_d > 1 else 0
        return -(-(queries + stats + scores) // 128) * 128 + self.stages_bytes

    @property
    def stages_bytes(self) -> int:
        """Shared memory of the stages of all teams, which the teams' sums and the pieces of a merge use after them."""
        rows = [(-(-row // 16) | 1) * 16 for row in self.row_bytes]
        rows[0] = self.row_bytes[0] if self.k_kind == NUMBERS["int5"] else rows[0]
        stage = self.tile * (sum(rows) + 4 * self.token_scales) + 16
        return self.warps_n * max(self.stages * stage, 4 * self.rows * (self.head_dim_v + 8))

    @property
    def row_bytes(self) -> tuple[int, ...]:
        """The bytes of a key and of a value in the pool, or of both in one."""
        rows = self.head_dim * _BITS[self.k_kind] // 8, self.head_dim_v * _BITS[self.v_kind] // 8
        return rows[: 2 - self.v_in_k]


class Specialisation(Protocol):
    """A kernel of csrc/cuda and the macros it is compiled with. Equal specialisations share one loaded kernel.

    name: the name of the kernel and, with .cuh, of its file.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def macros(self) -> dict[str, int]: ...  # noqa: D102
    @property
    def threads(self) -> int: ...  # noqa: D102
    @property
    def shared_bytes(self) -> int: ...  # noqa: D102


_FITS: Final = ((2, 4), (2, 3), (1, 4), (1, 3), (1, 2))
"""(CTAs on an SM, stages), best first. With two CTAs, one computes while the other begins or ends."""

_NARROW_FITS: Final = ((2, 3), (2, 2))
"""The same with tiles of 32 elements of 8 bits or fewer, tried first: each wait for a result serves twice the keys. An
H200 decodes 32 sequences of 4,096 tokens in 80 us for fp8, not 86."""

MOST_WARPS, MOST_THREADS = 8, 256
"""Warps of a CTA, and threads of an SM, at most: each thread may then have 255 registers."""

IN_FLIGHT: Final = 64 << 10
"""Bytes that the copies of an SM have under way at least: twice what latency and bandwidth ask for. Three stages
instead of two delay the first keys of a CTA: an H200 decodes 8 sequences of 4,096 tokens in 40 us, not 41."""

RESERVED: Final = 1024
"""Bytes of shared memory that the driver reserves for each CTA."""


@lru_cache(maxsize=1024)
def specialise(
    kinds: tuple[int, int, int], dims: tuple[int, int], row_class: RowClass, keys: KeyLayout, shared: tuple[int, int]
) -> AttentionSpecialisation:
    """Return the specialisation of attention for (Q, K, V) kinds and (D, Dv). shared: its bytes per CTA and per SM.

    Raises: InvalidRequest if shared memory does not hold two stages.
    """
    few = max(dims) > 128 or kinds[0] == NUMBERS["float32"]  # registers hold the scores of 16 keys only
    tile = 16 if few else row_class.tile
    parts = parts_of(dims, kinds)
    warps_m = min(row_class.warps_m, MOST_WARPS // parts)
    warps = (warps_m, min(row_class.warps_n, MOST_WARPS // parts // warps_m))
    is_narrow = tile < 32 and _BITS[kinds[1]] <= 8 and not few
    wide_tiles = [(32, *fit) for fit in _NARROW_FITS if is_narrow]
    while True:
        for keys_at_once, blocks, stages in (*wide_tiles, *((tile, *fit) for fit in _FITS)):
            tiling = (*warps, keys_at_once, stages, *keys[:2], blocks, parts, *keys[2:], row_class.keys_as_rows)
            kernel = AttentionSpecialisation(*kinds, *dims, *tiling)
            if (
                blocks * kernel.threads <= MOST_THREADS
                and kernel.shared_bytes <= shared[0]
                and blocks * (kernel.shared_bytes + RESERVED) <= shared[1]
            ):
                return _with_few_stages(kernel)
        if warps == (1, 1):
            break
        # Take fewer teams, then fewer rows.
        warps = (warps[0], warps[1] // 2) if warps[1] > 1 else (warps[0] // 2, 1)
    raise InvalidRequest(
        f"head dims {dims} need more shared memory than the {shared[0]} bytes of this GPU; use backend='reference'"
    )


def _with_few_stages(kernel: AttentionSpecialisation) -> AttentionSpecialisation:
    """Return the kernel of a decode with as few of its stages as have IN_FLIGHT bytes under way; others as they are."""
    if kernel.warps_m > 1:
        return kernel
    under_way = kernel.blocks * kernel.warps_n * kernel.tile * sum(kernel.row_bytes)  # by each stage but one
    return replace(kernel, stages=min(kernel.stages, 1 + max(1, -(-IN_FLIGHT // under_way))))


LONGEST_ROW: Final = 1024
"""The most elements of a vector. write_kv keeps them in the registers of a warp; merge_states has the same limit."""

ROW_WARPS: Final = 4


def _macros(kernel: object) -> dict[str, int]:
    return {name.upper(): getattr(kernel, name) for name in type(kernel).__slots__}  # type: ignore[attr-defined]


def vectors_of(head_dim: int) -> int:
    """Return how many vectors a CTA works on. `LANES_OF` in csrc/cuda/rows.cuh decides the same."""
    return ROW_WARPS * (1 if head_dim > 64 else 2 if head_dim > 32 else 4)


class _ByRows:
    """The part that the specialisations of kernels have in common whose warps work on a row each."""

    __slots__ = ()

    threads = 32 * ROW_WARPS
    shared_bytes = 0

    @property
    def macros(self) -> dict[str, int]:
        """The #defines of this specialisation."""
        return _macros(self)


@dataclass(frozen=True, slots=True)
class WriteSpecialisation(_ByRows):
    """A specialisation of csrc/cuda/write_kv.cuh, whose head explains the fields."""

    k_kind: int
    v_kind: int
    k_new_kind: int
    v_new_kind: int
    head_dim: int
    head_dim_v: int
    k_scale: int
    v_scale: int
    rope: int
    rope_pairs: int

    name = "write_kv"


@dataclass(frozen=True, slots=True)
class MergeSpecialisation(_ByRows):
    """A specialisation of csrc/cuda/merge_states.cuh."""

    q_kind: int
    head_dim_v: int

    name = "merge_states"


@dataclass(frozen=True, slots=True)
class CopySpecialisation:
    """A specialisation of csrc/cuda/copy_frames.cuh.

    word: bytes of one access.      shared_bytes: as the caller chooses; more of it holds more copies at once.
    """

    word: int
    shared_bytes: int

    name = "copy_frames"
    threads = 128

    @property
    def macros(self) -> dict[str, int]:
        """The macros that the kernel is compiled with."""
        return {"WORD": self.word}

    @property
    def shared_word(self) -> int:
        """Bytes that a word takes in shared memory."""
        return max(self.word, 2)


COPY_RUN: Final = 32 << 10
"""Bytes of shared memory of a CTA that copies frames, unless copies are very many. Several such CTAs share an SM."""
