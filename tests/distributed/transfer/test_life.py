"""A transfer begins, is interrupted, and ends: nothing outlives it, and nothing waits for what cannot come."""

from __future__ import annotations

import contextlib
import gc
import random
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from unittest.mock import Mock

import pytest
import torch

from pagedkv import PagedKVCache
from pagedkv.errors import InvalidRequest
from pagedkv.tiers.transfer import DistributedLink, PrefillServer, RemotePrefill, distributed, remote
from tests.interrupts import Interrupter, count_instructions
from tests.tiers.stores import free_port
from tests.tiers.world import SPEC

from .engines import ROOT
from .liars import Liar, Prefill, holds
from .sides import Sides

IDS = list(range(41))


def cache_over(tier: RemotePrefill | PrefillServer) -> PagedKVCache:
    return PagedKVCache(SPEC, num_frames=64, model="m", tiers=[tier])


# --- begin ------------------------------------------------------------------------------------------------------------


def test_a_second_decode_process_is_told_to_have_a_server_of_its_own_and_is_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Prefill() as prefill:
        liar = prefill.liar()
        tier = RemotePrefill(DistributedLink(prefill.address))
        cache = cache_over(tier)
        assert holds(lambda: "serves another decode process" in caplog.text, 30)
        assert not tier.is_connected
        assert not liar.is_cut.is_set()
        liar.close()
        assert tier.wait(30)
        cache.tiers.close()


def test_an_address_that_is_in_use_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        tier = PrefillServer(DistributedLink(f"127.0.0.1:{other.getsockname()[1]}"))
        cache = cache_over(tier)
        assert holds(lambda: "give a free port of this machine" in caplog.text)
        cache.tiers.close()


def test_arguments_that_nothing_can_serve_are_refused() -> None:
    link = DistributedLink("127.0.0.1:7000")
    for kind in (PrefillServer, RemotePrefill):
        for timeout in (0, -1.0, float("inf")):
            with pytest.raises(InvalidRequest, match="seconds of silence"):
                kind(link, timeout=timeout)
    with pytest.raises(InvalidRequest, match="max_prompts"):
        RemotePrefill(link, max_prompts=5000)


# --- the books of a decode side ---------------------------------------------------------------------------------------


def test_a_prompt_that_the_other_side_has_evicted_is_asked_for_anew() -> None:
    with Sides() as sides:
        with sides.serving():
            assert sides.run(IDS) == 40
        for world in (sides.prefill, sides.decode):
            world.cache.evict(64)
        with sides.serving():
            assert sides.run(IDS) == 0  # finds that they are gone
            sides.decode.cache.evict(64)
            assert sides.run(IDS) == 40


def test_prompts_beyond_max_prompts_are_computed_here_however_many_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "KEPT", 1)
    with Sides(num_frames=128, remote={"max_prompts": 3}) as sides:
        fetches = [sides.decode.cache.fetch([number, *IDS]) for number in range(5)]
        assert [fetch.asked for fetch in fetches] == [40, 40, 40, 0, 0]
        with sides.serving():
            assert all(fetch.wait(20) for fetch in fetches)
        assert [sides.decode.run([number, *IDS]) for number in range(5)] == [40, 40, 40, 0, 0]


def test_several_long_prompts_go_in_messages_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "MOST_BYTES", 32_000)  # wants of 256 pages, and one prompt
    with Sides(num_frames=1024) as sides:
        prompts = [[number, *range(10**6, 10**6 + 900)] for number in range(4)]
        fetches = [sides.decode.cache.fetch(ids) for ids in prompts]
        with sides.serving():
            assert all(fetch.wait(20) for fetch in fetches)
            assert [sides.decode.run(ids) for ids in prompts] == [900] * 4


@pytest.mark.parametrize("which", ["prefill", "decode"])
def test_sides_without_a_name_in_common_ask_for_nothing(which: str, caplog: pytest.LogCaptureFixture) -> None:
    with Sides() as sides:
        getattr(sides, which).cache.forget()
        assert holds(lambda: "no call of `forget`" in caplog.text)
        assert sides.decode.cache.fetch(IDS).done
        assert not sides.server.take(0.5)


