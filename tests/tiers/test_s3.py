"""Object tiers over HTTP, against an S3 server of the test's own: objects of megabytes, damage, a server that dies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pagedkv.tiers.shared import objects
from tests.tiers.stores import S3
from tests.tiers.test_shared import IDS, PAGES, closed, fetched, stored, world
from tests.tiers.world import SIZE, SPEC, World

LARGE = replace(SPEC, num_layers=512)
"""Frames of 256 KiB, so that ten pages make an object of more than 2 MiB."""


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    monkeypatch.setattr(objects, "LISTED_EVERY", 0.0)
    store = S3(tmp_path)
    yield store
    store.close()


def filled(store: S3) -> tuple[World, World]:
    """Return a world that has stored IDS, in one object of megabytes, and another one over the same store."""
    one, two = stored(store, spec=LARGE, size="64MiB", threads=1), world(store.client(), LARGE, size="64MiB")
    [name] = store.records()
    assert name.startswith(b"a/prefix/pagedkv/")
    assert len(store.read(name)) >= 2 << 20
    return one, two


def test_pages_in_large_objects_are_found_by_others_and_not_by_other_models(s3: S3) -> None:
    one, two = filled(s3)
    assert fetched(two) == PAGES * SIZE
    assert two.cache.tiers.stats()["shared"].loaded == PAGES
    other = world(s3.client(), LARGE, size="64MiB", model="another")
    assert fetched(other) == 0
    one.cache.forget()  # deletes the object
    until = time.monotonic() + 20
    while s3.records() and time.monotonic() < until:
        time.sleep(0.01)
    assert not s3.records()
    two.cache.evict(16)
    assert fetched(two) == 0
    closed(one, two, other)


def test_an_object_that_is_cut_short_is_a_miss(s3: S3) -> None:
    one, two = filled(s3)
    [name] = s3.records()
    assert fetched(two) == PAGES * SIZE  # two has read the head
    two.cache.evict(16)
    s3.write(name, s3.read(name)[: len(s3.read(name)) // 2])
    assert fetched(two) < PAGES * SIZE
    assert two.cache.tiers.stats()["shared"].corrupt > 0
    closed(one, two)


def test_a_server_that_dies_while_pages_load_makes_them_misses(s3: S3) -> None:
    one, two = filled(s3)
    began = time.monotonic()
    fetch = two.cache.fetch(IDS)
    assert fetch.asked == PAGES * SIZE
    s3.close()
    assert fetch.wait(30)
    two.check_found(IDS)
    two.cache.evict(16)
    assert fetched(two) == 0
    two.run(list(range(100, 141)))  # others go on
    two.cache.tiers.flush(30)  # False if the tier is skipped by now, as it fails
    assert two.cache.tiers.stats()["shared"].failed > 0
    assert two.cache.stats().mapped == 0
    assert time.monotonic() - began < 30
    closed(one, two)
