"""Receipts in vLLM: why a prompt was computed again, as a line of the log and a metric. No vLLM is imported here.

vLLM caches the blocks of a prompt while it plans the step in which the prompt begins. So blocks are noted in the order
of the plan, and a prompt is compared with what was noted before its own blocks.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any, Final

import numpy as np

from pagedkv.core import Receipt, TokenHistory

Request = Any
"""Request of vLLM: request_id, block_hashes, all_token_ids, num_prompt_tokens, cache_salt, num_preemptions."""

_LOG: Final = logging.getLogger("vllm.pagedkv")  # a child of vLLM's logger, which prints
_NO_TOKENS: Final = np.empty(0, np.int32)
_BLOCK: Final = 0x5555  # marks the number of a whole block, so that it is not that of the prefix that ends there


class Receipts:
    """The tokens of the blocks that were cached, and a count of reasons.

    sizes: tokens that a hash of vLLM covers, and a multiple of them at which all that is found ends. most: tokens that
    are remembered, about, with 32 bytes each. logged_miss: a
    prompt of which so many tokens are computed again gets a line in the log. Prefixes of another `cache_salt` are never
    compared.
    """

    def __init__(self, sizes: tuple[int, int], most: int, logged_miss: int) -> None:
        self._page, self._unit = sizes[0], sizes[1] // sizes[0]
        self._logged_miss = logged_miss
        self._history = TokenHistory(most)
        self._noted: list[tuple[Request, int, int]] = []
        self.counts: Counter[str] = Counter()

    def note(self, request: Request, first: int, last: int) -> None:
        """Note that the tokens from `first` to `last` of a request, whole blocks of vLLM, were cached."""
        if not _has_embeddings(request):
            self._noted.append((request, first // self._page, last // self._page))

    def tell(self, new: Iterable[tuple[Request, int]]) -> None:
        """Tell why the prompts of a step were computed. new: the requests that begin, and the tokens found of each."""
        begun = {request.request_id: (request, found) for request, found in new}
        for request, first, last in self._noted:
            if request.request_id in begun:
                self._count(*begun.pop(request.request_id))
            self._remember(request, first, last)
        self._noted.clear()
        for request, found in begun.values():
            self._count(request, found)

    def _remember(self, request: Request, first: int, last: int) -> None:
        size, hashes = self._page, request.block_hashes
        last = min(last, len(hashes))
        tokens = np.array(request.all_token_ids[first * size : last * size], np.int32)
        for page in range(first, last):
            self._history.note(_before(request, page), tokens[(page - first) * size : (page + 1 - first) * size])
            self._history.note(_number(hashes[page]) ^ _BLOCK, _NO_TOKENS)  # the hash covers an adapter and images, too

    def _count(self, request: Request, found: int) -> None:
        is_told = request.num_preemptions or getattr(request, "has_receipt", False)  # preempted, or a session goes on
        if is_told or _has_embeddings(request) or getattr(request, "skip_reading_prefix_cache", False):
            return
        request.has_receipt = True
        receipt = self._receipt(request, found)
        self.counts[receipt.reason] += 1
        _metric().labels(reason=receipt.reason).inc()
        if receipt.reason not in ("hit", "short", "new") and receipt.computed_tokens >= self._logged_miss:
            _LOG.info("computed again: %s: %s", request.request_id, receipt)

    def _receipt(self, request: Request, found: int) -> Receipt:
        total, page, size = request.num_prompt_tokens, found // self._page, self._page
        pages = min((total - 1) // size, len(request.block_hashes)) // self._unit * self._unit
        if page >= pages:
            return Receipt("hit" if pages else "short", total, found, found)
        unknown = (at for at in range(page, page + self._unit) if not self._is_known(request.block_hashes[at]))
        page = next(unknown, -1)
        if page < 0:
            return Receipt("evicted", total, found, found)
        ids = np.array(request.all_token_ids[page * size : (page + 1) * size], np.int32)
        common, was = self._history.nearest(_before(request, page), ids)
        at, may_differ = page * size + common, page == 0 or getattr(request, "mm_features", None)
        if common == size:
            return Receipt("other salt" if may_differ else "evicted", total, found, found)
        if was < 0 or at == 0:
            return Receipt("new", total, found, found)
        return Receipt("differs", total, found, at, was, int(ids[common]))

    def _is_known(self, name: bytes) -> bool:
        return self._history.nearest(_number(name) ^ _BLOCK, _NO_TOKENS)[0] == 0


def _has_embeddings(request: Request) -> bool:
    """Return whether a prompt has embeddings, for which vLLM notes 0 as tokens."""
    return getattr(request, "prompt_embeds", None) is not None


def _number(name: object) -> int:
    """Return 63 bits of a hash of vLLM, or of the name of a tenant."""
    found = name if isinstance(name, bytes) else hashlib.sha256(repr(name).encode()).digest()
    return int.from_bytes(found[:8], "little") >> 1


def _before(request: Request, page: int) -> int:
    """Return the number of the prefix before a page: that of a hash of vLLM, or of the tenant."""
    return _number(request.block_hashes[page - 1] if page else ("tenant", request.cache_salt))


@cache
def _metric() -> Any:
    """Return the counter of this process. PROMETHEUS_MULTIPROC_DIR lets /metrics of vLLM show that of each process."""
    from prometheus_client import Counter as Metric

    return Metric("pagedkv_prompts", "Prompts by the reason why no more of them was found", ["reason"])
