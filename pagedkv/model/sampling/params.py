"""SamplingParams: what a request asks of its sampling, checked when it is built. Knows no logits and no tokenizer."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import torch

from pagedkv.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

_GOLDEN: Final = 0x9E3779B97F4A7C15
"""2^64 / golden ratio: multiples of it lie far apart, so that samples of neighbouring seeds do not coincide."""


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of one request.

    max_tokens: of output. temperature: 0 for greedy. top_k: 0 for all. top_p: 1 for all. min_p: 0 for all.
    repetition_penalty: 1 for none. seed: None for a fresh seed each time.
    stop: strings (or one string) at which the text ends; the text does not contain them.
    stop_ids: tokens that end the text, in addition to the checkpoint's end tokens.
    ignore_eos: do not end the text at the checkpoint's end tokens.
    num_beams: 1 for none; otherwise a beam search, which needs temperature 0 and takes no stop strings and no penalty.
    length_penalty: outputs of a beam search are compared by the sum of log-probabilities / length ** length_penalty.
    early_stopping: of a beam search with num_beams ended outputs: True ends it; False goes on while a live beam is
        better than one of them; "never" while one may become better.
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_ids", tuple(self.stop_ids))
        self._demand("max_tokens", _is_int(self.max_tokens) and self.max_tokens >= 1, "an integer of at least 1")
        temperature_holds = _is_number(self.temperature) and self.temperature >= 0
        self._demand("temperature", temperature_holds, "a number of at least 0 (0 is greedy)")
        self._demand("top_k", _is_int(self.top_k) and self.top_k >= 0, "an integer of at least 0 (0 is off)")
        self._demand("top_p", _is_number(self.top_p) and 0 < self.top_p <= 1, "above 0 and at most 1 (1 is off)")
        self._demand("min_p", _is_number(self.min_p) and 0 <= self.min_p <= 1, "between 0 (off) and 1")
        penalty_holds = _is_number(self.repetition_penalty) and self.repetition_penalty > 0
        self._demand("repetition_penalty", penalty_holds, "above 0 (1 is off)")
        seed_holds = self.seed is None or (_is_int(self.seed) and 0 <= self.seed < 2**63)
        self._demand("seed", seed_holds, "None or an integer from 0 to 2^63 - 1")
        stop_holds = all(isinstance(text, str) and text for text in self.stop)
        self._demand("stop", stop_holds, "one or more strings, none empty")
        self._demand("stop_ids", all(_is_int(token) and token >= 0 for token in self.stop_ids), "token ids")
        self._demand("ignore_eos", isinstance(self.ignore_eos, bool), "true or false")
        self._check_beams()

    def _check_beams(self) -> None:
        self._demand("num_beams", _is_int(self.num_beams) and self.num_beams >= 1, "an integer of at least 1")
        self._demand("length_penalty", _is_number(self.length_penalty), "a number")
        self._demand("early_stopping", self.early_stopping in (True, False, "never"), 'true, false or "never"')
        if self.num_beams > 1:
            for name, plain in (("temperature", 0), ("repetition_penalty", 1), ("stop", ())):
                self._demand(name, getattr(self, name) == plain, f"{plain!r} with num_beams {self.num_beams}")

    def _demand(self, name: str, holds: bool, must: str) -> None:
        if not holds:
            raise InvalidRequest(f"{name} is {getattr(self, name)!r}; it must be {must}")

    @property
    def greedy(self) -> bool:
        """Whether each token is the likeliest one."""
        return self.temperature == 0

    def generator(self, sample: int = 0) -> torch.Generator:
        """Return a generator for the `sample`-th output of a request: the same one for the same seed and sample.

        torch's generator starts from 32 bits. So all 64 bits of seed + sample * golden are mixed, and the high half is
        folded into the low half: two seeds give the same start with a chance of 2^-32, even if they agree in 32 bits.
        """
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


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    # compared, not converted: JSON has integers that are too large for a float
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
