"""ObjectTier: pages in S3, Google Cloud Storage, Azure or a folder, many in one object, through obstore.

    pagedkv/<time>-<random>   head: magic, number of records, bytes of a record │ names [n] of 32 bytes │ records [n]

An object store charges for requests and is slow to begin, so the pages that are published within `linger` seconds are
written as one object of at most 16 MiB. A process learns of the objects of others by listing those whose time is new,
and reads their heads. So a page of another process is found a moment after it was written, and `find` reads no object
twice. An object is deleted when its process has evicted all pages in it; a rule of the bucket should delete old ones.
"""

from __future__ import annotations

import secrets
import struct
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from pagedkv.core.arguments import real
from pagedkv.errors import InvalidRequest
from pagedkv.tiers.checksum import Bytes
from pagedkv.tiers.shared.records import Record
from pagedkv.tiers.shared.tier import SharedTier
from pagedkv.tiers.tier import KEY_BYTES

FOLDER: Final = "pagedkv/"
MAGIC: Final = b"PKVo"
HEAD: Final = struct.Struct("<4sIQ")
"""magic, number of records, bytes of a record."""
MOST_RECORDS: Final = 4096
"""Records of one object, so that its head has a size that is known before it is read."""
LISTED_EVERY: Final = 1.0
"""Seconds between two listings."""
CLOCKS_DIFFER: Final = 120
"""Seconds by which the clocks of two processes may differ: objects so much older than the newest are listed again."""


class ObjectTier(SharedTier):
    """Pages in the object store at `url`: "s3://bucket/prefix", "gs://...", "az://..." or "file:///folder".

    linger:  seconds for which published pages are gathered into one object.
    timeout: seconds after which a request fails.
    store:   keyword options for obstore.store.from_url: region, endpoint, credentials.
    size, key, threads, patience, limit, policy: see SharedTier.
    Raises:  InvalidRequest, also without the package obstore. A store that is down makes every page a miss
    """

    kind = "objects"

    def __init__(
        self, url: str, size: str | int, *, linger: float = 1.0, timeout: float = 5.0,
        store: dict[str, Any] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(ObjectClient(url, timeout, store or {}), size, **options)
        self._linger, self._stored_at = real(linger, "linger"), 0.0

    @property
    def room(self) -> int:
        """See Tier.room. None within `linger` seconds of the last store: pages wait, and go together."""
        now = time.monotonic()
        if now - self._stored_at < self._linger:
            return 0
        self._stored_at = now
        return super().room


class _Place(NamedTuple):
    path: str
    offset: int
    size: int


class ObjectClient:
    """Records in the objects of a store. See Client."""

    def __init__(self, url: str, timeout: float, options: dict[str, Any]) -> None:
        try:
            import obstore
            from obstore.store import from_url
        except ImportError:
            raise InvalidRequest("a tier of objects needs the package obstore: pip install 'pagedkv[s3]'") from None
        self._obstore = obstore
        waits = {"timeout": f"{timeout}s", "connect_timeout": f"{timeout}s", **options.pop("client_options", {})}
        if not url.startswith(("file:", "memory:")):
            options = {"client_options": waits, "retry_config": {"max_retries": 1}, **options}
        try:
            self._store = from_url(url, **options)
        except Exception as error:  # obstore raises classes of its own for what it cannot read
            raise InvalidRequest(f"url is {url!r} ({error}); give one such as s3://bucket/prefix") from None
        self._places: dict[bytes, _Place] = {}
        self._own: Counter[str] = Counter()  # records of each object of this process that were not deleted
        self._heads: set[str] = set()  # the objects whose heads were read
        self._listed_at, self._changing = -LISTED_EVERY, threading.Lock()

    def find(self, names: Sequence[bytes]) -> list[bool]:
        """See Client.find."""
        with self._changing:
            if not all(name in self._places for name in names):
                self._list()
            return [name in self._places for name in names]

    def _list(self) -> None:
        """Learn of new objects. The caller holds the lock."""
        if time.monotonic() - self._listed_at < LISTED_EVERY:
            return
        newest = max((int(path[len(FOLDER) :].split("-")[0]) for path in self._heads), default=0)
        since = f"{FOLDER}{max(0, newest - CLOCKS_DIFFER * 10**9):020d}"
        for page in self._obstore.list(self._store, FOLDER, offset=since):
            for path, size in ((entry["path"], entry["size"]) for entry in page):
                if path not in self._heads and path[len(FOLDER) :].split("-")[0].isdecimal():
                    self._read_head(path, size)
        self._listed_at = time.monotonic()

    def _read_head(self, path: str, object_bytes: int) -> None:
        """Note the records of an object. One whose head does not describe it has none."""
        self._heads.add(path)
        try:
            head = bytes(self._get(path, 0, min(object_bytes, HEAD.size + MOST_RECORDS * KEY_BYTES)))
        except FileNotFoundError:
            return  # deleted meanwhile
        if len(head) < HEAD.size:
            return
        magic, count, size = HEAD.unpack_from(head)
        start = HEAD.size + count * KEY_BYTES
        if magic == MAGIC and count <= MOST_RECORDS and object_bytes == start + count * size:
            for at in range(count):
                name = head[HEAD.size + at * KEY_BYTES :][:KEY_BYTES]
                self._places[name] = _Place(path, start + at * size, size)

    def _get(self, path: str, start: int, length: int) -> Any:
        return self._obstore.get_range(self._store, path, start=start, length=length)

    def get(self, names: Sequence[bytes]) -> list[Record | None]:
        """See Client.get."""
        return [self._record(name) for name in names]

    def _record(self, name: bytes) -> Record | None:
        place = self._places.get(name)
        if place is None:
            return None
        try:
            return memoryview(self._get(place.path, place.offset, place.size))
        except FileNotFoundError:  # its process has evicted it
            self._places.pop(name, None)
            return None

    def put(self, names: Sequence[bytes], records: Sequence[tuple[bytes, Bytes]]) -> list[str]:
        """See Client.put."""
        for first in range(0, len(names), MOST_RECORDS):
            self._put_object(names[first : first + MOST_RECORDS], records[first : first + MOST_RECORDS])
        return [""] * len(names)

    def _put_object(self, names: Sequence[bytes], records: Sequence[tuple[bytes, Bytes]]) -> None:
        path = f"{FOLDER}{time.time_ns():020d}-{secrets.token_hex(8)}"
        size = len(records[0][0]) + len(records[0][1])
        head = HEAD.pack(MAGIC, len(names), size) + b"".join(names)
        bodies = [part for header, content in records for part in (header, content.data)]
        self._obstore.put(self._store, path, b"".join((head, *bodies)))
        with self._changing:
            self._heads.add(path)
            self._own[path] = len(names)
            for at, name in enumerate(names):
                self._places[name] = _Place(path, len(head) + at * size, size)

    def delete(self, names: Sequence[bytes]) -> None:
        """See Client.delete. Records of other processes are only forgotten here."""
        empty = []
        with self._changing:
            for place in filter(None, (self._places.pop(name, None) for name in names)):
                if place.path in self._own:
                    self._own[place.path] -= 1
                    if not self._own[place.path]:
                        del self._own[place.path]
                        empty.append(place.path)
        for path in empty:
            try:
                self._obstore.delete(self._store, path)
            except FileNotFoundError:
                continue

    def close(self) -> None:
        """See Client.close. obstore has nothing to end."""
