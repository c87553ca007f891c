"""The proof can fail: a kernel with one planted mistake is caught, by a fault of the emulator or by what comes out.

Each mistake replaces a text that must stand in the sources exactly once, so a test that no longer plants anything fails too.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.cases import Case
from tests.cuda.emulator import COMPILER, Emulator, Fault
from tests.cuda.test_attention import check

pytestmark = pytest.mark.skipif(not COMPILER, reason="the emulator needs g++")


class Planted(NamedTuple):
    """In `file`, `old` becomes `new`."""

    file: str
    old: str
    new: str


MISTAKES = {
    "a team does not wait for its lanes": Planted("paged_attention.cuh", "sync_team(me.team);  //", "//"),
    "nobody waits for the copies": Planted("paged_attention.cuh", "ptx::copy_wait<STAGES - 2>();", ""),
    "one copy too few is waited for": Planted("paged_attention.cuh", "copy_wait<STAGES - 2>", "copy_wait<STAGES - 1>"),
    "a stage is read that was not written": Planted("paged_attention.cuh", "u32 reading = 0,", "u32 reading = STAGES - 1,"),
    "a stage is filled while it is read": Planted("paged_attention.cuh", "filling = STAGES - 1;", "filling = STAGES - 2;"),
    "stages become sums too early": Planted("paged_attention.cuh", "ptx::sync_block();  // the stages become", "// the stages become"),
    "sums become stages too early": Planted("paged_attention.cuh", "ptx::sync_block();  // the sums' memory", "// the sums' memory"),
    "nobody waits to hear who is last": Planted("paged_attention.cuh", "ptx::sync_block();\n    ptx::fence();", "ptx::fence();"),
    "the last does not merge": Planted("paged_attention.cuh", "p.tickets + slot, 1) + 1", "p.tickets + slot, 1)"),
    "the ticket stays": Planted("paged_attention.cuh", "if (last) ptx::write(p.tickets + slot, 0u);", ""),
    "queries of nobody are read": Planted("paged_attention.cuh", "const bool there = query < unit.queries;", "const bool there = true;"),
    "entries past the last page are read": Planted("stages.cuh", "in_tile < TILE && key < end_key", "in_tile < TILE"),
    "punched pages are read": Planted("stages.cuh", "const bool present = frame >= 0;", "const bool present = true;"),
    "the wrong frame": Planted("stages.cuh", "key / p.block_size", "(key + 1) / p.block_size"),
    "the wrong fragment of K": Planted("scores.cuh", "(lane >> 3 & 1) * 8)", "(lane >> 2 & 1) * 8)"),
    "V is not transposed": Planted("scores.cuh", "ptx::load_matrices_transposed(b,", "ptx::load_matrices(b,"),
    "the wrong operand of P V": Planted("scores.cuh", "put(1, low[2], low[3]);", "put(1, high[2], high[3]);"),
    "sums keep an old maximum": Planted("scores.cuh", "state.l[r] * shrink + sum", "state.l[r] + sum"),
    "the window is forgotten": Planted("scores.cuh", "key >= row.begin && ", ""),
    "only half of the row's maximum": Planted("scores.cuh", "        m = ptx::larger(m, ptx::shuffle_xor(m, 2));\n", ""),
    "teams are merged with one weight": Planted("merge.cuh", "all = team ? fold(all, one) : one;", "all = one;"),
    "pieces share a slot": Planted("plan.cuh", "2 * (first + partial)", "2 * first + 2"),
    "a share begins one item late": Planted("plan.cuh", "(past + unit.weight - 1) / unit.weight", "(past + unit.weight) / unit.weight"),
    "a team waits for threads of others": Planted(
        "stages.cuh", "ptx::sync_team(1 + team, TEAM_THREADS)", "ptx::sync_team(1 + team, 2 * TEAM_THREADS)"
    ),
}
CASES = (
    Case((1, 1, 1), (700, 40, 333), heads=(8, 2), dtype="bfloat16", window=600, punched=True, layout="HND", padding=3),
    Case((40, 1), (400, 9), heads=(4, 2), dtype="bfloat16", window=64),
    Case((1,) * 8, (90,) * 8, heads=(4, 2), dtype="bfloat16", split_tokens=40),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_without_a_mistake_they_pass(case: Case) -> None:
    check(case, Emulator(8))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_caught(mistake: str) -> None:
    file, old, new = MISTAKES[mistake]
    machine = Emulator(8)
    assert machine.sources[file].count(old) == 1, "the text to replace must stand in the source exactly once"
    machine.sources[file] = machine.sources[file].replace(old, new)
    assert any(catches(case, machine) for case in CASES)


def catches(case: Case, machine: Emulator) -> bool:
    try:
        check(case, machine)
    except (Fault, AssertionError):
        return True
    return False
