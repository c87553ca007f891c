"""API keys: a tenant for each, no error that shows one, and for each tenant its part of a server and no more."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from pagedkv.engine.serve.gate import Gate, Rules, _Refused
from pagedkv.engine.serve.keys import ApiKeys
from pagedkv.engine.serve.shares import FIRST, OTHER, Place, Shares
from pagedkv.errors import InvalidRequest
from tests.engine.serve.server import ANSWER, ASKED, RUNNING, Server, serving

TEXT = "/v1/completions"
ALICE, BOB = {"Authorization": "Bearer keyA"}, {"Authorization": "Bearer keyB"}


def test_a_key_has_the_tenant_of_its_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"# of the year\n\nsesame acme\n  op\xc3\xa9n\tzebra  \r\n")
    keys = ApiKeys.read(path)
    assert (len(keys), keys.num_tenants) == (2, 2)
    assert keys.tenant_of(b"Bearer sesame") == b"acme"
    assert keys.tenant_of(b"bearer  op\xc3\xa9n ") == b"zebra"
    for wrong in (b"", b"Bearer", b"Bearer ", b"sesame", b"Basic sesame", b"Bearer Sesame", b"Bearer sesame acme"):
        assert keys.tenant_of(wrong) is None
    assert "sesame" not in repr(vars(keys))


def test_blanks_around_the_only_key_do_not_count_and_a_key_is_one_word() -> None:
    """A secret that was made by `echo` ends in a new line."""
    assert ApiKeys.of(" secret\n").tenant_of(b"Bearer secret") == b""
    for key in ("", "  ", "two words"):
        with pytest.raises(InvalidRequest, match="the API key is empty or has blanks inside"):
            ApiKeys.of(key)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has no key; give a line of `key tenant` for each"),
        (b"# only\n", "has no key"),
        (b"a b\nsecret\n", "line 2 of .* has 1 words; give `key tenant`"),
        (b"secret b c\n", "line 1 of .* has 3 words"),
        (b"secret a\nsecret b\n", "the key in line 2 of .* stands in an earlier line, too; drop one"),
        (None, "cannot read the keys in .*: No such file or directory; give another file"),
    ],
)
def test_a_bad_file_is_named_by_its_line_and_shows_no_key(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidRequest, match=words) as refused:
        ApiKeys.read(path)
    assert "secret" not in str(refused.value)


# --- shares ---


def entered(shares: Shares, tenant: bytes) -> Place:
    place = shares.enter(tenant)
    assert place is not None
    return place


@pytest.mark.parametrize("seed", range(2))
def test_a_tenant_never_has_more_than_its_share_and_each_request_has_its_turn(seed: int) -> None:
    chance, shares = random.Random(seed), Shares(4, 6)
    inside, running, refused, done = Counter[bytes](), Counter[bytes](), Counter[bytes](), Counter[bytes]()

    async def request(tenant: bytes) -> None:
        place = shares.enter(tenant)
        if place is None:
            assert inside[tenant] == 10
            refused[tenant] += 1
            return
        inside[tenant] += 1
        outputs = chance.randrange(1, 5)
        try:
            if chance.random() < 0.1:
                return  # a body that is refused
            await asyncio.wait_for(place.begin(outputs, chance.randrange(-3, 3)), chance.choice((0.001, 9)))
            running[tenant] += outputs
            assert running[tenant] <= 4
            await asyncio.sleep(chance.random() * 0.004)
            running[tenant] -= outputs
            done[tenant] += 1
        except TimeoutError:  # the client went away
            pass
        finally:
            place.leave()
            inside[tenant] -= 1

    async def story() -> None:
        tasks = []
        for _ in range(400):
            tasks.append(asyncio.ensure_future(request(chance.choice((b"a", b"b", b"b", b"b")))))
            await asyncio.sleep(chance.random() * 0.002)
        await asyncio.wait_for(asyncio.gather(*tasks), 60)
        for tenant in (b"a", b"b"):
            whole = [entered(shares, tenant) for _ in range(10)]
            assert shares.enter(tenant) is None, "as many as at first, and no more"
            assert await asyncio.wait_for(whole[0].begin(4, 0), 1) == FIRST

    asyncio.run(story())
    assert all(done[tenant] for tenant in (b"a", b"b"))


def begun(*asked: tuple[str, int], shares: Shares) -> list[tuple[str, int]]:
    """Let requests of one output enter, and each run for a moment. Returns: the names in the order of their turns"""
    turns: list[tuple[str, int]] = []

    async def request(name: str, priority: int) -> None:
        place = entered(shares, name[0].encode())
        turns.append((name, await place.begin(1, priority)))
        await asyncio.sleep(0.01)
        place.leave()

    async def story() -> None:
        await asyncio.gather(*(request(*each) for each in asked))

    asyncio.run(story())
    return turns


def test_a_priority_orders_the_requests_of_its_tenant_and_of_no_other() -> None:
    asked = [("a1", 0), ("a2", 5), ("b1", -9), ("a3", 0), ("b2", -9), ("a4", -1), ("b3", -99)]
    turns = begun(*asked, shares=Shares(1, 9))
    assert [name for name, _ in turns if name[0] == "a"] == ["a1", "a4", "a3", "a2"]
    assert [name for name, _ in turns if name[0] == "b"] == ["b1", "b3", "b2"]
    assert {level for _, level in turns} == {FIRST}, "each tenant has one that runs"
    assert [name for name, _ in turns[:2]] == ["a1", "b1"], "a tenant waits for itself alone"


def test_what_a_tenant_has_besides_its_first_request_goes_behind_the_first_of_others() -> None:
    turns = dict(begun(("a1", 0), ("a2", -7), ("a3", 0), ("b1", 9), shares=Shares(3, 9)))
    assert turns == {"a1": FIRST, "a2": OTHER, "a3": OTHER, "b1": FIRST}


def test_shared_priorities_count_among_all_tenants() -> None:
    turns = dict(begun(("a1", 3), ("a2", -7), ("b1", 9), shares=Shares(3, 9, shares_priorities=True)))
    assert turns == {"a1": 3, "a2": -7, "b1": 9}


def test_a_gate_refuses_a_tenant_that_has_its_share_and_lets_others_in() -> None:
    statuses: list[int] = []
    go_on = asyncio.Event()

    async def inside(scope: Any, receive: Any, send: Any) -> None:
        await go_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    keys = ApiKeys.of("keyA")
    keys._tenants.update(dict.fromkeys(keys._tenants, b"alice"))
    keys._tenants.update(dict.fromkeys(ApiKeys.of("keyB")._tenants, b"bob"))
    assert keys.num_tenants == 2
    gate = Gate(inside, Rules(keys, 100, 100, Shares(2, 1)), statuses.append)

    async def ask(key: str) -> None:
        headers = [(b"authorization", f"Bearer {key}".encode()), (b"content-type", b"application/json")]
        told: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b"{}", "more_body": False}

        async def send(message: Any) -> None:
            told.append(message)

        await gate({"type": "http", "method": "POST", "path": TEXT, "headers": headers}, receive, send)
        if told[0]["status"] == 429:
            words = json.loads(told[1]["body"])["error"]["message"]
            assert "3 requests run or wait already, the limit of a key" in words

    async def story() -> None:
        bobs = [asyncio.ensure_future(ask("keyB")) for _ in range(7)]
        await asyncio.sleep(0.01)
        assert statuses == [429] * 4
        alices = [asyncio.ensure_future(ask("keyA")) for _ in range(3)]
        await asyncio.sleep(0.01)
        assert statuses == [429] * 4
        go_on.set()
        await asyncio.gather(*bobs, *alices)
        await asyncio.gather(*(ask("keyB") for _ in range(3)))

    asyncio.run(story())
    assert Counter(statuses) == {429: 4, 200: 9}
    assert gate.num_inside == 0


def test_the_only_request_of_a_tenant_gets_in_however_many_fill_the_server() -> None:
    names = [b"a", b"b", b"c", b"d"]
    keys = ApiKeys.of("key-a")
    for name in names:
        keys._tenants.update(dict.fromkeys(ApiKeys.of(f"key-{name.decode()}")._tenants, name))
    gate = Gate(None, Rules(keys, 100, 6, Shares(1, 2)), [].append)  # type: ignore[arg-type]

    def enter(name: bytes) -> bool:
        try:
            gate._place(name)
        except _Refused:
            return False
        gate.num_inside += 1
        return True

    assert [enter(name) for name in names[:2] for _ in range(4)] == [True, True, True, False] * 2
    assert [enter(name) for name in names[2:] for _ in range(2)] == [True, False] * 2


def test_one_tenant_or_no_key_has_no_shares() -> None:
    process = pytest.importorskip("pagedkv.engine.serve.process", reason="uvicorn is not installed")
    one, two = ApiKeys.of("keyA"), ApiKeys({b"a": b"alice", b"b": b"bob"})
    same = ApiKeys({b"a": b"alice", b"b": b"alice"})
    for keys in (None, one, same):
        assert process._shares(process.Listening(keys=keys), 16) is None
    for share, running, waiting in (0.5, 8, 50), (0.001, 1, 1), (1.0, 16, 100):
        shares = process._shares(process.Listening(keys=two, key_share=share, max_waiting=100), 16)
        assert (shares.running, shares.waiting, shares.shares_priorities) == (running, waiting, False)
    assert process._shares(process.Listening(keys=two, shared_priorities=True), 16).shares_priorities


# --- a server of two keys ---


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("keyA alice\nkeyB bob\n")
    return path


@pytest.fixture
def flooded(extra: None, keys: Path) -> Iterator[Server]:
    """A server whose places, queue and frames Bob would fill, if he could."""
    options = ("--num-frames", 64, "--max-sequences", 4, "--max-waiting", 6, "--api-keys", keys)
    with serving(*options) as server:
        long = {"prompt": ASKED, "max_tokens": 900, "ignore_eos": True}
        ended: list[int] = []

        def bob(n: int) -> None:
            body = {**long, "n": 1 + n % 2, "priority": -n, "stream": n % 3 == 0}
            with suppress(OSError, HTTPException):  # the end of the server
                while not ended:
                    if server.ask(TEXT, body, **BOB).status == 429:
                        time.sleep(0.05)

        threads = [threading.Thread(target=bob, args=(n,), daemon=True) for n in range(12)]
        for thread in threads:
            thread.start()
        time.sleep(1)
        yield server
        ended.append(1)
    for thread in threads:
        thread.join()


def test_a_key_is_served_at_once_beside_one_that_fills_all_it_may(flooded: Server) -> None:
    assert flooded.count(429) > 0, "Bob has his share"
    body = {"prompt": ASKED, "temperature": 0, "priority": 9}
    for more in ({}, {"stream": True}, {"n": 2}, {"prompt": [ASKED, ASKED]}):
        began = time.monotonic()
        answer = flooded.ask(TEXT, {**body, **more}, **ALICE)
        assert answer.status == 200, answer.body
        assert time.monotonic() - began < 10, "one of Bob's requests takes longer than all of these"
        assert more.get("stream") or {choice["text"] for choice in answer.json["choices"]} == {ANSWER}
    many = flooded.ask(TEXT, {**body, "n": 3}, **ALICE)
    assert (many.status, "this server computes 2 at once" in many.error["message"]) == (400, True)


def test_a_client_that_goes_away_in_its_queue_gives_its_place_back(extra: None, keys: Path) -> None:
    with serving("--num-frames", 320, "--max-sequences", 2, "--max-waiting", 2, "--api-keys", keys) as server:
        for stream in (False, True):
            before = server.count(499)
            long = {"prompt": ASKED, "max_tokens": 3000, "ignore_eos": True, "stream": stream}
            with server.begun(long, **BOB), server.begun(long, wait=False, **BOB) as waiting:
                server.wait_until(RUNNING, 1)
                while (refused := server.ask(TEXT, {"prompt": ASKED, "max_tokens": 1}, **BOB)).status != 429:
                    time.sleep(0.02)
                assert "2 requests run or wait already, the limit of a key" in refused.error["message"]
                waiting.close()
                deadline = time.monotonic() + 30
                while server.count(499) == before:
                    assert time.monotonic() < deadline, "the client that went away still waits"
                    time.sleep(0.02)
                assert server.metric(RUNNING) == 1, "the other one goes on"
            server.wait_for_no_frame()
            assert server.ask(TEXT, {"prompt": ASKED, "max_tokens": 1}, **BOB).status == 200
        assert server.end() == (0, "")
