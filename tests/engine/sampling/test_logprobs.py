"""Log-probabilities: those of float64 log_softmax over the model's own logits, whatever edits or draws.

An answer has an entry for each token, and the place of each token in the text.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Raw
from tokenizers import decoders, models, pre_tokenizers

from pagedkv.engine.checkpoint import BUNDLED
from pagedkv.engine.checkpoint.tokenizer import Tokenizer
from pagedkv.engine.sampling.logits import LogitsRules
from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.engine.sampling.sampler import SamplingRow, sample
from pagedkv.engine.serve.answers import Answer, TokenTexts
from pagedkv.engine.serve.streaming import Piece
from tests.engine.checkpoint.test_text_stream import BY_BYTES, STREAMED, byte_tokens
from tests.engine.conftest import Checkpoints, Paging, prompt_of
from tests.engine.step.test_engine import build

TOLERANCE = 1e-5
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 2.0, "frequency_penalty": 2.0, "logit_bias": {0: 50.0}},
    {"allowed_ids": [0, 3]},
]
AT_ONE: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"min_p": 0.1}]
"""Options next to temperature 1. With the first two, the draw has made the sum of the probabilities."""


def rows_of(options: dict[str, Any], num_rows: int, logprobs: int | None) -> list[SamplingRow]:
    params = SamplingParams(seed=1, logprobs=logprobs, **options)
    return [SamplingRow(params, params.generator(b), LogitsRules.of(params, [0, 0, 1], 1)) for b in range(num_rows)]


@pytest.mark.parametrize("options", [*OPTIONS, *({"temperature": 1.0} | one for one in AT_ONE)], ids=str)
@pytest.mark.parametrize(("num_rows", "vocab"), [(1, 4), (3, 1000), (2, 40_000), (35, 1024)])
def test_log_probs_are_those_of_log_softmax_in_float64(num_rows: int, vocab: int, options: dict[str, Any]) -> None:
    for count, spread in ((0, 1.0), (3, 8.0), (20, 30.0)):
        logits = spread * torch.randn(num_rows, vocab)
        logits[:, 3] = logits[:, 0]  # equals
        want = logits.double().log_softmax(-1)
        tokens, errors, logprobs = sample(logits, rows_of(options, num_rows, count))
        assert not errors
        assert sorted(logprobs) == list(range(num_rows))
        for b, found in logprobs.items():
            assert found.logprob == pytest.approx(float(want[b, tokens[b]]), abs=TOLERANCE)
            likeliest = logits[b].sort(descending=True, stable=True).indices[:count].tolist()
            assert [token for token, _ in found.top] == likeliest
            assert [share for _, share in found.top] == pytest.approx(want[b, likeliest].tolist(), abs=TOLERANCE)


def test_a_token_of_probability_0_is_no_alternative() -> None:
    logits = torch.full((1, 5), -torch.inf)
    logits[0, 1], logits[0, 4] = 0.0, 0.0
    found = sample(logits, rows_of({}, 1, 4)).logprobs[0]
    assert [token for token, _ in found.top] == [1, 4]
    assert found.logprob == pytest.approx(-0.6931471805599453)


@pytest.mark.parametrize(("options", "num_frames"), [(OPTIONS[0], 400), (OPTIONS[2], 8)], ids=str)
def test_each_token_has_the_log_probs_of_the_models_own_logits(
    options: dict[str, Any], num_frames: int, checkpoint: Checkpoints
) -> None:
    """Beside other requests, after forks, and (with 8 frames) after preemptions."""
    engine = build(checkpoint("llama"), num_frames=num_frames)
    params = SamplingParams(max_tokens=30, seed=2, logprobs=3, **options)
    requests = [engine.submit(prompt_of(length), params, num_samples=2) for length in (45, 30)]
    others = engine.submit(prompt_of(14), SamplingParams(max_tokens=30))
    engine.run()
    assert engine.scheduler.preemptions or num_frames == 400
    assert others.completions[0].logprobs == []
    for completion in (c for request in requests for c in request.completions):
        prompt = completion.request.prompt_ids
        paging = Paging(engine.decoder, block_size=16, num_frames=12, num_sequences=1)
        logits = paging.step({0: prompt + completion.token_ids[:-1]})[len(prompt) - 1 :].double().log_softmax(-1)
        assert len(completion.logprobs) == len(completion.token_ids) == 30
        for want, token, found in zip(logits, completion.token_ids, completion.logprobs, strict=True):
            assert found.logprob == pytest.approx(float(want[token]), abs=1e-3)
            assert [share for _, share in found.top] == pytest.approx(want.topk(3).values.tolist(), abs=1e-3)


KINDS = {name: STREAMED[name] for name in BY_BYTES}


class Finished(SimpleNamespace):
    """A completion, as far as an answer reads it."""

    __hash__ = object.__hash__


def tokenizer_of(kind: str) -> Tokenizer:
    return Tokenizer(KINDS[kind]()) if kind in KINDS else Tokenizer.load(BUNDLED)


def completion_of(tokenizer: Tokenizer, prompt: list[int], tokens: list[int], dice: random.Random) -> Any:
    """Return a finished completion with the five likeliest tokens at each place: the drawn one is often among them."""
    stream = tokenizer.stream(prompt)
    told = []
    for token in tokens:
        others = dice.sample(range(tokenizer.vocab_size), 4) + byte_tokens(tokenizer, b"\xe2") * bool(
            tokenizer.bytes_of
        )
        top = list(dict.fromkeys([*others[:2], *([token] * (dice.random() < 0.8)), *others[2:]]))[:5]
        told.append(SimpleNamespace(logprob=-0.5, top=[(other, -1.0 - rank) for rank, other in enumerate(top)]))
    return Finished(
        request=SimpleNamespace(prompt_ids=prompt, params=SamplingParams()),
        token_ids=tokens,
        logprobs=told,
        text="".join(map(stream.push, tokens)) + stream.finish(),
        index=0,
        finish_reason="length",
    )


def told_of(tokenizer: Tokenizer, completion: Any, cuts: list[int], *, is_chat: bool = False) -> dict[str, list[Any]]:
    """Return the log-probabilities of an answer in pieces that end at `cuts`, joined."""
    answer = Answer("model", is_chat, 1, has_logprobs=True, texts=TokenTexts(tokenizer))
    joined: dict[str, list[Any]] = {}
    for cut in cuts:
        piece = Piece(completion, 0, "", cut, "")
        for name, values in answer.chunk(piece)["choices"][0]["logprobs"].items():
            joined.setdefault(name, []).extend(values or [])
    return joined


@pytest.mark.parametrize("kind", [*KINDS, "bundled"])
def test_each_token_stands_in_the_text_where_its_offset_says(kind: str) -> None:
    tokenizer, dice = tokenizer_of(kind), random.Random(1)
    odd = [] if kind == "bundled" else byte_tokens(tokenizer, "\n’🙂".encode())
    for _ in range(60):
        tokens = [dice.choice([dice.randrange(3, tokenizer.vocab_size), *odd]) for _ in range(dice.randrange(1, 20))]
        prompt = [0, *dice.choices(range(3, tokenizer.vocab_size), k=dice.randrange(3))]
        completion = completion_of(tokenizer, prompt, tokens, dice)
        cuts = sorted({*dice.sample(range(len(tokens) + 1), dice.randrange(len(tokens))), len(tokens)})
        told = told_of(tokenizer, completion, cuts)
        assert told == told_of(tokenizer, completion, [len(tokens)])  # a stream and a whole answer
        places = told["text_offset"]
        assert places == sorted(places)
        assert places[0] == 0
        assert places[-1] <= len(completion.text)
        for place, text, token in zip(places, told["tokens"], tokens, strict=True):
            is_whole = "\ufffd" not in text and token not in tokenizer.special_ids
            shown = completion.text[place : place + len(text)]
            # only the demo's decoder ends lines within a text: the next token has no space there
            assert not is_whole or shown == text or (kind == "bundled" and completion.text[place - 1] == "\n")
        content = told_of(tokenizer, completion, cuts, is_chat=True)["content"]
        assert [entry["token"] for entry in content] == told["tokens"]


@pytest.mark.parametrize("kind", [*KINDS, "bundled"])
def test_the_tokens_of_an_echo_stand_where_their_offsets_say(kind: str) -> None:
    tokenizer, dice, num_shown = tokenizer_of(kind), random.Random(2), 0
    for _ in range(60):
        words = dice.choices(["Mira", " keeps", " a ", "red", " lamp", "’s", "🙂", ".\n"], k=9)
        ids = tokenizer.encode("".join(words), special_tokens=False)
        at = dice.randrange(1, len(ids))
        prompt, tokens = ids[:at], ids[at:]
        completion = completion_of(tokenizer, prompt, tokens, dice)
        completion.request.prompt_logprobs = [None, *completion_of(tokenizer, [0], prompt, dice).logprobs[1:]]
        answer = Answer("model", False, 1, has_logprobs=True, texts=TokenTexts(tokenizer), is_echo=True)
        (choice,) = answer.chunk(Piece(completion, 0, completion.text, len(tokens), "length"))["choices"]
        told = choice["logprobs"]
        if "\ufffd" in choice["text"]:  # the prompt ends within a character
            continue
        assert choice["text"] == tokenizer.decode([*prompt, *tokens])
        assert {len(values) for values in told.values()} == {len(prompt) + len(tokens)}
        assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
        assert None not in told["token_logprobs"][1:]
        assert told["text_offset"] == sorted(told["text_offset"])
        for place, text, token in zip(told["text_offset"], told["tokens"], [*prompt, *tokens], strict=True):
            is_shown = choice["text"][place : place + len(text)] == text
            # only the demo's decoder ends lines within a text: the next token has no space there
            is_odd = "\ufffd" in text or token in tokenizer.special_ids or kind == "bundled"
            assert is_shown or is_odd, (choice["text"], place, text)
            num_shown += is_shown
    assert num_shown > 60


@pytest.mark.parametrize("kind", [*KINDS, "bundled"])
def test_each_alternative_has_an_entry_whatever_its_text(kind: str) -> None:
    tokenizer, dice = tokenizer_of(kind), random.Random(3)
    tokens = dice.choices(range(tokenizer.vocab_size), k=100)
    completion = completion_of(tokenizer, [0], tokens, dice)
    told = told_of(tokenizer, completion, [len(tokens)])
    for text, top, each, token in zip(told["tokens"], told["top_logprobs"], completion.logprobs, tokens, strict=True):
        assert list(top.values()) == [logprob for _, logprob in each.top]
        for key, (other, _) in zip(top, each.top, strict=True):
            assert key == f"token_id:{other}" or (key == text) is (other == token)
    for each in completion.logprobs:
        del each.top[2:]
    fewer = told_of(tokenizer, completion, [len(tokens)])["top_logprobs"]
    assert fewer == [dict(list(top.items())[:2]) for top in told["top_logprobs"]]


GREEK = [(piece, -1.0) for piece in ("<unk>", "\u2581\u03ba\u03b1\u03b9", "\u2581\u03c4\u03bf", "\u03c4\u03bf", ".")]
WORDS = {word: number for number, word in enumerate(("Mira", "lamp", "."))}


def test_a_token_keeps_its_space_whatever_the_vocabulary_lacks() -> None:
    """A vocabulary without Latin letters, and one without a token for unknown words, which cannot encode an "a"."""
    raw = Raw(models.Unigram(GREEK, unk_id=0))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    raw.add_special_tokens(["<unk>"])
    assert [TokenTexts(Tokenizer(raw)).of(token) for token in range(1, 5)] == [
        " \u03ba\u03b1\u03b9", " \u03c4\u03bf", "\u03c4\u03bf", "."
    ]  # fmt: skip
    assert [TokenTexts(Tokenizer(Raw(models.WordLevel(WORDS)))).of(token) for token in range(3)] == [
        " Mira", " lamp", " ."
    ]  # fmt: skip
