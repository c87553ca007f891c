"""Request and Completion: one prompt with its parameters, and the output so far. No cache, no scheduling.

Request ── prompt, params ──┬── Completion 0        one per sample; the samples share the frames of the prompt
                            └── Completion 1 ..

A caller may keep these objects and read them while the engine steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from pagedkv.engine.requests.latency import Latency

if TYPE_CHECKING:
    from torch import Generator

    from pagedkv.core.observe.receipts import Receipt
    from pagedkv.engine.sampling.grammar import Grammar
    from pagedkv.engine.sampling.params import SamplingParams
    from pagedkv.engine.sampling.sampler import TokenLogprobs

OnText = Callable[["Completion", str], None]
"""A listener: called with a completion and its next piece of text. The last call, at its end, may bring ""."""


class _Search(Protocol):
    """A search that fills the completions of a request at its end: `BeamSearch` of beams.py, which knows requests."""

    num_beams: int

    @property
    def common(self) -> tuple[int, ...]:
        """The tokens that all live outputs begin with."""


@dataclass(eq=False)
class Request:
    """One prompt, its sampling parameters, and its `completions`, which grow while the engine steps.

    deadline: seconds of time.perf_counter() at which the request ends, finished or not; None for no end.
    priority: requests with a lower number go first.
    retain_s: seconds after its end for which its pages are retained; 0 for none.
    grammar: the compiled grammar of the parameters; None if they have none.
    search: the beam search that fills the completions when it is done; None without beams.
    salt: identity of the prompt besides tenant and tokens: prompts with another one share no pages.
    prompt_logprobs: None for the first token of the prompt, then the log-probabilities of the others as far as they
        are computed; empty if the parameters do not ask for them.
    """

    prompt_ids: list[int]
    params: SamplingParams
    tenant: bytes = b""
    on_text: OnText | None = None
    completions: list[Completion] = field(default_factory=list)
    submitted_at: float = field(default_factory=time.perf_counter)
    deadline: float | None = None
    priority: int = 0
    retain_s: float = 0.0
    grammar: Grammar | None = field(default=None, repr=False)
    search: _Search | None = field(default=None, repr=False)
    salt: bytes = b""
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs.append(None)

    def fail(self, error: str) -> None:
        """End all completions that run with an error."""
        for completion in self.completions:
            completion.end("error", error)

    @property
    def is_scored(self) -> bool:
        """Whether no log-probability of the prompt is left to compute."""
        return self.params.prompt_logprobs is None or len(self.prompt_logprobs) == len(self.prompt_ids)

    @property
    def finished(self) -> bool:
        """Whether every completion is finished."""
        return all(completion.finish_reason for completion in self.completions)


@dataclass(eq=False)
class Completion:
    """One output of a request.

    token_ids:     the tokens generated so far, the end token included
    logprobs:      log-probabilities of each token, if the request asked for them, by the model's own distribution,
                   before temperature, penalties and all else that edits logits
    text:          the text of these tokens that may be shown: without the end token and the stop string
    finish_reason: "" while the completion runs; then "stop" (end token, stop id or stop string), "length" (max_tokens,
                   or the model's last position), "cancelled" or "error"
    error:         the reason of an "error", in words
    cached_tokens: prompt tokens found in the prefix cache, not computed, when the request was first admitted
    receipt:       the same, and the reason why no more were found; None before that
    score:         in a beam search, the sum of the tokens' log-probabilities / their number ** length_penalty
    admitted_at, first_token_at, last_token_at, finished_at: seconds of time.perf_counter(); 0.0 before that
    """

    request: Request
    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    cached_tokens: int = 0
    receipt: Receipt | None = None
    admitted_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    finished_at: float = 0.0
    error: str = ""
    score: float = 0.0
    num_sent: int = field(default=0, repr=False)
    """Characters of `text` that the listener got."""
    is_reported: bool = field(default=False, repr=False)
    """Whether the listener, and the caller of `step`, know that the completion has finished."""
    was_told: bool = field(default=False, repr=False)
    """Whether the listener was interrupted when it was told of the end. It is told once more."""
    _ends: list[tuple[str, str]] = field(default_factory=list, init=False, repr=False)
    """The reason and the error of each call of `end`. The first holds."""

    def generator(self) -> Generator:
        """Return a generator for the draws of its tokens."""
        return self.request.params.generator(self.index)

    def end(self, reason: str, error: str = "") -> None:
        """Finish the completion, unless it has finished. Any thread may call this, and a signal handler."""
        if not self.finish_reason:
            self._ends.append((reason, error))  # at once: a second caller, even inside of this call, finds it
            first, self.error = self._ends[0]
            self.finished_at = self.finished_at or time.perf_counter()
            self.finish_reason = first

    @property
    def ttft_s(self) -> float:
        """Seconds from submission to the first token; 0.0 before it."""
        return self.first_token_at - self.request.submitted_at if self.token_ids else 0.0

    @property
    def latency(self) -> Latency:
        """The seconds by phases: all of them when the completion has finished, so far until then."""
        begin = self.request.submitted_at
        end = self.finished_at or self.last_token_at or self.admitted_at or begin
        admitted, first = self.admitted_at or end, self.first_token_at or end
        return Latency(admitted - begin, first - admitted, end - first)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second after the first one; 0.0 if there are fewer than two."""
        elapsed = self.last_token_at - self.first_token_at
        return (len(self.token_ids) - 1) / elapsed if len(self.token_ids) > 1 and elapsed > 0 else 0.0


class StopStrings:
    """A search for stop strings in text that arrives in pieces. It holds back an end that may begin a stop string.

    are_shown: whether the text that may be shown ends behind a stop string, not before it.
    """

    def __init__(self, stops: Sequence[str], *, are_shown: bool = False) -> None:
        self._stops, self._are_shown = tuple(stops), are_shown
        self._pending = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Add a piece; return the text that may be shown now, and whether a stop string ended the text."""
        if not self._stops:
            return piece, False
        text = self._pending + piece
        found = [(at, at + len(stop)) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._pending = ""
            return text[: min(found)[self._are_shown]], True
        keep = max((n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        self._pending = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """Return the text still held back, at the end of the output: it begins no stop string."""
        rest, self._pending = self._pending, ""
        return rest
