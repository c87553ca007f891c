"""A prefill here, a decode there: pages cross as they are computed, and whatever fails is computed again."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from pagedkv import KVSpec, PagedKVCache
from pagedkv.errors import InvalidRequest
from pagedkv.tiers.transfer import DistributedLink, PrefillServer, RemotePrefill, remote, rows
from pagedkv.tiers.transfer.messages import decode
from tests.tiers.stores import free_port
from tests.tiers.world import SIZE, SPEC, World

from .liars import holds
from .sides import Sides, pages

IDS = list(range(41))
KEY = b"sixteen secret bytes"


def test_pages_cross_while_the_prompt_is_computed() -> None:
    with Sides() as sides:
        fetch = sides.decode.cache.fetch(IDS)
        [prompt] = sides.server.take(20)
        assert prompt.token_ids.tolist() == IDS
        sides.prefill.run(IDS[:20])
        assert holds(lambda: fetch.done or fetch.num_verified >= 5)  # `done` lets it go on
        assert fetch.num_verified == 5
        sides.prefill.run(IDS)
        sides.server.finish(prompt)
        assert fetch.wait(20)
        assert fetch.tokens == pages(41) == sides.decode.run(IDS)
        assert (sides.remote.stats().loaded, sides.server.stats().stored) == (10, 10)


def test_only_the_part_that_is_not_in_the_pool_crosses() -> None:
    with Sides() as sides, sides.serving():
        assert sides.run(IDS) == 40
        assert sides.run([*IDS[:20], 7, 7, 7, 7, 7]) == 24
        assert sides.remote.stats().loaded == 11
        assert sides.run(IDS[:30]) == 28  # known here: nothing is asked for
        assert sides.remote.stats().asked == 11


def test_a_prompt_that_the_other_side_knows_is_not_computed_again() -> None:
    with Sides() as sides:
        sides.prefill.run(IDS)
        fetch = sides.decode.cache.fetch(IDS)
        assert fetch.wait(20)  # before the prompt was taken
        assert fetch.tokens == 40


def test_tenants_and_salts_cross_and_stay_apart() -> None:
    with Sides() as sides, sides.serving():
        for tenant, salt in ((b"", b""), (b"acme", b""), (b"", b"adapter"), (b"acme", {0: b"a", 6: b"image"})):
            assert sides.decode.cache.lookup(IDS, tenant=tenant, salt=salt) == 0
            assert sides.run(IDS, tenant, salt) == 40


def test_layer_groups_cross_together() -> None:
    groups = {"spec": [SPEC, KVSpec(1, 1, 16, block_size=SIZE, dtype="float32", window=12)]}
    with Sides(prefill=groups, decode=groups) as sides, sides.serving(chunk=8):
        assert sides.run(IDS) in (0, 40)  # a page that the window has given back may be evicted
        assert sides.run(IDS[:30] + [5] * 10) >= 0


def test_pages_that_change_on_their_way_are_misses_with_a_count() -> None:
    with Sides() as sides, sides.serving():
        sides.link.hurt = lambda number, row: row[number].add_(1) if number == 3 else None
        assert sides.run(IDS) == 3 * SIZE
        assert sides.remote.stats().corrupt == 1


@pytest.mark.parametrize(("ours", "theirs", "found"), [(KEY, KEY, 40), (KEY, KEY[::-1], 0), (None, KEY, 0)])
def test_a_page_that_was_not_sent_under_the_key_is_a_miss(ours: bytes, theirs: bytes, found: int) -> None:
    with Sides(server={"key": ours}, remote={"key": theirs}) as sides, sides.serving():
        assert sides.run(IDS) == found
        assert sides.remote.stats().corrupt == (0 if found else 10)


@pytest.mark.parametrize(
    "other",
    [
        {"model": "n"},
        pytest.param({"rank": 1}, marks=pytest.mark.slow),
        pytest.param({"spec": KVSpec(1, 1, 16, block_size=SIZE, dtype="float16")}, marks=pytest.mark.slow),
    ],
)
def test_another_model_rank_or_dtype_is_refused(other: dict[str, object], caplog: pytest.LogCaptureFixture) -> None:
    sides = Sides(decode=other)
    assert holds(lambda: "the caches differ" in caplog.text)
    assert not sides.remote.wait(0.5)
    assert sides.run(IDS) == 0
    sides.check_given_back()
    sides.close()


def test_no_more_frames_are_under_way_than_the_window_holds() -> None:
    size = SPEC.frame_bytes
    with Sides(num_frames=128, server={"window": 3 * size}, remote={"window": 9 * size}) as sides, sides.serving():
        assert sides.run(list(range(300))) == pages(300)
        assert 1 <= sides.link.most <= 3


class Said(dict[str, list[int]]):
    """The numbers of offers, and of credits, in each message that is sent over `links`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *links: DistributedLink) -> None:
        super().__init__(offers=[], dones=[])
        for link in links:
            monkeypatch.setattr(link, "send", partial(self._listen, link.send))

    def _listen(self, send: Callable[[bytes, float], None], content: bytes, timeout: float) -> None:
        for name, what in decode(content).items():
            if name in self:
                self[name].append(len(what))
        send(content, timeout)


