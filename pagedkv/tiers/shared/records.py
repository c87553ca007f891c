"""Records: pages in a store that others write to, too, each verified when it is read.

    record    header of 64 bytes: magic, format, number of bytes, name, checksum │ the bytes of a page
    name      that of the page, hashed once more under the key: who has no key does not know where pages lie

The clients of the vendors, one file each, know bytes by name. This file knows what a record must look like; it must not
know frames, tokens or a vendor.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

import numpy as np

from pagedkv.tiers.checksum import Bytes, checksum, require_secret
from pagedkv.tiers.urls import reason

MAGIC: Final = b"PKVr"
FORMAT: Final = 1
HEADER: Final = struct.Struct("<4sIQ32s16s")
"""magic, format, number of bytes, name, checksum."""
MISSING, DAMAGED = "missing", "damaged"
THERE: Final = "there"
"""The end of a store whose page another process has stored already."""

Record = bytes | memoryview
_Answer = TypeVar("_Answer")


class Client(Protocol):
    """Bytes by name, in a store of some vendor.

    All methods block until the store has answered, raise an exception if it does not, and may be called by several
    threads at a time. Names are bytes [32]. A client whose store has a URL keeps it as `url`: see Records.
    """

    def find(self, names: Sequence[bytes]) -> list[bool]:
        """Return whether the store has each record."""

    def get(self, names: Sequence[bytes]) -> list[Record | None]:
        """Return each record; None for one that is not there."""

    def put(self, names: Sequence[bytes], records: Sequence[tuple[bytes, Bytes]]) -> list[str]:
        """Store records, each a header and uint8 [n]. Return for each "" or the reason why it was refused."""

    def delete(self, names: Sequence[bytes]) -> None:
        """Remove records. A name without a record is no error."""

    def close(self) -> None:
        """End the connections."""


class Records:
    """Pages by name behind `client`, each with a header that says what it is.

    key:    16 to 64 secret bytes, the same for all who share the store. Pages of others are not found.
    Raises: InvalidRequest. Every other method: OSError for an exception of the client, without the secrets of its URL
    """

    def __init__(self, client: Client, key: bytes | None) -> None:
        require_secret(key)
        self._client, self._key = client, key

    def _ask(self, call: Callable[..., _Answer], *arguments: object) -> _Answer:
        try:
            return call(*arguments)
        except Exception as error:
            why = reason(error, getattr(self._client, "url", ""))
        raise OSError(why)  # outside of the handler, so that a traceback shows no exception of the client

    def _names(self, pages: Sequence[bytes]) -> list[bytes]:
        """Return the names of the records of pages, bytes [32] each."""
        key = self._key or b""
        return [hashlib.blake2b(page, digest_size=32, key=key, person=b"pagedkv name").digest() for page in pages]

    def find(self, pages: Sequence[bytes]) -> list[bool]:
        """Return whether the store has each page."""
        return self._ask(self._client.find, self._names(pages)) if pages else []

    def put(self, pages: Sequence[bytes], contents: Sequence[Bytes]) -> list[str]:
        """Store pages, uint8 [n] each. Return for each "" or the reason why it was refused."""
        if not pages:
            return []
        names = self._names(pages)
        pairs = zip(names, contents, strict=True)
        return self._ask(self._client.put, names, [(self._header(name, content), content) for name, content in pairs])

    def get(self, pages: Sequence[bytes], num_bytes: int) -> list[Bytes | str]:
        """Return the bytes of each page, uint8 [num_bytes], or MISSING, or DAMAGED. A damaged record is deleted."""
        names = self._names(pages)
        found = zip(names, self._ask(self._client.get, names), strict=True)
        contents = [self._content(name, record, num_bytes) for name, record in found]
        if damaged := [name for name, content in zip(names, contents, strict=True) if content is DAMAGED]:
            self._ask(self._client.delete, damaged)
        return contents

    def delete(self, pages: Sequence[bytes]) -> None:
        """Remove pages."""
        self._ask(self._client.delete, self._names(pages))

    def close(self) -> None:
        """End the connections."""
        self._ask(self._client.close)

    def _content(self, name: bytes, record: Record | None, num_bytes: int) -> Bytes | str:
        if record is None:
            return MISSING
        if len(record) != HEADER.size + num_bytes:
            return DAMAGED
        content = np.frombuffer(record, np.uint8, offset=HEADER.size)
        return content if bytes(record[: HEADER.size]) == self._header(name, content) else DAMAGED

    def _header(self, name: bytes, content: Bytes) -> bytes:
        return HEADER.pack(MAGIC, FORMAT, len(content), name, checksum(content, name, self._key))
