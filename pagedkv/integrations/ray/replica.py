"""PagedReplica: an engine as a replica of a Ray Serve deployment. One thread steps it, and publishes its events.

generate (event loop of Ray) ─ submit ─▶ engine ─ step ─▶ tokens ─ call_soon_threadsafe ─▶ the queue of the reply
                                         publisher ─ publish ─▶ routers
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from pagedkv.engine import Engine, Request, SamplingParams
from pagedkv.errors import EngineStopped, InvalidRequest
from pagedkv.integrations.ray.router import PrefixRouter
from pagedkv.integrations.zmq_events import EventPublisher

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
    interface:       the address of the network interface on which they are published, None for that of Ray's node.
    """

    def __init__(
        self, folder: str | None = None, *, events: int = 1 << 16, interface: str | None = None, **options: Any
    ) -> None:
        self._engine = Engine.load(folder, events=events, **options)
        address = interface or ray.util.get_node_ip_address()
        host = f"[{address}]" if ":" in address else address
        self._publisher = EventPublisher(self._engine.cache, f"tcp://{host}:*", form="digests", bind=True)
        self._stats = {"events": self._publisher.endpoint, "block_size": self._engine.cache.spec.block_size}
        self._replies: dict[_Reply, None] = {}
        self._left: list[Request] = []  # requests without a reader
        self._error: Exception | None = None  # of a step, until the next token
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="pagedkv replica", daemon=True)
        self._thread.start()

    def record_routing_stats(self) -> dict[str, Any]:
        """Return where the events are published; Ray Serve hands it to the router."""
        return self._stats

    def check_health(self) -> None:
        """Let Ray Serve replace this replica if its steps fail. A replica whose requests all fail has a short queue.

        Raises: RuntimeError, from a step that failed to the next token
        """
        if self._error is not None or not self._thread.is_alive():
            raise RuntimeError(f"the engine does not step: {self._error or 'its thread has ended'}")

    def close(self) -> None:
        """End the thread, store what waits for a tier, and close the sockets. Replies that run get EngineStopped."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def __del__(self) -> None:
        """Ray Serve calls it before it ends the process."""
        if "_thread" in self.__dict__:  # else __init__ has failed
            self.close()

    async def generate(
        self, token_ids: list[int], params: Mapping[str, Any] | None = None, tenant: bytes = b""
    ) -> AsyncIterator[Item]:
        """Yield the tokens of a reply as they are made. params: fields of SamplingParams.

        Raises: PagedKVError, as Engine.submit; RuntimeError if the request ends with an error
        """
        request = self._engine.submit(token_ids, SamplingParams(**(params or {})), tenant=tenant)
        reply = _Reply(request, asyncio.get_running_loop(), asyncio.Queue())
        with self._changed:
            if self._is_closed:
                raise EngineStopped("the replica was closed; send the prompt to another one")
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
            self._leave(reply)

    def _leave(self, reply: _Reply) -> None:
        """Let the thread end a request, unless its last token was handed out."""
        with self._changed:
            if reply in self._replies:
                del self._replies[reply]
                self._left.append(reply.request)

    def _run(self) -> None:
        """Step, publish and deliver, until this replica is closed."""
        self._engine.cache.own()
        while not self._is_closed:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._engine.has_work, IDLE)
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
                self._error = error
                for reply in replies:
                    self._hand(reply, error)
                time.sleep(IDLE)  # until they have left
        for reply in list(self._replies):
            self._hand(reply, EngineStopped("the replica was closed; send the prompt to another one"))
        self._publisher.close()
        self._engine.close()

    def _deliver(self, reply: _Reply) -> None:
        completion = reply.request.completions[0]
        reason, tokens = completion.finish_reason, completion.token_ids[reply.num_sent :]  # in this order
        if reason == "error":
            item: Item | Exception = RuntimeError(f"the request failed: {completion.error}")
        elif tokens or reason:
            if tokens:  # a step without tokens proves nothing: the readers of a step that failed leave no work
                self._error = None
            reply.num_sent += len(tokens)
            item = tokens, bool(reason), completion.cached_tokens
        else:
            return
        if reason:
            with self._changed:
                self._replies.pop(reply, None)
        self._hand(reply, item)

    def _hand(self, reply: _Reply, item: Item | Exception) -> None:
        try:
            reply.loop.call_soon_threadsafe(reply.queue.put_nowait, item)
        except RuntimeError:  # the event loop of the reader is closed: the reader has left
            self._leave(reply)


def replicas(
    num_replicas: int, folder: str | None = None, *, most_at_once: int = 32, least: int = 1,
    ray_actor_options: Mapping[str, Any] | None = None, **options: Any,
) -> serve.Application:  # fmt: skip
    """Return an application of equal engines behind a PrefixRouter, for serve.run.

    most_at_once:      requests that a replica has at a time; further ones go to others. least: see PrefixRouter.
    ray_actor_options: resources that Ray reserves for a replica. It sees no GPU without {"num_gpus": 1}.
    options:           options of Engine.load, and `events` and `interface` of PagedReplica.
    Raises: InvalidRequest
    """
    if least < 1:
        raise InvalidRequest(f"least is {least}; give the blocks by which known prefixes must differ, 1 or more")
    router = RequestRouterConfig(
        request_router_class=PrefixRouter, request_router_kwargs={"least": least}, request_routing_stats_period_s=0.5
    )
    deployment = serve.deployment(
        PagedReplica,
        name="pagedkv",
        num_replicas=num_replicas,
        max_ongoing_requests=most_at_once,
        ray_actor_options=dict(ray_actor_options or {}),
        request_router_config=router,
    )
    return deployment.bind(folder, **options)
