"""The draft model of the bundled checkpoint: the same answers in fewer passes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pagedkv.engine.checkpoint import BUNDLED
from pagedkv.engine.checkpoint.demo import DEMO_PROMPT
from pagedkv.engine.drafts.drafters import BUNDLED_DRAFT
from pagedkv.engine.step.engine import Engine
from tests.engine.step.test_engine import idle, outputs
from tests.records import DEMO_ANSWER, document

if TYPE_CHECKING:
    from pagedkv.engine.requests.request import Request


def passes(engine: Engine, prompts: list[str]) -> tuple[list[Request], int]:
    """Return the requests, answered one after another, and the number of steps."""
    requests, before = [], engine.meter.steps
    for prompt in prompts:
        requests += engine.generate([prompt])
    return requests, engine.meter.steps - before


def test_the_demo_takes_fewer_passes_with_the_draft_model() -> None:
    plain, drafted = Engine.load(num_frames=64), Engine.load(num_frames=64, speculate="draft")
    _, slow = passes(plain, [DEMO_PROMPT])
    [request], fast = passes(drafted, [DEMO_PROMPT])
    assert request.completions[0].text == DEMO_ANSWER
    assert slow == 10
    assert slow >= 1.5 * fast
    assert idle(drafted)


def test_held_out_questions_take_fewer_passes_with_the_draft_model() -> None:
    asked = document(300, seed=41)
    prompts = [asked.prompt(question) for question in asked.questions[:12]]
    plain, slow = passes(Engine.load(num_frames=128), prompts)
    engine = Engine.load(num_frames=128, speculate="draft")
    drafted, fast = passes(engine, prompts)
    assert outputs(drafted) == outputs(plain)
    assert slow >= 1.5 * fast
    assert engine.speculation is not None
    assert engine.speculation.acceptance > 0.5


def test_the_draft_model_is_half_as_deep_and_has_the_same_words() -> None:
    config, draft = (json.loads((folder / "config.json").read_text()) for folder in (BUNDLED, BUNDLED_DRAFT))
    assert draft["num_hidden_layers"] * 2 == config["num_hidden_layers"]
    assert (BUNDLED_DRAFT / "tokenizer.json").read_bytes() == (BUNDLED / "tokenizer.json").read_bytes()
