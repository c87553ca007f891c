"""Text that grows token by token: the pieces join to the text of all tokens, and no whole character waits."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models

from pagedkv.cache import PagedKVCache
from pagedkv.engine.checkpoint.tokenizer import Tokenizer
from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.engine.step.engine import Engine
from tests.engine.checkpoint.test_tokenizer import KINDS, SPECIAL, TEXTS, byte_fallback, byte_level, word_piece
from tests.engine.conftest import VOCAB, Checkpoints

if TYPE_CHECKING:
    from pagedkv.engine.requests.request import Completion


def keeps_first_space() -> tokenizers.Tokenizer:
    """Make a tokenizer like Gemma's: bytes for unknown characters; the first space of a text stays."""
    raw = byte_fallback()
    raw.normalizer = None
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return raw


STREAMED = {**KINDS, "first space kept": keeps_first_space, "WordPiece": word_piece}
BY_BYTES = ["byte level", "byte fallback", "first space kept"]
BYTES_AT_ODDS = [0x0A, 0x20, 0xE2, 0x80, 0x99, 0xF0, 0x9F, 0xFF, 0xEF, 0xBF, 0xBD]


@pytest.fixture(scope="module", params=STREAMED)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(STREAMED[request.param]())


@pytest.fixture(scope="module", params=BY_BYTES)
def by_bytes(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(STREAMED[request.param]())


def byte_tokens(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Return a token for each byte."""
    if tokenizer.bytes_of:
        return [{byte: token for token, byte in tokenizer.bytes_of.items()}[byte] for byte in data]
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]  # ByteLevel writes these as they are
    others = [byte for byte in range(256) if byte not in own]
    return [tokenizer.raw.token_to_id(chr(b if b in own else 256 + others.index(b))) for b in data]


def dice_of(tokenizer: Tokenizer, dice: random.Random) -> list[int]:
    """Draw tokens: any, special ones, some that the tokenizer lacks, and bytes that are often no characters."""
    beyond = tokenizer.vocab_size + 3  # a model may have rows for tokens that the tokenizer lacks
    odd = byte_tokens(tokenizer, bytes(BYTES_AT_ODDS)) if beyond > 256 else [0]
    kinds = [range(beyond), range(4), *[odd] * dice.randrange(4)]
    return [dice.choice(dice.choice(kinds)) for _ in range(dice.randrange(30))]


def pieces_of(tokenizer: Tokenizer, ids: list[int], *, prompt: Any = (), skip: bool = True) -> list[str]:
    stream = tokenizer.stream(prompt, skip_special_tokens=skip)
    return [*map(stream.push, ids), stream.finish()]


def text_of(tokenizer: Tokenizer, ids: list[int], *, skip: bool = True) -> str:
    """Return the text of tokens: as the decoder, but valid characters next to invalid byte tokens stay (slow twin)."""
    if not tokenizer.bytes_of:
        return tokenizer.raw.decode(ids, skip_special_tokens=skip)
    pieces = [tokenizer.raw.id_to_token(i) for i in ids if not (skip and i in tokenizer.special_ids)]
    data = "".join(piece or "" for piece in pieces).replace("▁", " ").encode()
    data = re.sub(rb"<0x([0-9A-F]{2})>", lambda found: bytes([int(found[1], 16)]), data)
    text = re.sub("[\udc80-\udcff]", "\ufffd", data.decode(errors="surrogateescape"))
    return text.removeprefix(" ") if b"Strip" in tokenizer.raw.decoder.__getstate__() else text


@pytest.mark.parametrize("skip", [True, False], ids=["special tokens skipped", "special tokens shown"])
def test_prompt_and_pieces_join_to_the_text_of_all_tokens(tokenizer: Tokenizer, skip: bool) -> None:
    dice = random.Random(0)
    for _ in range(300):
        ids = dice_of(tokenizer, dice)
        cut = dice.choice([0, dice.randrange(len(ids) + 1)])
        whole, before = text_of(tokenizer, ids, skip=skip), text_of(tokenizer, ids[:cut], skip=skip)
        answer = "".join(pieces_of(tokenizer, ids[cut:], prompt=ids[:cut], skip=skip))
        if not cut or whole.startswith(before):
            assert before + answer == whole
        else:  # the prompt ends within a character, which the answer shows whole
            assert before.endswith("\ufffd")
            assert whole in [before[:-held] + answer for held in (1, 2, 3)]


@pytest.mark.parametrize("text", TEXTS)
def test_valid_text_is_streamed_as_the_decoder_shows_it(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    for cut in range(len(ids)):
        before = tokenizer.decode(ids[:cut])
        if not before.endswith("\ufffd"):
            assert before + "".join(pieces_of(tokenizer, ids[cut:], prompt=ids[:cut])) == tokenizer.decode(ids)


@pytest.mark.parametrize("data", [b"a\n\n\nb", "naïve 🙂🙂 你好\n".encode(), b"\n" * 40, "a \ufffd\ufffd\n".encode()])
def test_a_character_is_shown_with_the_token_that_makes_it_whole(by_bytes: Tokenizer, data: bytes) -> None:
    start = by_bytes.encode("the", special_tokens=False)
    stream, shown = by_bytes.stream(start), ""
    for number, token in enumerate(byte_tokens(by_bytes, data), 1):
        shown += stream.push(token)
        assert shown == data[:number].decode(errors="ignore")
    assert stream.finish() == ""


def test_a_character_in_one_token_with_the_begin_of_the_next_is_shown() -> None:
    raw = byte_level()
    raw.add_tokens(["\ufffd"])
    tokenizer = Tokenizer(raw)
    start, half, rest = tokenizer.encode("the "), byte_tokens(tokenizer, "🙂".encode()[:2]), [tokenizer.vocab_size - 1]
    assert pieces_of(tokenizer, [*half, *rest], prompt=start) == ["", "", "\ufffd\ufffd", ""]


@pytest.mark.parametrize("data", [b"\xff", b"\x80", b"\xe2\x80", b"\xf0\x9f\x98", b"\xf0\x9f\n", b"\xc3a"])
def test_endless_invalid_bytes_are_shown_as_they_come(by_bytes: Tokenizer, data: bytes) -> None:
    decode, num_decoded = by_bytes.decode, 0

    def watched(token_ids: Any, **options: Any) -> str:
        nonlocal num_decoded
        num_decoded += len(token_ids)
        return decode(token_ids, **options)

    ids = byte_tokens(by_bytes, data * 200)
    stream, shown = by_bytes.stream(), ""
    by_bytes.decode = watched  # type: ignore[method-assign]
    try:
        for number, token in enumerate(ids, 1):
            shown += stream.push(token)
            assert len(text_of(by_bytes, ids[:number])) - len(shown) <= 3
        assert shown + stream.finish() == text_of(by_bytes, ids)
    finally:
        del by_bytes.decode
    assert num_decoded <= 16 * len(ids)


def test_a_character_that_a_prompt_begins_is_shown_by_the_answer(by_bytes: Tokenizer) -> None:
    start, smile = by_bytes.encode("the ", special_tokens=False), byte_tokens(by_bytes, "🙂".encode())
    letter = byte_tokens(by_bytes, b"t")
    for cut in range(1, 4):
        prompt = [*start, *smile[:cut]]
        assert "".join(pieces_of(by_bytes, [*smile[cut:], *letter], prompt=prompt)) == "🙂t"
        assert "".join(pieces_of(by_bytes, letter, prompt=prompt)) == "t"  # the prompt's text ends with U+FFFD
        assert "".join(pieces_of(by_bytes, [], prompt=prompt)) == ""
        assert "".join(pieces_of(by_bytes, byte_tokens(by_bytes, b"\xff"), prompt=prompt)) == "\ufffd"


def few_bytes() -> Tokenizer:
    """Make a tokenizer of VOCAB tokens with the decoder of Llama 2, a third of which are bytes."""
    names = [*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in BYTES_AT_ODDS * 2)]
    names += [f"{'▁' * (i % 2)}w{i}" for i in range(VOCAB - len(dict.fromkeys(names)))]
    vocab = {name: i for i, name in enumerate(dict.fromkeys(names))}
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    raw.decoder = byte_fallback().decoder
    raw.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return Tokenizer(raw)


WILD = {"max_tokens": 40, "temperature": 4.0, "ignore_eos": True}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # sampling, submit, engine
    "samples": (WILD, {"num_samples": 3}, {}),
    "beams": ({"max_tokens": 12, "num_beams": 3, "ignore_eos": True}, {"num_samples": 3}, {}),
    "few frames": (WILD, {"num_samples": 2}, {"num_frames": 8}),
    "a stop string": ({**WILD, "stop": ["\n"]}, {"num_samples": 3}, {}),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_prompt_and_each_answer_of_an_engine_are_the_text_of_all_tokens(way: str, checkpoint: Checkpoints) -> None:
    decoder, tokenizer = checkpoint("llama").decoder(), few_bytes()
    sampling, options, build = WAYS[way]
    engine = Engine(decoder, tokenizer, PagedKVCache(decoder.config.spec(), **{"num_frames": 200, **build}))
    shown: dict[Completion, str] = {}

    def hear(completion: Completion, text: str) -> None:
        shown[completion] = shown.get(completion, "") + text

    ends = [[VOCAB - 1], [VOCAB - 2], [1, 2], [5, 5], [VOCAB - 1, *[1] * 20], [6], []]
    drawn = [[token % VOCAB for token in dice_of(tokenizer, random.Random(seed))] for seed in range(len(ends))]
    prompts = [[*ids, VOCAB - 3 + i % 2, *end] for i, (ids, end) in enumerate(zip(drawn, ends, strict=True))]
    params = SamplingParams(**{"seed": 3, **sampling})
    requests = [engine.submit(prompt, params, on_text=hear, **options) for prompt in prompts]
    engine.run()
    assert way != "few frames" or engine.scheduler.preemptions
    for request in requests:
        for completion in request.completions:
            before = text_of(tokenizer, request.prompt_ids)
            whole = text_of(tokenizer, [*request.prompt_ids, *completion.token_ids])
            assert completion.text == shown[completion]
            assert not completion.error
            if completion.finish_reason == "stop":  # with the token that completes the stop string, and not behind it
                assert whole == f"{before}{completion.text}\n"
            else:
                assert whole == before + completion.text