def test_offers_and_credits_are_said_for_many_frames_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedkv.tiers.transfer.server.AT_ONCE", 8 * 512)  # bytes: 8 frames
    monkeypatch.setattr("pagedkv.tiers.transfer.remote.AT_ONCE", 16)
    ids = list(range(129))
    with Sides() as sides:
        said = Said(monkeypatch, sides.link, sides.other_link)
        finish, are_offered = sides.other_link.finish, threading.Event()

        def finish_when_all_are_offered(number: int, timeout: float) -> None:
            are_offered.wait(60)
            finish(number, timeout)

        monkeypatch.setattr(sides.other_link, "finish", finish_when_all_are_offered)
        sides.prefill.run(ids)
        with sides.serving():
            fetch = sides.decode.cache.fetch(ids, timeout=20)
            try:
                assert holds(lambda: sides.remote._reads.qsize() == 31)  # the reader has one more
            finally:
                are_offered.set()
            assert fetch.wait(20)
        assert holds(lambda: not sides.server._offered)
        assert sides.decode.run(ids) == 128
    assert sum(said["offers"]) == 32
    assert max(said["offers"]) == 8
    assert len(said["offers"]) <= 6
    assert said["dones"] in ([16, 16], [32])  # [32]: all were verified before the first were said


def test_credits_of_frames_that_come_one_by_one_wait_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedkv.tiers.transfer.remote.AT_ONCE", 16)
    ids = list(range(129))
    with Sides() as sides:
        said = Said(monkeypatch, sides.other_link)
        fetch = sides.decode.cache.fetch(ids, timeout=20)
        [prompt] = sides.server.take(20)
        for num_pages in range(1, 33):
            sides.prefill.run(ids[: num_pages * SIZE])
            assert holds(lambda number=num_pages: fetch.done or fetch.num_verified >= number)
        sides.server.finish(prompt)
        assert holds(lambda: not sides.server._offered)
        assert fetch.tokens == 128
    assert sum(said["dones"]) == 32
    assert len(said["dones"]) <= 8  # 2, but a message that is sent for another reason takes along what is there


def test_wants_beyond_the_most_wait_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MOST_WANTS", 3)
    with Sides(num_frames=128) as sides, sides.serving(chunk=8):
        assert sides.run(list(range(300))) == pages(300)


def test_frames_of_a_gpu_go_through_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Staged(rows.Rows):
        def __init__(self, pool, most):
            super().__init__(pool, most, is_staged=True)

    for module in ("remote", "server"):
        monkeypatch.setattr(f"pagedkv.tiers.transfer.{module}.Rows", Staged)
    with Sides(num_frames=128, remote={"window": 4 * SPEC.frame_bytes}) as sides, sides.serving(chunk=40):
        assert sides.run(list(range(300))) == pages(300)
        sides.link.hurt = lambda number, row: row[0].add_(1)
        assert sides.run(list(range(300, 341))) == 0


