"""The tests catch a kernel with one planted mistake, by a fault of the emulator or by a wrong result.

A mistake replaces a text that must occur in the sources exactly once, so a test fails if its text is gone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
import torch

from pagedkv.kernels import reference
from pagedkv.kernels.args import RotaryTable
from tests.cases import Case, call_of, empty_layer, write_of
from tests.kernels.cuda.emulator import COMPILER, Emulator, Fault
from tests.kernels.cuda.test_attention import check
from tests.kernels.cuda.test_launch import late_launches_are_right, splits_are_equal, steps_are_right

pytestmark = pytest.mark.skipif(not COMPILER, reason="the emulator needs g++")


class Planted(NamedTuple):
    """A mistake: the text `old` in `file` becomes `new`."""

    file: str
    old: str
    new: str


MISTAKES = {
    "a team does not wait for its lanes": Planted("paged_attention.cuh", "sync_team(me.team);  //", "//"),
    "no thread waits for the copies": Planted("paged_attention.cuh", "ptx::copy_wait<STAGES - 2>();", ""),
    "one copy too few is waited for": Planted("paged_attention.cuh", "copy_wait<STAGES - 2>", "copy_wait<STAGES - 1>"),
    "an unwritten stage is read": Planted("paged_attention.cuh", "u32 reading = 0;", "u32 reading = 1;"),
    "a stage is filled while it is read": Planted(
        "paged_attention.cuh", "walk.filling + 1 == STAGES ? 0 : walk.filling + 1;", "walk.filling;"
    ),
    "stages become sums too early": Planted(
        "paged_attention.cuh", "ptx::sync_block();  // the sums will", "// the sums will"
    ),
    "states of teams are read before they are stored": Planted(
        "paged_attention.cuh", "me.first_row, me.part);\n    ptx::sync_block();", "me.first_row, me.part);"
    ),
    "sums become stages too early": Planted(
        "paged_attention.cuh",
        "ptx::sync_block();  // the next stages will overwrite the sums\n    if (!last",
        "if (!last",
    ),
    "no thread waits to learn which CTA is last": Planted(
        "paged_attention.cuh", "    ptx::sync_block();\n    return ptx::shared_read", "    return ptx::shared_read"
    ),
    "the last does not merge": Planted(
        "paged_attention.cuh", "none + static_cast<u32>(expected);", "none + (expected & 0);"
    ),
    "queries past the last are read": Planted("paged_attention.cuh", "there = query < unit.queries;", "there = true;"),
    "a query row too many is read": Planted(
        "paged_attention.cuh", "there = query < unit.queries;", "there = query <= unit.queries;"
    ),
    "a query row too many is stored": Planted(
        "merge.cuh", "left < ROWS ? left : ROWS", "left < ROWS ? left + 1 : ROWS"
    ),
    "entries past the last page are read": Planted(
        "stages.cuh", "in_tile < TILE && key < tile.end_key", "in_tile < TILE"
    ),
    "runs past the last page are looked up": Planted(
        "stages.cuh", "tile.first_key + RUN * r < tile.end_key ?", "tile.first_key >= 0 ?"
    ),
    "runs of punched pages are read": Planted("stages.cuh", "tile.frame[r] >= 0 ? tile.end_key", "true ? tile.end_key"),
    "a run that is not whole is read whole": Planted("stages.cuh", "if (left >= RUN) {", "if (left > 0) {"),
    "a run begins at the wrong slot": Planted("stages.cuh", "if (slot >= p.block_size) slot = 0;\n", ""),
    "a run is read from the wrong page": Planted("stages.cuh", "tile.page += step.pages;", "tile.page += 1;"),
    "punched pages are read": Planted("stages.cuh", "const bool present = frame >= 0;", "const bool present = true;"),
    "the wrong frame": Planted("stages.cuh", "pages, key / p.block_size", "pages, (key + 1) / p.block_size"),
    "the wrong fragment of K": Planted("queries_as_rows.cuh", "(lane >> 3 & 1) * 8)", "(lane >> 2 & 1) * 8)"),
    "V is not transposed": Planted("queries_as_rows.cuh", "ptx::load_matrices_transposed(b,", "ptx::load_matrices(b,"),
    "the wrong operand of P V": Planted("queries_as_rows.cuh", "put(1, low[2], low[3]);", "put(1, high[2], high[3]);"),
    "the wrong fragment of K as rows": Planted("keys_as_rows.cuh", "k + (lane >> 4) * 8)", "k + (lane >> 3 & 1) * 8)"),
    "V is transposed twice": Planted("keys_as_rows.cuh", "ptx::load_matrices_transposed(a,", "ptx::load_matrices(a,"),
    "P is not turned": Planted(
        "keys_as_rows.cuh",
        "ptx::transposed(ptx::pack<Elements::PV_HALF>(p[j][0], p[j][1]));",
        "ptx::pack<Elements::PV_HALF>(p[j][0], p[j][1]);",
    ),
    "columns of narrow values change places": Planted(
        "fragments.cuh", "(high[i], v8, v9, i)", "(high[i], v8, v9, i ^ 3)"
    ),
    "a lane masks other keys than it has": Planted(
        "keys_as_rows.cuh", "16 * j + (lane >> 2) + 8 * i", "16 * j + 2 * (lane >> 2) + i"
    ),
    "sums keep an old maximum": Planted("scores.cuh", "state.l[r] * shrink[r] + sum", "state.l[r] + sum"),
    "results keep an old maximum": Planted(
        "scores.cuh", "shrink[1] != 1.0f)) return;", "shrink[1] != 1.0f) || true) return;"
    ),
    "the unit of a result is forgotten": Planted("merge.cuh", "(254u << 23) - ptx::as_bits(state.unit)", "127u << 23"),
    "a query's power of two is forgotten": Planted(
        "paged_attention.cuh", "factor * ptx::shared_read<float>(at)", "factor + 0.0f * ptx::shared_read<float>(at)"
    ),
    "the window is forgotten": Planted("scores.cuh", "key >= row.begin && ", ""),
    "the window has no right side": Planted(
        "paged_attention.cuh", "row.end = row.position + 1 + unit.right < unit.length", "row.end = unit.right < 0"
    ),
    "only half of the row's maximum": Planted("fragments.cuh", "bits *= 2", "bits *= 8"),
    "teams are merged with one weight": Planted("merge.cuh", "all = team ? fold(all, one) : one;", "all = one;"),
    "pieces share a partial state": Planted(
        "partition.cuh", "first + 1 + static_cast<i64>(step) * (piece - 1)", "first + 1"
    ),
    "a piece begins one step late": Planted("partition.cuh", ": past;  // else", ": past + 1;  // else"),
    "queries are used before they came": Planted("paged_attention.cuh", "ptx::copy_wait<STAGES - 1>();", ""),
    "whole units become stages too early": Planted(
        "paged_attention.cuh",
        "ptx::sync_block();  // the next stages will overwrite the sums\n        return;",
        "return;",
    ),
    "parts of a score are added before they are there": Planted(
        "scores.cuh",
        "sync_team(sharing.team);\n#pragma unroll\n        for (int i",
        "#pragma unroll\n        for (int i",
    ),
    "every warp sums the same part of D": Planted(
        "scores.cuh", "stage + sharing.part * (D_PART * K_BITS / 8)", "stage"
    ),
    "every warp has the same columns": Planted(
        "merge.cuh", "row * SUM_STRIDE + 4 * part * DV_PART", "row * SUM_STRIDE"
    ),
    "a team waits for threads of others": Planted(
        "stages.cuh", "ptx::sync_team(1 + team, TEAM_THREADS)", "ptx::sync_team(1 + team, 2 * TEAM_THREADS)"
    ),
    "scales are stored after they are read": Planted(
        "paged_attention.cuh", "store_scales(walk.filled, walk.next, me.team_thread);\n        ptx::copy", "ptx::copy"
    ),
    "the fifth bits of other keys": Planted("fragments.cuh", "FIFTH_IN_STAGE + key * (D / 8)", "FIFTH_IN_STAGE"),
    "codes of the first keys for all": Planted(
        "fragments.cuh",
        "widen_codes<Elements::PV_HALF>(high, values.codes[n][1])",
        "widen_codes<Elements::PV_HALF>(high, values.codes[n][0])",
    ),
    "results are not rotated back": Planted("merge.cuh", "rotate<DV, 32, true>(x, thread % 32);", ""),
    "the centre of the keys is forgotten": Planted("merge.cuh", "part.m + bias", "part.m + 0.0f * bias"),
    "the divisor of the keys is forgotten": Planted(
        "paged_attention.cuh", "ptx::times(x, ptx::read(centre + D + column))", "x"
    ),
    "offsets of int5 stay in the scores": Planted("scores.cuh", "{ x = queries.start[r]; }", "{ x = 0.0f * r; }"),
}
CASES = (
    Case((1, 1, 1), (700, 40, 333), heads=(8, 2), dtype="bfloat16", window=600, punched=True, layout="HND", padding=3),
    Case((1, 1), (90, 40), heads=(4, 2), dtype="bfloat16", layout="HND"),
    Case((1, 1), (400, 390), heads=(8, 8), dtype="bfloat16", layout="HND"),
    Case((40, 1), (400, 9), heads=(4, 2), dtype="bfloat16", mask="some", window=(63, 5)),
    Case((1,) * 8, (90,) * 8, heads=(4, 2), dtype="bfloat16", split_tokens=40),
    Case((2,), (200,), heads=(8, 1), dims=(576, 512), dtype="bfloat16", layout="mla"),
    Case((1, 1), (333, 40), heads=(8, 2), dtype="bfloat16", block_size=5, window=300, punched=True),
    Case((1, 2), (200, 40), heads=(4, 2), dims=(128, 128), kv="int8/token_head", dtype="bfloat16", block_size=48),
    Case((1, 2), (200, 40), heads=(4, 2), dims=(80, 80), kv="k5v4/calibrated", dtype="bfloat16"),
    Case((1,) * 20, (20,) * 20, heads=(4, 2), dtype="bfloat16", layout="HND"),
)
"""The last has more units than CTAs: a CTA works on one whole unit after another."""

MANY_PIECES = Case((1,), (2100,), heads=(4, 2), dtype="bfloat16", split_tokens=40)
"""More pieces of a unit than the kernel copies at once."""


def some(mistakes: Iterable[str]) -> list[Any]:
    """Return all mistakes; nineteen of twenty are slow, because a compiler runs for each."""
    return [pytest.param(one, marks=[pytest.mark.slow] if n % 20 else []) for n, one in enumerate(mistakes)]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] * (n % 4 > 0)) for n, case in enumerate((*CASES, MANY_PIECES))],
    ids=str,
)
def test_kernels_without_a_mistake_pass(case: Case) -> None:
    check(case, Emulator(8))


@pytest.mark.parametrize("mistake", some(MISTAKES))
def test_a_planted_mistake_is_caught(mistake: str) -> None:
    machine = planted(MISTAKES[mistake], Emulator(8))
    assert any(catches(case, machine) for case in CASES)


REMEMBERING = {
    "a share of other lengths is used": Planted("partition.cuh", "if (now != kept) {", "if (!kept) {"),
    "a share is read before it is renewed": Planted(
        "partition.cuh", "            ptx::sync_block();\n            read_record", "            read_record"
    ),
    "frames of other lengths are used": Planted(
        "paged_attention.cuh", "recalled.is_known && walk.steps", "walk.steps != 0"
    ),
    "frames are looked up outside of the page table": Planted(
        "stages.cuh", "!EARLY || static_cast", "true || static_cast"
    ),
    "lengths are not compared": Planted(
        "partition.cuh", "(end_query << 32 | length)", "(end_query << 32 | (length & 0))"
    ),
    "numbers of queries are not compared": Planted("partition.cuh", "(end_query << 32 |", "((end_query & 0) << 32 |"),
    "rows are not compared": Planted("partition.cuh", "mixed(row + place)", "mixed((row & 0) + place)"),
    "no rows are taken for rows of zeros": Planted(
        "partition.cuh", "ptx::read(p.rows + b) : b)", "ptx::read(p.rows + b) : 0)"
    ),
    "only the first sequences are compared": Planted(
        "partition.cuh",
        "b < p.num_sequences; b += THREADS",
        "b < 1; b += THREADS",
    ),
    "launches count from the same number": Planted("partition.cuh", "launch + 1", "launch"),
    "tickets of all launches are counted": Planted(
        "paged_attention.cuh", "count_up(tickets + first, none)", "count_up(tickets + first, 0)"
    ),
    "launches are counted up to 2^32": Planted("paged_attention.cuh", "LAUNCH_AT) << PIECE_BITS;", "LAUNCH_AT) << 32;"),
    "a record lacks its unit's place": Planted("partition.cuh", "move(unit.place, &kept->place);", ""),
}


@pytest.mark.parametrize("mistake", some(REMEMBERING))
def test_a_planted_mistake_in_remembering_shares_is_caught(mistake: str) -> None:
    machine = planted(REMEMBERING[mistake], Emulator(8))
    with contextlib.suppress(Fault):
        assert not (steps_are_right(machine) and late_launches_are_right(machine, call_of(MANY_PIECES.build())))


PIECES = {
    "a piece is left out": Planted(
        "merge.cuh", "for (i32 i = done ? 0 : 1; i < now", "for (i32 i = done ? 0 : 2; i < now"
    ),
    "only the pieces that are copied at once are merged": Planted(
        "merge.cuh", "done < pieces.count; done += AT_ONCE", "done < AT_ONCE; done += AT_ONCE"
    ),
    "more pieces are merged than there are": Planted(
        "merge.cuh", "pieces.count - done < AT_ONCE ? pieces.count - done : AT_ONCE", "AT_ONCE"
    ),
    "pieces are folded before they came": Planted("merge.cuh", "ptx::copy_wait<0>();", ""),
    "no thread waits for what others copied": Planted(
        "merge.cuh", "ptx::copy_wait<0>();\n            ptx::sync_block();", "ptx::copy_wait<0>();"
    ),
    "pieces are overwritten too early": Planted(
        "merge.cuh", "ptx::sync_block();  // the next pieces or stages", "// the next pieces or stages"
    ),
}


ORDER = {
    "pieces are merged from the last to the first": Planted(
        "merge.cuh", "fold(all, piece(i))", "fold(all, piece(done ? i : now - i))"
    ),
    "a state is merged before the earlier ones": Planted("merge.cuh", "fold(all, piece(i))", "fold(piece(i), all)"),
    "a ticket is drawn before the piece is stored": Planted(
        "paged_attention.cuh",
        """
    for_quads(unit, group, me.thread, [&](u32, u32 row, u32 column, i64, i32) {
        mine.store(row, column, load_teams(me.base, row, column));
    });
    if (!arrive(p, pieces.first, pieces.count, me)) return;
