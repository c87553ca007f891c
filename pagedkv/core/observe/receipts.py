"""Receipts: how much of a prompt was found, and for the first token that was not the reason, for the one who sent it.

A receipt speaks of the tenant's own past only: `evicted` does not say for whom.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pagedkv.core.observe.misses import Miss

_REASONS: Final = {
    "nothing missed": "hit",
    "below one page": "short",
    "never published": "new",
    "evicted": "evicted",
    "differs": "differs",
    "other salt": "other salt",
    "other root": "new",
}
"""The reason of a receipt by that of a Miss."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """The part of a prompt that the cache knew when it was first admitted, and why no more.

    "hit"         everything but the last page, of which at least one token is computed
    "short"       the prompt fills no page
    "new"         no prompt of this tenant was known to go on like this
    "differs"     the nearest known prompt has the token `was` at `position`, this one has `now`
    "other salt"  the tokens are known with another adapter or image only
    "evicted"     the tokens were known, and their page has left the pool
    "tier"        a tier had the page, and did not bring it: it was slow, or the bytes were damaged
    "no state"    the KV is known to beyond `position`, the recurrent state up to it

    prompt_tokens: the length of the prompt. cached_tokens: how many were found, in whole pages.
    position: the first token that was not found; for "differs" it may lie within a page, beyond `cached_tokens`.
    """

    reason: str
    prompt_tokens: int
    cached_tokens: int
    position: int
    was: int | None = None
    now: int | None = None

    @classmethod
    def of(cls, miss: Miss, prompt_tokens: int, *, tier_failed: bool = False) -> Receipt:
        """Return the receipt of a prompt. tier_failed: whether a tier did not bring what it seemed to have."""
        reason, found, position = _REASONS[miss.reason], miss.tokens_matched, miss.position
        if miss.ready is not None and miss.ready < found:
            reason, found, position = "no state", miss.ready, miss.ready
        if tier_failed and reason in ("evicted", "new", "no state"):
            reason = "tier"
        is_edit = reason == "differs"
        return cls(reason, prompt_tokens, found, position, miss.was if is_edit else None, miss.now if is_edit else None)

    @property
    def computed_tokens(self) -> int:
        """Tokens of the prompt that were computed."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def coarse(self) -> Receipt:
        """The receipt without tokens and without a position in a page: for a client among others of one tenant."""
        return Receipt(self.reason, self.prompt_tokens, self.cached_tokens, self.cached_tokens)

    def as_dict(self, seconds: float) -> dict[str, Any]:
        """Return the receipt as JSON. seconds: how long the computed tokens took."""
        told = {"reason": self.reason, "prompt_tokens": self.prompt_tokens, "cached_tokens": self.cached_tokens}
        told |= {"position": self.position, "computed_tokens": self.computed_tokens, "seconds": round(seconds, 6)}
        return told if self.was is None else told | {"was": self.was, "now": self.now}

    def __str__(self) -> str:
        text = f"{self.cached_tokens} of {self.prompt_tokens} tokens found; {self.reason}"
        if self.reason in ("hit", "short"):
            return text
        text += f" at {self.position}"
        return text if self.was is None else f"{text}: token was {self.was} and is {self.now}"
