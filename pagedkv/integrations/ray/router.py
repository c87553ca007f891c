"""PrefixRouter: Ray Serve sends a prompt to the replica that has the longest prefix of it.

    replica ─ routing stats ─▶ where it publishes its events ─▶ EventReader ─▶ PrefixIndex
    request ─▶ names of its blocks ─▶ replicas in ranks: those with the longest known prefix first, then the others

Ray Serve takes the first rank in which a replica has a free place, and in it the replica with the shortest queue. So a
full replica (max_ongoing_requests) does not hold up those who would find their prefix there. Only whole multiples of
`least` blocks count, so that a common beginning of all prompts does not send all of them to one replica.
"""

from __future__ import annotations

from typing import Any

import zmq
from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

from pagedkv.core import page_digests
from pagedkv.integrations.ray.index import EventReader, PrefixIndex


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
        for replica_id, reader in self._readers.items():
            self._index.apply(replica_id, reader.read())
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
        prompt = _prompt_of(pending_request)
        if not block_size or prompt is None:
            return [candidate_replicas]
        names = page_digests(prompt[0], block_size, tenant=prompt[1])
        ranks: dict[int, list[RunningReplica]] = {}
        for replica in candidate_replicas:
            ranks.setdefault(self._index.known(replica.replica_id, names) // self._least, []).append(replica)
        return [ranks[known] for known in sorted(ranks, reverse=True)]


def _prompt_of(request: PendingRequest | None) -> tuple[list[int], bytes] | None:
    """Return the token ids and the tenant of a request; None if it has none."""
    if request is None:
        return None
    given = dict(zip(("token_ids", "params", "tenant"), request.args, strict=False)) | request.kwargs
    ids = given.get("token_ids")
    return (ids, given.get("tenant", b"")) if isinstance(ids, list) and ids else None
