"""Log-probabilities of an answer: an entry for each token, and the place of each token in the text."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer as Raw
from tokenizers import decoders, models, pre_tokenizers

from pagedkv.engine.checkpoint import BUNDLED
from pagedkv.engine.checkpoint.tokenizer import Tokenizer
from pagedkv.engine.serve.answers import Answer, TokenTexts
from pagedkv.engine.serve.streaming import Piece
from tests.engine.checkpoint.test_text_stream import BY_BYTES, STREAMED, byte_tokens

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
        request=SimpleNamespace(prompt_ids=prompt),
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
