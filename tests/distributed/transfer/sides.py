"""The two sides of a transfer in one process: two caches whose bytes are known, and a link that can be hurt."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from pagedkv import PagedKVCache
from pagedkv.tiers.transfer import AskedPrompt, DistributedLink, PrefillServer, RemotePrefill
from tests.tiers.stores import free_port
from tests.tiers.world import SIZE, SPEC, World


class HurtLink(DistributedLink):
    """A link whose frames can be changed on their way.

    hurt: is given a frame's number and a copy of its bytes before it is sent. most: offers at a time, so far.
    """

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.hurt: Callable[[int, torch.Tensor], object] | None = None
        self.under_way: set[int] = set()
        self.most = 0

    def offer(self, number: int, row: torch.Tensor) -> int:
        self.under_way.add(number)
        self.most = max(self.most, len(self.under_way))
        if self.hurt is not None:
            row = row.clone()
            self.hurt(number, row)
        return super().offer(number, row)

    def settle(self, number: int, timeout: float) -> None:
        super().settle(number, timeout)
        self.under_way.discard(number)


class Sides:
    """A prefill side and a decode side. Prompts are computed when `serve` is called, or by `serving`."""

    def __init__(
        self, *, num_frames: int = 64, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None,
        server: dict[str, Any] | None = None, remote: dict[str, Any] | None = None,
        link: Callable[[str], Any] = HurtLink,
    ) -> None:  # fmt: skip
        address = f"127.0.0.1:{free_port()}"
        self.link, self.other_link = link(address), link(address)
        self.server = PrefillServer(self.link, **(server or {}))
        self.remote = RemotePrefill(self.other_link, **({"min_tokens": 1} | (remote or {})))
        options: dict[str, Any] = {"num_frames": num_frames, "model": "m"}
        specs = {"spec": SPEC}
        self.prefill = World(PagedKVCache(**(specs | options | (prefill or {})), tiers=[self.server]))
        self.decode = World(PagedKVCache(**(specs | options | (decode or {})), tiers=[self.remote]))

    def serve(self, seconds: float = 20.0, chunk: int = 10**9) -> list[AskedPrompt]:
        """Compute what is asked for within `seconds`, in chunks. Return the prompts."""
        prompts = self.server.take(seconds)
        for prompt in prompts:
            ids = prompt.token_ids.tolist()
            for end in range(min(chunk, len(ids)), len(ids) + 1, min(chunk, len(ids))):
                if not prompt.is_cancelled:
                    self.prefill.run(ids[:end], prompt.tenant, prompt.salt)
            if not prompt.is_cancelled:
                self.prefill.run(ids, prompt.tenant, prompt.salt)
            self.server.finish(prompt)
        return prompts

    @contextmanager
    def serving(self, **options: Any) -> Iterator[None]:
        """Serve in a thread, while the block runs."""
        stop = threading.Event()

        def work() -> None:
            self.prefill.cache.own()
            while not stop.is_set():
                self.serve(0.01, **options)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self.prefill.cache.own()

    def run(self, ids: Sequence[int], tenant: bytes = b"", salt: Any = b"", timeout: float = 20.0) -> int:
        """Fetch a prompt and compute the rest. Return how many tokens were not computed here."""
        fetch = self.decode.cache.fetch(ids, tenant=tenant, salt=salt, timeout=timeout)
        assert fetch.wait(timeout + 20)
        return self.decode.run(ids, tenant, salt)

    def run_at_random(self, seed: int, number: int) -> int:
        """Run prompts over a connection that breaks at random. Return the tokens that were found.

        The worlds check the bytes of every page that is found.
        """
        draw, found = random.Random(seed), 0
        for _ in range(number):
            ids = [draw.randrange(3) for _ in range(6)] + list(range(draw.randrange(1, 90)))
            tenant = draw.choice([b"", b"acme"])
            if draw.random() < 0.2:
                draw.choice([self.link, self.other_link]).cut()
            elif draw.random() < 0.3:
                self.decode.cache.evict(48)
            fetch = self.decode.cache.fetch(ids, tenant=tenant, timeout=3)
            if draw.random() < 0.2:
                fetch.cancel()
            assert fetch.wait(20)
            found += self.decode.run(ids, tenant)
            self.remote.wait(draw.choice([0.0, 1.0]))
        return found

    def check_given_back(self, seconds: float = 20.0) -> None:
        """Check that neither side holds a frame, and that the invariants hold."""
        until = time.monotonic() + seconds
        for world in (self.prefill, self.decode):
            while world.cache.stats().mapped and time.monotonic() < until:
                world.cache.tiers.pump()
            assert world.cache.stats().mapped == 0
            assert not world.cache.has_plans
            world.cache.check()

    def close(self) -> None:
        self.decode.cache.tiers.close()
        self.prefill.cache.tiers.close()

    def __enter__(self) -> Sides:
        assert self.remote.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self.check_given_back()
        self.close()


def pages(num_tokens: int) -> int:
    """Return the tokens that a prompt finds at most: whole pages, and one token less."""
    return (num_tokens - 1) // SIZE * SIZE
