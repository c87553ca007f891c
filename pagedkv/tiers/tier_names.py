"""The names of pages in tiers: one for each (tokens, tenant, salts, layer group) of a cache with one fingerprint.

    digest of a page   chained sha256 over tenant, tokens and salts     core/prefix/digests.py
    name               BLAKE2b(digest ‖ layer group), its key the fingerprint of the cache

The fingerprint covers geometry and dtype, the name of the weights, and the rank.
"""

from __future__ import annotations

import hashlib
import json
import os
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

FORMAT = 2


def fingerprint(
    specs: Sequence[KVSpec], layer_groups: Sequence[int], frame_bytes: int, *, model: str = "", rank: int = 0
) -> bytes:
    """Return 32 bytes that two caches share if the bytes of their frames mean the same.

    model: a name for the weights and all else that decides the bytes. rank: the part of a model that is split.
    """
    facts: dict[str, Any] = {
        "format": FORMAT,
        "specs": [asdict(spec) for spec in specs],
        "layer_groups": list(layer_groups),
        "frame_bytes": frame_bytes,
        "byte_order": sys.byteorder,
        "model": model,
        "rank": rank,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()


def states_fingerprint(of_pages: bytes, layers: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the fingerprint of the recurrent states of a cache. layers: those of its StateSpec."""
    return hashlib.sha256(of_pages + json.dumps(list(layers), sort_keys=True).encode()).digest()


class Namer:
    """Makes the keys of pages for a cache with `fingerprint` and so many layer groups, and those of its states."""

    def __init__(self, fingerprint: bytes, num_groups: int, of_states: bytes = b"") -> None:
        self._fingerprint, self._num_groups, self._of_states = fingerprint, num_groups, of_states

    def renamed(self) -> Namer:
        """Return a namer with other names: they find no page that was stored before."""
        return Namer(os.urandom(KEY_BYTES), self._num_groups, os.urandom(KEY_BYTES))

    def key(self, digest: bytes, tenant: bytes, group: int) -> Key:
        """Return the key of a page with this digest in `group`."""
        hasher = hashlib.blake2b(digest + struct.pack("<i", group), digest_size=KEY_BYTES, key=self._fingerprint)
        return Key(hasher.digest(), tenant)

    def state_key(self, digest: bytes, tenant: bytes) -> Key:
        """Return the key of the recurrent state after the page with this digest."""
        return Key(hashlib.blake2b(digest, digest_size=KEY_BYTES, key=self._of_states).digest(), tenant)

    def keys_of(
        self,
        ids: I32,
        tenant: bytes,
        salt: bytes | Mapping[int, bytes],
        *,
        block_size: int,
        first: int = 0,
        digests: list[bytes] | None = None,
    ) -> Iterator[list[Key]]:
        """Yield the keys of each full page of `ids` (int32 [n]) from page `first` on, one for each group.

        A page is hashed when it is asked for. digests: of the pages from the first on, as far as they were hashed for
        the same tokens before; it grows, so that no page is hashed twice.
        """
        salts, hashed = salt_row(salt) if salt != b"" else (), [] if digests is None else digests
        for page, at in enumerate(range(0, len(ids) - block_size + 1, block_size)):
            if page == len(hashed):
                own = tuple((place - at, each) for place, each in salts if at <= place < at + block_size)
                before = hashed[-1] if hashed else root_digest(tenant)
                hashed.append(page_digest(before, ids[at : at + block_size], own))
            if page >= first:
                yield [self.key(hashed[page], tenant, group) for group in range(self._num_groups)]
