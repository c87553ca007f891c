"""A peer that lies, repeats, or sends garbage costs its connection: no frame, no memory, and no wrong token."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from pagedkv.model import Engine, Limits, serve_prefills
from pagedkv.tiers.checksum import checksum
from pagedkv.tiers.transfer import DistributedLink, PrefillServer, server
from pagedkv.tiers.transfer.distributed import SHORT
from pagedkv.tiers.transfer.link import LinkDown, Refused
from pagedkv.tiers.transfer.messages import Message, encode, window_of
from pagedkv.tiers.transfer.messages import hello as ours_of
from tests.tiers.stores import free_port

from .liars import SILENCE, Liar, Prefill, has_all_frames, holds, lying_prefill, page

IDS = list(range(41))
OTHER = list(range(100, 141))


def sum_of(frame: torch.Tensor) -> str:
    return checksum(frame.numpy(), b"").hex()


# --- the decode side --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_frame_whose_page_was_answered_twice_goes_to_nobody_while_it_is_written(is_gone: bool) -> None:
    with lying_prefill(num_frames=12) as (world, remote, liar):
        fetch = world.cache.fetch(IDS)
        wants = liar.hear("wants", 10)
        first = wants[0][0]
        liar.say({"offers": [[first, sum_of(page(IDS, 0)), 0]]})
        again = "" if is_gone else sum_of(page(IDS, 0))
        liar.say({"offers": [[first, again, 0], *([want[0], "", 0] for want in wants[1:])]})
        assert fetch.wait(20) == holds(lambda: not remote.is_connected)
        world.run(OTHER)
        liar.send_frame(first, torch.full_like(page(IDS, 0), 7))
        liar.is_cut.wait(0.3)
        assert world.check_found(OTHER) == 40


def test_a_frame_that_was_offered_and_does_not_come_is_given_back() -> None:
    with lying_prefill(timeout=0.5) as (world, remote, liar):
        fetch = world.cache.fetch(IDS, timeout=20)
        [number, *_] = liar.hear("wants")[0]
        liar.say({"offers": [[number, sum_of(page(IDS, 0)), 0]]})
        assert fetch.wait(SILENCE - 2)  # which would end it, too
        assert has_all_frames(world)
        assert not remote.is_connected


def test_no_frame_is_given_back_before_the_transport_has_let_it_go() -> None:
    with lying_prefill() as (world, remote, liar):
        finished = list[int]()

        def finish(number: int, timeout: float) -> None:
            if not finished:
                assert holds(lambda: remote._reads.qsize() == 9)
            finished.append(number)
            raise RuntimeError("a read that fails")

        remote._link.finish = finish  # type: ignore[method-assign]
        fetch = world.cache.fetch(IDS)
        wants = liar.hear("wants", 10)
        liar.say(offers_of(wants, sum_of(page(IDS, 0))))
        assert fetch.wait(20)
        assert finished == [number for number, *_ in wants]


def test_more_frames_than_the_window_are_not_read() -> None:
    with lying_prefill(window="16KiB") as (world, remote, liar):
        fetch = world.cache.fetch(IDS)
        liar.hear("wants", 10)
        liar.say({"offers": [[number, sum_of(page(IDS, 0)), 0] for number in range(1000, 1100)]})
        assert holds(lambda: not remote.is_connected)
        assert fetch.wait(20)


def offers_of(wants: list[list[object]], total: str) -> Message:
    return {"offers": [[number, total, 0] for number, *_ in wants]}


def die_after_a_frame(liar: Liar, wants: list[list[object]]) -> None:
    liar.say(offers_of(wants[:1], sum_of(page(IDS, 0))))
    liar.send_frame(wants[0][0], page(IDS, 0))
    liar.hear("dones")
    liar.say(offers_of(wants[1:], sum_of(page(IDS, 0))))


DEATHS = {
    "before it answers": lambda liar, wants: None,
    "in a message": lambda liar, wants: liar.link.send(encode(offers_of(wants, "ab"))[:-7], 20.0),
    "before the frames": lambda liar, wants: liar.say(offers_of(wants, sum_of(page(IDS, 0)))),
    "after a frame": die_after_a_frame,
}


@pytest.mark.parametrize("when", DEATHS)
def test_a_prefill_side_that_dies_at_any_message_costs_only_what_had_not_arrived(when: str) -> None:
    with lying_prefill() as (world, _, liar):
        fetch = world.cache.fetch(IDS)
        DEATHS[when](liar, liar.hear("wants", 10))
        liar.close()
        assert fetch.wait(20)
        assert has_all_frames(world)
        assert world.run(IDS) == (4 if when == "after a frame" else 0)


def say_raw(content: bytes) -> Callable[[Liar, int], None]:
    return lambda liar, number: liar.link.send(content, 20.0)


def say_endless(liar: Liar, number: int) -> None:
    group, peer = liar.link._connection.messages, liar.link._connection.peer
    group.send([torch.full((SHORT,), 255, dtype=torch.uint8)], peer, 0).wait()


LIES = {
    "a wrong sum": lambda liar, number: liar.say({"offers": [[number, "ab" * 16, 0]]}),
    "a short frame": lambda liar, number: liar.say({"offers": [[number, sum_of(page(IDS, 0)), 0]]}),
    "a long sum": lambda liar, number: liar.say({"offers": [[number, "ab" * 1000, 0]]}),
    "a long number": lambda liar, number: liar.say({"offers": [["5" * 1000, "ab" * 16, 0]]}),
    "half a message": say_raw(b'{"offers": [['),
    "a deep message": say_raw(b"[" * 100_000),
    "an endless message": say_endless,
}


@pytest.mark.parametrize("lie", LIES)
def test_a_prefill_side_that_lies_spoils_no_page(lie: str) -> None:
    with lying_prefill() as (world, remote, liar):
        fetch = world.cache.fetch(IDS)
        [number, *_] = liar.hear("wants", 10)[0]
        LIES[lie](liar, number)
        liar.send_frame(number, page(IDS, 0)[: -100 if lie == "a short frame" else None])
        if costs_a_page := lie in {"a wrong sum", "a short frame"}:
            assert holds(lambda: fetch.done or remote.stats().corrupt == 1)  # `done` lets it go on
            fetch.cancel()  # the other pages do not come
        assert fetch.wait(20)
        assert has_all_frames(world)
        assert remote.is_connected == costs_a_page
        assert world.run(IDS) == 0


def test_prompts_that_were_cancelled_before_they_were_asked_for_leave_nothing() -> None:
    with lying_prefill() as (world, remote, liar):
        remote.due = dict  # type: ignore[method-assign] (nothing is said, as while a message is stuck)
        for number in range(200):
            fetch = world.cache.fetch([number, *IDS])
            assert not fetch.done
            fetch.cancel()
            assert fetch.done
        assert not remote._unsaid.get("asks")
        assert not remote._waiting
        del remote.due
        world.cache.fetch(OTHER)
        liar.hear("wants", 10)
        assert [ids for *_, ids in liar.heard["asks"]] == [OTHER]
        assert not liar.heard.keys() & {"stops", "drops"}


@pytest.mark.parametrize("hello", [[2, "ab", 64, 3, "a field of later"], [2]])
def test_a_side_of_another_version_is_told_so(hello: list[object]) -> None:
    with pytest.raises(Refused, match="speaks format 2, and this one 1: use one version of pagedkv"):
        window_of({"hello": hello}, ours_of(b"", 64, 3))


@pytest.mark.parametrize("hello", [None, [], ["1", "", 64, 3], [1, "", 64], [1, "", 64, 0], [1, "", 64, True]])
def test_a_side_that_begins_otherwise_is_no_peer(hello: list[object] | None) -> None:
    with pytest.raises(LinkDown, match="does not begin as a pagedkv process does"):
        window_of({} if hello is None else {"hello": hello}, ours_of(b"", 64, 3))


# --- the prefill side -------------------------------------------------------------------------------------------------


def test_a_prompt_of_an_old_connection_does_not_end_one_of_the_new_connection() -> None:
    with Prefill() as prefill:
        liar = prefill.liar()
        liar.say({"asks": [[1, "", [], OTHER]]})
        [old] = prefill.server.take(20)
        liar.say({"asks": [[2, "", [], OTHER]]})
        assert holds(lambda: prefill.server._new)
        liar.close()
        assert holds(lambda: old.is_cancelled)
        liar = prefill.liar()
        liar.say({"asks": [[1, "", [], IDS]], "wants": [[5, 1, prefill.names(IDS)[0]]]})
        [new] = prefill.server.take(20)
        prefill.server.finish(old)
        prefill.server.finish(new, is_computed=False)
        assert liar.hear("ends") == [[1, False]]
        assert liar.hear("offers") == [[5, "", 0]]


def many(field: str, entry: list[object]) -> list[Message]:
    return [{field: [entry]} for _ in range(5)]


@pytest.mark.parametrize(
    "said",
    [
        many("wants", [5, 1, "ab" * 32]),
        many("asks", [7, "", [], OTHER]),
        [{"wants": [[6, 1, "ab" * 1000]]}],
        [{"wants": [["6" * 1000, 1, "ab" * 32]]}],
        [{"wants": [[6, "1" * 1000, "ab" * 32]]}],
        [{"asks": [["2" * 1000, "", [], OTHER]]}],
        [{"asks": [[2, "", [], list(range(3000))]]}],
        [{"asks": [[2, "ab" * 3000, [], OTHER]]}],
        [{"asks": [[2, "", [[0, "ab" * 3000]], OTHER]]}],
        [{"asks": [[number, "", [], OTHER] for number in range(2, 30)]}],
        [{"wants": [[number, 1, "ab" * 32] for number in range(20_000)]}],
        [{"dones": [3]}],
        [{"asks": [[2, "", [], [2**40]]]}],
        [{"asks": [[2, "", [], ["x"]]]}],
        [{"asks": [[2, "", [], OTHER, 1]]}],
        [{"asks": [[2, "", [[-1, "ab"]], OTHER]]}],
    ],
)  # fmt: skip
def test_a_peer_that_asks_for_more_than_it_may_loses_the_connection(
    said: list[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MOST_PROMPT", 2000)
    monkeypatch.setattr(server, "MOST_ASKS", 20)
    with Prefill() as prefill:
        liar = prefill.liar()
        liar.say({"asks": [[1, "", [], IDS]]})
        for message in said:
            liar.say(message)
        assert liar.is_cut.wait(20)
        assert holds(lambda: not prefill.server.is_connected)
        prefill.liar().say({"asks": [[1, "", [], IDS]]})  # the next one is served
        assert holds(lambda: [each.token_ids.tolist() for each in prefill.server.take(1)][-1:] == [IDS])


@pytest.mark.parametrize("end", ["dies", "is silent", "gives back what it has not read", "gives back twice"])
def test_a_decode_side_that_leaves_offers_open_leaves_nothing(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Prefill(timeout=1.0) as prefill:
        assert prefill.silence == 1.0
        prefill.world.run(IDS)
        liar, name = prefill.liar(beats=end != "is silent"), prefill.names(IDS)[0]
        liar.say({"asks": [[1, "", [], OTHER]], "wants": [[5, 1, name], [6, 1, prefill.names(OTHER)[0]]]})
        liar.hear("offers")
        [prompt] = prefill.server.take(20)
        if end == "dies":
            liar.close()
        elif end == "is silent":
            monkeypatch.setattr(prefill.server._channel, "_timeout", prefill.silence)  # from now on
        elif end == "gives back what it has not read":
            liar.say({"dones": [5]})
        elif end == "gives back twice":
            row = page(OTHER, 0)
            liar.link.read(5, 0, row)
            liar.link.finish(5, 20.0)
            assert torch.equal(row, page(IDS, 0))
            liar.say({"dones": [5]})
            liar.say({"dones": [5]})
        assert holds(lambda: prompt.is_cancelled)
        assert holds(lambda: not prefill.server._offered)
        assert not prefill.server._wants
        assert not prefill.server._parked
        monkeypatch.undo()
        liar = prefill.liar()
        liar.say({"wants": [[5, 1, name]]})
        assert liar.hear("offers")[0][0] == 5


def test_wants_that_are_dropped_leave_nothing() -> None:
    with Prefill(window=1) as prefill:
        prefill.world.run(IDS)
        liar, names = prefill.liar(), prefill.names(IDS)
        liar.say({"wants": [[1, 0, names[0]]]})
        liar.hear("offers")  # the window is used
        for number in range(2, 202):
            liar.say({"wants": [[number, 0, names[1]]], "drops": [number]})
        liar.say({"asks": [[1, "", [], IDS]]})
        assert prefill.server.take(20)
        assert not prefill.server._wants
        assert not prefill.server._ready


def test_prompts_that_were_stopped_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_ASKS", 2)
    with Prefill() as prefill:
        liar = prefill.liar()
        for number in range(1, 200):
            liar.say({"asks": [[number, "", [], OTHER]], "stops": [number - 2]})
        liar.say({"stops": [198, 199]})
        liar.say({"asks": [[5000, "", [], IDS]]})
        assert holds(lambda: prefill.server._new and prefill.server._new[-1].number == 5000)
        assert [prompt.number for prompt in prefill.server.take(20)] == [5000]
        assert list(prefill.server._asks) == [5000]


# --- engines ----------------------------------------------------------------------------------------------------------


def test_a_prefill_engine_refuses_prompts_that_it_cannot_compute_and_goes_on() -> None:
    address = f"127.0.0.1:{free_port()}"
    tier = PrefillServer(DistributedLink(address))
    engine = Engine.load(tiers=[tier], num_frames=64, limits=Limits(prefill_chunk=16))
    liar = Liar(address, engine.cache.storage.frames, listens=False)
    liar.say(tier.hello())
    prompts = [[], [-1] * 40, [10**9] * 40, list(range(10, 60)) * 100, list(range(10, 60))]
    liar.say({"asks": [[number, "", [], ids] for number, ids in enumerate(prompts)]})
    liar.say({"asks": [[5, "", [[0, "ab"]], prompts[-1]]]})
    last = time.monotonic() + 20
    serve_prefills(engine, [tier], until=lambda: len(liar.heard.get("ends", ())) == 6 or time.monotonic() > last)
    assert sorted(liar.heard["ends"]) == [[0, False], [1, False], [2, False], [3, False], [4, True], [5, False]]
    assert engine.cache.stats().mapped == 0
    liar.say({"asks": [[6, "", [], list(range(100, 150))]]})
    serve_prefills(
        engine, [tier], until=lambda: engine.has_work or time.monotonic() > last
    )  # ends before it is computed
    assert liar.hear("ends", 7)[-1] == [6, False]
    assert engine.cache.stats().mapped == 0
    assert not engine.has_work
    liar.close()
    engine.close()
