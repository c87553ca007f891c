"""Snapshots of prompts with salts: a restored page is found with its salts, and with no others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pagedkv import KVSpec, PagedKVCache
from pagedkv.cache import snapshots

SPEC = KVSpec(1, 1, 64, block_size=4, dtype="float32")
TOKENS = [5] * 17
SALTS: list[dict[int, bytes]] = [{}, {6: b"cat"}, {6: b"dog"}, {6: b"cat", 13: b"dog"}, {0: b"adapter", 6: b"cat"}]


def filled() -> PagedKVCache:
    """Return a cache in which the page of each salt has bytes of its own."""
    cache = PagedKVCache(SPEC, num_frames=64)
    for number, salt in enumerate(SALTS):
        space = cache.open(TOKENS, salt=salt)
        known = len(space)
        batch = cache.plan([space], [len(TOKENS) - known])
        cache.storage.frames[space.pages[known // 4 :].tolist()] = number
        cache.commit(batch, TOKENS[known:])
        space.release()
    return cache


def contents(cache: PagedKVCache, salt: dict[int, bytes]) -> list[int]:
    """Return the byte of each page found."""
    space = cache.open(TOKENS, salt=salt)
    found = [int(cache.storage.frames[frame][0]) for frame in space.pages.tolist()]
    space.release()
    return found


def test_a_restored_page_is_found_with_its_salts_alone(tmp_path: Path) -> None:
    old, new = filled(), PagedKVCache(SPEC, num_frames=64)
    assert new.restore(tmp_path).refused
    pages = old.snapshot(tmp_path)
    assert new.restore(tmp_path) == snapshots.Restored(pages=pages)
    for salt in [*SALTS, {5: b"cat"}, {6: b"cat", 12: b"dog"}]:
        assert contents(new, salt) == contents(old, salt)
    assert contents(new, SALTS[3]) == [0, 1, 1, 3]
    assert contents(new, SALTS[4]) == [4] * 4
    new.check()


@pytest.mark.parametrize("change", ["another salt", "another offset", "an empty salt", "no list", "twice"])
def test_a_salt_that_was_changed_on_disk_is_a_miss(tmp_path: Path, change: str) -> None:
    cache = filled()
    pages = cache.snapshot(tmp_path)
    path = tmp_path / snapshots.MANIFEST
    manifest = json.loads(path.read_text())
    at = manifest["salts"].index([[2, b"dog".hex()]])
    manifest["salts"][at] = {
        "another salt": [[2, b"cow".hex()]],
        "another offset": [[1, b"dog".hex()]],
        "an empty salt": [[2, ""]],
        "no list": 7,
        "twice": [[2, b"dog".hex()]] * 2,
    }[change]
    path.write_text(json.dumps(manifest))
    new = PagedKVCache(SPEC, num_frames=64)
    restored = new.restore(tmp_path)
    if change.startswith("another"):
        assert (restored.pages, restored.bad) == (pages - 3, 3)
        assert contents(new, {6: b"dog"}) == [0]
        assert contents(new, {6: b"cow"}) == [0]
    else:
        assert restored.refused
    assert torch.equal(torch.tensor(contents(new, {})), torch.tensor([0] * 4 if not restored.refused else []))
    new.check()
