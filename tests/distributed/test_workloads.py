"""Random work, and interrupts between steps' messages: each prompt has the tokens that it has in one process."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedkv.distributed import leader
from pagedkv.model import engine as engines
from pagedkv.model.engine import Engine
from pagedkv.model.loop.delivery import Delivery
from pagedkv.model.scheduler import Limits
from pagedkv.sampling.params import SamplingParams

from . import jobs
from .conftest import VOCAB
from .threads import ThreadRanks, on_threads

Lead = Callable[[Engine], Any]


def with_engine(folder: Path, run: Lead, limits: Limits | None = None, **options: Any) -> Any:
    """Return what `run` makes of the engine of two ranks."""

    def lead(ranks: ThreadRanks) -> Any:
        result = run(leader.load(ranks, folder, dtype="float32", limits=limits, **options))
        ranks.stop()
        return result

    return on_threads(2, lead, lambda ranks: jobs.followed(ranks, jobs.job_of(folder, [])))


def worked(engine: Engine, seed: int) -> dict[tuple[int, int], list[int]]:
    """Submit, step, cancel and fork at random. Returns: the tokens of each prompt and sample that was not cancelled"""
    dice, asked, cancelled = random.Random(seed), dict[int, Any](), set[int]()
    for number in range(8):
        shared = [dice.randrange(3)] * dice.choice([0, 16, 40])  # a prefix that others may have
        prompt = shared + [dice.randrange(VOCAB) for _ in range(dice.choice([1, 5, 30]))]
        params = SamplingParams(max_tokens=dice.randint(1, 20), temperature=dice.choice([0.0, 1.0]), seed=number)
        if dice.random() < 0.2:
            params = SamplingParams(max_tokens=8, num_beams=2)
        asked[number] = engine.submit(prompt, params, num_samples=dice.choice([1, 1, 2]))
        for _ in range(dice.randint(0, 4)):
            engine.step()
        if dice.random() < 0.2:
            cancelled.add(number)
            engine.cancel(asked[number])
    engine.run()
    engine.cache.check(3)
    return {
        (number, completion.index): completion.token_ids
        for number, request in asked.items()
        if number not in cancelled
        for completion in request.completions
    }


PLACES = ("plan", "outcome", "deliver")
SEEDS = [pytest.param(seed, marks=pytest.mark.slow if seed else ()) for seed in range(20)]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_work_gives_the_tokens_of_one_process(seed: int, folder: Callable[..., Path]) -> None:
    dice = random.Random(seed)
    name, block_size = dice.choice(["llama", "qwen2", "gemma2", "mistral"]), dice.choice([1, 4, 16])
    options: dict[str, Any] = {"block_size": block_size, "num_frames": 3 * (200 // block_size)}
    options["speculate"] = dice.choice([None, "prompt-lookup"])
    limits = Limits(dice.choice([64, 2048]), dice.choice([3, 8]), dice.choice([None, 10]))
    made = folder(name)
    alone = Engine.load(made, dtype="float32", limits=limits, **options)
    assert with_engine(made, lambda engine: worked(engine, seed), limits, **options) == worked(alone, seed)


@pytest.mark.parametrize("place", ["commit", *(pytest.param(at, marks=pytest.mark.slow) for at in PLACES)])
def test_an_interrupt_beside_the_messages_loses_no_token(
    place: str, folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step before its message, or behind its sums, may be interrupted and made again, as in one process."""
    owner, name = {
        "plan": (leader.RankedRunner, "plan"),
        "outcome": (engines, "outcome_of"),
        "commit": (leader.RankedCache, "commit"),
        "deliver": (Delivery, "report"),
    }[place]
    real, calls, params = getattr(owner, name), [0], SamplingParams(max_tokens=12, temperature=1.0, seed=3)

    def sometimes(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        result = real(*args, **options) if place in ("plan", "deliver") else None
        if calls[0] % 4 == 2:
            raise KeyboardInterrupt
        return result if place in ("plan", "deliver") else real(*args, **options)

    def lead(engine: Engine) -> list[list[int]]:
        request, interrupts = engine.submit([1, 2, 3] * 11, params, num_samples=3), 0
        while engine.has_work:
            try:
                engine.step()
            except KeyboardInterrupt:
                interrupts += 1
        monkeypatch.setattr(owner, name, real)
        engine.cache.check(3)
        assert interrupts > 2
        return [completion.token_ids for completion in request.completions]

    made = folder("llama")
    alone = Engine.load(made, dtype="float32", num_frames=60).generate([[1, 2, 3] * 11], params, num_samples=3)
    wanted = [completion.token_ids for completion in alone[0].completions]
    monkeypatch.setattr(owner, name, sometimes)
    assert with_engine(made, lead, num_frames=60) == wanted
