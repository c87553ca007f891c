"""Tiers as a person writes them: host:16GiB, disk:200GiB:FOLDER, or a store that processes share, redis:40GiB:URL.

The key of what processes share is PAGEDKV_TIER_KEY, so that it stands neither in a command line nor in the list of
processes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from pagedkv import debug
from pagedkv.errors import InvalidRequest
from pagedkv.spec import parse_bytes
from pagedkv.tiers.disk import DiskTier
from pagedkv.tiers.host import HostTier
from pagedkv.tiers.shared.mooncake import MooncakeTier
from pagedkv.tiers.shared.objects import ObjectTier
from pagedkv.tiers.shared.redis import RedisTier
from pagedkv.tiers.tier import Tier

FORMS = (
    "host:SIZE, disk:SIZE:FOLDER, redis:SIZE:URL, objects:SIZE:URL or mooncake:SIZE:HOST:PORT, such as host:16GiB or "
    "disk:200GiB:/var/cache/pagedkv"
)

_WITH_A_PLACE: Final[dict[str, Callable[..., Tier]]] = {
    kind.kind: kind for kind in (DiskTier, RedisTier, ObjectTier, MooncakeTier)
}

_PLAIN: Final = re.compile(r"[a-z]*(:[\d.]*\s*\w{0,3}(:\w*)?)?")
"""A text without a URL: a kind, a size, and perhaps a word."""


def tiers_of(given: Sequence[Tier | str]) -> list[Tier]:
    """Return the tiers of a list in which some are texts. Raises: InvalidRequest for a text that names no tier"""
    return [_tier_of(one) if isinstance(one, str) else one for one in given]


def _tier_of(text: str) -> Tier:
    kind, _, rest = text.partition(":")
    size, _, place = rest.partition(":")
    if kind == "host" and size and not place:
        return HostTier(size)
    if kind in _WITH_A_PLACE and re.fullmatch(r"[\w. ]+", size) and place:
        parse_bytes(size)  # first: without a size, the place is a part of a URL
        return _WITH_A_PLACE[kind](place, size, key=debug.tier_key())
    hidden = f"{kind}:***" if kind in _WITH_A_PLACE else "***"  # a URL in it may have a password anywhere
    raise InvalidRequest(f"a tier is {text if _PLAIN.fullmatch(text) else hidden!r}; give {FORMS}")
