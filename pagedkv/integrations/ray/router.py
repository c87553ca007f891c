"""PrefixRouter: Ray Serve sends a prompt to the replica that has the longest prefix of it.

    replica ─ routing stats ─▶ where it publishes its events ─▶ EventReader ─▶ PrefixIndex
    request ─▶ names of its blocks ─▶ replicas in ranks: those with the longest known prefix first, then the others

Ray Serve takes the first rank in which a replica has a free place, and in it the replica with the shortest queue. So a
full replica (max_ongoing_requests) does not hold up those who would find their prefix there. Only whole multiples of
`least` blocks count, so that a common beginning of all prompts does not send all of them to one replica.

A replica that was chosen for a request goes to that request, and not to the first of the queue, as with FIFOMixin
alone; to the first, if it has waited for PATIENCE. An error here would end Ray's task for a request, which would then
wait forever: so a prompt that cannot be named goes to any replica, which says what is wrong.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

import msgspec
import zmq
from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

from pagedkv.core import page_digests
from pagedkv.integrations.ray.index import EventReader, PrefixIndex

LISTEN: Final = 0.25
"""Seconds between two looks for events while no request comes: the queue of a socket would overflow."""
PATIENCE: Final = 1.0
"""Seconds after which the first request of the queue gets the next replica that is free, whatever it knows."""


class PrefixRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]
    """See the head of the file. Requests are calls of PagedReplica.generate: (token_ids, params, tenant).

    request_router_kwargs: least, the blocks by which known prefixes must differ to count, 1 by default.
    """

    def initialize_state(self, least: int = 1, **_: Any) -> None:
        """See RequestRouter.initialize_state."""
        self._least = least
        self._index = PrefixIndex[Any]()
        self._readers: dict[Any, EventReader] = {}
        self._context: zmq.Context[Any] = zmq.Context.instance()  # it lives as long as the process: its end would wait
        self._listening: asyncio.Task[None] | None = None

    async def _listen(self) -> None:
        """Take in events, and forget replicas that are gone, until none is left."""
        while self._readers:
            await asyncio.sleep(LISTEN)
            self._hear(list(self.curr_replicas.values()))

    def _hear(self, candidates: list[RunningReplica]) -> int:
        """Take in the events of all replicas, and forget those that are gone. Return the tokens of a block, or 0."""
        block_size = 0
        for replica in candidates:
            stats = replica.routing_stats or {}
            endpoint, known = stats.get("events"), self._readers.get(replica.replica_id)
            if endpoint and (known is None or known.endpoint != endpoint):
                self._forget(replica.replica_id)
                self._readers[replica.replica_id] = EventReader(self._context, endpoint)
            block_size = max(block_size, stats.get("block_size", 0))
        for gone in self._readers.keys() - {replica.replica_id for replica in candidates}:
            self._forget(gone)
        for replica_id, reader in list(self._readers.items()):
            try:
                self._index.apply(replica_id, reader.read())
            except (ValueError, TypeError, LookupError, AttributeError, msgspec.MsgspecError):
                self._forget(replica_id)  # another program is at its port
        return block_size

    def _forget(self, replica_id: Any) -> None:
        self._index.drop(replica_id)
        if (reader := self._readers.pop(replica_id, None)) is not None:
            reader.close()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """See RequestRouter.choose_replicas."""
        block_size = self._hear(candidate_replicas)
        if self._listening is None or self._listening.done():
            self._listening = asyncio.get_running_loop().create_task(self._listen())
        names = _names_of(pending_request, block_size)
        ranks: dict[int, list[RunningReplica]] = {}
        for replica in candidate_replicas:
            ranks.setdefault(self._index.known(replica.replica_id, names) // self._least, []).append(replica)
        return [ranks[known] for known in sorted(ranks, reverse=True)]

    def _get_pending_request_matching_metadata(self, request_metadata: Any = None) -> PendingRequest | None:
        """See FIFOMixin. None: the first of the queue gets the replica."""
        first = next((request for request in self._pending_requests_to_fulfill if not request.future.done()), None)
        if first is not None and time.time() - first.created_at > PATIENCE:
            return None
        return self._get_pending_request_matching_internal_request_id(request_metadata)


def _names_of(request: PendingRequest | None, block_size: int) -> list[bytes]:
    """Return the names of the blocks of a request; none if it has no prompt, or one that has no names."""
    if request is None or not block_size:
        return []
    given = dict(zip(("token_ids", "params", "tenant"), request.args, strict=False)) | request.kwargs
    try:
        return page_digests(given["token_ids"], block_size, tenant=given.get("tenant", b""))
    except (KeyError, TypeError, ValueError, OverflowError):
        return []
