"""The checksum of a page: xxh3, 128 bits. It finds damage, not malice.

A store that others can write to needs a key: then the checksum is BLAKE2b under that key, and a page that was not
written with it does not fit. xxh3 reads about 30 GB/s a core, BLAKE2b about 1.
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from pagedkv.errors import InvalidRequest

SUM_BYTES: Final = 16
LEAST_LONG: Final = 241
"""Bytes from which xxh3 has the formula that csrc/cpu/moves/runs.cpp computes while it copies."""

Bytes = npt.NDArray[np.uint8]


def checksum(content: Bytes, name: bytes, key: bytes | None = None) -> bytes:
    """Return 16 bytes for `content` (uint8 [n], contiguous), stored under `name`. key: 16 to 64 secret bytes, or None.

    With a key the name is covered, too: so no page passes for another one.
    """
    if key is None:
        return xxhash.xxh3_128_digest(content.data)
    hasher = hashlib.blake2b(name, digest_size=SUM_BYTES, key=key)
    hasher.update(content.data)
    return hasher.digest()


def require_secret(key: object) -> None:
    """Raise InvalidRequest for a key that is neither None nor 16 to 64 bytes."""
    if key is not None and not (isinstance(key, bytes) and 16 <= len(key) <= hashlib.blake2b.MAX_KEY_SIZE):
        raise InvalidRequest("key is not 16 to 64 bytes; give so many secret bytes, or None")
