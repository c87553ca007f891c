"""Tree drafts: whichever branch comes true, each request gets the tokens of the plain way, and the cache has its KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pagedkv.cache import PagedKVCache
from pagedkv.checkpoint.demo import DEMO_PROMPT
from pagedkv.errors import InvalidRequest
from pagedkv.model.engine import Engine, Limits
from pagedkv.model.ways import trees
from pagedkv.model.ways.prompt_lookup import PromptLookup
from pagedkv.model.ways.trees import Tree, merged
from pagedkv.sampling.params import SamplingParams
from tests.interrupts import count_instructions
from tests.model.conftest import VOCAB, prompt_of
from tests.model.test_engine import NUM_TOKENS, build, idle, outputs
from tests.model.test_trust import interrupt_and_compare, submitted
from tests.model.ways.test_bundled_draft import passes
from tests.model.ways.test_speculation import Oracle, crowd
from tests.records import DEMO_ANSWER, document

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagedkv.model.loop.sequence import SequenceState
    from tests.model.conftest import Checkpoint


@dataclass
class Forest(Oracle):
    """An oracle whose drafts are one branch of a tree, at any place in it; the others leave it at any token."""

    num_tokens: int = 9

    def propose(self, sequences: list[SequenceState], most: list[int]) -> list[Any]:
        dice, grown = self.dice, list[Any]()
        for right, count in zip(super().propose(sequences, [min(4, n) for n in most]), most, strict=True):
            ends = [dice.randrange(len(right)) for _ in range(dice.randint(0, 3))] if right else []
            branches = [[*right[:at], (right[at] + 1 + n) % VOCAB, dice.randrange(VOCAB)] for n, at in enumerate(ends)]
            branches.insert(dice.randint(0, len(branches)), right)
            grown.append(merged(branches, count) if len(branches) > 1 else right)
        return grown


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return a list that gets, for each sequence of a step with trees, the drafts that came true."""
    found, move = list[list[int]](), trees.move

    def noted(cache: Any, batch: Any, chunks: Any, accepted: Any) -> None:
        found.extend([guess.draft for guess in guesses] for guesses in accepted.values())
        move(cache, batch, chunks, accepted)

    monkeypatch.setattr(trees, "move", noted)
    return found


@pytest.mark.parametrize("wrong", [0.2, pytest.param(0.0, marks=pytest.mark.slow)])
def test_greedy_tokens_are_those_of_the_plain_way(
    wrong: float, moved: list[list[int]], checkpoint: Callable[[str], Checkpoint]
) -> None:
    params = SamplingParams(max_tokens=NUM_TOKENS)
    plain = crowd(build(checkpoint("llama")), params)
    forest = Forest(wrong=wrong).learn(plain)
    for options in ({"block_size": 1}, {"limits": Limits(max_batch_tokens=30)}, {"num_frames": 17}):
        engine = build(checkpoint("llama"), drafter=forest, **options)
        assert outputs(crowd(engine, params)) == outputs(plain)
        assert idle(engine)
        assert not forest.running
    assert any(path != sorted(range(len(path))) for path in moved)
    assert any(len(path) == 4 and path != [0, 1, 2, 3] for path in moved)


@pytest.mark.parametrize("kv_dtype", [None, "int8", "int4"])
def test_a_branch_that_came_true_leaves_its_own_kv_in_the_cache(
    kv_dtype: str | None, moved: list[list[int]], checkpoint: Callable[[str], Checkpoint]
) -> None:
    """A request that goes on with the text finds the pages, and has the log-probabilities of the plain way."""
    decoder, params = checkpoint("llama").decoder(), SamplingParams(max_tokens=40)
    spec, tokenizer = decoder.config.spec(block_size=4, kv_dtype=kv_dtype), build(checkpoint("llama")).tokenizer
    plain = Engine(decoder, tokenizer, PagedKVCache(spec, num_frames=60))
    (request,) = plain.generate([prompt_of(9)], params)
    tree = Engine(decoder, tokenizer, PagedKVCache(spec, num_frames=60), drafter=Forest().learn([request]))
    assert outputs(tree.generate([prompt_of(9)], params)) == outputs([request])
    assert any(path != sorted(range(len(path))) for path in moved)
    text, found = [*prompt_of(9), *request.completions[0].token_ids, 5], []
    for engine in (plain, tree):
        (one,) = engine.generate([text], SamplingParams(max_tokens=1, logprobs=20))[0].completions
        assert one.cached_tokens == 48
        found.append(dict(one.logprobs[0].top))
    assert found[1] == pytest.approx(found[0], abs=0.05 if kv_dtype else 1e-3)


