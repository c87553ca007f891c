"""Tiers in stores that several processes share: one file for each vendor, over its own client."""

from __future__ import annotations

from pagedkv.errors import InvalidRequest
from pagedkv.tiers.shared.mooncake import MooncakeClient
from pagedkv.tiers.shared.objects import ObjectClient
from pagedkv.tiers.shared.records import Client
from pagedkv.tiers.shared.redis import RedisClient
from pagedkv.tiers.urls import shown

TIMEOUT = 2.0
"""Seconds after which a call to the store of `client_of` fails."""


def client_of(text: str) -> Client:
    """Return a client of the store that `text` names: "redis:URL", "objects:URL" or "mooncake:HOST:PORT".

    Raises: InvalidRequest for a text that names none, or without the package of the vendor; ConnectionError if a
            Mooncake master cannot be reached
    """
    kind, _, rest = text.partition(":")
    if kind == "redis" and rest:
        return RedisClient(rest, TIMEOUT, None)
    if kind == "objects" and rest:
        return ObjectClient(rest, TIMEOUT, {})
    if kind == "mooncake" and rest:
        return MooncakeClient(rest, "127.0.0.1", (0, 256 << 20), "tcp", "")
    raise InvalidRequest(f"a store is {shown(text)!r}; give redis:URL, objects:URL or mooncake:HOST:PORT")
