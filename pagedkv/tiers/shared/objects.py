"""ObjectTier: pages in S3, Google Cloud Storage, Azure or a folder, many in one object, through obstore.

    pagedkv/<time>-<random>   head: magic, number of records, bytes of a record │ names [n] of 32 bytes │ records [n]

An object store charges for requests and is slow to begin, so the pages that are published within `linger` seconds go
together, into few objects of at most 16 MiB. A process learns of the objects of others by listing those whose time is
new, and reads their heads. So a page of another process is found a moment after it was written, and `find` reads no
object twice. An object is deleted when its process has evicted all pages in it; a rule of the bucket should delete old
ones.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import secrets
import struct
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from pagedkv.core.arguments import real
from pagedkv.errors import InvalidRequest
from pagedkv.tiers import private_files
from pagedkv.tiers.checksum import Bytes
from pagedkv.tiers.shared.records import HEADER, Record
from pagedkv.tiers.shared.tier import SharedTier
from pagedkv.tiers.tier import KEY_BYTES
from pagedkv.tiers.urls import reason, shown

FOLDER: Final = "pagedkv/"
LONGEST_LINGER: Final = 3600.0
"""Seconds."""
MAGIC: Final = b"PKVo"
HEAD: Final = struct.Struct("<4sIQ")
"""magic, number of records, bytes of a record."""
MOST_RECORDS: Final = 4096
"""Records of one object, so that its head has a size that is known before it is read."""
LISTED_EVERY: Final = 1.0
"""Seconds between two listings."""
CLOCKS_DIFFER: Final = 120
"""Seconds by which the clocks of two processes may differ: objects so much older than the newest are listed again."""
MOST_HEADS: Final = 256
"""Heads that one listing reads; the next listing goes on."""
MOST_FAILURES: Final = 3
"""Heads that may fail in one listing before the store counts as down."""
MOST_EXTENTS: Final = 1 << 20
"""Records of other processes that are remembered. The oldest are forgotten first."""


class ObjectTier(SharedTier):
    """Pages in the object store at `url`: "s3://bucket/prefix", "gs://...", "az://..." or "file:///folder".

    linger:  seconds for which published pages are gathered.
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
        if not 0.0 <= self._linger <= LONGEST_LINGER:
            raise InvalidRequest(f"linger is {linger}; give the seconds, 0 to {LONGEST_LINGER}")

    @property
    def max_stores(self) -> int:
        """See Tier.max_stores. None within `linger` seconds of the last store: pages wait, and go together."""
        now = time.monotonic()
        if now - self._stored_at < self._linger:
            return 0
        self._stored_at = now
        return super().max_stores


class _Extent(NamedTuple):
    """The bytes of a record in an object."""

    path: str
    offset: int
    size: int


