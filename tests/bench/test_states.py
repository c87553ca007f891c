"""Rules of keeping recurrent states: exact figures of three requests, worked out by hand; and the traces."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from pagedkv.bench import plots
from pagedkv.bench.states import rules, runner
from pagedkv.bench.states.rules import PAGE, RULES, Prefixes, known_pages
from pagedkv.bench.states.trace import KINDS, START, Message, Request, length, requests, token_ids
from pagedkv.core import MemoryManager
from pagedkv.errors import InvalidRequest

SYSTEM, USER, OTHER, ANSWER, AGAIN = (Message(i + 1, tokens) for i, tokens in enumerate((2000, 300, 500, 200, 100)))
THREE = (
    Request(0, (SYSTEM, USER), (ANSWER,)),  # 2,300 tokens, and 200 of output
    Request(1, (SYSTEM, OTHER), (Message(6, 200),)),  # 2,500 and 200; 2,001 are known, as each message begins alike
    Request(0, (SYSTEM, USER, ANSWER, AGAIN), (Message(7, 200),)),  # 2,600 and 200; 2,500 are known
)
POSSIBLE = 2000 + 2496
SMALL = replace(KINDS["agent"], main=12, others=3, system=600, longest=900)


@pytest.mark.parametrize(
    ("name", "starts", "made"),
    [
        # 2112 | its own 2112, and the branch point at 1584 | 2112 is held
        ("blocks of 528", (0, 2112), (1, 2, 0)),
        ("blocks of 1600", (1600, 1600), (1, 0, 0)),
        # 2144 | its own 2144; the branch point lies before the first block's end | 2144 is held
        ("blocks of 2144", (0, 2144), (1, 1, 0)),
        # 1600, 2272 | 2496 | 2592
        ("match unit 32", (1600, 2272), (2, 1, 1)),
        # 2240, 2304 in the output | the branch point at 1984 in place of 2496; 2560 in the output | the branch at 2496
        ("SGLang", (0, 2304), (2, 2, 1)),
        # 1784, 2000, 2296 | 1984, 2000, 2496 in another slot | 2500, 2596
        ("llama.cpp", (0, 2296), (3, 3, 2)),
        # 128 to 2432 | 2048 to 2688 | 2560, 2688
        ("every 128", (1920, 2432), (19, 6, 2)),
    ],
)
def test_a_rule_keeps_the_states_that_it_should(name: str, starts: tuple[int, int], made: tuple[int, ...]) -> None:
    [rule] = [rule for rule in RULES if name in rule.name]
    tallies = [rules.play(THREE[:n], rule) for n in range(4)]
    computed = [after.computed - before.computed for before, after in pairwise(tallies)]
    assert computed == [2300, 2500 - starts[0], 2600 - starts[1]]
    assert [after.made - before.made for before, after in pairwise(tallies)] == list(made)
    assert (tallies[3].possible, tallies[3].held) == (POSSIBLE, sum(made))


def test_the_state_that_was_not_used_for_the_longest_time_goes_first() -> None:
    tally = rules.play(THREE, RULES[0], limit=2)  # 1584 and 2112 of the second request are left
    assert (tally.computed, tally.made, tally.held) == (2300 + 2500 + (2600 - 1584), 4, 2)


def test_known_prefixes_are_those_of_the_token_ids() -> None:
    manager, prefixes, before = MemoryManager(4096, PAGE), Prefixes(), list[np.ndarray]()
    for _, prompt, output in requests(SMALL, 0):
        ids, tokens = token_ids(prompt + output), length(prompt)
        common = [(row[: min(len(row), tokens)] == ids[: min(len(row), tokens)]) for row in before]
        longest = max((len(row) if row.all() else int(row.argmin()) for row in common), default=0)
        assert prefixes.known(prompt) == longest
        space = manager.open(ids[:tokens])
        assert len(space) == known_pages(prefixes, prompt)
        manager.commit(manager.plan([space], [len(ids) - len(space)]), ids[len(space) :])
        space.release()
        prefixes.add(prompt + output)
        before.append(ids)
        assert np.count_nonzero(ids == START) == len(prompt + output)


def test_a_trace_is_that_of_its_seed_and_clients_change_what_they_sent() -> None:
    served = requests(SMALL, 1)
    assert served == requests(SMALL, 1) != requests(SMALL, 2)
    main = [request for request in served if request.session == 0]
    assert len(main) == 12
    appended = [second.prompt[: len(first.prompt)] == first.prompt for first, second in pairwise(main)]
    assert {True, False} == set(appended)
    assert not [message for message in main[-1].prompt if message.tokens > SMALL.longest]


def test_rows_have_a_group_of_bars_for_each_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "KINDS", {"agent": SMALL})
    rows: list[runner.Row] = []
    runner.measure(rows.append, is_quick=True, rules=["528", "llama"])
    found = [(row["limit"], row["variant"].partition(" ")[0]) for row in rows]
    assert found == [("no limit", "vLLM"), ("no limit", "llama.cpp,"), ("64 states", "vLLM"), ("16 states", "vLLM")]
    assert all(row["median"] == pytest.approx(row["computed"] - row["least"]) for row in rows)
    [chart] = plots.charts("states", rows)
    assert (chart.svg.count(">vLLM 0.33, blocks of 528<"), chart.svg.count(">64 states<")) == (1, 1)
    with pytest.raises(InvalidRequest, match="--trace code: there is no such trace; there are agent"):
        runner.measure(rows.append, is_quick=True, only=["code"])


@pytest.mark.parametrize("policy", ["cost", "lru"])
def test_the_live_manager_computes_the_least_of_three_requests(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagedkv.bench.states import live

    monkeypatch.setenv("PAGEDKV_DEBUG", "0")  # a check of a large pool after each commit took a third of all tests
    tally = live.play(THREE, policy)
    assert (tally.possible, tally.computed) == (POSSIBLE, tally.tokens - POSSIBLE)
    served = requests(SMALL, 0)
    free, tight = live.play(served, policy), live.play(served, policy, limit=8)
    assert free.tokens - free.possible <= free.computed <= tight.computed < tight.tokens
    assert tight.held <= 8 < free.held
