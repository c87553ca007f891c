"""Request and Completion: what was asked, and what has come of it so far. No cache, no scheduling: a person may hold these and look.

Request ── prompt, params ──┬── Completion 0        one per sample; the prompt's frames are shared between them
                            └── Completion 1 ..
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagedkv.model.sampler import SamplingParams

OnText = Callable[["Completion", str], None]
"""Called with each piece of text as soon as it is settled, and with "" when the completion is finished."""


@dataclass(eq=False)
class Request:
    """One prompt and what is wanted of it. `completions` fill up while the engine steps."""

    prompt_ids: list[int]
    params: SamplingParams
    tenant: bytes = b""
    on_text: OnText | None = None
    completions: list[Completion] = field(default_factory=list)
    submitted_at: float = field(default_factory=time.perf_counter)

    @property
    def finished(self) -> bool:
        """Whether every completion is."""
        return all(completion.finish_reason for completion in self.completions)


@dataclass(eq=False)
class Completion:
    """One output of a request.

    token_ids:     generated so far, the end token included                    text: the same as text, without it
    finish_reason: "" while it runs, then "stop" (end token, stop id or stop string), "length" (max_tokens, or the model's last position)
                   or "cancelled"
    cached_tokens: how many tokens of the prompt were mapped, not computed, when it was first admitted
    """

    request: Request
    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    cached_tokens: int = 0
    first_token_at: float = 0.0
    last_token_at: float = 0.0

    @property
    def ttft_s(self) -> float:
        """Seconds from submission to the first token; 0.0 if there is none."""
        return self.first_token_at - self.request.submitted_at if self.token_ids else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second after the first one; 0.0 if there are fewer than two."""
        elapsed = self.last_token_at - self.first_token_at
        return (len(self.token_ids) - 1) / elapsed if len(self.token_ids) > 1 and elapsed > 0 else 0.0


class StopStrings:
    """Finds stop strings in text that comes in pieces, and holds back what may turn out to begin one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """(text that may be shown, whether a stop string ended it)."""
        text = self._held + piece
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        keep = max((n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """What was held back and began no stop string after all."""
        rest, self._held = self._held, ""
        return rest
