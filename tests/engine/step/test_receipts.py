"""Receipts: what the cache knew of each prompt, and why no more."""

from __future__ import annotations

import logging

import pytest

from pagedkv.core.observe.receipts import Receipt
from pagedkv.engine.requests.limits import Limits
from pagedkv.engine.requests.request import Request
from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.engine.step.engine import Engine
from pagedkv.tiers import HostTier
from tests.engine.conftest import Checkpoints, prompt_of
from tests.engine.step.test_engine import build

PARAMS = SamplingParams(max_tokens=2)
PROMPT = prompt_of(100)


def receipt(engine: Engine, prompt: list[int], tenant: bytes = b"") -> Receipt:
    request: Request = engine.submit(prompt, PARAMS, tenant=tenant)
    while not request.finished:
        engine.step()
    told = request.completions[0].receipt
    assert told is not None
    assert told.cached_tokens == request.completions[0].cached_tokens
    return told


def edited(place: int) -> list[int]:
    return [*PROMPT[:place], 99 - PROMPT[place], *PROMPT[place + 1 :]]


def test_a_prompt_is_told_what_was_known_of_it(checkpoint: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    engine = build(checkpoint("llama"), limits=Limits(logged_miss=60), history=4096)
    caplog.set_level(logging.INFO, "pagedkv.engine")
    assert receipt(engine, PROMPT) == Receipt("new", 100, 0, 0)
    assert receipt(engine, PROMPT) == Receipt("hit", 100, 96, 96)
    assert not caplog.messages
    told = receipt(engine, edited(37))
    assert told == Receipt("differs", 100, 32, 37, PROMPT[37], 99 - PROMPT[37])
    assert caplog.messages == [f"computed again: {told}"]
    assert f"{told}" == f"32 of 100 tokens found; differs at 37: token was {PROMPT[37]} and is {99 - PROMPT[37]}"
    assert receipt(engine, PROMPT[:9]).reason == "short"
    assert receipt(engine, PROMPT, b"other").reason == "new"
    engine.cache.evict(1000)
    assert receipt(engine, PROMPT) == Receipt("evicted", 100, 0, 0)
    assert engine.stats().receipts == {"new": 2, "hit": 1, "differs": 1, "short": 1, "evicted": 1}
    shown = told.as_dict(0.5)
    assert (shown["computed_tokens"], shown["seconds"], shown["was"], shown["now"]) == (68, 0.5, told.was, told.now)


def test_a_tier_that_brings_damaged_pages_is_named(checkpoint: Checkpoints) -> None:
    tier = HostTier("4MiB")
    engine = build(checkpoint("llama"), tiers=[tier], model="m")
    receipt(engine, PROMPT)
    assert engine.cache.tiers.flush(60)
    engine.cache.evict(1000)
    tier._memory ^= 1
    assert receipt(engine, PROMPT) == Receipt("tier", 100, 0, 0)
    engine.close()


def test_the_samples_of_a_prompt_have_its_receipt(checkpoint: Checkpoints) -> None:
    engine = build(checkpoint("llama"))
    request = engine.submit(PROMPT, PARAMS, num_samples=2)
    while not request.finished:
        engine.step()
    assert [completion.receipt for completion in request.completions] == [Receipt("new", 100, 0, 0)] * 2
    assert engine.stats().receipts == {"new": 1}
