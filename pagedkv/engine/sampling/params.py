"""SamplingParams: what a request asks of its sampling, checked when it is built. Knows no logits, no tokenizer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from pagedkv.errors import InvalidRequest

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LogitsProcessor = Callable[[list[int], "Tensor"], "Tensor"]
"""A function of the tokens of prompt and output so far, and of the logits float32 [V] of the next; returns logits."""

MOST_LOGPROBS: Final = 20
"""The most alternatives of a token, as in OpenAI's chat completions."""

EDITS: Final = (
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "allowed_ids",
    "logits_processor",
)
"""Parameters that edit logits, beside grammars and min_tokens."""

GRAMMARS: Final = ("json_schema", "regex", "choice")

_GOLDEN: Final = 0x9E3779B97F4A7C15
"""2^64 / golden ratio: multiples of it lie far apart, so that samples of neighbouring seeds do not coincide."""


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of one request.

    max_tokens: the longest output. min_tokens: tokens before an end token, a stop id or a stop string may end it.
    temperature: 0 for greedy. top_k: 0 for all. top_p: 1 for all, 0 for greedy. min_p: 0 for all.
    repetition_penalty: divides the positive logits of tokens in prompt or output, multiplies negative ones; from 0.001
        to 1000; 1 for none.
    frequency_penalty: subtracted from a token's logit for each time it is in the output; presence_penalty: once, if it
        is there. From -2 to 2; 0 for none.
    logit_bias: added to the logits of tokens, by id; from -100 to 100.
    allowed_ids: the only tokens that may be drawn; None for all.
    logits_processor: a function of (token_ids, logits) that returns the logits to draw from.
    json_schema, regex, choice: at most one of them. The text follows a JSON schema, matches a regular expression, or is
        one of some strings; with the extra `pagedkv[grammar]`.
    logprobs: None, or the number of alternatives (at most 20) whose log-probabilities are kept for each token.
    prompt_logprobs: the same for each token of the prompt but the first. Such a prompt is computed whole: none of its
        pages are taken from the prefix cache. max_tokens may then be 0.
    seed: None for a fresh seed each time.
    stop: strings (or one string) at which the text ends; the text does not contain them.
    include_stop: let the text contain the stop string or the end token that ends it.
    skip_special_tokens: leave special tokens out of the text; an end token is one in most checkpoints.
    stop_ids: tokens that end the text, in addition to the checkpoint's end tokens.
    ignore_eos: do not end the text at the checkpoint's end tokens.
    num_beams: 1 for none; otherwise a beam search, which needs temperature 0, and takes no stop strings and nothing
        that edits logits.
    length_penalty: outputs of a beam search are compared by the sum of log-probabilities / length ** length_penalty;
        from -10 to 10.
    early_stopping: when a beam search with num_beams ended outputs ends. True: at once; False: when no live beam is
        better than one of them; "never": when none can become better.
    Raises: InvalidRequest, which names the field and its range
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_ids: Sequence[int] = ()
    ignore_eos: bool = False
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    min_tokens: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_ids: Sequence[int] | None = None
    logits_processor: LogitsProcessor | None = None
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else _as_tuple(self.stop))
        for name in ("stop_ids", "allowed_ids", "choice"):
            object.__setattr__(self, name, _as_tuple(getattr(self, name)))
        object.__setattr__(self, "logit_bias", _as_bias(self.logit_bias))
        self._check_draw()
        self._check_end()
        self._check_logits()
        self._check_grammar()
        self._check_beams()

    def _check_draw(self) -> None:
        temperature_holds = _is_number(self.temperature) and self.temperature >= 0
        self._demand("temperature", temperature_holds, "a number of at least 0 (0 is greedy)")
        self._demand("top_k", _is_int(self.top_k) and self.top_k >= 0, "an integer of at least 0 (0 is off)")
        self._demand("top_p", _is_number(self.top_p) and 0 <= self.top_p <= 1, "between 0 (greedy) and 1 (off)")
        self._demand("min_p", _is_number(self.min_p) and 0 <= self.min_p <= 1, "between 0 (off) and 1")
        seed_holds = self.seed is None or (_is_int(self.seed) and 0 <= self.seed < 2**63)
        self._demand("seed", seed_holds, "None or an integer from 0 to 2^63 - 1")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            count_holds = count is None or (_is_int(count) and 0 <= count <= MOST_LOGPROBS)
            self._demand(name, count_holds, f"None or an integer from 0 to {MOST_LOGPROBS}")

    def _check_end(self) -> None:
        least = 1 if self.prompt_logprobs is None else 0
        self._demand(
            "max_tokens", _is_int(self.max_tokens) and self.max_tokens >= least, f"an integer of at least {least}"
        )
        min_holds = _is_int(self.min_tokens) and 0 <= self.min_tokens <= self.max_tokens
        self._demand("min_tokens", min_holds, f"an integer from 0 to max_tokens, {self.max_tokens}")
        self._demand("stop", _are_texts(self.stop), "one or more strings, none empty")
        self._demand("stop_ids", _are_ids(self.stop_ids), "token ids")
        for name in ("ignore_eos", "include_stop", "skip_special_tokens"):
            self._demand(name, isinstance(getattr(self, name), bool), "true or false")

    def _check_logits(self) -> None:
        # beyond, a product of float32 may be no number
        penalty_holds = _is_number(self.repetition_penalty) and 0.001 <= self.repetition_penalty <= 1000
        self._demand("repetition_penalty", penalty_holds, "between 0.001 and 1000 (1 is off)")
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            self._demand(name, _is_number(value) and -2 <= value <= 2, "between -2 and 2 (0 is off)")
        bias = self.logit_bias
        bias_holds = isinstance(bias, Mapping) and _are_ids(tuple(bias))
        bias_holds = bias_holds and all(_is_number(value) and -100 <= value <= 100 for value in bias.values())
        self._demand("logit_bias", bias_holds, "a mapping from token ids to numbers between -100 and 100")
        ids_hold = self.allowed_ids is None or (_are_ids(self.allowed_ids) and len(self.allowed_ids) > 0)
        self._demand("allowed_ids", ids_hold, "None or one or more token ids")
        processor_holds = self.logits_processor is None or callable(self.logits_processor)
        self._demand("logits_processor", processor_holds, "None or a function of (token_ids, logits)")

    def _check_grammar(self) -> None:
        self._demand("regex", self.regex is None or isinstance(self.regex, str), "None or a regular expression")
        choice_holds = self.choice is None or (_are_texts(self.choice) and len(self.choice) > 0)
        self._demand("choice", choice_holds, "None or one or more strings, none empty")
        schema_holds = self.json_schema is None or _is_schema(self.json_schema)
        self._demand("json_schema", schema_holds, "None or a JSON schema: an object, or the text of one")
        given = [name for name in GRAMMARS if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidRequest(f"{' and '.join(given)} are given; the text can follow only one of them")
        if given and self.ignore_eos:
            raise InvalidRequest(f"{given[0]} and ignore_eos are given; an end token is how the text ends, drop one")

    def _check_beams(self) -> None:
        self._demand("num_beams", _is_int(self.num_beams) and self.num_beams >= 1, "an integer of at least 1")
        # beyond, length ** length_penalty may be no number
        penalty_holds = _is_number(self.length_penalty) and -10 <= self.length_penalty <= 10
        self._demand("length_penalty", penalty_holds, "between -10 and 10")
        stopping_holds = isinstance(self.early_stopping, bool) or (
            isinstance(self.early_stopping, str) and self.early_stopping == "never"
        )
        self._demand("early_stopping", stopping_holds, 'true, false or "never"')
        if self.num_beams > 1:
            defaults = SamplingParams()
            for name in ("temperature", "stop", "min_tokens", "logprobs", "prompt_logprobs", *EDITS, *GRAMMARS):
                plain = getattr(defaults, name)
                words = f"{plain:g}" if isinstance(plain, float) else repr(plain)
                self._demand(name, getattr(self, name) == plain, f"{words} with num_beams {self.num_beams}")

    def _demand(self, name: str, holds: bool, must: str) -> None:
        if not holds:
            value = repr(getattr(self, name))
            raise InvalidRequest(f"{name} is {value if len(value) < 500 else f'{value[:500]}..'}; it must be {must}")

    @property
    def greedy(self) -> bool:
        """Whether each token is the likeliest one."""
        return self.temperature == 0 or self.top_p == 0

    def generator(self, sample: int = 0) -> torch.Generator:
        """Return a generator for the `sample`-th output of a request: the same one for the same seed and sample.

        torch's generator starts from 32 bits. So all 64 bits of seed + sample * golden are mixed, and the high half is
        folded into the low half: two seeds give the same start with a chance of 2^-32, even if they agree in 32 bits.
        """
        import torch  # late: a command checks its parameters before it loads torch

        generator = torch.Generator()
        if self.seed is None:
            generator.seed()
        else:
            mixed = _mixed((self.seed + sample * _GOLDEN) % 2**64)
            generator.manual_seed((mixed ^ mixed >> 32) % 2**32)
        return generator


def _mixed(x: int) -> int:
    """Mix 64 bits with the finaliser of SplitMix64 (Steele, Lea, Flood, 2014), a bijection; each bit depends on all."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ x >> shift) * factor % 2**64
    return x ^ x >> 31


def _as_tuple(value: object) -> object:
    """Return a tuple of a list or another iterable; a text, or anything else, as it is, to be refused."""
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping) else value


def _as_bias(value: object) -> object:
    """Return a copy of a mapping. JSON has only texts as keys: "12" becomes 12."""
    if not isinstance(value, Mapping):
        return value
    # Python refuses to read numbers of thousands of digits; a key that stays a text is refused as no token id.
    ids = (int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 20 else key for key in value)
    return dict(zip(ids, value.values(), strict=True))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    # compared, not converted: JSON has integers that are too large for a float
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _are_ids(value: object) -> bool:
    return isinstance(value, tuple) and all(_is_int(token) and 0 <= token < 2**31 for token in value)


def _are_texts(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(text, str) and text for text in value)


def _is_schema(value: object) -> bool:
    """Return whether a value is a JSON object, or the text of one."""
    try:
        return isinstance(json.loads(value if isinstance(value, str) else json.dumps(value)), dict)
    except (TypeError, ValueError, RecursionError):
        return False
