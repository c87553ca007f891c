"""A long prompt is waited for while its pages come, and only pages that no tier here has are computed elsewhere."""

from __future__ import annotations

import time

import pytest

from pagedkv import PagedKVCache
from pagedkv.errors import InvalidRequest
from pagedkv.model import Engine
from pagedkv.sampling.params import SamplingParams
from pagedkv.tiers import HostTier, level
from pagedkv.tiers.fetch import Fetch
from pagedkv.tiers.transfer import AskedPrompt, DistributedLink, PrefillServer, RemotePrefill
from tests.tiers.stores import free_port
from tests.tiers.world import SIZE, SPEC, World

from .liars import Liar, holds
from .sides import Sides

IDS, OTHER = list(range(41)), list(range(100, 141))
PATIENCE = 0.8


class Clock:
    """The clock of fetches and of levels. It stands still until a test moves it, so a busy machine ends no patience."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = time.monotonic()
        for module in ("fetch", "level"):
            monkeypatch.setattr(f"pagedkv.tiers.{module}.time", self)

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def compute_slowly(sides: Sides, clock: Clock, prompt: AskedPrompt, bringer: Fetch) -> None:
    """Compute a prompt that was asked for, four pages in the time of PATIENCE. `bringer` fetches it."""
    ids = prompt.token_ids.tolist()
    for number, end in enumerate(range(SIZE, len(ids), SIZE), 1):
        sides.prefill.run(ids[: end + 1])
        assert holds(lambda most=number: bringer.done or bringer.num_verified >= most)  # `done` lets all fetches go on
        clock.now += PATIENCE / 4
    sides.server.finish(prompt)


def test_a_prompt_is_waited_for_while_its_pages_come(clock: Clock) -> None:
    with Sides(remote={"patience": PATIENCE}) as sides:
        began, fetch = clock.now, sides.decode.cache.fetch(IDS)
        [prompt] = sides.server.take(20)
        compute_slowly(sides, clock, prompt, fetch)
        assert holds(lambda: fetch.done)
        assert clock.now - began > 2 * PATIENCE
        assert fetch.tokens == sides.decode.run(IDS) == 40


def test_a_prompt_is_waited_for_while_pages_of_an_earlier_one_come(clock: Clock) -> None:
    with Sides(remote={"patience": PATIENCE}) as sides:
        first, second = (sides.decode.cache.fetch(ids) for ids in (IDS, OTHER))
        assert holds(lambda: len(sides.server._new) == 2)
        [prompt, later] = sides.server.take(20)
        compute_slowly(sides, clock, prompt, first)
        assert first.done
        assert not second.done
        sides.prefill.run(later.token_ids.tolist())
        sides.server.finish(later)
        assert holds(lambda: second.done)
        assert [sides.decode.run(ids) for ids in (IDS, OTHER)] == [40, 40]


@pytest.mark.slow
def test_pages_of_later_prompts_do_not_keep_an_earlier_one_waiting(clock: Clock) -> None:
    with Sides(remote={"patience": PATIENCE}) as sides:
        first = sides.decode.cache.fetch(IDS)
        assert sides.server.take(20)
        second = sides.decode.cache.fetch(OTHER)
        [later] = sides.server.take(20)
        compute_slowly(sides, clock, later, second)
        assert first.done
        assert holds(lambda: second.done)
        assert [sides.decode.run(ids) for ids in (IDS, OTHER)] == [0, 40]


def test_a_prompt_of_which_no_page_comes_is_computed_here() -> None:
    with Sides(remote={"patience": PATIENCE}) as sides:
        began, fetch = time.monotonic(), sides.decode.cache.fetch(IDS)
        [prompt] = sides.server.take(20)
        assert fetch.wait(30)
        assert PATIENCE <= time.monotonic() - began < PATIENCE + 20
        assert sides.decode.run(IDS) == 0
        assert holds(lambda: (sides.decode.cache.tiers.pump(), prompt.is_cancelled)[1])


@pytest.mark.slow
def test_a_timeout_of_the_caller_is_kept_though_pages_come(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    with Sides(remote={"patience": 60}) as sides:
        with monkeypatch.context() as patch:
            patch.setattr("pagedkv.tiers.stack.time", clock)
            fetch = sides.decode.cache.fetch(IDS, timeout=PATIENCE)
        [prompt] = sides.server.take(20)
        compute_slowly(sides, clock, prompt, fetch)
        assert fetch.done
        assert 0 < sides.decode.run(IDS) < 40


def test_a_first_page_may_take_as_long_as_the_patience_of_the_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(level, "STALLED", 0.05)
    with Sides(remote={"patience": 60}) as sides:
        fetch = sides.decode.cache.fetch(IDS)
        assert not fetch.wait(0.5)
        sides.serve()
        assert fetch.wait(20)
        assert sides.decode.run(IDS) == 40


def test_only_what_no_tier_above_has_is_computed_elsewhere() -> None:
    address = f"127.0.0.1:{free_port()}"
    server, remote = PrefillServer(DistributedLink(address)), RemotePrefill(DistributedLink(address), min_tokens=1)
    prefill = World(PagedKVCache(SPEC, num_frames=64, model="m", tiers=[server]))
    decode = World(PagedKVCache(SPEC, num_frames=64, model="m", tiers=[HostTier("1MiB"), remote]))
    assert remote.wait(20)
    decode.run(IDS)
    assert decode.cache.tiers.flush(5)
    decode.cache.evict(64)
    fetch = decode.cache.fetch(IDS)
    assert fetch.wait(20)
    assert (fetch.source, decode.run(IDS)) == ({"host": 10}, 40)
    assert not server.take(0.3)
    decode.cache.evict(64)
    longer = [*IDS[:40], *OTHER]
    fetch = decode.cache.fetch(longer)
    [prompt] = server.take(20)
    prefill.run(prompt.token_ids.tolist())
    server.finish(prompt)
    assert fetch.wait(20)
    assert (fetch.source, decode.run(longer)) == ({"host": 10, "prefill": 10}, 80)
    for world in (decode, prefill):
        world.cache.tiers.close()


@pytest.mark.parametrize(("num_frames", "number"), [(800, 16), (200, 10)])
def test_an_engine_asks_for_as_many_prompts_as_it_may_and_leaves_frames_to_those_that_run(
    num_frames: int, number: int
) -> None:
    address = f"127.0.0.1:{free_port()}"
    remote = RemotePrefill(DistributedLink(address))
    with Engine.load(num_frames=num_frames, tiers=[remote], watermark=0.0) as engine:
        liar = Liar(address, engine.cache.storage.frames, listens=True)
        liar.say(remote.hello())
        assert remote.wait(20)
        for first in range(16):
            engine.submit(list(range(10 + first, 310 + first)), SamplingParams(max_tokens=2))
        engine.step()
        liar.hear("asks", number)
        assert len(liar.hear("wants", 18 * number)) == 18 * number
        assert len(liar.heard["asks"]) == number
        liar.close()
        engine.run()


def test_a_patience_that_nothing_can_have_is_refused() -> None:
    for patience in (0, -1.0, float("inf")):
        with pytest.raises(InvalidRequest, match=r"patience is .*; give seconds"):
            RemotePrefill(DistributedLink("127.0.0.1:7000"), patience=patience)