""",
        """
    const bool is_last = arrive(p, pieces.first, pieces.count, me);
    for_quads(unit, group, me.thread, [&](u32, u32 row, u32 column, i64, i32) {
        mine.store(row, column, load_teams(me.base, row, column));
    });
    if (!is_last) return;
""",
    ),
    "the CTA that arrives first merges": Planted(
        "paged_attention.cuh", "static_cast<u32>(expected);", "1 + 0 * expected;"
    ),
}


@pytest.mark.parametrize("mistake", ORDER)
def test_a_planted_mistake_in_the_order_of_merging_is_caught(mistake: str) -> None:
    assert splits_are_equal(Emulator(3), Emulator(40))
    with contextlib.suppress(Fault):
        assert not splits_are_equal(Emulator(3), planted(ORDER[mistake], Emulator(40)))


@pytest.mark.parametrize("mistake", some(PIECES))
def test_a_planted_mistake_in_merging_pieces_is_caught(mistake: str) -> None:
    machine = planted(PIECES[mistake], Emulator(8))
    assert any(catches(case, machine) for case in (*CASES, MANY_PIECES))


def test_rows_of_8_bytes_alignment_are_copied_8_bytes_at_a_time() -> None:
    machine = Emulator(1)
    check(Case(dims=(80, 80), kv="k8v4/token_head", dtype="bfloat16"), machine)
    assert [kernel.copy for kernel in machine.launches] == [8]


MOVING = {
    "a token without a slot is stored": Planted(
        "write_kv.cuh", "v.there = slot >= 0 && slot < p.num_slots;", "v.there = true;"
    ),
    "the wrong place in a frame": Planted(
        "write_kv.cuh", "at = slot - frame * size;", "at = size - 1 - (slot - frame * size);"
    ),
    "the largest of half a vector": Planted(
        "rows.cuh", "bits = LANES / 2; bits; bits /= 2)", "bits = LANES / 4; bits; bits /= 2)"
    ),
    "every lane stores another scale": Planted(
        "write_kv.cuh", "bits = static_cast<u16>(ptx::pack<true>(scale, 0.0f));", "bits = static_cast<u16>(lane + 1);"
    ),
    "turned by the angle of another token": Planted(
        "write_kv.cuh", "ptx::read(p.positions + token * p.positions_step)", "ptx::read(p.positions)"
    ),
    "turned the wrong way": Planted("write_kv.cuh", "first ? -across : across", "first ? across : -across"),
    "past the end of a row": Planted(
        "write_kv.cuh",
        "if (v.there && column < DIM) {\n            store_quad<STORED>(v.to, column, DIM,",
        "if (v.there) {\n            store_quad<STORED>(v.to, column, 4096,",
    ),
    "a frame is stored while it is read": Planted(
        "copy_frames.cuh", "ptx::sync_block();  // the run of every", "// the run of every"
    ),
    "stored before it came": Planted("copy_frames.cuh", "ptx::copy_wait<0>();", ""),
    "past the end of a frame": Planted(
        "copy_frames.cuh", "if (!is_frame || within >= p.frame_words) continue;", "if (!is_frame) continue;"
    ),
    "a state that saw no key is read": Planted("merge_states.cuh", "if (w_b != 0.0f) y", "y"),
    "one weight for both": Planted("merge_states.cuh", "w_b = has_b && !infinite ? e_b / sum : 0.0f", "w_b = w_a"),
}


def moves_right(machine: Emulator) -> bool:
    """Return whether the three kernels leave the same bytes as the reference."""
    case, draw = Case(kv="int8/token_head", dims=(80, 80), layout="HND"), torch.Generator().manual_seed(0)
    k, angles = torch.randn(7, 2, 80, generator=draw), torch.rand(7, 16, generator=draw) * 6
    layers = [empty_layer(case, 4) for _ in range(2)]
    for layer, write in zip(layers, (machine.write_kv, reference.write_kv), strict=True):
        slots = torch.tensor([37, -1, 0, 63, 16, -5, 2])
        write(write_of(layer, k, k, slots, RotaryTable(angles.cos(), angles.sin()), torch.arange(7)))
    pools = [torch.arange(6 * 160, dtype=torch.int32).view(6, 160) for _ in range(2)]
    for pool, copy in zip(pools, (machine.copy_frames, reference.copy_frames), strict=True):
        copy(pool, torch.tensor([[0, 1], [1, 2], [2, 0], [4, 5]], dtype=torch.int32))
    a, b, lse = (
        torch.randn(5, 2, 64, generator=draw),
        torch.randn(5, 2, 64, generator=draw),
        torch.randn(5, 2, generator=draw),
    )
    nothing = torch.where(torch.arange(5)[:, None] % 2 == 0, -torch.inf, lse + 1)
    b[0] = torch.nan
    merged = [merge(a, lse, b, nothing)[0] for merge in (machine.merge_states, reference.merge_states)]
    stored = all(
        torch.equal(getattr(layers[0], name).view(torch.int8), getattr(layers[1], name).view(torch.int8))
        for name in ("k", "v")
    )
    return stored and torch.equal(*pools) and torch.allclose(*merged, rtol=1e-5, atol=1e-6)


def test_writes_copies_and_merges_without_a_mistake_pass() -> None:
    assert moves_right(Emulator())


@pytest.mark.parametrize("mistake", some(MOVING))
def test_a_planted_mistake_in_writes_copies_and_merges_is_caught(mistake: str) -> None:
    machine = planted(MOVING[mistake], Emulator())
    with contextlib.suppress(Fault):
        assert not moves_right(machine)


def planted(mistake: Planted, machine: Emulator) -> Emulator:
    file, old, new = mistake
    assert machine.sources[file].count(old) == 1, "the text to replace must occur in the source exactly once"
    machine.sources[file] = machine.sources[file].replace(old, new)
    return machine


def catches(case: Case, machine: Emulator) -> bool:
    try:
        check(case, machine)
    except (Fault, AssertionError):
        return True
    return False