def test_pages_that_the_other_side_has_evicted_are_missing() -> None:
    with Sides() as sides:
        fetch = sides.decode.cache.fetch(IDS)
        [prompt] = sides.server.take(20)
        sides.prefill.run(IDS[:20])
        assert holds(lambda: fetch.done or fetch.num_verified >= 5)  # `done` lets it go on
        sides.prefill.cache.evict(64)
        sides.server.finish(prompt)
        assert fetch.wait(20)
        assert sides.decode.run(IDS) == 20


def test_a_page_that_was_evicted_and_is_computed_again_crosses() -> None:
    with Sides() as sides:
        sides.prefill.run(IDS)
        sides.prefill.cache.evict(64)
        with sides.serving(chunk=12):
            assert sides.run(IDS) == 40


def test_a_fetch_that_is_cancelled_gives_its_frames_back_and_stops_the_prefill() -> None:
    with Sides() as sides:
        fetch = sides.decode.cache.fetch(IDS)
        [prompt] = sides.server.take(20)
        fetch.cancel()
        assert fetch.done
        sides.check_given_back()
        assert holds(lambda: prompt.is_cancelled)
        sides.server.finish(prompt)
        with sides.serving():
            assert sides.run(IDS) == 40  # nothing was spoiled


def test_a_prompt_that_is_never_computed_ends_at_the_deadline() -> None:
    with Sides() as sides:
        began = time.monotonic()
        fetch = sides.decode.cache.fetch(IDS, timeout=0.3)
        assert fetch.wait(20)
        assert 0.3 <= time.monotonic() - began < 20
        assert sides.decode.run(IDS) == 0


def test_a_prompt_that_is_refused_is_computed_here() -> None:
    with Sides() as sides:
        fetch = sides.decode.cache.fetch(IDS)
        [prompt] = sides.server.take(20)
        sides.server.finish(prompt, is_computed=False)
        assert fetch.wait(20)
        assert sides.decode.run(IDS) == 0


def test_short_prompts_and_too_many_prompts_are_computed_here() -> None:
    with Sides(remote={"min_tokens": 30, "max_prompts": 1}) as sides:
        assert sides.decode.cache.fetch(IDS[:30]).done
        first = sides.decode.cache.fetch(IDS)
        second = sides.decode.cache.fetch([9, *IDS])
        assert (first.asked, second.asked) == (40, 0)
        sides.serve()
        assert first.wait(20)


def test_a_prompt_that_the_first_side_cannot_take_goes_to_the_next() -> None:
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    servers = [PrefillServer(DistributedLink(address)) for address in addresses]
    sides = [World(PagedKVCache(SPEC, num_frames=64, tiers=[server], model="m")) for server in servers]
    remotes = [RemotePrefill(DistributedLink(address), min_tokens=1, max_prompts=1) for address in addresses]
    decode = World(PagedKVCache(SPEC, num_frames=64, tiers=remotes, model="m"))
    assert all(tier.wait(20) for tier in remotes)
    prompts = [IDS, [9, *IDS], [8, *IDS]]
    fetches = [decode.cache.fetch(ids) for ids in prompts]
    assert [fetch.source for fetch in fetches] == [{"prefill": 10}, {"prefill-2": 10}, {}]
    for world, server in zip(sides, servers, strict=True):
        [prompt] = server.take(20)
        world.run(prompt.token_ids.tolist())
        server.finish(prompt)
    assert all(fetch.wait(20) for fetch in fetches)
    assert [decode.run(ids) for ids in prompts] == [40, 40, 0]
    for world in (decode, *sides):
        world.cache.tiers.close()


