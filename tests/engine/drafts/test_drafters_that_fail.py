"""A drafter that fails ends only the requests for which it fails alone; the others keep tokens and drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from pagedkv.engine.requests.limits import Limits
from pagedkv.engine.sampling.params import SamplingParams
from tests.engine.conftest import VOCAB, Checkpoint, Checkpoints, prompt_of
from tests.engine.drafts.test_speculation import Oracle, crowd, draft_model
from tests.engine.step.test_engine import LENGTHS, build, idle, outputs

if TYPE_CHECKING:
    from pagedkv.engine.requests.sequence import SequenceState

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
BAD = 71
"""The length of the prompt for which a drafter fails, from its fifth token on."""


@dataclass
class Failing(Oracle):
    """An Oracle that raises `given`, or returns it for the sequences of the bad prompt; `times` times, if given."""

    given: Any = None
    times: int = 1 << 30
    recovered: int = 0

    def propose(self, sequences: list[SequenceState], most: list[int]) -> Any:
        drafts: list[Any] = super().propose(sequences, most)
        for n, sequence in enumerate(sequences):
            if len(sequence.completion.request.prompt_ids) == BAD and sequence.num_output > 4 and self.times:
                self.times -= 1
                if isinstance(self.given, BaseException):
                    raise self.given
                drafts[n] = self.given
        return drafts

    def recover(self) -> None:
        self.recovered += 1
        super().recover()


def run(checkpoint: Checkpoint, drafter: Any, **options: Any) -> tuple[Any, list[Any]]:
    engine = build(checkpoint, drafter=drafter, **options)
    requests = [engine.submit(prompt_of(length), PARAMS, num_samples=2) for length in LENGTHS]
    engine.run()
    assert idle(engine)
    return engine, requests


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (ValueError("a bug of mine"), "ValueError: a bug of mine"),
        (StopIteration(), "StopIteration: "),
        (None, "TypeError: object of type 'NoneType' has no len()"),
        ([1] * 5, "InvalidRequest: propose returned 5 drafts for a sequence that may have 4"),
        ([1, VOCAB], f"InvalidRequest: propose returned [1, {VOCAB}]; drafts must be from 0 to {VOCAB - 1}"),
        ([-1], "InvalidRequest: propose returned [-1]; drafts must be from 0 to"),
        (["a"], "TypeError: "),
        (GeneratorExit("bad arguments"), "GeneratorExit: bad arguments"),
    ],
    ids=str,
)
def test_a_drafter_that_fails_for_one_request_ends_that_one_only(
    given: Any, words: str, checkpoint: Checkpoints
) -> None:
    plain = crowd(build(checkpoint("llama")), PARAMS, num_samples=2)
    drafter = Failing(given=given)
    engine, requests = run(checkpoint("llama"), drafter.learn(plain))
    for request, wanted in zip(requests, plain, strict=True):
        if len(request.prompt_ids) == BAD:
            for one, whole in zip(request.completions, wanted.completions, strict=True):
                assert one.finish_reason == "error"
                assert one.error.startswith(f"the drafter failed: {words}")
                assert 4 < len(one.token_ids) < 24
                assert one.token_ids == whole.token_ids[: len(one.token_ids)]  # nothing is lost that came before
        else:
            assert outputs([request]) == outputs([wanted])
    assert engine.speculation.acceptance == 1.0
    assert drafter.recovered == 2  # for the whole step, and for the first of its two samples, alone
    assert not drafter.running


def test_a_drafter_that_fails_once_costs_no_request(checkpoint: Checkpoints) -> None:
    plain = crowd(build(checkpoint("llama")), PARAMS, num_samples=2)
    drafter = Failing(given=MemoryError("of the GPU"), times=1)
    engine, requests = run(checkpoint("llama"), drafter.learn(plain))
    assert outputs(requests) == outputs(plain)
    assert engine.speculation.tokens_per_pass > 4
    assert drafter.recovered == 1


def test_a_draft_model_that_raises_inside_of_a_pass_gives_all_its_frames_back(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = crowd(build(checkpoint("llama")), PARAMS)
    drafter = draft_model(checkpoint("llama"))
    forward, calls = drafter.decoder.forward, list[int]()

    def failing(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) in (3, 9):  # for two sequences, then for the second of them alone
            raise RuntimeError("out of memory")
        return forward(*arguments, **options)

    monkeypatch.setattr(drafter.decoder, "forward", failing)
    engine = build(checkpoint("llama"), drafter=drafter, limits=Limits(max_sequences=2))
    requests = [engine.submit(prompt_of(length), PARAMS) for length in LENGTHS]
    engine.run()
    errors = [request.completions[0].error for request in requests]
    assert sorted(errors) == ["", "", "the drafter failed: RuntimeError: out of memory"]
    for request, wanted in zip(requests, plain, strict=True):
        own = request.completions[0].token_ids
        assert own == wanted.completions[0].token_ids[: len(own) if request.completions[0].error else None]
    assert idle(engine)
    assert drafter.cache.stats().mapped == 0
