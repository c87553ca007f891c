"""Prefill in one process, decode in another: tokens as of one engine; whichever side dies, the other goes on."""

from __future__ import annotations

import json
import os
import random
import signal
import time

import pytest

from pagedkv.model import Engine
from pagedkv.sampling.params import SamplingParams
from tests.tiers.stores import free_port

from .engines import DECODE, Process, check_given_back, decode_engine, lone_engine, prefill_process

PARAMS = SamplingParams(max_tokens=8)


def prompts_of(number: int, length: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [draw.choices(range(10, 600), k=length + i) for i in range(number)]


def tokens_of(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    return [request.completions[0].token_ids for request in engine.generate(prompts, PARAMS)]


@pytest.fixture(scope="module")
def alone() -> Engine:
    return lone_engine()


def test_the_decode_side_computes_no_whole_page_and_its_tokens_are_equal(alone: Engine) -> None:
    prompts = prompts_of(8, 300)
    address = f"127.0.0.1:{free_port()}"
    there = prefill_process(address)
    engine, tier = decode_engine(address)
    assert tier.wait(20)
    requests = engine.generate(prompts, PARAMS)
    tokens = [request.completions[0].token_ids for request in requests]
    assert tokens == tokens_of(alone, prompts)
    found = [request.completions[0].cached_tokens for request in requests]
    assert found == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]
    tails = sum(map(len, prompts)) - sum(found)
    assert engine.stats().computed_tokens == tails + sum(len(each) - 1 for each in tokens)
    assert tier.stats().corrupt == tier.stats().failed == 0
    check_given_back(engine)
    engine.close()
    assert there.end() == [0, sum(found) // 16]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_a_prefill_process_that_is_killed_costs_time_and_no_token(alone: Engine, seed: int) -> None:
    draw, prompts = random.Random(seed), prompts_of(6, 400, seed)
    address = f"127.0.0.1:{free_port()}"
    there = prefill_process(address, slow=0.01)
    engine, tier = decode_engine(address)
    assert tier.wait(20)
    requests = [engine.submit(prompt, PARAMS) for prompt in prompts]
    kill_at = time.monotonic() + draw.uniform(0.0, 0.5)
    while engine.has_work:
        engine.step()
        if time.monotonic() > kill_at and there.process.poll() is None:
            there.kill()
    there.kill()
    assert [request.completions[0].token_ids for request in requests] == tokens_of(alone, prompts)
    check_given_back(engine)
    engine.close()


@pytest.mark.slow
def test_a_prefill_process_that_is_stopped_costs_its_timeout(alone: Engine) -> None:
    prompts, address = prompts_of(6, 400, 9), f"127.0.0.1:{free_port()}"
    there = prefill_process(address, slow=0.05)
    engine, tier = decode_engine(address, timeout=2.0)
    assert tier.wait(20)
    requests = [engine.submit(prompt, PARAMS) for prompt in prompts]
    engine.step()
    time.sleep(0.2)
    os.kill(there.process.pid, signal.SIGSTOP)
    began = time.monotonic()
    engine.run()
    assert time.monotonic() - began < 15
    assert [request.completions[0].token_ids for request in requests] == tokens_of(alone, prompts)
    check_given_back(engine)
    os.kill(there.process.pid, signal.SIGCONT)
    assert tier.wait(20)  # it comes back
    prompts = prompts_of(2, 300, 10)
    before = tier.stats().loaded
    assert tokens_of(engine, prompts) == tokens_of(alone, prompts)
    assert tier.stats().loaded > before
    engine.close()
    there.end()


@pytest.mark.slow
def test_a_prefill_process_that_is_started_again_is_found(alone: Engine) -> None:
    address = f"127.0.0.1:{free_port()}"
    engine, tier = decode_engine(address)
    for seed in range(3):
        there = prefill_process(address)
        assert tier.wait(20)
        prompts, before = prompts_of(2, 300, 20 + seed), tier.stats().loaded
        assert tokens_of(engine, prompts) == tokens_of(alone, prompts)
        assert tier.stats().loaded > before
        there.kill()
        until = time.monotonic() + 20
        while tier.is_connected and time.monotonic() < until:
            time.sleep(0.01)
        assert not tier.is_connected
    engine.close()


@pytest.mark.slow
def test_decode_processes_that_are_killed_leave_a_prefill_process_that_goes_on(alone: Engine) -> None:
    address, draw = f"127.0.0.1:{free_port()}", random.Random(3)
    there = prefill_process(address, slow=0.01)
    for seed in range(6):
        other = Process(DECODE, address)
        other.tell(json.dumps(prompts_of(6, 400, 30 + seed)))
        time.sleep(draw.uniform(0.0, 0.4))
        other.kill()
    last, prompts = Process(DECODE, address), prompts_of(3, 300, 50)
    last.tell(json.dumps(prompts))
    assert json.loads(last.line()) == tokens_of(alone, prompts)
    assert last.process.wait(20) == 0
    assert there.end()[0] == 0  # no frame is held