class Posts:
    """Groups of a connection that post a frame when `moved` is set: until then they move the frames before."""

    def __init__(self) -> None:
        self.moved, self.posted, self.error = threading.Event(), list[int](), None
        self.is_broken = False

    def send(self, rows: list[torch.Tensor], peer: int, tag: int) -> Posts:
        assert self.moved.wait(20)
        if self.error is not None:
            raise self.error
        self.posted.append(tag)
        return self

    def recv(self, rows: list[torch.Tensor], peer: int, tag: int) -> Posts:
        assert tag == distributed.NEVER_SENT
        self.is_broken, self.error = True, RuntimeError("the connection is closed")
        return self

    def wait(self, timeout: timedelta) -> None: ...


@pytest.fixture
def posts() -> Iterator[Posts]:
    made = Posts()
    yield made
    made.moved.set()


def link_over(posts: Posts) -> DistributedLink:
    link = DistributedLink("127.0.0.1:7000")
    link._connection = distributed._Connection(posts, posts, 0)
    return link


ROW = torch.empty(64, dtype=torch.uint8)


def test_an_offer_does_not_wait_for_the_frames_that_move(posts: Posts) -> None:
    """Checksums are computed meanwhile. The end of an offer waits until it was posted."""
    link = link_over(posts)
    for number in (3, 4, 5):
        link.offer(number, ROW)
    assert posts.posted == []
    with pytest.raises(TimeoutError):
        link.settle(3, 0.05)
    posts.moved.set()
    for number in (3, 4, 5):
        link.settle(number, 20.0)
    assert posts.posted == [3, 4, 5]
    link.cut()


def test_an_offer_that_was_not_posted_ends_with_its_connection(posts: Posts) -> None:
    link = link_over(posts)
    for number in (3, 4):
        link.offer(number, ROW)
    link.cut()
    posts.moved.set()
    for number in (3, 4):
        with pytest.raises(RuntimeError, match="is closed"):
            link.settle(number, 20.0)
    with pytest.raises(distributed.LinkDown):
        link.offer(5, ROW)
    assert holds(lambda: "pagedkv poster" not in [thread.name for thread in threading.enumerate()])


def test_an_offer_that_cannot_be_posted_breaks_the_connection(posts: Posts) -> None:
    """The other side would wait for the frame."""
    link, posts.error = link_over(posts), RuntimeError("no memory")
    posts.moved.set()
    link.offer(3, ROW)
    with pytest.raises(RuntimeError, match="no memory"):
        link.settle(3, 20.0)
    assert holds(lambda: posts.is_broken)
    link.cut()