def test_sampled_tokens_are_those_of_the_plain_way_for_any_seed(
    moved: list[list[int]], checkpoint: Callable[[str], Checkpoint]
) -> None:
    """So their distribution is that of the model. With penalties whose history holds the drafts that came true."""
    penalties = {"repetition_penalty": 1.4, "frequency_penalty": 0.3}
    params = SamplingParams(max_tokens=30, temperature=1.3, top_p=0.9, seed=5, logprobs=1, **penalties)
    plain = crowd(build(checkpoint("llama")), params, num_samples=3)
    engine = build(checkpoint("llama"), drafter=Forest(wrong=0.2).learn(plain))
    drafted = crowd(engine, params, num_samples=3)
    assert outputs(drafted) == outputs(plain)
    assert any(path != sorted(range(len(path))) for path in moved)
    assert idle(engine)


def test_a_draft_sees_the_drafts_before_it_in_the_text_and_no_other(checkpoint: Callable[[str], Checkpoint]) -> None:
    engine = build(checkpoint("llama"))
    first, second = engine.submit(prompt_of(5)), engine.submit(prompt_of(3))
    engine.step()
    chunks, batch = engine.scheduler.next_step()
    assert batch is not None
    engine.cache.abort(batch)
    assert trees.branches_of(chunks, batch) is None
    tree = Tree((10, 11, 12, 13), (-1, 0, -1, 2))
    chunks = [chunks[0].with_drafts(tree.tokens, tree.parents), chunks[1].with_drafts([20, 21])]
    batch = engine.cache.plan([c.sequence.space for c in chunks if c.sequence.space], [5, 3])
    branches = trees.branches_of(chunks, batch)
    assert branches is not None
    assert branches.batch.positions is not None
    assert branches.batch.positions.tolist() == [5, 6, 7, 6, 7, 3, 4, 5]
    seen = ["x", "xx", "xxx", "x..x", "x..xx", "x", "xx", "xxx"]
    assert np.where(branches.mask.numpy(), "x", ".").tolist() == [list(row.ljust(5, ".")) for row in seen]
    engine.cache.abort(batch)
    for request in (first, second):
        engine.cancel(request)
    engine.run()


def test_equal_beginnings_are_one_branch() -> None:
    assert merged([[1, 2, 3], [1, 2, 4], [5], [1]], 9) == Tree((1, 2, 3, 4, 5), (-1, 0, 1, 1, -1))
    assert merged([[1, 2, 3], [4, 5]], 4) == Tree((1, 2, 3, 4), (-1, 0, 1, -1))


