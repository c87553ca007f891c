"""The partition of csrc/cuda/partition.cuh for random launches, compared with a slow one that is its definition.

The host code of the backend computes the launches. A probe takes the place of the kernel: it walks over a CTA's units
as paged_attention does, and writes down what paged_attention would do. The slow partition lays all steps of all units
on a line, in Python, from the contract's words alone.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from pagedkv.kernels.args import AttentionCall
from pagedkv.kernels.cuda import attention
from pagedkv.kernels.cuda.attention import LAYOUT, PARAMS, RECORD_WORDS
from tests.kernels.cuda import emulator
from tests.kernels.cuda.emulator import COMPILER, Emulator, Fault

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.kernels.cuda.specialisation import AttentionSpecialisation

pytestmark = pytest.mark.skipif(not COMPILER, reason="the emulator needs g++")

OVERHEAD, FIELDS, MOST = 2, 11, 1 << 19
"""Of a unit, in steps; numbers that the probe writes for each piece; pieces of a launch, at most."""

PROBE = """
#include "params.h"
#include "partition.cuh"
#include "ptx.cuh"

KERNEL(64, 1) probe(const __grid_constant__ AttentionParams p) {
    Partition<PROBE_ROWS, PROBE_STEP, 64, (PROBE_ROWS > 8)> partition(p);
    Record* record = reinterpret_cast<Record*>(p.kept) + ptx::block_index();
    const u64 launch = partition.recall(record, ptx::shared_base(), [] {}).launch;
    i64* to = static_cast<i64*>(p.out) + static_cast<i64>(ptx::block_index()) * p.tree_row;  // no tree: a free field
    for (; partition.more(); partition.advance()) {
        const Unit& unit = partition.unit;
        const i32 mine = partition.first_mine(), end = partition.end_mine();
        if (mine >= end && !(unit.num_items == 0 && partition.starts_here())) continue;
        const Pieces pieces = partition.pieces();
        i32 item = mine;
        do {
            const i32 next = p.split_tokens && item < end ? item + 1 : end;
            const i64 is_whole = item == mine && next == end;
            const i64 found[PROBE_FIELDS] = {
                unit.sequence, unit.tile, unit.head, item, next, partition.from_key(item), partition.to_key(next),
                pieces.count, pieces.first, pieces.index(p.split_tokens ? item : pieces.mine), is_whole};
            if (ptx::thread_index() == 0) {
                for (i64 x : found) ptx::write(to++, x);
            }
            item = next;
        } while (item < end);
    }
    if (ptx::thread_index() == 0) ptx::write(to, -1 - static_cast<i64>(launch));
}
"""


class Probe(NamedTuple):
    """The specialisation of the probe, for the rows and steps of a kernel."""

    rows: int
    step: int
    name: str = "probe"
    threads: int = 64
    shared_bytes: int = 16

    @property
    def macros(self) -> dict[str, int]:
        return {"PROBE_ROWS": self.rows, "PROBE_STEP": self.step, "PROBE_FIELDS": FIELDS}


class Seen(NamedTuple):
    """The work of a CTA on items [item, end) of a unit (sequence, tile, head)."""

    cta: int
    sequence: int
    tile: int
    head: int
    item: int
    end: int
    from_key: int
    to_key: int
    count: int
    first: int
    index: int
    is_whole: int

    @property
    def unit(self) -> tuple[int, int, int]:
        return self.sequence, self.tile, self.head


class Launched(NamedTuple):
    """One launch: its parameters by name, its CTAs, the number of the launch that each CTA read, and what CTAs did."""

    fields: dict[str, Any]
    kernel: AttentionSpecialisation
    ctas: int
    numbers: set[int]
    seen: list[Seen]


class Prober(Emulator):
    """A GPU that runs the probe with the parameters of each launch."""

    def __init__(self, num_sms: int) -> None:
        super().__init__(num_sms)
        self.sources["probe.cuh"] = PROBE
        self.launched: list[Launched] = []
        self.words = 0

    def kept(self, kind: int, words: int, like: Tensor) -> Tensor:
        self.words = words
        return super().kept(kind, words, like)

    def launch(self, kernel: Any, blocks: int, params: bytes) -> None:
        fields = dict(zip(PARAMS, LAYOUT.unpack(params), strict=True))
        of_cta = MOST // blocks * FIELDS
        found = torch.empty(blocks, of_cta, dtype=torch.int64)
        self.memory.append(found)
        params_of = fields | {"out": found.data_ptr(), "tree_row": of_cta}
        probe = Probe(kernel.rows, kernel.tile * kernel.warps_n)
        super().launch(probe, blocks, LAYOUT.pack(*params_of.values()))
        seen, numbers = [], set()
        for cta, row in enumerate(found):
            at = 0
            while (number := int(row[at])) >= 0:
                seen.append(Seen(cta, *row[at : at + FIELDS].tolist()))
                at += FIELDS
            numbers.add(-1 - number)
        self.launched.append(Launched(fields | {"words": self.words}, kernel, blocks, numbers, seen))


class Shape(NamedTuple):
    """A batch and the options that its partition follows from."""

    queries: tuple[int, ...]
    lengths: tuple[int, ...]
    heads: tuple[int, int]
    causal: bool = True
    causal_of: tuple[bool, ...] | None = None
    window: int | None = None
    right: int | None = None
    split: int | None = None
    kv: torch.dtype = torch.bfloat16
    spare: int = 0
    """Rows of q after those of the last sequence, as a captured graph has them."""

    def call(self) -> AttentionCall:
        (H, K), B, T = self.heads, len(self.queries), sum(self.queries) + self.spare
        pool = torch.empty(1, 16, K, 64, dtype=self.kv)
        q, out, lse = torch.empty(T, H, 64, dtype=torch.bfloat16), torch.empty(T, H, 64), torch.empty(T, H)
        starts = torch.tensor([0, *itertools.accumulate(self.queries)], dtype=torch.int32)
        causal_of = None if self.causal_of is None else torch.tensor(self.causal_of)
        return AttentionCall(
            pool, pool.clone(), None, None, None, 0.125, self.causal, self.window, self.right, 0.0, None, None,
            self.split, q, torch.zeros(B, 1, dtype=torch.int32), None, torch.tensor(self.lengths, dtype=torch.int32),
            starts, max(self.queries), max(self.lengths), None, causal_of, out, lse,
        )  # fmt: skip

    def sees(self, b: int, query: int) -> tuple[int, int]:
        """Return the first key that a query sees, and the one after the last: by the contract."""
        at = self.lengths[b] - self.queries[b] + query
        causal = self.causal_of[b] if self.causal_of is not None else self.causal
        first = 0 if self.window is None else max(0, at - self.window + 1)
        right = 0 if causal else self.right
        last = self.lengths[b] if right is None else min(self.lengths[b], at + right + 1)
        return first, max(first, last)


class Unit(NamedTuple):
    key: tuple[int, int, int]
    begin: int
    end: int
    cuts: list[int]
    """The keys at which its items begin, and the end of the last."""
    weight: int


def units_of(shape: Shape, rows: int, step: int, least: int, most: int) -> list[Unit]:
    """Return the units of a launch, in the order of the line."""
    H, K = shape.heads
    G, units = H // K, []
    for b, queries in enumerate(shape.queries):
        if not least <= queries * G <= most:
            continue
        for tile in range(-(-queries * G // rows)):
            of_tile = {x // G for x in range(tile * rows, min(queries * G, (tile + 1) * rows))}
            bounds = [shape.sees(b, query) for query in (min(of_tile), max(of_tile))]
            begin, end = bounds[0][0] // 16 * 16, bounds[1][1]
            weight = 1
            if bounds[0][0] >= end:
                begin, end, cuts = 0, 0, []
            elif shape.split:
                weight = -(-shape.split // step)
                first = begin // shape.split + 1
                cuts = [begin, *range(first * shape.split, end, shape.split), end]
            else:
                cuts = [*range(begin, end, step), end]
            units += [Unit((b, tile, head), begin, end, cuts, weight) for head in range(K)]
    return units


class Slow(NamedTuple):
    """The partition: for each (CTA, unit), its items; whether it is even."""

    items: dict[tuple[int, tuple[int, int, int]], list[int]]
    even: bool
    share: int


def slow_partition(units: list[Unit], ctas: int, split: bool, spread: bool) -> Slow:
    counts = [max(0, len(unit.cuts) - 1) for unit in units]
    widths = [OVERHEAD + n * unit.weight for n, unit in zip(counts, units, strict=True)]
    share = max(1, -(-sum(widths) // ctas))
    overhead, even = OVERHEAD, False
    if not split and max(widths, default=0) > share:
        cut = max(1, -(-max(counts) // (max(widths) // share)))
        padded = [max(1, -(-n // cut)) * cut for n in counts]
        if sum(padded) <= cut * ctas and 16 * cut <= 17 * share:
            overhead, even, share, widths = 0, True, cut, padded
    items, place = defaultdict(list), 0
    for n, unit, width in zip(counts, units, widths, strict=True):
        if not n or (split and not spread):
            items[place // share, unit.key] += range(n)
        else:
            for item in range(n):
                items[(place + overhead + item * unit.weight) // share, unit.key].append(item)
        place += width
    return Slow(dict(items), even, share)


def check(shape: Shape, launched: Launched) -> Slow:
    """Compare one launch with the slow partition, and check what a merge relies on."""
    fields, kernel = launched.fields, launched.kernel
    split, spread, slots = fields["split_tokens"], fields["spread"], fields["max_partials"]
    units = units_of(shape, kernel.rows, kernel.tile * kernel.warps_n, fields["min_rows"], fields["max_rows"])
    slow = slow_partition(units, launched.ctas, bool(split), bool(spread))
    items, of_unit = defaultdict(list), defaultdict(list)
    for seen in launched.seen:
        items[seen.cta, seen.unit] += range(seen.item, seen.end)
        of_unit[seen.unit].append(seen)
    assert dict(items) == slow.items
    assert of_unit.keys() == {unit.key for unit in units}
    if slow.even:
        ctas = [seen.cta for seen in launched.seen]
        assert len(set(ctas)) == len(ctas), "of an even cut, no CTA works on two units"
    tickets, partials = set[int](), set[int]()
    for unit in units:
        pieces = of_unit[unit.key]
        edges = [seen.from_key for seen in pieces] + [pieces[-1].to_key]
        assert (edges[0], edges[-1]) == (unit.begin, unit.end)
        assert edges[1:] == [seen.to_key for seen in pieces], "the pieces of a unit follow one another"
        if split:
            assert edges == (unit.cuts or [0, 0]), "a chunk ends at a multiple of split_tokens"
        if len(pieces) == 1 or (split and not spread):
            assert {seen.count for seen in pieces} == {1}
            assert len({seen.cta for seen in pieces}) == 1, "one CTA folds the chunks"
            assert pieces[0].is_whole == (len(pieces) == 1)
            continue
        assert {seen.count for seen in pieces} == {len(pieces)}, "each of these CTAs draws a ticket of the unit"
        assert len({seen.first for seen in pieces}) == 1
        assert pieces[0].first not in tickets
        tickets.add(pieces[0].first)
        mine = [seen.index for seen in pieces]
        assert mine[0] == pieces[0].first
        assert not partials & set(mine)
        assert len(set(mine)) == len(mine)
        steps = {after - before for before, after in itertools.pairwise(mine[1:])}
        assert mine[1] == mine[0] + 1
        assert steps <= ({1} if split else {2})
        partials |= set(mine)
    assert all(0 <= index < slots for index in partials | tickets)
    if tickets:
        assert fields["words"] >= RECORD_WORDS * launched.ctas + slots
    return slow


def run(machine: Prober, *shapes: Shape) -> list[Slow]:
    """Launch each shape in turn, three times in all, and check every launch."""
    found = []
    for shape in (*shapes, shapes[-1], shapes[0]):
        machine.launched = []
        call = shape.call()
        machine._may_touch(*call)
        attention.attend(call, machine)
        for launched in machine.launched:
            assert len(launched.numbers) == 1, "all CTAs count launches alike"
            found.append(check(shape, launched))
    return found


HEADS = ((1, 1), (4, 1), (8, 2), (32, 8), (6, 6), (24, 2), (40, 1), (6, 2))
LONGEST = (20, 300, 3000, 20000)


def drawn(draw: random.Random) -> tuple[int, list[Shape]]:
    """Return a number of SMs, and batches of one shape that differ in their lengths."""
    heads = draw.choice(HEADS)
    B = draw.choice((1, 1, 2, 3, 5, 8, 31, 33, 70) if heads[1] < 6 else (1, 2, 5, 12))
    longest = draw.choice(LONGEST if B < 9 else LONGEST[:3])
    kind = draw.choice(("decode", "drafts", "mixed", "prefill"))
    split = draw.choice((None, None, None, 16, 40, 128, 512, 4096))
    if split and split < longest // 64:
        split *= 64
    window = draw.choice((None, None, 1, 33, 500))
    causal = draw.choice((True, True, False))
    right = None if causal or draw.random() < 0.5 else draw.choice((0, 3, 70))
    kv = draw.choice((torch.bfloat16, torch.float8_e4m3fn))
    most = {"decode": 1, "drafts": 6, "mixed": 40, "prefill": 200 if heads[1] < 6 else 60}[kind]
    spread = draw.choice((0.0, 0.02, 0.3, 1.0))
    base, shapes, is_lopsided = draw.randint(1, longest), [], draw.random() < 0.2
    queries = [1 if kind == "decode" else draw.randint(0 if draw.random() < 0.3 else 1, most) for _ in range(B)]
    if draw.random() < 0.2:
        queries = [draw.choice((0, q)) for q in queries]
    if not any(queries):
        queries[-1] = 1
    causal_of = None
    if causal and window is None and draw.random() < 0.3:
        causal_of = tuple(draw.random() < 0.5 for _ in range(B))
    for _ in range(2):
        lens = [max(0, round(base * (1 + spread * draw.uniform(-1, 1)))) for _ in range(B)]
        if is_lopsided:
            lens = [longest, *(n // 50 for n in lens[1:])]
        if causal:
            lens = [max(n, q) for n, q in zip(lens, queries, strict=True)]
        else:
            lens = [n if draw.random() < 0.9 else draw.randint(0, 3) for n in lens]
        shapes.append(
            Shape(tuple(queries), tuple(lens), heads, causal, causal_of, window, right, split, kv, draw.choice((0, 9)))
        )
    top = max(max(shape.lengths) for shape in shapes)
    assert top <= 1 << 20
    return draw.choice((1, 2, 3, 7, 16, 66, 132)), shapes


@pytest.fixture(autouse=True)
def parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(emulator.PARAMS, "probe", "AttentionParams")


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 12))])
def test_any_partition_is_the_slow_one(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(10):
        num_sms, shapes = drawn(draw)
        run(Prober(num_sms), *shapes)


def decode(*lengths: int, heads: tuple[int, int] = (1, 1)) -> Shape:
    return Shape((1,) * len(lengths), lengths, heads, causal=False)


@pytest.mark.parametrize(("sequences", "pieces", "steps"), [(1, 32, 2), (8, 4, 16), (32, 1, 64), (33, 1, 64)])
def test_equal_sequences_of_an_engine_are_cut_evenly_on_an_h200(sequences: int, pieces: int, steps: int) -> None:
    """Of 4096 tokens and 8 kv heads; no CTA works on two units, but where there are more units than CTAs."""
    machine = Prober(132)
    run(machine, decode(*(4096,) * sequences, heads=(32, 8)))
    seen = machine.launched[0].seen
    assert len(seen) == sequences * 8 * pieces
    assert {one.end - one.item for one in seen} == {steps}


@pytest.mark.parametrize(
    ("old", "new", "num_sms", "shapes"),
    [
        ("/ share * share : share;", "/ share * share : 0;", 8, [decode(4096, 0)]),
        ("total > share * ptx::num_blocks() || ", "", 66, [decode(6400, *[64] * 200)]),
        ("even = 1;", "even = 0;", 132, [decode(*(4096,) * 8, heads=(32, 8))]),
        ("longest - OVERHEAD", "longest", 132, [decode(*(4096,) * 8, heads=(32, 8))]),
        ("|| 16 * share > 17 * cut", "", 132, [decode(*(4096,) * 12, heads=(32, 8))]),
        ("even ? 0 : OVERHEAD", "OVERHEAD", 8, [decode(4096)]),
        ("        is_first = false;\n", "", 2, [decode(4000, 3000, 2000)]),
        ("ptx::block_index()) - first, 2}", "ptx::block_index()) - first, 1}", 8, [decode(4096, 4096)]),
        ("past + unit.weight - 1)", "past + unit.weight)", 8, [Shape((1,), (4096,), (1, 1), split=64)]),
        ("if (now != kept) {", "if (!kept) {", 8, [decode(4096, 4096), decode(4096, 3000)]),
        ("warp < THREADS / 32", "warp < 1", 8, [decode(*(64,) * 40), decode(*(64,) * 39, 640)]),
    ],
)
def test_a_planted_mistake_in_the_partition_is_caught(old: str, new: str, num_sms: int, shapes: list[Shape]) -> None:
    run(Prober(num_sms), *shapes)
    machine = Prober(num_sms)
    assert machine.sources["partition.cuh"].count(old) == 1
    machine.sources["partition.cuh"] = machine.sources["partition.cuh"].replace(old, new)
    with pytest.raises((AssertionError, Fault)):
        run(machine, *shapes)
