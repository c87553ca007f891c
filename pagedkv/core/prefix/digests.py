"""Digests: what a page is called outside this process. Chained sha256 over packed tokens; computed only when something leaves.

    root:  sha256("root" ‖ tenant)
    page:  sha256("page" ‖ digest of the page before, or of its root ‖ tokens as little-endian int32)

Equal in every process and on every machine, unlike the index's fingerprints, which are keyed and only 32 bits. The two words keep a tenant's name
from passing for a page.
"""

from __future__ import annotations

import hashlib

import numpy as np

from pagedkv.core.state import I32


def root_digest(tenant: bytes) -> bytes:
    """32 bytes for the empty prefix of `tenant`."""
    return hashlib.sha256(b"root" + tenant).digest()


def page_digest(before: bytes, tokens: I32) -> bytes:
    """32 bytes for a page that holds `tokens` (int32 [S]) after a page, or root, of digest `before`."""
    return hashlib.sha256(b"page" + before + np.ascontiguousarray(tokens, "<i4").tobytes()).digest()
