"""A long prompt is waited for while its pages come, and only pages that no tier here has are computed elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from pagedkv import PagedKVCache
from pagedkv.errors import InvalidRequest
from pagedkv.model import Engine
from pagedkv.sampling.params import SamplingParams
from pagedkv.tiers import HostTier, level
from pagedkv.tiers.transfer import AskedPrompt, DistributedLink, PrefillServer, RemotePrefill
from tests.tiers.stores import free_port
from tests.tiers.world import SIZE, SPEC, World

from .liars import Liar, holds
from .sides import Sides

IDS, OTHER = list(range(41)), list(range(100, 141))
PATIENCE = 0.8


def compute_slowly(sides: Sides, prompt: AskedPrompt, go_on: Callable[[], object]) -> None:
    """Compute a prompt that was asked for, four pages in the time of PATIENCE. `go_on` is called meanwhile."""
    ids = prompt.token_ids.tolist()
    for end in range(SIZE, len(ids), SIZE):
        sides.prefill.run(ids[: end + 1])
        until = time.monotonic() + PATIENCE / 4
        while time.monotonic() < until:
            go_on()
            time.sleep(0.001)
    sides.server.finish(prompt)


def test_a_prompt_is_waited_for_while_its_pages_come() -> None:
    with Sides(remote={"patience": PATIENCE}) as sides:
        sides.prefill.run(OTHER)  # compiles
        began, fetch = time.monotonic(), sides.decode.cache.fetch(IDS)
        [prompt] = sides.server.take(5)
        compute_slowly(sides, prompt, lambda: fetch.done)
        assert fetch.wait(5)
        assert time.monotonic() - began > 2 * PATIENCE
        assert fetch.tokens == sides.decode.run(IDS) == 40


def test_a_prompt_is_waited_for_while_pages_of_an_earlier_one_come() -> None:
    with Sides(remote={"patience": PATIENCE}) as sides:
        sides.prefill.run([7, *OTHER])  # compiles
        first, second = (sides.decode.cache.fetch(ids) for ids in (IDS, OTHER))
        assert holds(lambda: len(sides.server._new) == 2)
        [prompt, later] = sides.server.take(5)
        compute_slowly(sides, prompt, lambda: second.done)
        assert first.done
        assert not second.done
        sides.prefill.run(later.token_ids.tolist())
        sides.server.finish(later)
        assert second.wait(5)
        assert [sides.decode.run(ids) for ids in (IDS, OTHER)] == [40, 40]


@pytest.mark.slow
def test_pages_of_later_prompts_do_not_keep_an_earlier_one_waiting() -> None:
    with Sides(remote={"patience": PATIENCE}) as sides:
        sides.prefill.run([7, *OTHER])  # compiles
        first = sides.decode.cache.fetch(IDS)
        assert sides.server.take(5)
        second = sides.decode.cache.fetch(OTHER)
        [later] = sides.server.take(5)
        compute_slowly(sides, later, lambda: first.done)
        assert first.done
        assert second.wait(5)
        assert [sides.decode.run(ids) for ids in (IDS, OTHER)] == [0, 40]


def test_a_prompt_of_which_no_page_comes_is_computed_here() -> None:
    with Sides(remote={"patience": PATIENCE}) as sides:
        began, fetch = time.monotonic(), sides.decode.cache.fetch(IDS)
        [prompt] = sides.server.take(5)
        assert fetch.wait(5)
        assert PATIENCE <= time.monotonic() - began < PATIENCE + 2
        assert sides.decode.run(IDS) == 0
        assert holds(lambda: (sides.decode.cache.tiers.pump(), prompt.is_cancelled)[1])


@pytest.mark.slow
def test_a_timeout_of_the_caller_is_kept_though_pages_come() -> None:
    with Sides(remote={"patience": 60}) as sides:
        sides.prefill.run(OTHER)  # compiles
        fetch = sides.decode.cache.fetch(IDS, timeout=PATIENCE)
        [prompt] = sides.server.take(5)
        compute_slowly(sides, prompt, lambda: fetch.done)
        assert fetch.done
        assert 0 < sides.decode.run(IDS) < 40


def test_a_first_page_may_take_as_long_as_the_patience_of_the_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(level, "STALLED", 0.05)
    with Sides(remote={"patience": 60}) as sides:
        fetch = sides.decode.cache.fetch(IDS)
        assert not fetch.wait(0.5)
        sides.serve()
        assert fetch.wait(5)
        assert sides.decode.run(IDS) == 40


def test_only_what_no_tier_above_has_is_computed_elsewhere() -> None:
    address = f"127.0.0.1:{free_port()}"
    server, remote = PrefillServer(DistributedLink(address)), RemotePrefill(DistributedLink(address), min_tokens=1)
    prefill = World(PagedKVCache(SPEC, num_frames=64, model="m", tiers=[server]))
    decode = World(PagedKVCache(SPEC, num_frames=64, model="m", tiers=[HostTier("1MiB"), remote]))
    assert remote.wait(10)
    decode.run(IDS)
    assert decode.cache.tiers.flush(5)
    decode.cache.evict(64)
    fetch = decode.cache.fetch(IDS)
    assert fetch.wait(5)
    assert (fetch.source, decode.run(IDS)) == ({"host": 10}, 40)
    assert not server.take(0.3)
    decode.cache.evict(64)
    longer = [*IDS[:40], *OTHER]
    fetch = decode.cache.fetch(longer)
    [prompt] = server.take(5)
    prefill.run(prompt.token_ids.tolist())
    server.finish(prompt)
    assert fetch.wait(5)
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
        assert remote.wait(10)
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
