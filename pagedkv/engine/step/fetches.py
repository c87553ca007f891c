"""Fetches: the prompts at the head of the queue come up from the tiers below the pool while others compute.

It also knows how an engine begins over tiers, which a person may write as texts, and how it ends.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Self

from pagedkv.errors import InvalidRequest
from pagedkv.tiers.from_text import tiers_of
from pagedkv.tiers.tier import CLOSING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pagedkv.cache import PagedKVCache
    from pagedkv.engine.requests.sequence import SequenceState
    from pagedkv.tiers.fetch import Fetch
    from pagedkv.tiers.tier import Tier

AHEAD: Final = 4
"""Waiting sequences whose pages are fetched: a fetch takes its frames at once, and running sequences grow meanwhile."""
WAIT: Final = 0.05
"""Seconds that a step without work waits for such pages."""


def ask(cache: PagedKVCache, waiting: Iterable[SequenceState]) -> None:
    """Begin to fetch the first sequences, and ask again for those whose pages the pool had too few frames for.

    Their pages are held until they are admitted. A fetch that brought less than it asked for is not repeated: the tier
    fails, and would be asked in each step.
    """
    ahead = list(itertools.islice(waiting, AHEAD))
    for place, sequence in enumerate(ahead):
        before = sequence.fetch
        if sequence.space is None and (before is None or _may_go_on(before, cache, ahead[place + 1 :])):
            _begin(cache, sequence)
            if before is not None:
                before.cancel()


def _begin(cache: PagedKVCache, sequence: SequenceState) -> None:
    sequence.fetch = cache.fetch(sequence.tokens, tenant=sequence.completion.request.tenant, hold=True)


def _has_twice(cache: PagedKVCache, sequence: SequenceState) -> bool:
    """Return whether the pool has twice the frames that a sequence needs."""
    pages = -(-len(sequence.tokens) // cache.spec.block_size)
    return 2 * pages * len(cache.specs) <= cache.available_to(sequence.completion.request.tenant) - cache.reserve


def _may_go_on(fetch: Fetch, cache: PagedKVCache, later: Sequence[SequenceState]) -> bool:
    """Return whether the pool has the frames now that `fetch` lacked. Pages that `later` sequences hold yield to it."""
    if not fetch.done or fetch.tokens < fetch.asked or not fetch.lacked:
        return False
    most = cache.available_to(fetch.tenant) - cache.reserve
    if most - cache.tiers.num_held(fetch.tenant) < fetch.lacked <= most:
        for sequence in later:
            release(sequence)
    return fetch.lacked <= cache.available_to(fetch.tenant) - cache.reserve - cache.tiers.num_held(fetch.tenant)


def release(sequence: SequenceState) -> None:
    """Hold the pages of `sequence` no longer, if they have arrived: it maps them now, or has to do without."""
    if sequence.fetch is not None and sequence.fetch.done:
        sequence.fetch.cancel()


def take_back(cache: PagedKVCache) -> bool:
    """End the fetch that began last, as a sequence lacks frames. Return whether its frames came back within a moment.

    Pages that were held came back before: `PagedKVCache.plan` takes them. A tier that hangs keeps the frames that it
    may write into; `PagedKVCache.commit` gives them back later.
    """
    return cache.tiers.num_fetches > 0 and cache.tiers.abandon(WAIT)


def wait(waiting: Iterable[SequenceState]) -> bool:
    """Wait a moment for pages, as there is nothing to compute meanwhile. Return whether any were on their way."""
    fetch = next((s.fetch for s in waiting if s.fetch is not None and not s.fetch.done), None)
    if fetch is not None:
        fetch.wait(WAIT)
    return fetch is not None


def first_ready(cache: PagedKVCache, waiting: Iterable[SequenceState]) -> SequenceState | None:
    """Return the first waiting sequence whose pages are not on their way; None if there is none.

    One that was not asked for yet, as it is not among the first, is asked for now if there is room: it may be admitted.
    """
    for sequence in waiting:
        if sequence.fetch is None and sequence.space is None and cache.tiers and _has_twice(cache, sequence):
            _begin(cache, sequence)
        if sequence.fetch is None or sequence.fetch.done:
            return sequence
    return None


class OverTiers:
    """The end of an engine over tiers. A `with` block closes the engine at its end."""

    cache: PagedKVCache

    def close(self, timeout: float = CLOSING) -> bool:
        """Store what waits for a tier on disk, and close the tiers. Without tiers there is nothing to close.

        timeout: about the most seconds that this takes; what was not stored then is lost, and is computed again. An
            engine that was closed still answers, without tiers.
        Returns: whether all was stored and no tier hangs
        """
        return self.cache.tiers.close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def tiers_for(
    cache_options: dict[str, Any], given: Sequence[Tier | str], identity: Callable[[], str]
) -> Iterator[None]:
    """Let the cache that the block makes have tiers; an error of the file system becomes one line.

    identity: returns a name for the KV of the model; called if a tier outlives the process.
    Modifies: cache_options
    Raises: InvalidRequest
    """
    cache_options["tiers"] = tiers = tiers_of(given)
    if any(tier.is_lasting for tier in tiers):
        cache_options.setdefault("model", identity())
    try:
        yield
    except OSError as error:
        texts = [one for one in given if isinstance(one, str) and one.startswith("disk:")]
        if not texts:
            raise
        where = f"{error.filename}: " if error.filename else ""
        raise InvalidRequest(
            f"a tier of {', '.join(texts)} cannot be used: {where}{error.strerror}; "
            "give a folder of its own, on a disk with room"
        ) from None
