"""A peer that says what a test wants: one side of a transfer is a tier over a cache, the other a link in hand."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from pagedkv import PagedKVCache
from pagedkv.tiers.names import Namer
from pagedkv.tiers.transfer import DistributedLink, PrefillServer, RemotePrefill
from pagedkv.tiers.transfer.messages import Message, decode, encode
from tests.tiers.stores import free_port
from tests.tiers.world import SIZE, SPEC, World, content

SILENCE = 10.0
"""Seconds of silence that end a connection to a peer in hand. A shorter `timeout` of a test is that of frames alone,
because a busy machine delays the signs of life.
"""


class Liar:
    """A peer over a link in hand. heard: the entries of all messages so far, by field. It beats until it is closed."""

    def __init__(self, address: str, memory: torch.Tensor, *, listens: bool, beats: bool = True) -> None:
        self.link, self.heard, self.is_cut = DistributedLink(address), dict[str, list[Any]](), threading.Event()
        until = time.monotonic() + 30
        while True:
            try:
                self.link.open(memory, listens=listens, timeout=5.0)
                break
            except (OSError, RuntimeError):
                assert time.monotonic() < until
        self._saying = threading.Lock()
        threads = [threading.Thread(target=self._listen), threading.Thread(target=self._beat)]
        self._threads = threads if beats else threads[:1]
        for thread in self._threads:
            thread.start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            while True:
                for field, entries in decode(self.link.receive()).items():
                    self.heard.setdefault(field, []).extend(entries)
        self.is_cut.set()

    def _beat(self) -> None:
        while not self.is_cut.wait(0.1):
            self.say({})

    def say(self, message: Message) -> None:
        with self._saying, contextlib.suppress(OSError, RuntimeError):
            self.link.send(encode(message), 20.0)

    def hear(self, field: str, number: int = 1, seconds: float = 20.0) -> list[Any]:
        """Wait until `number` entries of `field` were heard. Return all that were."""
        assert holds(lambda: len(self.heard.get(field, ())) >= number, seconds), f"{field}: {self.heard.get(field)}"
        return self.heard[field]

    def send_frame(self, number: int, frame: torch.Tensor) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self.link.offer(number, frame)

    def close(self) -> None:
        self.is_cut.set()
        self.link.close()
        for thread in self._threads:
            thread.join()


def holds(fact: Callable[[], object], seconds: float = 20.0) -> bool:
    """Wait until `fact()` is true, at most `seconds`. Return whether it is."""
    until = time.monotonic() + seconds
    while not fact():
        if time.monotonic() > until:
            return False
        time.sleep(0.002)
    return True


def has_all_frames(world: World) -> bool:
    """Wait until the pool has all frames back. Return whether it has."""
    return holds(lambda: (world.cache.tiers.pump(), world.cache.stats().mapped == 0)[1])


def page(ids: Sequence[int], number: int) -> torch.Tensor:
    """uint8 [frame_bytes]: the bytes of page `number` of a prompt."""
    return torch.from_numpy(content(ids[: (number + 1) * SIZE], b"", b"", 0, SPEC.frame_bytes).copy())


@contextlib.contextmanager
def lying_prefill(*, num_frames: int = 64, **options: Any) -> Iterator[tuple[World, RemotePrefill, Liar]]:
    """Yield a decode side, and a peer in hand that is its prefill side."""
    address = f"127.0.0.1:{free_port()}"
    remote = RemotePrefill(DistributedLink(address), **({"min_tokens": 1} | options))
    remote._channel._timeout = SILENCE
    world = World(PagedKVCache(SPEC, num_frames=num_frames, model="m", tiers=[remote]))
    liar = Liar(address, world.cache.storage.frames, listens=True)
    liar.say(remote.hello())
    assert remote.wait(20)
    try:
        yield world, remote, liar
    finally:
        liar.close()
        world.cache.tiers.close()


class Prefill:
    """A prefill side, for peers in hand. silence: the seconds that it would accept, if it were not given SILENCE."""

    def __init__(self, **options: Any) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.server = PrefillServer(DistributedLink(self.address), **options)
        self.silence, self.server._channel._timeout = self.server._channel._timeout, SILENCE
        self.world = World(PagedKVCache(SPEC, num_frames=64, model="m", tiers=[self.server]))
        self.liars: list[Liar] = []

    def liar(self, *, beats: bool = True) -> Liar:
        """Return a new peer that has said hello, and is connected."""
        liar = Liar(self.address, self.world.cache.storage.frames, listens=False, beats=beats)
        self.liars.append(liar)
        liar.say(self.server.hello())
        liar.hear("hello")
        assert holds(lambda: self.server.is_connected)
        return liar

    def names(self, ids: Sequence[int]) -> list[str]:
        """Return the names of the pages of a prompt, as they are sent."""
        namer = Namer(bytes.fromhex(self.server.hello()["hello"][1]), 1)
        return [
            key.name.hex()
            for [key] in namer.keys_of(torch.tensor(ids, dtype=torch.int32).numpy(), b"", b"", block_size=SIZE)
        ]

    def __enter__(self) -> Prefill:
        return self

    def __exit__(self, *_: object) -> None:
        for liar in self.liars:
            liar.close()
        self.world.cache.tiers.close()
