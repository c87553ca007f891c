"""Fetches: the prompts at the head of the queue come up from the tiers below the pool while others compute.

It also knows how an engine begins over tiers, which a person may write as texts.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from pagedkv.errors import InvalidRequest
from pagedkv.tiers.from_text import tiers_of

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


class Fetches:
    """The fetches of a queue of sequences into one cache."""

    def __init__(self, cache: PagedKVCache) -> None:
        self.cache: PagedKVCache = cache

    def ask(self, waiting: Iterable[SequenceState]) -> None:
        """Begin to fetch the first sequences, and ask again for those whose pages the pool had too few frames for.

        Their pages are held until they are admitted. A fetch that brought less than it asked for is not repeated: the
        tier fails, and would be asked in each step.
        """
        ahead = list(itertools.islice(waiting, AHEAD))
        for place, sequence in enumerate(ahead):
            before = sequence.fetch
            if sequence.space is not None or sequence.most_known is not None:
                continue
            if before is None or self._may_go_on(before, ahead[place + 1 :]):
                self._begin(sequence)
                if before is not None:
                    before.cancel()

    def _begin(self, sequence: SequenceState) -> None:
        request = sequence.completion.request
        sequence.fetch = self.cache.fetch(sequence.tokens, tenant=request.tenant, salt=request.salt, hold=True)

    def _has_twice(self, sequence: SequenceState) -> bool:
        """Return whether the pool has twice the frames that a sequence needs, and pages may be found for it."""
        if sequence.most_known is not None:
            return False
        pages = -(-len(sequence.tokens) // self.cache.spec.block_size)
        return 2 * pages * len(self.cache.specs) <= self._available_to(sequence.completion.request.tenant)

    def _available_to(self, tenant: bytes) -> int:
        return self.cache.available_to(tenant) - self.cache.reserve

    def _may_go_on(self, fetch: Fetch, later: Sequence[SequenceState]) -> bool:
        """Return whether the pool has the frames now that `fetch` lacked. Pages that `later` ones hold yield to it."""
        if not fetch.done or fetch.tokens < fetch.asked or not fetch.lacked:
            return False
        most = self._available_to(fetch.tenant)
        if most - self.cache.tiers.num_held(fetch.tenant) < fetch.lacked <= most:
            for sequence in later:
                self.release(sequence)
        return fetch.lacked <= self._available_to(fetch.tenant) - self.cache.tiers.num_held(fetch.tenant)

    @staticmethod
    def release(sequence: SequenceState) -> None:
        """Hold the pages of `sequence` no longer, if they have arrived: it maps them now, or has to do without."""
        if sequence.fetch is not None and sequence.fetch.done:
            sequence.fetch.cancel()

    def take_back(self) -> bool:
        """End the fetch that began last, as a sequence lacks frames. Return whether its frames came back in a moment.

        Pages that were held came back before: `PagedKVCache.plan` takes them. A tier that hangs keeps the frames that
        it may write into; `PagedKVCache.commit` gives them back later.
        """
        return self.cache.tiers.num_fetches > 0 and self.cache.tiers.abandon(WAIT)

    @staticmethod
    def wait(waiting: Iterable[SequenceState]) -> bool:
        """Wait a moment for pages, as there is nothing to compute meanwhile. Return whether any were on their way."""
        fetch = next((s.fetch for s in waiting if s.fetch is not None and not s.fetch.done), None)
        if fetch is not None:
            fetch.wait(WAIT)
        return fetch is not None

    def first_ready(self, waiting: Iterable[SequenceState]) -> SequenceState | None:
        """Return the first waiting sequence whose pages are not on their way; None if there is none.

        One that was not asked for yet, as it is not among the first, is asked for now if there is room: it may be
        admitted.
        """
        for sequence in waiting:
            if sequence.fetch is None and sequence.space is None and self.cache.tiers and self._has_twice(sequence):
                self._begin(sequence)
            if sequence.fetch is None or sequence.fetch.done:
                return sequence
        return None


@contextmanager
def tiers_for(
    cache_options: dict[str, Any], given: Sequence[Tier | str], identity: Callable[[], str]
) -> Iterator[None]:
    """Let the cache that the block makes have tiers; an error of the file system becomes one line.

    identity: returns a name for the KV of the model; called if a tier outlives the process.
    Modifies: cache_options, whose `state_tiers` may be texts, too
    Raises: InvalidRequest
    """
    of_states = cache_options.get("state_tiers", ())
    cache_options |= {"tiers": tiers_of(given), "state_tiers": tiers_of(of_states)}
    if any(tier.is_lasting for tier in (*cache_options["tiers"], *cache_options["state_tiers"])):
        cache_options.setdefault("model", identity())
    try:
        yield
    except OSError as error:
        texts = [one for one in (*given, *of_states) if isinstance(one, str) and one.startswith("disk:")]
        if not texts:
            raise
        where = f"{error.filename}: " if error.filename else ""
        raise InvalidRequest(
            f"a tier of {', '.join(texts)} cannot be used: {where}{error.strerror}; "
            "give a folder of its own, on a disk with room"
        ) from None
