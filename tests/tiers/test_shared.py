"""Two caches over one store: each finds what the other has stored, verified, and each fault is a counted miss."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from pagedkv import KVSpec, PagedKVCache
from pagedkv.tiers import HostTier, slots
from pagedkv.tiers.checksum import Bytes, checksum
from pagedkv.tiers.shared import objects
from pagedkv.tiers.shared.records import FORMAT, HEADER, MAGIC, Client, Records
from pagedkv.tiers.shared.tier import SharedTier, _Asker
from tests.interrupts import count_instructions, interrupted
from tests.tiers.stores import KINDS, S3, Memory, MemoryClient, Mooncake, Objects, Redis, Store
from tests.tiers.world import IDS, PAGES, SIZE, SPEC, World, close_all

KEY = b"a secret of 16 bytes and more"


@pytest.fixture(params=list(KINDS))
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(objects, "LISTED_EVERY", 0.0)
    made = KINDS[request.param](tmp_path)
    yield made
    close_all()
    made.close()


def shared(client: Client, size: str | int = "1MiB", **options: object) -> SharedTier:
    return SharedTier(client, size, **{"key": None, "patience": 60.0} | options)  # type: ignore[arg-type]


def world(client: Client, spec: KVSpec = SPEC, *, model: str = "a model", rank: int = 0, **options: object) -> World:
    tiers = [shared(client, **options)]  # type: ignore[arg-type]
    return World(PagedKVCache(spec, num_frames=16, tiers=tiers, model=model, rank=rank))


def stored(store: Store, **options: object) -> World:
    """Return a world that has stored IDS."""
    made = world(store.client(), **options)
    made.store(IDS)
    return made


def fetched(other: World) -> int:
    """Fetch IDS, check the bytes of all that is found, and return how many tokens that is."""
    found = other.fetched(IDS)
    assert other.cache.tiers.flush(300)
    assert other.cache.stats().mapped == 0
    other.cache.check()
    return found


def until(holds: Callable[[], bool]) -> None:
    """Wait for what a thread of a tier does."""
    end = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_one_cache_finds_what_another_has_stored(store: Store) -> None:
    one, two = stored(store), world(store.client())
    assert fetched(two) == PAGES * SIZE
    assert two.cache.tiers.stats()["shared"].loaded == PAGES
    two.cache.evict(16)
    one.cache.tiers.close()
    assert fetched(two) == PAGES * SIZE  # a process that ends leaves its pages


def test_each_page_is_stored_once_whoever_computed_it(store: Store) -> None:
    one, two = stored(store), stored(store)
    assert [each.cache.tiers.stats()["shared"].stored for each in (one, two)] == [PAGES, 0]


@pytest.mark.parametrize(
    "other",
    [
        {"model": "another"},
        {"rank": 1},
        {"spec": replace(SPEC, num_layers=2)},
        {"spec": replace(SPEC, kv_dtype="int8")},
    ],
    ids=["model", "rank", "layers", "dtype"],
)
def test_pages_of_another_model_rank_or_layout_are_not_found(store: Store, other: dict[str, object]) -> None:
    _, two = stored(store), world(store.client(), **other)
    assert fetched(two) == 0
    assert two.cache.tiers.stats()["shared"].hits == 0


def test_tenants_and_salts_share_nothing(store: Store) -> None:
    _, two = stored(store), world(store.client())
    for options in ({"tenant": b"acme"}, {"salt": b"adapter"}):
        assert two.cache.fetch(IDS, **options).asked == 0  # type: ignore[arg-type]


def damaged(store: Store, damage: str) -> None:
    names = store.records()
    whole = {name: store.read(name) for name in names}
    for name in names:
        record = bytearray(whole[name])
        if damage == "a byte":
            record[-1] ^= 16
        elif damage == "cut":
            del record[-3:]
        elif damage == "zeros":
            record = bytearray(len(record))
        elif damage == "another page":
            record = bytearray(whole[names[names.index(name) - 1]])
        elif damage == "no key":  # planted, with the checksum that needs none
            content = np.frombuffer(record, np.uint8, offset=HEADER.size)
            header = HEADER.pack(MAGIC, FORMAT, len(content), name, checksum(content, name))
            record = bytearray(header + content.tobytes())
        else:
            at = record.find(MAGIC)
            record[at : at + 8] = HEADER.pack(MAGIC, FORMAT + 1, 0, b"", b"")[:8]
        store.write(name, bytes(record))


@pytest.mark.parametrize("damage", ["a byte", "cut", "zeros", "an old format", "another page", "no key"])
def test_a_damaged_or_planted_record_is_a_miss(store: Store, damage: str) -> None:
    if isinstance(store, Objects) and damage in ("another page", "no key"):
        pytest.skip("an object has several records")
    _, two = stored(store, key=KEY), world(store.client(), key=KEY)
    damaged(store, damage)
    found = fetched(two)
    # In an object of many records a flipped byte damages one page, the last; elsewhere each page is damaged.
    assert found < PAGES * SIZE
    stats = two.cache.tiers.stats()["shared"]
    if isinstance(store, Objects):
        assert stats.corrupt > 0 or stats.hits == 0  # an object that its head does not describe has no pages
    else:
        assert stats.corrupt > 0
    assert two.store(IDS) == found  # it is computed
    two.cache.evict(16)
    assert fetched(two) == PAGES * SIZE  # and stored again


@pytest.mark.parametrize("other", [KEY[::-1], None])
def test_pages_that_were_written_under_another_key_are_not_found(store: Store, other: bytes | None) -> None:
    _, two = stored(store, key=KEY), world(store.client(), key=other)
    assert fetched(two) == 0


def test_the_tier_keeps_no_more_than_its_size_and_deletes_its_own_pages_alone(store: Store) -> None:
    one = stored(store)
    frame = one.cache.frame_bytes + HEADER.size
    two = world(store.client(), size=4 * frame)
    for start in range(100, 600, 100):
        two.store(list(range(start, start + 4 * SIZE + 1)))
    if not isinstance(store, Objects):  # there records are in objects, of several pages
        until(lambda: len(store.records()) <= PAGES + 4)
    assert two.cache.tiers.stats()["shared"].pages <= 4
    three = world(store.client())
    assert fetched(three) == PAGES * SIZE  # those of the first are all there


def test_forget_deletes_what_the_process_stored_and_hides_the_rest(store: Store) -> None:
    one = stored(store)
    two = world(store.client())
    one.cache.forget()
    until(lambda: not store.records())  # another process may load what is not deleted yet
    assert fetched(two) == 0
    two.store(IDS)
    assert fetched(one) == 0  # stored by a process that may have other weights


class Asked(MemoryClient):
    """A client that counts the pages that lookups ask for."""

    num_asked = 0

    def find(self, names: Sequence[bytes]) -> list[bool]:
        if threading.current_thread().name == "pagedkv asker":
            self.num_asked += len(names)
        return super().find(names)


def over_host_and(client: Client) -> World:
    tiers = [HostTier("1MiB"), shared(client)]
    return World(PagedKVCache(SPEC, num_frames=16, tiers=tiers, model="a model"))


def test_a_store_is_asked_only_for_pages_that_faster_tiers_lack() -> None:
    store = Memory(Path())
    _, client = stored(store), Asked(store.contents)
    two = over_host_and(client)
    two.store(IDS[:21])
    two.cache.evict(16)
    assert fetched(two) == PAGES * SIZE
    assert client.num_asked == PAGES - 5  # five pages were in host memory
    two.cache.evict(16)
    assert fetched(two) == PAGES * SIZE
    assert client.num_asked == PAGES - 5  # now all are there


def test_a_record_that_another_process_stored_first_is_not_deleted() -> None:
    class Second(MemoryClient):
        def find(self, names: Sequence[bytes]) -> list[bool]:
            return [False] * len(names)  # the other process stores them now

        def put(self, names: Sequence[bytes], records: Sequence[tuple[bytes, Bytes]]) -> list[str]:
            return ["there"] * len(names)

    store = Memory(Path())
    _, two = stored(store), world(Second(store.contents))
    two.run(IDS)
    two.cache.tiers.tiers[0]._mover.drain(300)  # type: ignore[attr-defined]  # no store is polled
    two.cache.forget()
    close_all()
    assert len(store.contents) == PAGES


@pytest.mark.parametrize("store", ["redis"], indirect=True)
def test_a_page_that_another_process_stores_first_is_counted_there(store: Redis) -> None:
    client = store.client()
    assert client.put([bytes(32)], [(b"head", np.zeros(4, np.uint8))]) == [""]
    assert client.put([bytes(32)], [(b"head", np.ones(4, np.uint8))]) == ["there"]


def test_a_store_that_fails_after_it_kept_the_pages_keeps_none() -> None:
    class Late(MemoryClient):
        def put(self, names: Sequence[bytes], records: Sequence[tuple[bytes, Bytes]]) -> list[str]:
            super().put(names, records)
            raise TimeoutError("the answer came too late")

    store = Memory(Path())
    one = world(Late(store.contents))
    one.store(IDS)
    assert one.cache.tiers.stats()["shared"].failed == PAGES
    one.cache.tiers.close()
    assert not store.contents


def test_a_store_that_cannot_be_asked_costs_no_page_of_another_process() -> None:
    store = Memory(Path())
    silent = MemoryClient(store.contents)
    silent.find = Mock(side_effect=TimeoutError("no answer"))  # type: ignore[method-assign]
    one, two = stored(store), world(silent)
    two.store(IDS)
    assert two.cache.tiers.stats()["shared"].failed == PAGES
    two.cache.tiers.close()
    assert len(store.contents) == PAGES
    one.cache.evict(16)
    assert fetched(one) == PAGES * SIZE


def test_a_page_that_is_sent_while_the_process_forgets_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    sending, may_go_on = threading.Event(), threading.Event()

    class Slow(MemoryClient):
        def put(self, names: Sequence[bytes], records: Sequence[tuple[bytes, Bytes]]) -> list[str]:
            sending.set()
            may_go_on.wait(300)
            return super().put(names, records)

    monkeypatch.setattr(slots, "CLOSING", 0.05)
    store = Memory(Path())
    one = world(Slow(store.contents))
    one.run(IDS)
    assert sending.wait(300)
    one.cache.forget()
    may_go_on.set()
    assert one.cache.tiers.flush(300)
    one.cache.tiers.close()
    assert not store.contents


@pytest.mark.parametrize("store", ["redis"], indirect=True)
def test_a_value_of_another_type_costs_its_own_page_alone(store: Redis) -> None:
    _, two = stored(store), world(store.client())
    store.replace_by_list(store.records()[0])
    assert fetched(two) < PAGES * SIZE
    stats = two.cache.tiers.stats()["shared"]
    assert (stats.corrupt, stats.failed, stats.loaded) == (1, 0, PAGES - 1)


def test_an_object_that_a_store_has_kept_though_it_failed_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = object_client(tmp_path)
    write = client._write

    def late(*arguments: Any) -> None:
        write(*arguments)
        raise TimeoutError("the answer came too late")

    with monkeypatch.context() as patch:
        patch.setattr(client, "_write", late)
        with pytest.raises(TimeoutError):
            client.put([bytes(32)], [(bytes(HEADER.size), np.zeros(9, np.uint8))])
    assert list(tmp_path.rglob("pagedkv/*"))
    client.delete([bytes(32)])
    assert not list(tmp_path.rglob("pagedkv/*"))


def object_client(folder: Path) -> Any:
    return Objects(folder).client()


def test_one_short_object_costs_its_own_pages_alone(tmp_path: Path) -> None:
    pages, header = [bytes([at]) * 32 for at in range(4)], bytes(HEADER.size)
    one, two = object_client(tmp_path), object_client(tmp_path)
    one.put(pages, [(header, np.full(100, at, np.uint8)) for at in range(4)])
    assert two.find(pages) == [True] * 4
    [path] = tmp_path.rglob("pagedkv/*")
    path.write_bytes(path.read_bytes()[:-150])
    found = two.get(pages)
    whole = HEADER.size + 100
    assert [record is not None and len(record) == whole for record in found] == [True] * 3 + [False]
    assert two.find(pages) == [True] * 3 + [False]


def test_each_process_deletes_its_own_object_of_a_page_that_two_have_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "LISTED_EVERY", 0.0)
    one, two = object_client(tmp_path), object_client(tmp_path)
    for client in (two, one):
        client.put([bytes(32)], [(bytes(HEADER.size), np.zeros(9, np.uint8))])
    assert two.find([bytes([1]) * 32]) == [False]  # lists the object of the other
    two.delete([bytes(32)])
    assert len(list(tmp_path.rglob("pagedkv/*"))) == 1
    one.delete([bytes(32)])
    assert not list(tmp_path.rglob("pagedkv/*"))


def test_an_object_that_cannot_be_read_hides_no_later_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "LISTED_EVERY", 0.0)
    one, two = (object_client(tmp_path) for _ in range(2))
    pages = [bytes([at]) * 32 for at in range(3)]
    for page in pages:
        one.put([page], [(bytes(HEADER.size), np.zeros(9, np.uint8))])
    read, archived = two._get, min(path.name for path in tmp_path.rglob("pagedkv/*"))

    def get(path: str, start: int, length: int) -> Any:
        if path.endswith(archived):
            raise PermissionError("the object is archived")
        return read(path, start, length)

    monkeypatch.setattr(two, "_get", get)
    assert two.find(pages) == [False, True, True]
    one.put([bytes([9]) * 32], [(bytes(HEADER.size), np.zeros(9, np.uint8))])
    monkeypatch.setattr(two, "_get", lambda *_: (_ for _ in ()).throw(TimeoutError("no answer")))
    with pytest.raises(TimeoutError):  # a store that reads no head at all is down
        two.find([bytes([9]) * 32])
    monkeypatch.setattr(two, "_get", read)
    assert two.find(pages) == [True] * 3


def test_an_interrupt_of_a_question_leaves_a_thread_that_answers() -> None:
    pages = [bytes(32)]
    asker = _Asker(Records(MemoryClient({}), None))
    for at in range(1, count_instructions(lambda: asker.ask(pages, 300)) + 1):
        interrupted(at, lambda: asker.ask(pages, 300))
        if asker._last is not None:
            assert asker._last.is_answered.wait(60), at
        assert asker.ask(pages, 300) == [False]
    assert asker.close()


class Hung(MemoryClient):
    """A client whose server does not answer until `may_answer` is set."""

    def __init__(self, contents: dict[bytes, bytes]) -> None:
        super().__init__(contents)
        self.num_asked, self.may_answer = 0, threading.Event()

    def find(self, names: Sequence[bytes]) -> list[bool]:
        self.num_asked += 1
        self.may_answer.wait(300)
        return super().find(names)


def test_a_server_that_hangs_is_asked_once_and_costs_a_lookup_its_patience_and_no_more() -> None:
    store = Memory(Path())
    _, client = stored(store), Hung(store.contents)
    two = world(client, patience=0.05)
    for _ in range(4):  # while the first question is open, no other waits
        assert two.cache.fetch(IDS).asked == 0
    until(lambda: client.num_asked == 1)
    client.may_answer.set()
    until(lambda: two.cache.fetch(IDS).asked > 0)
    until(lambda: two.fetched(IDS) == PAGES * SIZE)


@pytest.mark.parametrize("store", ["redis"], indirect=True)
def test_a_server_that_dies_makes_every_page_a_miss(store: Redis) -> None:
    _, two = stored(store), world(store.client())
    find = two.cache.tiers.tiers[0].lookup
    fetch = two.cache.fetch(IDS)  # on its way
    store.close()
    assert fetch.wait(300)
    assert fetch.tokens in range(0, 41, SIZE)
    two.cache.evict(16)
    assert fetched(two) == 0
    assert two.store(list(range(100, 140))) == 0  # and others go on
    assert two.cache.tiers.stats()["shared"].failed > 0
    assert not find([]).size


def test_a_full_server_refuses_pages_and_goes_on_with_the_others(tmp_path: Path) -> None:
    store = Redis(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    tiers = [shared(store.client(), "64MiB")]
    full = World(PagedKVCache(replace(SPEC, num_layers=256), num_frames=64, tiers=tiers, model="a model"))
    for start in range(0, 1000, 100):
        full.store(list(range(start, start + 41)))
    stats = full.cache.tiers.stats()["shared"]
    assert stats.stored > 0
    assert stats.refused > 0
    store.close()


def test_mooncake_shares_pages_and_a_dead_master_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_TCP_BIND_ADDRESS", "127.0.0.1")
    store = Mooncake(tmp_path)
    one, two = (world(store.client()) for _ in range(2))
    one.store(IDS)
    assert fetched(two) == PAGES * SIZE
    assert two.store(list(range(100, 141))) == 0
    assert [each.cache.tiers.stats()["shared"].stored for each in (one, two)] == [PAGES, PAGES]
    one.cache.evict(16)
    assert one.fetched(list(range(100, 141))) == PAGES * SIZE
    store.process.kill()
    two.cache.evict(16)
    assert fetched(two) == 0
    two.store(list(range(200, 241)))  # and others go on
    assert two.cache.tiers.stats()["shared"].failed == PAGES
    close_all()
    store.close()


LARGE = replace(SPEC, num_layers=512)
"""Frames of 256 KiB, so that ten pages make an object of more than 2 MiB."""


def test_pages_in_large_objects_are_found_by_others_and_a_server_that_dies_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "LISTED_EVERY", 0.0)
    s3, large = S3(tmp_path), {"spec": LARGE, "size": "64MiB"}
    one, two = stored(s3, **large, threads=1), world(s3.client(), **large)  # type: ignore[arg-type]
    [name] = s3.records()
    assert name.startswith(b"a/prefix/pagedkv/")
    assert len(s3.read(name)) >= 2 << 20
    assert fetched(two) == PAGES * SIZE
    assert two.cache.tiers.stats()["shared"].loaded == PAGES
    other = world(s3.client(), **large, model="another")  # type: ignore[arg-type]
    assert fetched(other) == 0
    one.cache.forget()  # deletes the object
    until(lambda: not s3.records())
    two.cache.evict(16)
    assert fetched(two) == 0
    two.store(IDS)
    two.cache.evict(16)
    fetch = two.cache.fetch(IDS)
    assert fetch.asked == PAGES * SIZE
    s3.close()
    assert fetch.wait(300)
    two.check_found(IDS)
    two.run(list(range(100, 141)))  # others go on
    two.cache.tiers.flush(300)  # False if the tier is skipped by now, as it fails
    assert two.cache.tiers.stats()["shared"].failed > 0
    assert two.cache.stats().mapped == 0
