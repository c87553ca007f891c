"""Digests: the names of pages outside this process. A digest is a chained sha256 over packed tokens.

    root:  sha256("root" ‖ tenant)
    page:  sha256("page" ‖ digest of the page before, or of its root ‖ tokens as little-endian int32)
    page with salts: sha256("salt" ‖ digest of a page without them ‖ for each salt: its offset and its length as
                            little-endian int32, and the salt)

A digest is computed only when a page or its name leaves the process. It is equal in every process and on every machine.
The prefix hashes of the index are not: they are keyed, and have only 32 bits. The words "root", "page" and "salt" keep
the name of a tenant from passing for a page.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pagedkv.core.prefix.roots import Salts
from pagedkv.core.state import I32


def root_digest(tenant: bytes) -> bytes:
    """32 bytes: the digest of the empty prefix of `tenant`."""
    return hashlib.sha256(b"root" + tenant).digest()


def page_digest(before: bytes, tokens: I32, salts: Salts = ()) -> bytes:
    """32 bytes: the digest of a page that holds `tokens` (int32 [S]) after a page, or root, with digest `before`.

    salts: the page's salts, with their offsets in the page.
    """
    digest = hashlib.sha256(b"page" + before + np.ascontiguousarray(tokens, "<i4").tobytes()).digest()
    if not salts:
        return digest
    parts = [struct.pack("<2i", offset, len(salt)) + salt for offset, salt in salts]
    return hashlib.sha256(b"salt" + digest + b"".join(parts)).digest()


def page_digests(
    token_ids: Sequence[int] | npt.NDArray[np.integer], block_size: int, *, tenant: bytes = b""
) -> list[bytes]:
    """Return the digest of each whole page of a prompt without salts: the names of its blocks in events."""
    ids, digest, digests = np.asarray(token_ids, np.int32), root_digest(tenant), list[bytes]()
    for at in range(0, len(ids) - block_size + 1, block_size):
        digest = page_digest(digest, ids[at : at + block_size])
        digests.append(digest)
    return digests
