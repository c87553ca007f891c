"""Fetches: the prompts at the head of the queue come up from the tiers below the pool while others compute."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pagedkv.cache import PagedKVCache
    from pagedkv.model.loop.sequence import SequenceState

AHEAD: Final = 4
"""Waiting sequences whose pages are fetched."""
WAIT: Final = 0.05
"""Seconds that a step without work waits for such pages."""


def ask(cache: PagedKVCache, waiting: Iterable[SequenceState]) -> None:
    """Begin to fetch the first sequences, and ask again for those whose pages the pool had too few frames for."""
    for sequence in itertools.islice(waiting, AHEAD):
        tenant, fetch = sequence.completion.request.tenant, sequence.fetch
        room = cache.available_to(tenant) - cache.reserve
        if sequence.space is None and (fetch is None or (fetch.done and 0 < fetch.lacked <= room)):
            sequence.fetch = cache.fetch(sequence.tokens, tenant=tenant)


def wait(waiting: Iterable[SequenceState]) -> bool:
    """Wait a moment for pages, as there is nothing to compute meanwhile. Return whether any were on their way."""
    fetch = next((s.fetch for s in waiting if s.fetch is not None and not s.fetch.done), None)
    if fetch is not None:
        fetch.wait(WAIT)
    return fetch is not None


def first_ready(waiting: Iterable[SequenceState]) -> SequenceState | None:
    """Return the first waiting sequence whose pages are not on their way; None if there is none."""
    return next((s for s in waiting if s.fetch is None or s.fetch.done), None)
