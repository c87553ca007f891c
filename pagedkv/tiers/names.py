"""The names of pages in tiers: one for each (tokens, tenant, salts, layer group) of a cache with one fingerprint.

    digest of a page   chained sha256 over tenant, tokens and salts     core/prefix/digests.py
    name               BLAKE2b(digest ‖ layer group), its key the fingerprint of the cache

A tier adds the facts that it knows, model and rank, to the fingerprint.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pagedkv.core.arguments import salt_row
from pagedkv.core.prefix.digests import page_digest, root_digest
from pagedkv.core.state import I32
from pagedkv.spec import KVSpec
from pagedkv.tiers.tier import KEY_BYTES, Key

FORMAT = 1


def fingerprint(specs: Sequence[KVSpec], layer_groups: Sequence[int], frame_bytes: int) -> bytes:
    """Return 32 bytes that two caches share if the bytes of their frames mean the same."""
    facts: dict[str, Any] = {
        "format": FORMAT,
        "specs": [asdict(spec) for spec in specs],
        "layer_groups": list(layer_groups),
        "frame_bytes": frame_bytes,
        "byte_order": sys.byteorder,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()


class Namer:
    """Makes the keys of pages for a cache with `fingerprint` and so many layer groups."""

    def __init__(self, fingerprint: bytes, num_groups: int) -> None:
        self._fingerprint, self._num_groups = fingerprint, num_groups

    def key(self, digest: bytes, tenant: bytes, group: int) -> Key:
        """Return the key of a page with this digest in `group`."""
        hasher = hashlib.blake2b(digest + struct.pack("<i", group), digest_size=KEY_BYTES, key=self._fingerprint)
        return Key(hasher.digest(), tenant)

    def keys_of(
        self, ids: I32, tenant: bytes, salt: bytes | Mapping[int, bytes], block_size: int
    ) -> Iterator[list[Key]]:
        """Yield the keys of each full page of `ids` (int32 [n]), one for each group."""
        salts, digest = salt_row(salt) if salt != b"" else (), root_digest(tenant)
        for first in range(0, len(ids) - block_size + 1, block_size):
            own = tuple((at - first, each) for at, each in salts if first <= at < first + block_size)
            digest = page_digest(digest, ids[first : first + block_size], own)
            yield [self.key(digest, tenant, group) for group in range(self._num_groups)]