def test_a_cut_that_was_interrupted_is_made_by_the_next_one(posts: Posts, monkeypatch: pytest.MonkeyPatch) -> None:
    link = link_over(posts)
    with monkeypatch.context() as patch:
        patch.setattr(link._connection, "end", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            link.cut()
    link.cut()
    assert posts.is_broken
    assert link._connection is None


MAIN_ENDS = """
import threading
from tests.distributed.transfer.sides import Sides

def work():
    threading.main_thread().join()
    with Sides() as sides, sides.serving():
        print(sides.run(list(range(41))), flush=True)

threading.Thread(target=work).start()
"""


def test_pages_cross_when_the_main_thread_has_ended() -> None:
    ended = subprocess.run([sys.executable, "-c", MAIN_ENDS], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (ended.stdout, ended.returncode) == ("40\n", 0), ended.stderr


# --- the end ----------------------------------------------------------------------------------------------------------


def test_a_pool_goes_with_its_cache() -> None:
    sides = Sides()
    with sides, sides.serving():
        assert sides.run(IDS) == 40
    pools = [weakref.ref(world.cache.tiers.pool) for world in (sides.prefill, sides.decode)]
    del sides
    gc.collect()
    assert [pool() for pool in pools] == [None, None]


def test_a_side_that_is_closed_while_it_connects_leaves_no_thread() -> None:
    class Slow(DistributedLink):
        def open(self, *arguments: object, **options: object) -> None:
            super().open(*arguments, **options)  # type: ignore[arg-type]
            opened.set()
            may_go_on.wait(20)

    opened, may_go_on = threading.Event(), threading.Event()
    address = f"127.0.0.1:{free_port()}"
    tier = RemotePrefill(Slow(address))
    cache = cache_over(tier)
    liar = Liar(address, cache.storage.frames, listens=True)
    assert opened.wait(20)
    tier.close(0.1)
    may_go_on.set()
    assert holds(lambda: not tier._channel._keeper.is_alive())
    liar.close()
    cache.tiers.close()


# --- interrupts -------------------------------------------------------------------------------------------------------


def fetched(sides: Sides, ids: list[int]) -> None:
    """Fetch, open and compute a prompt, and cancel another one."""
    other = sides.decode.cache.fetch([9, *ids], timeout=2)
    fetch = sides.decode.cache.fetch(ids, timeout=2)
    fetch.wait(20)
    sides.decode.check_found(ids)
    other.cancel()
    sides.decode.run(ids)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_an_interrupt_leaves_a_decode_side_that_goes_on(seed: int) -> None:
    draw, numbers = random.Random(seed), iter(range(100, 1000))
    with Sides(num_frames=128, remote={"timeout": 2.0}) as sides, sides.serving():
        total = count_instructions(lambda: fetched(sides, [next(numbers), *IDS]))
        for at in [draw.randrange(1, total) for _ in range(4)]:
            with contextlib.suppress(KeyboardInterrupt):
                Interrupter(at).run(partial(fetched, sides, [next(numbers), *IDS]))
            cache, until = sides.decode.cache, time.monotonic() + 20
            while cache.tiers.num_pending or cache.tiers.num_fetches:
                cache.tiers.pump(0.001)
                assert time.monotonic() < until
            cache.tiers.release_holds()
            cache.recover()
            cache.check()
            assert cache.stats().mapped == 0
            assert sides.remote.wait(20)
            assert 40 in (sides.run([next(numbers), *IDS]) for _ in range(2))


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_an_interrupt_leaves_a_prefill_side_that_goes_on(seed: int) -> None:
    draw, numbers, done = random.Random(seed), iter(range(100, 1000)), threading.Event()
    found = list[int]()

    def decode(sides: Sides) -> None:
        sides.decode.cache.own()
        while not done.is_set():
            found.append(sides.run([next(numbers), *IDS], timeout=1.0))

    with Sides(num_frames=128) as sides:
        thread = threading.Thread(target=decode, args=(sides,))
        thread.start()
        try:
            total = count_instructions(sides.serve)
            for at in [draw.randrange(1, total) for _ in range(4)]:
                with contextlib.suppress(KeyboardInterrupt):
                    Interrupter(at).run(sides.serve)
                sides.prefill.cache.recover()
                sides.prefill.cache.check()
                before = len(found) + 1  # the prompt that is under way may have been served before the interrupt
                assert holds(lambda first=before: (sides.serve(0.05), 40 in found[first:])[1], 30)
        finally:
            done.set()
            while thread.is_alive():
                sides.serve(0.05)
            sides.decode.cache.own()


@pytest.mark.parametrize("side", ["link", "other_link"])
def test_a_side_with_a_long_timeout_says_something_often(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No side knows the timeout of the other one, which may be shorter."""
    with Sides(remote={"timeout": 60.0}, server={"timeout": 60.0}) as sides:
        link, said = getattr(sides, side), list[bytes]()
        send = link.send
        monkeypatch.setattr(link, "send", lambda message, timeout: (said.append(message), send(message, timeout))[1])
        assert holds(lambda: len(said) >= 5)  # within 20 s
