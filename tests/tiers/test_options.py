"""Wrong options of tiers are refused in words before the first page, and change nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedkv import PagedKVCache
from pagedkv.errors import InvalidRequest
from pagedkv.tiers import DiskTier, HostTier, ObjectTier, RedisTier, SharedTier, UsedAgain
from tests.tiers.stores import MemoryClient
from tests.tiers.world import SPEC

HOST: Any = {"size": "1MiB"}
DISK: Any = HOST | {"folder": "."}
SHARED: Any = HOST | {"client": MemoryClient({}), "key": None}
REDIS: Any = HOST | {"url": "redis://127.0.0.1", "key": None}
OBJECTS: Any = HOST | {"url": "s3://bucket", "key": None}

TIERS: list[tuple[Callable[..., Any], dict[str, Any], str, str]] = [
    *((HostTier, HOST | {"limit": limit}, "limit", "") for limit in (0, -1)),
    (HostTier, HOST | {"verify": "no"}, "verify", ""),
    (HostTier, {"size": "1PiB"}, "not an amount", ""),
    (HostTier, {"size": "100TiB"}, "memory of this machine", ""),
    (HostTier, {"size": 1}, "has 1 bytes", ""),
    (HostTier, HOST | {"policy": "nonsense"}, "policy", ""),
    *((DiskTier, DISK | {"threads": threads}, "threads", "") for threads in (0, "2")),
    (DiskTier, DISK | {"direct": 1}, "direct", ""),
    *((DiskTier, DISK | {"folder": folder}, "folder", "") for folder in (None, "a\0b")),
    (SharedTier, SHARED | {"key": b"short"}, "key", ""),
    (SharedTier, SHARED | {"threads": 0}, "threads", ""),
    *((SharedTier, SHARED | {"patience": patience}, "patience", "") for patience in ("soon", -1.0)),
    (SharedTier, SHARED | {"limit": 0}, "limit", ""),
    *((RedisTier, REDIS | {"timeout": timeout}, "timeout", "redis") for timeout in (-1.0, 0, math.inf, "2")),
    *((RedisTier, REDIS | {"expire": expire}, "expire", "redis") for expire in (0, 1.5)),
    *((RedisTier, REDIS | {"url": url}, "url", "redis") for url in (None, 5)),
    *((ObjectTier, OBJECTS | {"url": url}, "url", "obstore") for url in (None, 5)),
    *((ObjectTier, OBJECTS | {"store": store}, "url", "obstore") for store in (5, [("a", "b")])),
    *(
        (ObjectTier, OBJECTS | {"url": "file:///tmp", "linger": linger}, "linger", "obstore")
        for linger in (-1.0, math.inf, math.nan, "1", None)
    ),
]
CACHES: list[tuple[dict[str, Any], str]] = [
    *(({"tiers": [wrong]}, "is no tier") for wrong in (object(), "host:1MiB")),
    *(({"tiers": [HostTier("1MiB")], "write_back": wrong}, "write_back") for wrong in (UsedAgain, object())),
    *(({"tiers": [HostTier("1MiB")], "model": wrong}, "model") for wrong in (None, b"m")),
    *(({"tiers": [HostTier("1MiB")], "rank": wrong}, "rank") for wrong in ("x", -1)),
    ({"tiers": [DiskTier("/none", "1MiB")]}, "no name for its weights"),
    ({"tiers": [SharedTier(**SHARED)]}, "model="),
]


@pytest.mark.parametrize(("make", "options", "word", "needs"), TIERS)
def test_a_wrong_option_of_a_tier(
    make: Callable[..., Any], options: dict[str, Any], word: str, needs: str, tmp_path: Path
) -> None:
    if needs:
        pytest.importorskip(needs)
    options = options | {"folder": tmp_path} if options.get("folder") == "." else options
    with pytest.raises(InvalidRequest, match=word):
        PagedKVCache(SPEC, model="m", num_frames=16, tiers=[make(**options)])


@pytest.mark.parametrize(("options", "word"), CACHES)
def test_a_wrong_option_of_a_cache(options: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidRequest, match=word):
        PagedKVCache(SPEC, num_frames=16, **options)


@pytest.mark.parametrize("verb", ["flush", "quiesce", "close"])
def test_a_wrong_timeout(verb: str) -> None:
    cache = PagedKVCache(SPEC, num_frames=16, tiers=[HostTier("1MiB")])
    for timeout in ("x", float("nan"), []):
        with pytest.raises(InvalidRequest, match="timeout"):
            getattr(cache.tiers, verb)(timeout)
    assert cache.tiers.close()
