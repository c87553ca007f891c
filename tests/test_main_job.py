"""The main job, end to end, with the bundled checkpoint: a prompt in, the right answer out, all KV in paged memory.

The bundled checkpoint answers from facts far back in its prompt. So the last tests damage the pool on purpose: a frame
that is lost, stale or mixed up must change the answer. Otherwise these tests would not prove that the cache is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from pagedkv.engine.checkpoint import BUNDLED
from pagedkv.engine.checkpoint.demo import DEMO_PROMPT
from pagedkv.engine.requests.limits import Limits
from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.engine.step.engine import Engine
from pagedkv.kernels.ops import copy_frames
from tests.records import DEMO_ANSWER, document

if TYPE_CHECKING:
    from collections.abc import Callable

SHORT = SamplingParams(max_tokens=40)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load(dtype="float32", num_frames=700)


def answers(engine: Engine, prompts: list[Any], params: SamplingParams = SHORT) -> list[str]:
    return [request.completions[0].text for request in engine.generate(prompts, params)]


def test_the_demo_is_answered_right(engine: Engine) -> None:
    completion = engine.generate([DEMO_PROMPT])[0].completions[0]
    assert (completion.text, completion.finish_reason) == (DEMO_ANSWER, "stop")


@pytest.mark.parametrize(
    "options",
    [{"dtype": "bfloat16", "block_size": 1}, {"block_size": 32}, {"kv_dtype": "int8"}, {"kv_dtype": "fp8_e4m3"}],
)
def test_the_demo_is_answered_right_in_other_pools(options: dict[str, Any]) -> None:
    assert answers(Engine.load(**{"dtype": "float32", "num_frames": 400, **options}), [DEMO_PROMPT]) == [DEMO_ANSWER]


def test_transformers_computes_the_same_from_the_bundled_checkpoint(engine: Engine) -> None:
    """Both read the same folder, and give the same logits and the same greedy answer."""
    model = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED, dtype="float32").eval()
    ids = engine.tokenizer.encode(DEMO_PROMPT)
    prompt = torch.tensor([ids])
    theirs = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=40)[
        0, len(ids) :
    ]
    assert engine.generate([ids], SHORT)[0].completions[0].token_ids == theirs.tolist()
    batch = engine.cache.plan([engine.cache.open()], [len(ids)])
    ours = engine.decoder.forward(prompt[0], batch, engine.cache)
    engine.cache.abort(batch)
    with torch.inference_mode():
        assert (ours - model(prompt).logits[0]).abs().max() <= 1e-4 * ours.abs().max()


@pytest.mark.parametrize(
    ("length", "dtype"),
    [(1000, "float32"), *(pytest.param(4000, dtype, marks=pytest.mark.slow) for dtype in ("float32", "bfloat16"))],
)
def test_held_out_questions(length: int, dtype: str) -> None:
    """Of 50 answers to questions about two long pages at most one is wrong, to the last token."""
    engine, right = Engine.load(dtype=dtype, num_frames=1200), 0
    for seed in range(2):
        page = document(length, seed=9000 + seed)
        questions = page.questions[:25]
        got = answers(engine, [page.prompt(question) for question in questions])
        right += sum(text == question.answer for text, question in zip(got, questions, strict=True))
    assert right >= 49


def test_less_than_four_percent_of_the_slots_are_wasted_on_a_mixed_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of 60 to 1,900 tokens arrive and finish, at block size 16; a third of them have four samples."""
    monkeypatch.setattr("pagedkv.engine.step.meter.MEASURED", 1)  # every step counts
    engine = Engine.load(dtype="float32", num_frames=1500, limits=Limits(max_batch_tokens=512))
    for seed in range(12):
        page = document(60 + 160 * seed, seed=seed)
        engine.submit(
            page.prompt(page.questions[-1]),
            SamplingParams(max_tokens=30, temperature=1.0, seed=seed),
            num_samples=1 + 3 * (seed % 3 == 0),
        )
        engine.step()
    engine.run()
    assert engine.meter.slots_mapped > 50_000
    assert 0 < engine.meter.waste < 0.04


def lose(engine: Engine, frame: int, other: int) -> None:
    engine.cache.storage.frames[frame] = 0


def make_stale(engine: Engine, frame: int, other: int) -> None:
    copy_frames(engine.cache.storage.frames, torch.tensor([[other, frame]], dtype=torch.int32))


def reorder_keys(engine: Engine, frame: int, other: int) -> None:
    for layer in engine.cache.storage.layers:
        layer.k[frame] = layer.k[frame].flip(0)


def swap_keys(engine: Engine, frame: int, other: int) -> None:
    for layer in engine.cache.storage.layers:
        layer.k[[frame, other]] = layer.k[[other, frame]]


@pytest.mark.parametrize("damage", [lose, make_stale, reorder_keys, swap_keys])
def test_a_damaged_frame_changes_the_answer(
    damage: Callable[[Engine, int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDKV_DEBUG", "0")  # at a higher level, check() would raise first
    engine = Engine.load(dtype="float32", num_frames=200)
    page, stranger = document(600, seed=1), document(600, seed=2)
    question = next(q for q in page.questions if " in the " in q.answer)
    prompt = engine.tokenizer.encode(page.prompt(question))
    assert answers(engine, [prompt, stranger.prompt(stranger.questions[0])])[0] == question.answer
    here, there = engine.cache.open(prompt), engine.cache.open(engine.tokenizer.encode(stranger.text))
    place = question.answer.split(" in the ")[1]
    pages = [prompt[16 * i : 16 * i + 16] for i in range(len(here.pages))]
    fact_pages = [i for i, page_ids in enumerate(pages) if place.rstrip(".") in engine.tokenizer.decode(page_ids)]
    assert fact_pages
    for i in fact_pages:
        damage(engine, int(here.pages[i]), int(there.pages[i]))
    assert answers(engine, [prompt])[0] != question.answer
