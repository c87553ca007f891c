"""The partition of csrc/cuda/partition.cuh, run on the emulator by all CTAs of an H200, and its rule once more.

A probe takes the place of the kernel: it walks over a CTA's units as paged_attention does, and attends to no key. So
the shapes are those of a real step.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from pagedkv.kernels.cuda.attention import LAYOUT, PARAMS
from tests.kernels.cuda import emulator
from tests.kernels.cuda.emulator import COMPILER, Emulator

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.skipif(not COMPILER, reason="the emulator needs g++")

HEADS, KV_HEADS, ROWS, STEP, OVERHEAD = 32, 8, 16, 64, 2
"""Of a decode: 32/8 heads, four teams of 16 keys a step."""

MOST = 64
"""Units of a CTA, at most."""

PROBE = """
#include "params.h"
#include "partition.cuh"
#include "ptx.cuh"

KERNEL(32, 1) probe(const __grid_constant__ AttentionParams p) {
    Partition<PROBE_ROWS, PROBE_STEP> partition(p);
    partition.compute();
    i64* to = static_cast<i64*>(p.out) + static_cast<i64>(ptx::block_index()) * PROBE_MOST * 4;
    for (; partition.more(); partition.advance(), to += 4) {
        if (ptx::thread_index() != 0) continue;
        ptx::write(to, i64{partition.unit.sequence} * p.num_kv_heads + partition.unit.head);
        ptx::write(to + 1, i64{partition.first_mine()});
        ptx::write(to + 2, i64{partition.end_mine()});
        ptx::write(to + 3, i64{partition.pieces().count});
    }
}
"""


class Probe:
    """The specialisation of the probe."""

    name, threads, shared_bytes = "probe", 32, 0
    macros = {"PROBE_ROWS": ROWS, "PROBE_STEP": STEP, "PROBE_MOST": MOST}  # noqa: RUF012


class Piece(NamedTuple):
    """A CTA's part of a unit: the items [first, end) of it, and the unit's number of partial states."""

    cta: int
    unit: int
    first: int
    end: int
    partials: int


class Cut(NamedTuple):
    """A line of work cut into shares. busiest: steps of the CTA with the most. pieces: the most of a unit.
    shared: units of several pieces."""

    busiest: int
    pieces: int
    shared: int


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Emulator:
    monkeypatch.setitem(emulator.PARAMS, Probe.name, "AttentionParams")
    found = Emulator()
    found.sources["probe.cuh"] = PROBE
    return found


def pieces_of(machine: Emulator, lens: Sequence[int], ctas: int) -> list[Piece]:
    """Return the pieces of a decode of sequences of these lengths, as the kernel cuts them."""
    B = len(lens)
    seq_lens, starts = torch.tensor(lens, dtype=torch.int32), torch.arange(B + 1, dtype=torch.int32)
    out = torch.full((ctas, MOST, 4), -1)
    fields: dict[str, Any] = dict.fromkeys(PARAMS, 0) | {"scale": 1.0, "softcap": 0.0}
    fields |= {"seq_lens": seq_lens.data_ptr(), "cu_seqlens_q": starts.data_ptr(), "out": out.data_ptr()}
    fields |= {"num_sequences": B, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "block_size": 16, "causal": 1}
    fields |= {"min_rows": 1, "max_rows": 16}
    machine.memory = [seq_lens, starts, out]
    machine.launch(Probe(), ctas, LAYOUT.pack(*(fields[name] for name in PARAMS)))
    return [
        Piece(cta, *row)
        for cta, rows in enumerate(out.tolist())
        for row in rows
        if row[0] >= 0 and (row[1] < row[2] or row[3] > 1)
    ]


def cut_of(pieces: list[Piece]) -> Cut:
    """Return the partition in short, and check that partial states are counted right."""
    work, parts, partials = Counter[int](), Counter[int](), dict[int, int]()
    for piece in pieces:
        work[piece.cta] += piece.end - piece.first
        parts[piece.unit] += piece.first < piece.end
        partials[piece.unit] = piece.partials
    assert parts == partials
    return Cut(max(work.values()), max(parts.values()), sum(count > 1 for count in parts.values()))


def copy_of(lens: Sequence[int], ctas: int) -> Cut:
    """Return the partition by the rule of csrc/cuda/partition.cuh, written a second time."""
    units = [-(-n // STEP) for n in lens for _ in range(KV_HEADS)]
    overhead, widths = OVERHEAD, [OVERHEAD + steps for steps in units]
    share, longest = max(1, -(-sum(widths) // ctas)), max(widths)
    if longest > share:
        even = max(1, -(-(longest - overhead) // (longest // share)))
        if sum(max(1, -(-steps // even)) for steps in units) <= ctas and 16 * even <= 17 * share:
            share, overhead, widths = even, 0, [max(1, -(-steps // even)) * even for steps in units]
    place, work, most, shared = 0, Counter[int](), 1, 0
    for steps, width in zip(units, widths, strict=True):
        owners = [min((place + overhead + i) // share, ctas) for i in range(steps)]
        work.update(owners)
        pieces = owners[-1] - owners[0] + 1 if owners else 1
        most, shared, place = max(most, pieces), shared + (pieces > 1), place + width
    return Cut(max(work.values()), most, shared)


BASE, CTAS = (4096,) * 32, 264
SHAPES = {
    "32 x 4k": BASE,
    "1 x 1k": (1024,),
    "1 x 4k": (4096,),
    "1 x 32k": (32768,),
    "8 x 8k": (8192,) * 8,
    "12 x 4k": (4096,) * 12,
    "33 x 4k": (4096,) * 33,
    "ragged": tuple(4096 * 32 // (n + 8) for n in range(32)),
}


def test_32_sequences_of_4k_are_cut_nowhere_on_an_h200(machine: Emulator) -> None:
    pieces = pieces_of(machine, BASE, CTAS)
    assert cut_of(pieces) == Cut(busiest=64, pieces=1, shared=0)
    assert len(pieces) == 256


@pytest.mark.parametrize("lens", SHAPES.values(), ids=SHAPES)
def test_the_kernel_cuts_by_its_rule(lens: tuple[int, ...], machine: Emulator) -> None:
    pieces = pieces_of(machine, lens, CTAS)
    assert cut_of(pieces) == copy_of(lens, CTAS)
    for unit in range(len(lens) * KV_HEADS):
        mine = [piece for piece in pieces if piece.unit == unit and piece.first < piece.end]
        edges = [0, *(piece.end for piece in mine)]
        assert [piece.first for piece in mine] == edges[:-1], "the pieces of a unit follow one another"
        assert edges[-1] == -(-lens[unit // KV_HEADS] // STEP)


@pytest.mark.parametrize(("sequences", "steps"), [(1, 2), (2, 4), (8, 16), (32, 64), (33, 64)])
def test_equal_sequences_are_cut_evenly_and_no_cta_works_on_two_units(
    sequences: int, steps: int, machine: Emulator
) -> None:
    pieces = pieces_of(machine, (4096,) * sequences, CTAS)
    assert len({piece.cta for piece in pieces}) == len(pieces)
    assert {piece.end - piece.first for piece in pieces} == {steps}


@pytest.mark.parametrize(
    ("lens", "old", "new", "cut"),
    [
        (BASE, "even = 1;", "even = 0;", Cut(busiest=64, pieces=2, shared=248)),
        ((4096,) * 8, "even = 1;", "even = 0;", Cut(busiest=16, pieces=5, shared=64)),
        ((4096,) * 8, "longest - OVERHEAD", "longest", Cut(busiest=17, pieces=4, shared=64)),
        ((4096,) * 12, "|| 16 * share > 17 * cut", "", Cut(busiest=32, pieces=2, shared=96)),
    ],
)
def test_a_planted_mistake_in_the_rule_for_even_cuts_is_caught(
    lens: tuple[int, ...], old: str, new: str, cut: Cut, machine: Emulator
) -> None:
    assert machine.sources["partition.cuh"].count(old) == 1
    machine.sources["partition.cuh"] = machine.sources["partition.cuh"].replace(old, new)
    assert cut_of(pieces_of(machine, lens, CTAS)) == cut != copy_of(lens, CTAS)
