"""RedisTier: pages in Redis or Valkey, one string each.

    pagedkv:<name in hex>   header and bytes of a page

The server decides what to do when its memory is full: with `maxmemory-policy allkeys-lru` it drops the records used
longest ago, with `noeviction` it refuses new ones, which the tier counts as refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from pagedkv.core.arguments import real, whole
from pagedkv.errors import InvalidRequest
from pagedkv.tiers.checksum import Bytes
from pagedkv.tiers.shared.records import THERE, Record
from pagedkv.tiers.shared.tier import SharedTier
from pagedkv.tiers.slots import FULL
from pagedkv.tiers.urls import reason, shown

PREFIX: Final = b"pagedkv:"


class RedisTier(SharedTier):
    """Pages in the Redis or Valkey server at `url`, such as "redis://127.0.0.1:6379/0".

    timeout: seconds after which a call to the server fails.
    expire:  seconds after which the server drops a page; None: never.
    size, key, threads, patience, limit, policy: see SharedTier.
    Raises:  InvalidRequest, also without the package redis. A server that is down makes every page a miss
    """

    kind = "redis"

    def __init__(
        self, url: str, size: str | int, *, timeout: float = 2.0, expire: int | None = None, **options: Any
    ) -> None:
        super().__init__(RedisClient(url, timeout, expire), size, **options)


class RedisClient:
    """Records in Redis. See Client."""

    def __init__(self, url: str, timeout: float, expire: int | None) -> None:
        try:
            import redis
        except ImportError:
            raise InvalidRequest("a tier in Redis needs the package redis: pip install 'pagedkv[redis]'") from None
        self._out_of_memory = redis.exceptions.OutOfMemoryError
        self._wrong_type = redis.exceptions.ResponseError
        self._expire = None if expire is None else whole(expire, "expire", 1)
        if not 0 < real(timeout, "timeout") < math.inf:
            raise InvalidRequest(f"timeout is {timeout}; give the seconds after which a call to the server fails")
        if not isinstance(url, str):
            raise InvalidRequest(
                f"the url of Redis has the type {type(url).__name__}; give a text such as redis://127.0.0.1:6379/0"
            )
        self.url: str = url
        why = ""
        try:
            self._redis = redis.Redis.from_url(
                url, socket_timeout=timeout, socket_connect_timeout=timeout, decode_responses=False
            )
        except ValueError as error:
            why = reason(error, url)
        if why:  # outside of the handler: the exception shows the URL
            raise InvalidRequest(f"the url of Redis is {shown(url)!r} ({why}); give redis://127.0.0.1:6379/0")

    def find(self, names: Sequence[bytes]) -> list[bool]:
        """See Client.find."""
        pipe = self._redis.pipeline(transaction=False)
        for name in names:
            pipe.exists(_key(name))
        return [bool(count) for count in pipe.execute()]

    def get(self, names: Sequence[bytes]) -> list[Record | None]:
        """See Client.get."""
        pipe = self._redis.pipeline(transaction=False)
        for name in names:
            pipe.get(_key(name))
        return [self._record(answer) for answer in pipe.execute(raise_on_error=False)]

    def _record(self, answer: Any) -> Record | None:
        """Return a record. A value of another type, which somebody else wrote, is a damaged one."""
        if isinstance(answer, self._wrong_type) and str(answer).startswith("WRONGTYPE"):
            return b""
        if isinstance(answer, Exception):
            raise answer
        record: Record | None = answer
        return record

    def put(self, names: Sequence[bytes], records: Sequence[tuple[bytes, Bytes]]) -> list[str]:
        """See Client.put."""
        pipe = self._redis.pipeline(transaction=False)
        for name, (header, content) in zip(names, records, strict=True):
            pipe.set(_key(name), b"".join((header, content.data)), ex=self._expire, nx=True)
        return [self._why(answer) for answer in pipe.execute(raise_on_error=False)]

    def _why(self, answer: object) -> str:
        if isinstance(answer, self._out_of_memory):
            return FULL
        if isinstance(answer, Exception):
            return f"failed: {reason(answer, self.url)}"
        return "" if answer else THERE  # another process has stored it meanwhile: it counts the record

    def delete(self, names: Sequence[bytes]) -> None:
        """See Client.delete."""
        if names:
            self._redis.unlink(*map(_key, names))

    def close(self) -> None:
        """See Client.close."""
        self._redis.close()


def _key(name: bytes) -> bytes:
    return PREFIX + name.hex().encode()