@pytest.mark.parametrize("step", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_an_interrupt_at_some_instructions_of_a_step_loses_nothing(
    step: int, checkpoint: Callable[[str], Checkpoint]
) -> None:
    undisturbed = build(checkpoint("llama"))
    want = submitted(undisturbed)
    undisturbed.run()

    def begun() -> tuple[Engine, list[Any]]:
        engine = build(checkpoint("llama"), num_frames=60, drafter=Forest().learn(want))
        requests = submitted(engine)
        for _ in range(step):
            engine.step()
        return engine, requests

    total = count_instructions(begun()[0].step)
    for at in range(1, total + 1, total // 4):
        interrupt_and_compare(*begun(), want, at)


def test_a_model_with_windows_refuses_trees(checkpoint: Callable[[str], Checkpoint]) -> None:
    build(checkpoint("mistral"), drafter=PromptLookup())
    with pytest.raises(InvalidRequest, match="the model has windows.*prompt-lookup instead of prompt-tree.*width=1"):
        build(checkpoint("mistral"), drafter=PromptLookup(width=2))


@dataclass
class Branching(Oracle):
    """An oracle that gives, for all sequences or one, the right branch behind `num_wrong` wrong ones."""

    num_tokens: int = 12
    num_wrong: int = 3
    only: int = -1

    def propose(self, sequences: list[SequenceState], most: list[int]) -> list[Any]:
        given = super().propose(sequences, [min(4, n) for n in most])
        for i, (right, sequence) in enumerate(zip(given, sequences, strict=True)):
            if right and self.only in (-1, len(sequence.completion.request.prompt_ids)):
                wrong = [[(right[0] + 1 + n) % VOCAB, 1, 2] for n in range(self.num_wrong)]
                given[i] = merged([*wrong, right], most[i])
        return given


@pytest.mark.parametrize("streaming", [False, True], ids=["mistral", "window and sinks"])
def test_under_windows_a_request_whose_drafter_gives_branches_ends_with_an_error(
    streaming: bool, checkpoint: Callable[[str], Checkpoint]
) -> None:
    """A drafter of one's own has no `width`. A tree of one branch is a chain; other requests have their tokens."""

    def engine_of(drafter: Any) -> Engine:
        if not streaming:
            return build(checkpoint("mistral"), drafter=drafter)
        return Engine.load(num_frames=60, window=12, sinks=4, speculate=drafter)

    params, prompts = SamplingParams(max_tokens=20, ignore_eos=True), [prompt_of(50), prompt_of(41)]
    plain = engine_of(None).generate(prompts, params)
    engine = engine_of(Branching().learn(plain))
    for request, other in zip(engine.generate(prompts, params), plain, strict=True):
        (one,) = request.completions
        assert one.finish_reason == "error"
        assert "tree with several branches" in one.error
        assert one.token_ids == other.completions[0].token_ids[:1]
    assert idle(engine)
    engine = engine_of(Branching(only=41).learn(plain))
    whole, ended = engine.generate(prompts, params)
    assert outputs([whole]) == outputs(plain[:1])
    assert ended.completions[0].finish_reason == "error"
    chains = engine_of(Branching(num_wrong=0).learn(plain))
    assert outputs(chains.generate(prompts, params)) == outputs(plain)
    assert chains.speculation is not None
    assert chains.speculation.num_accepted > 0


# -- prompt lookup with several continuations --------------------------------------------------------------------------


def lookup(tokens: list[int], count: int, **options: Any) -> Any:
    """Return the drafts of a PromptLookup that has seen the text grow token by token."""
    drafter = PromptLookup(num_tokens=count, **options)
    sequence: Any = type("Sequence", (), {"tokens": []})()
    drafts: list[Any] = [[]]
    for token in tokens:
        sequence.tokens.append(token)
        drafts = drafter.propose([sequence], [count])
    assert drafts == PromptLookup(num_tokens=count, **options).propose([sequence], [count])
    return drafts[0]


def test_continuations_of_longer_runs_come_first_and_of_equal_runs_the_latest() -> None:
    text = [9, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2]
    assert lookup(text, 6, width=1) == [3, 8, 1, 2, 4, 9]
    assert lookup(text, 6, width=2) == Tree((3, 8, 1, 4, 9, 1), (-1, 0, 1, -1, 3, 4))
    several = [1, 2, 3, 1, 2, 4, 1, 2, 5, 1, 2]
    assert lookup(several, 6, width=3) == Tree((5, 1, 4, 1, 3, 1), (-1, 0, -1, 2, -1, 4))
    assert lookup(several, 4, width=3) == Tree((5, 1, 4, 1), (-1, 0, -1, 2))
    assert lookup([1, 2, 3, 1, 2], 4, width=3) == [3, 1, 2, 3]
    assert lookup([1, 2, 3], 4, width=3) == []


def test_a_tree_takes_fewer_passes_than_a_chain_where_a_text_has_gone_on_in_several_ways() -> None:
    asked = document(300, seed=41)
    prompts = [DEMO_PROMPT, *(asked.prompt(question) for question in asked.questions[:4])]
    plain, _ = passes(Engine.load(num_frames=128), prompts)
    chain, tree = (
        Engine.load(num_frames=128, speculate="prompt-lookup"),
        Engine.load(num_frames=128, speculate="prompt-tree"),
    )
    results = [passes(engine, prompts) for engine in (chain, tree)]
    assert plain[0].completions[0].text == DEMO_ANSWER
    assert [outputs(requests) for requests, _ in results] == [outputs(plain)] * 2
    assert results[1][1] < results[0][1]
    assert idle(tree)
