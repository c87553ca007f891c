"""API keys: a tenant for each, no error that shows one, and for each tenant its part of a server and no more."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from pathlib import Path

import pytest

from pagedkv.engine.serve.gate import Gate, Rules, _Refused
from pagedkv.engine.serve.keys import ApiKeys
from pagedkv.engine.serve.shares import FIRST, OTHER, Place, Shares
from pagedkv.errors import InvalidRequest
from tests.engine.serve.server import ANSWER, ASKED, FACTS, LONG, RUNNING, serving

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


def entered(shares: Shares, tenant: bytes) -> Place:
    place = shares.enter(tenant)
    assert place is not None
    return place


def test_a_tenant_never_has_more_than_its_share_and_each_request_has_its_turn() -> None:
    chance, shares = random.Random(0), Shares(4, 6)
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
        for _ in range(300):
            tasks.append(asyncio.ensure_future(request(chance.choice((b"a", b"b", b"b", b"b")))))
            await asyncio.sleep(chance.random() * 0.002)
        await asyncio.gather(*tasks)
        for tenant in (b"a", b"b"):
            whole = [entered(shares, tenant) for _ in range(10)]
            assert shares.enter(tenant) is None, "as many as at first, and no more"
            assert await whole[0].begin(4, 0) == FIRST

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


def test_the_only_request_of_a_tenant_gets_in_however_many_fill_the_server() -> None:
    names = [b"a", b"b", b"c", b"d"]
    gate = Gate(None, Rules(None, 100, 6, Shares(1, 2)), [].append)  # type: ignore[arg-type]

    def enter(name: bytes) -> bool:
        try:
            gate._place(name)
        except _Refused:
            return False
        gate.num_inside += 1
        return True

    assert [enter(name) for name in names[:2] for _ in range(4)] == [True, True, True, False] * 2
    assert [enter(name) for name in names[2:] for _ in range(2)] == [True, False] * 2


def test_a_key_that_has_its_share_takes_no_place_of_another_one(extra: None, tmp_path: Path) -> None:
    """Of Bob's requests one runs, one waits in his queue until its client goes away, and others are refused."""
    keys = tmp_path / "keys"
    keys.write_text("keyA alice\nkeyB bob\n")
    limits = ("--max-sequences", 2, "--max-waiting", 2, "--max-prompt", 30)
    with serving("--num-frames", 320, *limits, "--api-keys", keys) as server:
        assert "keyA" not in server.said
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            refused = server.ask(TEXT, b"{", **headers)
            assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
            assert server.ask("/v1/models", **headers).status == 401
        assert server.ask("/health").status == server.ask("/metrics").status == 200
        with server.begun(LONG, **BOB), server.begun(LONG, wait=False, **BOB) as waiting:
            while (refused := server.ask(TEXT, b"{", **BOB)).status != 429:
                assert refused.status == 400
            assert "2 requests run or wait already, the limit of a key" in refused.error["message"]
            assert int(refused.headers["Retry-After"]) >= 1
            asked = {"prompt": ASKED, "temperature": 0}
            assert server.ask(TEXT, asked, **ALICE).json["choices"][0]["text"] == ANSWER
            for wrong, words in (({"n": 2}, "computes 1 at once"), ({"prompt": FACTS * 9}, "of this server is 30")):
                assert words in server.ask(TEXT, {**asked, **wrong}, **ALICE).error["message"]
            waiting.close()
            server.wait_until('pagedkv_answers_total{status="499"}', 1)
            assert server.metric(RUNNING) == 1, "the other one goes on"
        server.wait_for_no_frame()
        assert server.ask(TEXT, asked, **BOB).status == 200
        assert server.end(signal.SIGINT) == (130, "")
