"""PagedReplica: an engine as a replica of a Ray Serve deployment. One thread steps it, and publishes its events.

generate (event loop of Ray) ─ submit ─▶ engine ─ step ─▶ tokens ─ call_soon_threadsafe ─▶ the queue of the reply
                                         publisher ─ publish ─▶ routers
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from pagedkv.core import Observe
from pagedkv.integrations.ray.router import PrefixRouter
from pagedkv.integrations.zmq_events import EventPublisher
from pagedkv.model import Engine, Request, SamplingParams

IDLE: Final = 0.02
"""Seconds after which an idle engine looks for new readers of its events."""
Item = tuple[list[int], bool, int]
"""New tokens, whether they are the last, and the tokens of the prompt that were found."""


@dataclass(eq=False)
class _Reply:
    request: Request
    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[Item | Exception]
    num_sent: int = 0


class PagedReplica:
    """An engine with a thread of its own.

    folder, options: see Engine.load. events: KV events that are kept until they are published.
    """

    def __init__(self, folder: str | None = None, *, events: int = 1 << 16, **options: Any) -> None:
        self._engine = Engine.load(folder, observe=Observe(events=events), **options)
        self._publisher = EventPublisher(self._engine.cache, "tcp://*:*", form="digests")
        port = self._publisher.endpoint.rpartition(":")[2]
        self._stats = {
            "events": f"tcp://{ray.util.get_node_ip_address()}:{port}",
            "block_size": self._engine.cache.spec.block_size,
        }
        self._replies: dict[_Reply, None] = {}
        self._left: list[Request] = []  # requests without a reader
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="pagedkv replica", daemon=True).start()

    def record_routing_stats(self) -> dict[str, Any]:
        """Return where the events are published; Ray Serve hands it to the router."""
        return self._stats

    async def generate(
        self, token_ids: list[int], params: Mapping[str, Any] | None = None, tenant: bytes = b""
    ) -> AsyncIterator[Item]:
        """Yield the tokens of a reply as they are made. params: fields of SamplingParams.

        Raises: PagedKVError, as Engine.submit; RuntimeError if the request ends with an error
        """
        request = self._engine.submit(token_ids, SamplingParams(**(params or {})), tenant=tenant)
        reply = _Reply(request, asyncio.get_running_loop(), asyncio.Queue())
        with self._changed:
            self._replies[reply] = None
            self._changed.notify()
        try:
            is_last = False
            while not is_last:
                item = await reply.queue.get()
                if isinstance(item, Exception):
                    raise item
                is_last = item[1]
                yield item
        finally:
            with self._changed:
                if self._replies.pop(reply, None) is not None:
                    self._left.append(request)

    def _run(self) -> None:
        """Step, publish and deliver, as long as the process lives."""
        self._engine.cache.own()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._engine.has_work, IDLE)
                replies, left, self._left = list(self._replies), self._left, []
            try:
                for request in left:
                    self._engine.cancel(request)
                if self._engine.has_work:
                    self._engine.step()
                self._publisher.publish()
                for reply in replies:
                    self._deliver(reply)
            except Exception as error:  # of the model: the readers must hear of it
                for reply in replies:
                    reply.loop.call_soon_threadsafe(reply.queue.put_nowait, error)

    def _deliver(self, reply: _Reply) -> None:
        completion = reply.request.completions[0]
        reason, tokens = completion.finish_reason, completion.token_ids[reply.num_sent :]  # in this order
        if reason == "error":
            item: Item | Exception = RuntimeError(f"the request failed: {completion.error}")
        elif tokens or reason:
            reply.num_sent += len(tokens)
            item = tokens, bool(reason), completion.cached_tokens
        else:
            return
        if reason:
            with self._changed:
                self._replies.pop(reply, None)
        reply.loop.call_soon_threadsafe(reply.queue.put_nowait, item)


def replicas(
    num_replicas: int, folder: str | None = None, *, most_at_once: int = 32, least: int = 1, **options: Any
) -> serve.Application:
    """Return an application of equal engines behind a PrefixRouter, for serve.run.

    most_at_once: requests that a replica has at a time; further ones go to others. least: see PrefixRouter.
    options:      options of Engine.load, and `events` of PagedReplica.
    """
    router = RequestRouterConfig(
        request_router_class=PrefixRouter, request_router_kwargs={"least": least}, request_routing_stats_period_s=0.5
    )
    deployment = serve.deployment(
        PagedReplica,
        name="pagedkv",
        num_replicas=num_replicas,
        max_ongoing_requests=most_at_once,
        request_router_config=router,
    )
    return deployment.bind(folder, **options)
