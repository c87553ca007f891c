"""Clients of stores refuse wrong options in words, and outlive an object, or an interrupt, that breaks a call."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedkv.errors import InvalidRequest
from pagedkv.tiers import ObjectTier, RedisTier
from pagedkv.tiers.shared import objects
from pagedkv.tiers.shared.records import HEADER, Records
from pagedkv.tiers.shared.tier import _Asker
from tests.interrupts import Interrupter, count_instructions
from tests.tiers.stores import MemoryClient, Objects


@pytest.mark.parametrize(
    ("url", "options", "word"),
    [
        ("redis://127.0.0.1", {"timeout": -1.0}, "timeout"),
        ("redis://127.0.0.1", {"timeout": 0}, "timeout"),
        ("redis://127.0.0.1", {"timeout": math.inf}, "timeout"),
        ("redis://127.0.0.1", {"timeout": "2"}, "timeout"),
        ("redis://127.0.0.1", {"expire": 0}, "expire"),
        ("redis://127.0.0.1", {"expire": 1.5}, "expire"),
        (None, {}, "url"),
        (5, {}, "url"),
    ],
)
def test_wrong_options_of_redis_are_refused_in_words(url: Any, options: dict[str, Any], word: str) -> None:
    pytest.importorskip("redis")
    with pytest.raises(InvalidRequest, match=word):
        RedisTier(url, "1MiB", key=None, **options)


@pytest.mark.parametrize(("url", "store"), [(None, None), (5, None), ("s3://bucket", 5), ("s3://bucket", [("a", "b")])])
def test_wrong_options_of_objects_are_refused_in_words(url: Any, store: Any) -> None:
    pytest.importorskip("obstore")
    with pytest.raises(InvalidRequest, match="url"):
        ObjectTier(url, "1MiB", key=None, store=store)


@pytest.mark.parametrize("linger", [-1.0, math.inf, math.nan, "1", None])
def test_a_linger_that_never_ends_is_refused(tmp_path: Path, linger: Any) -> None:
    pytest.importorskip("obstore")
    with pytest.raises(InvalidRequest, match="linger"):
        ObjectTier(f"file://{tmp_path}", "1MiB", key=None, linger=linger)


def test_an_object_that_cannot_be_read_hides_no_later_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "LISTED_EVERY", 0.0)
    one, two = (Objects(tmp_path).client() for _ in range(2))
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
    monkeypatch.setattr(two, "_get", read)
    assert two.find(pages) == [True] * 3


def test_an_interrupt_of_a_question_leaves_a_thread_that_answers() -> None:
    pages = [bytes(32)]
    asker = _Asker(Records(MemoryClient({}), None))
    for at in range(1, count_instructions(lambda: asker.ask(pages, 20)) + 1):
        with contextlib.suppress(KeyboardInterrupt):
            Interrupter(at).run(lambda: asker.ask(pages, 20))
        if asker._last is not None:
            assert asker._last.is_answered.wait(20), at
        assert asker.ask(pages, 20) == [False]
    assert asker.close()
