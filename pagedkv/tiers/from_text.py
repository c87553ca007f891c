"""Tiers as a person writes them: host:16GiB, or disk:200GiB:FOLDER."""

from __future__ import annotations

from collections.abc import Sequence

from pagedkv.errors import InvalidRequest
from pagedkv.tiers.disk import DiskTier
from pagedkv.tiers.host import HostTier
from pagedkv.tiers.tier import Tier

FORMS = "host:SIZE or disk:SIZE:FOLDER, such as host:16GiB or disk:200GiB:/var/cache/pagedkv"


def tiers_of(given: Sequence[Tier | str]) -> list[Tier]:
    """Return the tiers of a list in which some are texts. Raises: InvalidRequest for a text that names no tier"""
    tiers = list[Tier]()
    for one in given:
        if not isinstance(one, str):
            tiers.append(one)
            continue
        kind, _, rest = one.partition(":")
        size, _, folder = rest.partition(":")
        if kind == "host" and size and not folder:
            tiers.append(HostTier(size))
        elif kind == "disk" and size and folder:
            tiers.append(DiskTier(folder, size))
        else:
            raise InvalidRequest(f"a tier is {one!r}; give {FORMS}")
    return tiers
