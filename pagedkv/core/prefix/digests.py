"""Digests: the names of pages outside this process. A digest is a chained sha256 over packed tokens.

    root:  sha256("root" ‖ tenant)
    page:  sha256("page" ‖ digest of the page before, or of its root ‖ tokens as little-endian int32)

A digest is computed only when a page or its name leaves the process. It is equal in every process and on every machine.
The prefix hashes of the index are not: they are keyed, and have only 32 bits. The words "root" and "page" keep the name
of a tenant from passing for a page.
"""

from __future__ import annotations

import hashlib

import numpy as np

from pagedkv.core.state import I32


def root_digest(tenant: bytes) -> bytes:
    """32 bytes: the digest of the empty prefix of `tenant`."""
    return hashlib.sha256(b"root" + tenant).digest()


def page_digest(before: bytes, tokens: I32) -> bytes:
    """32 bytes: the digest of a page that holds `tokens` (int32 [S]) after a page, or root, with digest `before`."""
    return hashlib.sha256(b"page" + before + np.ascontiguousarray(tokens, "<i4").tobytes()).digest()
