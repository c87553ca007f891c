"""KV hints of vLLM 0.33, executed on the blocks of the request that carries them. No vLLM is imported here.

vLLM carries `kv_hints` with a request, and leaves the actions to the manager of the blocks. These are the actions.
Their `action_version` is "1". `payload` has `seconds` for retain and pin. `tokens` limits an action to the whole blocks
within the first tokens.

    retain     the blocks are evicted after all others until then, those with the last end first
    pin        the blocks are not evicted until then
    release    ends retain and pin of these blocks, also those of other requests
    demote     does so, and the prefix cache forgets the blocks that no other request uses; a connector may have them
    prefetch   what a connector has is loaded with the request, as without the hint

An action is executed when the request ends: its blocks are whole then. Its answer is in the log and in a metric.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from functools import cache
from operator import attrgetter
from typing import Any, Final

from pagedkv.errors import InvalidRequest

Block = Any
"""KVCacheBlock of vLLM."""

ACTIONS: Final = ("retain", "pin", "release", "demote", "prefetch")
MAX_ACTIONS: Final = 16
"""Actions of one request that are read."""

LONGEST: Final = 86_400
"""Seconds that a hint may last."""

_LOG: Final = logging.getLogger("vllm.pagedkv")
_TIMED: Final = ("retain", "pin")
_END: Final = attrgetter("block_hash_num_tokens")


class KvHints:
    """The hints on the blocks of a PagedBlockPool. has_connector: whether blocks can be loaded from elsewhere."""

    def __init__(self, pool: Any, *, has_connector: bool) -> None:
        self._pool, self._has_connector = pool, has_connector

    def obey(self, request: Any, groups: Sequence[Sequence[Block]], now: float) -> None:
        """Execute the hints of a request that has ended. groups: its blocks in each group. now: in seconds."""
        hints = getattr(request, "kv_hints", None)  # vLLM 0.32 has none
        for action in [] if hints is None else hints.actions[:MAX_ACTIONS]:
            name, answer, why = str(action.action_type).lower(), "rejected", ""
            try:
                seconds, tokens = _read(name, action)
                answer = self._execute(name, _cached(self._pool, groups, tokens), now + seconds)
            except InvalidRequest as error:
                why = f": {error}"
            _metric().labels(action=name if name in ACTIONS else "unknown", answer=answer).inc()
            _LOG.debug("hint %s of request %s: %s%s", action.action_id, request.request_id, answer, why)

    def _execute(self, name: str, blocks: list[Block], until: float) -> str:
        if name == "prefetch":
            return "accepted" if self._has_connector else "missing"
        if not blocks:
            return "missing"
        if name == "pin":
            return str(self._pool.pin(blocks, until))
        if name == "retain":
            return str(self._pool.free_block_queue.retain(blocks, until))
        return str(self._pool.demote(blocks) if name == "demote" else self._pool.release(blocks))


def _cached(pool: Any, groups: Sequence[Sequence[Block]], tokens: int | None) -> list[Block]:
    """Return the cached blocks of `pool` that end within the first `tokens` of a request, in the order of its text.

    A group may have a pool of its own on another device, with the same numbers of blocks.
    """
    found = {
        block.block_id: block
        for block in itertools.chain(*groups)
        if not block.is_null and block.block_hash is not None and getattr(block, "pool", pool) in (None, pool)
        if tokens is None or block.block_hash_num_tokens <= tokens
    }
    return sorted(found.values(), key=_END)


def _read(name: str, action: Any) -> tuple[float, int | None]:
    """Return the seconds and the tokens of an action. Raises: InvalidRequest"""
    if name not in ACTIONS or action.action_version not in ("1", "1.0"):
        raise InvalidRequest(
            f"action {action.action_type!r} of version {action.action_version!r}; give one of {', '.join(ACTIONS)} of "
            "version '1'"
        )
    payload = action.payload
    wrong = [key for key in payload if key not in ("seconds", "tokens")]
    if wrong or ("seconds" in payload) != (name in _TIMED):
        raise InvalidRequest(f"payload {payload!r} of {name}; give tokens or not, and seconds to retain and pin alone")
    seconds, tokens = payload.get("seconds", 0), payload.get("tokens")
    is_time = type(seconds) in (int, float) and 0 <= seconds <= LONGEST
    if not is_time or not (tokens is None or (type(tokens) is int and tokens > 0)):
        raise InvalidRequest(f"payload {payload!r}; give seconds from 0 to {LONGEST:,}, and tokens of at least 1")
    return float(seconds), tokens


@cache
def _metric() -> Any:
    from prometheus_client import Counter

    return Counter("pagedkv_kv_hints", "Actions of kv_hints by their answer", ["action", "answer"])