class ObjectClient:
    """Records in the objects of a store. See Client."""

    def __init__(self, url: str, timeout: float, options: dict[str, Any]) -> None:
        try:
            import obstore
            from obstore.store import LocalStore, from_url
        except ImportError:
            raise InvalidRequest("a tier of objects needs the package obstore: pip install 'pagedkv[s3]'") from None
        self._obstore = obstore
        if not isinstance(url, str) or not isinstance(options, dict):
            kinds = type(url).__name__, type(options).__name__  # their values may be secrets
            raise InvalidRequest("url is a {}, and store a {}; give text, and a dict of options".format(*kinds))
        self.url = url
        waits = {"timeout": f"{timeout}s", "connect_timeout": f"{timeout}s", **options.get("client_options", {})}
        if not url.startswith(("file:", "memory:")):
            options = {"retry_config": {"max_retries": 1}, **options, "client_options": waits}
        why = ""
        try:
            self._store = from_url(url, **options)
        except Exception as error:  # obstore raises classes of its own for what it cannot read
            why = reason(error, url, *re.findall(r"\w{4,}", repr([*options.values()])))
        if why:  # outside of the handler: the exception shows the URL
            raise InvalidRequest(f"url is {shown(url)!r} ({why}); give one such as s3://bucket/prefix")
        self._folder = Path(str(self._store.prefix or "/")) if isinstance(self._store, LocalStore) else None
        self._extents: dict[bytes, _Extent] = {}
        self._own: Counter[str] = Counter()  # records of each object of this process that were not deleted
        self._heads: set[str] = set()  # the objects whose heads were read, but for those that are not listed again
        self._undeleted: set[str] = set()  # empty objects that the store has not deleted yet
        self._newest = 0  # nanoseconds: the time in the name of the newest object whose head was read
        self._listed_at, self._listing, self._changing = -LISTED_EVERY, threading.Lock(), threading.Lock()

    def find(self, names: Sequence[bytes]) -> list[bool]:
        """See Client.find."""
        self._learn(names)
        return [name in self._extents for name in names]

    def _learn(self, names: Sequence[bytes]) -> None:
        """List the store unless all of `names` are known."""
        if not all(name in self._extents for name in names):
            with self._listing:
                self._list()

    def _list(self) -> None:
        """Learn of new objects. The caller holds `_listing`."""
        if time.monotonic() - self._listed_at < LISTED_EVERY:
            return
        self._listed_at = time.monotonic()
        latest = time.time_ns() + CLOCKS_DIFFER * 10**9  # a name with a later time would hide all others
        since = f"{FOLDER}{max(0, self._newest - CLOCKS_DIFFER * 10**9):020d}"
        self._heads = {path for path in self._heads if path >= since}
        num_read, failures = 0, list[Exception]()
        for page in self._obstore.list(self._store, FOLDER, offset=since):
            for path, size in ((entry["path"], entry["size"]) for entry in page):
                made_at = path[len(FOLDER) :].split("-")[0]
                if path in self._heads or not made_at.isdecimal() or int(made_at) > latest:
                    continue
                if num_read == MOST_HEADS:
                    return
                try:
                    self._read_head(path, size)
                except Exception as failure:  # of this object, such as an archived one, or of the store
                    failures.append(failure)
                    if len(failures) > MOST_FAILURES:
                        raise
                    continue  # it is read again by a later listing
                self._heads.add(path)
                self._newest, num_read = max(self._newest, int(made_at)), num_read + 1
        if failures and not num_read:
            raise failures[0]

    def _read_head(self, path: str, object_bytes: int) -> None:
        """Note the records of an object. One whose head does not describe it has none."""
        if object_bytes < HEAD.size:
            return
        try:
            head = bytes(self._get(path, 0, min(object_bytes, HEAD.size + MOST_RECORDS * KEY_BYTES)))
        except FileNotFoundError:
            return  # deleted meanwhile
        magic, count, size = HEAD.unpack_from(head)
        start = HEAD.size + count * KEY_BYTES
        if magic != MAGIC or count > MOST_RECORDS or size <= HEADER.size or object_bytes != start + count * size:
            return
        with self._changing:
            for at in range(count):
                name = head[HEAD.size + at * KEY_BYTES :][:KEY_BYTES]
                held = self._extents.get(name)
                if held is None or held.path not in self._own:  # the extent of an own record is known better here
                    self._extents[name] = _Extent(path, start + at * size, size)
            for name in list(itertools.islice(self._extents, max(0, len(self._extents) - MOST_EXTENTS))):
                if self._extents[name].path not in self._own:
                    del self._extents[name]

    def _get(self, path: str, start: int, length: int) -> Any:
        return self._obstore.get_range(self._store, path, start=start, length=length)

    def get(self, names: Sequence[bytes]) -> list[Record | None]:
        """See Client.get. A page that a faster tier has lost was not looked up here before."""
        self._learn(names)
        return [self._record(name) for name in names]

    def _record(self, name: bytes) -> Record | None:
        extent = self._extents.get(name)
        if extent is None:
            return None
        try:
            record = memoryview(self._get(extent.path, extent.offset, extent.size))
        except FileNotFoundError:  # its process has evicted it
            self._forget(name, extent)
            return None
        except Exception:
            if self._obstore.head(self._store, extent.path)["size"] >= extent.offset + extent.size:
                raise  # the store failed, and not the object
            record = memoryview(b"")
        if len(record) < extent.size:  # the object is shorter than its head says: a damaged record
            self._forget(name, extent)
        return record

    def _forget(self, name: bytes, extent: _Extent) -> None:
        with self._changing:
            if self._extents.get(name) == extent:
                del self._extents[name]

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
        try:
            self._write(path, b"".join((head, *bodies)))
        except BaseException:
            self._undeleted.add(path)  # the store may have kept it
            raise
        with self._changing:
            self._heads.add(path)
            self._own[path] = len(names)
            for at, name in enumerate(names):
                self._extents[name] = _Extent(path, len(head) + at * size, size)

    def _write(self, path: str, content: bytes) -> None:
        """Store an object. In a folder it is a file of this user alone: obstore's files follow the umask."""
        if self._folder is None:
            self._obstore.put(self._store, path, content)
            return
        file = self._folder / path
        private_files.make_folder(file.parent)
        private_files.write(file, content, part=file.with_name(f".{file.name}"))

    def delete(self, names: Sequence[bytes]) -> None:
        """See Client.delete. Records of other processes are only forgotten here. A failed deletion is tried again."""
        with self._changing:
            for extent in filter(None, (self._extents.pop(name, None) for name in names)):
                if extent.path in self._own:
                    self._own[extent.path] -= 1
                    if not self._own[extent.path]:
                        del self._own[extent.path]
                        self._undeleted.add(extent.path)
            empty = list(self._undeleted)
        for path in empty:
            with contextlib.suppress(FileNotFoundError):
                self._obstore.delete(self._store, path)
            self._undeleted.discard(path)

    def close(self) -> None:
        """See Client.close. obstore has nothing to end."""