def test_a_prompt_goes_to_the_side_that_has_the_fewest_tokens_to_compute_before_it() -> None:
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    servers = [PrefillServer(DistributedLink(address)) for address in addresses]
    sides = [World(PagedKVCache(SPEC, num_frames=64, tiers=[server], model="m")) for server in servers]
    remotes = [RemotePrefill(DistributedLink(address), min_tokens=1) for address in addresses]
    decode = World(PagedKVCache(SPEC, num_frames=128, tiers=remotes, model="m"))
    assert all(tier.wait(20) for tier in remotes)
    prompts = [[9, *IDS], [8, *IDS], [7, *IDS, *IDS], [6, *IDS], [7, *IDS, *range(60, 90)]]
    fetches = [decode.cache.fetch(ids) for ids in prompts[:4]]
    assert [list(fetch.source) for fetch in fetches] == [["prefill"], ["prefill-2"], ["prefill"], ["prefill-2"]]

    def compute() -> None:
        until = time.monotonic() + 20
        while not all(fetch.done for fetch in fetches) and time.monotonic() < until:
            for world, server in zip(sides, servers, strict=True):
                for prompt in server.take(0.01):
                    world.run(prompt.token_ids.tolist())
                    server.finish(prompt)
        assert all(fetch.done for fetch in fetches)

    compute()
    decode.cache.evict(128)
    fetches = [decode.cache.fetch(ids) for ids in (prompts[3], prompts[4], [5, *IDS, *IDS, *IDS])]
    assert [list(fetch.source) for fetch in fetches] == [["prefill-2"], ["prefill"], ["prefill-2"]]
    compute()
    for world in (decode, *sides):
        world.cache.tiers.close()


def test_a_connection_that_is_cut_costs_its_pages_and_comes_again() -> None:
    with Sides() as sides:
        fetch = sides.decode.cache.fetch(IDS)
        [prompt] = sides.server.take(20)
        sides.prefill.run(IDS[:20])
        sides.link.cut()
        assert fetch.wait(20)
        assert sides.decode.run(IDS) in range(0, 24, 4)
        assert holds(lambda: prompt.is_cancelled)  # the other side may hear of the end later
        sides.server.finish(prompt)  # too late: nothing happens
        assert prompt.is_cancelled
        assert sides.remote.wait(20)
        with sides.serving():
            assert sides.run([7, *IDS]) == 40


def test_a_pool_that_is_resized_goes_on() -> None:
    with Sides(num_frames=32) as sides, sides.serving():
        assert sides.run(IDS) == 40
        sides.decode.cache.resize(64)
        assert sides.run([7, *IDS]) == 40
    with Sides(num_frames=64) as sides:
        sides.prefill.run(IDS)
        for size in (24, 96):
            sides.prefill.cache.resize(size)
            sides.prefill.cache.tiers.pump()
            assert sides.decode.cache.fetch(IDS).wait(20)
            assert sides.decode.run(IDS) == 40
            sides.decode.cache.evict(64)


def test_forgotten_pages_do_not_cross() -> None:
    with Sides() as sides:
        sides.prefill.run(IDS)
        sides.prefill.cache.forget()
        assert sides.decode.cache.fetch(IDS).wait(20)
        assert sides.decode.run(IDS) == 0


@pytest.mark.slow
def test_a_peer_that_sends_nonsense_is_cut_off() -> None:
    with Sides() as sides:
        for words in (b"x", b"[]", b'{"offers": [[1]]}', b'{"offers": [[1, "zz", 0]]}', b'{"dones": [5]}'):
            assert sides.remote.wait(20)
            assert holds(lambda: sides.server.is_connected)
            for link in (sides.link, sides.other_link):
                with contextlib.suppress(OSError, RuntimeError):
                    link.send(words, 1.0)
            time.sleep(0.1)
        assert sides.remote.wait(20)
        with sides.serving():
            assert sides.run(IDS) == 40


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_prompts_of_all_kinds_with_a_connection_that_breaks_at_random(seed: int) -> None:
    with Sides(num_frames=48) as sides, sides.serving(chunk=16):
        assert sides.run_at_random(seed, 40) > 0


def test_wrong_arguments_are_refused_with_a_remedy() -> None:
    for address in ("localhost", "x:", "x:0", "x:99999", 7000):
        with pytest.raises(InvalidRequest, match="give HOST:PORT"):
            DistributedLink(address)  # type: ignore[arg-type]
    link = DistributedLink("127.0.0.1:7000")
    for kind in (PrefillServer, RemotePrefill):
        with pytest.raises(InvalidRequest, match="16 to 64"):
            kind(link, key=b"short")
    tier = RemotePrefill(link)
    tier.close()
    assert not tier.is_connected
