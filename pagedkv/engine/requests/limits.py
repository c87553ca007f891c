"""Limits: the most that one step of an engine may do. Knows numbers only."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.core.arguments import whole
from pagedkv.spec import STEP_TOKENS


@dataclass(frozen=True)
class Limits:
    """The most that one step may do.

    max_batch_tokens: new tokens in a step, summed over all sequences. max_sequences: sequences running at once.
    prefill_chunk:    tokens of one prompt in a step; None for no limit but max_batch_tokens.
    max_waiting:      requests that wait for their first step; `Engine.submit` refuses more. None for no limit.
    logged_miss:      a prompt of which so many tokens are computed again gets a line in the log, with the reason.
    """

    max_batch_tokens: int = STEP_TOKENS
    max_sequences: int = 256
    prefill_chunk: int | None = None
    max_waiting: int | None = None
    logged_miss: int = 2048

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None or name in ("max_batch_tokens", "max_sequences", "logged_miss"):
                whole(value, f"Limits.{name}", 1)

    @property
    def chunk(self) -> int:
        """The most tokens of a sequence in a step, without drafts."""
        return min(self.prefill_chunk or self.max_batch_tokens, self.max_batch_tokens)
