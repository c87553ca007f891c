"""DiskTier: pages in one file, which a restart finds again.

    folder/pagedkv-tier.lock    held while a process uses the folder
    folder/pagedkv-tier.json    format, fingerprint, frame bytes, number of slots
    folder/pagedkv-tier.seals   [slots] of 128 bytes: serial, name, checksum, tenant, check of the seal itself
                                its blocks are taken at once. It is read once and written by calls, never mapped: a
                                mapped file that cannot be read, or that somebody cut short, would end the process
    folder/pagedkv-tier.bytes   [slots, stride], stride: a frame, rounded up to 4 KiB

To store a page: its seal is zeroed, the bytes are written, the seal is written. So a process that is killed between any
two of these loses this page, and a page whose bytes and seal do not fit (the machine lost power, the disk flipped a
bit) is seen when it is loaded, by its checksum. No step waits for the disk to be flushed: the pages can be computed
again.

The bytes go past the page cache of the system (O_DIRECT) where the file system and the addresses allow it, so a tier
does not push the memory of other programs out.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import mmap
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from pagedkv.core.arguments import flag, whole
from pagedkv.tiers import private_files
from pagedkv.tiers.checksum import SUM_BYTES, Bytes, checksum, require_secret
from pagedkv.tiers.mover import Task
from pagedkv.tiers.pool_view import PoolView
from pagedkv.tiers.slots import CANCELLED, CHANGED, CORRUPT, Move, SlotTier
from pagedkv.tiers.tier import CLOSING, KEY_BYTES

_LOG = logging.getLogger(__name__)

FORMAT: Final = 2
NAME: Final = "pagedkv-tier"
SECTOR: Final = 4096
TENANT_BYTES: Final = 16
MOST_SERIAL: Final = 2**63
"""A seal with a greater serial is damaged: so many pages are never stored."""
MOST_MANIFEST_BYTES: Final = 2**16

SEAL: Final = np.dtype(
    [
        ("serial", "<u8"),
        ("name", "u1", KEY_BYTES),
        ("sum", "u1", SUM_BYTES),
        ("tenant", "u1", TENANT_BYTES),
        ("check", "<u8"),
        ("unused", "u1", 48),
    ]
)

_FIRST: Final = np.zeros(1, np.int64)


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // SECTOR) * SECTOR


class DiskTier(SlotTier):
    """Pages in a file of `folder`, which one process uses at a time. A later process finds them again.

    size:    the size of the file: bytes, or text like "200GiB".
    direct:  whether reads and writes go past the page cache of the system, where that is possible.
    threads: how many transfers may be under way at a time.
    key:     16 to 64 secret bytes: pages that were not written with this key are misses. Without, someone who can write
             to the folder can plant pages.
    limit:   the most bytes a second that the tier moves, "2GB" or an int; None for no limit.
    policy:  the order in which pages are evicted, see MemoryManager.

    The cache must have a name for its weights (PagedKVCache, model=): pages of another model are not found. The folder
    is emptied, with a warning, if it holds pages of another model, geometry, rank or size.
    Raises:  InvalidRequest. When the cache is made: OSError from the file system, or for a file of the tier that is not
             this user's alone (private_files.private); BlockingIOError while another process uses the folder
    """

    kind = "disk"
    is_lasting = True

    def __init__(
        self,
        folder: str | Path,
        size: str | int,
        *,
        direct: bool = True,
        threads: int = 2,
        key: bytes | None = None,
        limit: str | int | None = None,
        policy: str = "lru",
    ) -> None:
        super().__init__(size, limit=limit, policy=policy)
        require_secret(key)
        self._folder, self._key = private_files.folder_of(folder), key
        self._checksum = "xxh3-128" if key is None else "blake2b with a key"
        self._direct = flag(direct, "direct")
        self.num_threads: int = whole(threads, "threads", 1, 1025)
        self._here, self._sealing = threading.local(), threading.Lock()
        self._lock: private_files.Lock | None = None
        self._file = self._seals_file = -1

    def _slot_bytes(self, frame_bytes: int) -> int:
        return _rounded(frame_bytes) + SEAL.itemsize

    def _begin(self, pool: PoolView, fingerprint: bytes, num_slots: int) -> list[tuple[int, bytes, bytes]]:
        private_files.make_folder(self._folder)
        try:
            self._lock = private_files.Lock(self._path("lock"))
        except FileNotFoundError:
            raise OSError(errno.ENOENT, "no file can be made in this folder", str(self._folder)) from None
        except BlockingIOError:
            raise BlockingIOError(errno.EAGAIN, "another process uses this disk tier", str(self._folder)) from None
        self._stride, self._frame_bytes = _rounded(pool.frame_bytes), pool.frame_bytes
        facts = {
            "format": FORMAT,
            "fingerprint": fingerprint.hex(),
            "checksum": self._checksum,
            "frame_bytes": pool.frame_bytes,
            "slots": num_slots,
        }
        try:
            found = self._facts_on_disk()
            is_known = found == facts
            if found is not None and not is_known:
                differ = ", ".join(
                    name for name in facts if not isinstance(found, dict) or found.get(name) != facts[name]
                )
                _LOG.warning("%s held pages of another cache (%s differs); they are dropped", self._folder, differ)
            self._open(num_slots, is_known)
            if not is_known:
                self._write_facts(facts)
        except BaseException:
            self._end()
            raise
        return self._pages_on_disk() if is_known else []

    def _path(self, end: str) -> Path:
        return self._folder / f"{NAME}.{end}"

    def _facts_on_disk(self) -> Any:
        try:
            with open(private_files.private(self._path("json"), os.O_RDONLY), "rb") as file:
                return json.loads(file.read(MOST_MANIFEST_BYTES))
        except (FileNotFoundError, ValueError, RecursionError):
            return None

    def _write_facts(self, facts: dict[str, Any]) -> None:
        part = self._path("json.part")
        part.unlink(missing_ok=True)  # it may be a link to a file of someone else
        private_files.write(self._path("json"), json.dumps(facts).encode(), part=part)

    def _open(self, num_slots: int, is_known: bool) -> None:
        """Open the files; begin them anew unless they are those of an earlier tier like this one."""
        self._seals_file = private_files.private(self._path("seals"), os.O_RDWR | os.O_CREAT)
        self._file, self._is_direct = self._open_bytes()
        if not is_known:
            self._path("json").unlink(missing_ok=True)  # first: the old facts must not describe the new files
            os.ftruncate(self._seals_file, 0)
        os.ftruncate(self._seals_file, num_slots * SEAL.itemsize)
        os.posix_fallocate(self._seals_file, 0, num_slots * SEAL.itemsize)
        self._seals: npt.NDArray[Any] = np.zeros(num_slots, SEAL)
        self._serial, size = 0, num_slots * SEAL.itemsize if is_known else 0
        content, at = self._seals.view(np.uint8), 0
        while at < size and (count := os.preadv(self._seals_file, [content[at:].data], at)):
            at += count
        os.ftruncate(self._file, num_slots * self._stride)

    def _open_bytes(self) -> tuple[int, bool]:
        path, flags = self._path("bytes"), os.O_RDWR | os.O_CREAT
        if self._direct and hasattr(os, "O_DIRECT"):
            try:
                return private_files.private(path, flags | os.O_DIRECT), True
            except OSError as error:
                if error.errno != errno.EINVAL:  # the file system has no direct reads and writes
                    raise
        return private_files.private(path, flags), False

    def _pages_on_disk(self) -> list[tuple[int, bytes, bytes]]:
        """Return what `_begin` returns, for each sealed slot, the oldest first. A damaged seal is an empty slot."""
        found, damaged = [], []
        for slot in np.flatnonzero(self._seals["serial"]).tolist():
            seal = self._seals[slot]
            if int(seal["check"]) == self._check(slot) and int(seal["serial"]) < MOST_SERIAL:
                found.append((int(seal["serial"]), slot, seal["name"].tobytes(), seal["tenant"].tobytes()))
            else:
                damaged.append(slot)
        self._reuse(damaged)
        self._write_seals(damaged)
        found.sort()
        self._serial = found[-1][0] if found else 0  # of a whole seal: a damaged one may have any
        return [(slot, name, tenant) for _, slot, name, tenant in found]

    def _check(self, slot: int) -> int:
        return xxhash.xxh3_64_intdigest(self._seals[slot].tobytes()[: SEAL.fields["check"][1]])  # type: ignore[index]

    def _charged(self, tenant: bytes) -> bytes:
        return hashlib.blake2b(tenant, digest_size=TENANT_BYTES).digest()

    def _store(self, moves: Sequence[Move]) -> None:
        for move in moves:
            self._store_page(move)

    def _store_page(self, move: Move) -> None:
        pool, content = self._pool, self._content(move.frame)
        if not self._goes_straight:
            pool.read(np.array([move.frame]), self._bounce(), _FIRST, move.job.fence)
        total = checksum(content[: self._frame_bytes], move.key.name, self._key)
        try:
            with self._sealing:
                self._write_seal(move.slot)  # which `_reuse` has zeroed
            written = os.pwrite(self._file, content.data, move.slot * self._stride)
            if written != len(content):
                move.why = f"failed: {written} of {len(content)} bytes were written"
            elif not pool.holds(move.frame, move.stamp):
                move.why = CHANGED
            else:
                self._seal(move, total)
        except OSError as error:
            move.why = f"failed: {error.strerror}"

    def _seal(self, move: Move, total: bytes) -> None:
        slot, key = move.slot, move.key
        with self._sealing:
            if move.job.is_dropped:  # `forget` has voided all seals, and none may come after it
                move.why = CANCELLED
                return
            self._serial += 1
            seal = self._seals[slot]
            seal["name"], seal["sum"] = (np.frombuffer(part, np.uint8) for part in (key.name, total))
            seal["tenant"] = np.frombuffer(self._charged(key.tenant), np.uint8)
            seal["serial"] = self._serial
            seal["check"] = self._check(slot)
            try:
                self._write_seal(slot)
            except OSError:
                seal["serial"] = 0
                raise

    def _write_seal(self, slot: int) -> None:
        """Write the seal of a slot to the file. The caller holds `_sealing`."""
        written = os.pwrite(self._seals_file, self._seals[slot].tobytes(), slot * SEAL.itemsize)
        if written != SEAL.itemsize:
            raise OSError(errno.ENOSPC, f"{written} of {SEAL.itemsize} bytes of a seal were written")

    def _load(self, moves: Sequence[Move]) -> None:
        for move in moves:
            try:
                move.why = "" if self._load_page(move) else CORRUPT
            except OSError as error:
                move.why = f"failed: {error.strerror}"

    def _load_page(self, move: Move) -> bool:
        content, seal = self._content(move.frame), self._seals[move.slot].copy()
        if seal["name"].tobytes() != move.key.name:
            return False
        if os.preadv(self._file, [content.data], move.slot * self._stride) < len(content):
            return False
        if checksum(content[: self._frame_bytes], move.key.name, self._key) != seal["sum"].tobytes():
            return False
        if not self._goes_straight:
            self._pool.write(np.array([move.frame]), self._bounce(), _FIRST, move.job.fence)
        return True

    @property
    def _goes_straight(self) -> bool:
        """Whether the file is read into and written from frames, without a copy between."""
        return self._pool.is_aligned(SECTOR) or not (self._is_direct or self._pool.is_cuda)

    def _content(self, frame: int) -> Bytes:
        """Return the memory from which a slot is written, and into which it is read: the frame, or a copy."""
        return self._pool.bytes_of(frame) if self._goes_straight else self._bounce().numpy().ravel()

    def _bounce(self) -> torch.Tensor:
        """Return uint8 [1, stride] of the calling thread, at an address that direct transfers take."""
        if not hasattr(self._here, "bounce"):
            self._here.bounce = torch.frombuffer(mmap.mmap(-1, self._stride), dtype=torch.uint8)[None]
        bounce: torch.Tensor = self._here.bounce
        return bounce

    def _reuse(self, slots: Sequence[int]) -> None:
        self._seals["serial"][slots] = 0  # a thread writes the seal before it writes the page

    def _void(self, slots: Sequence[int]) -> None:
        self._reuse(slots)
        self._mover.put(Task(partial(self._write_seals, slots), 0, 0, False, lambda: True))

    def forget(self) -> None:
        """See Tier.forget. The seals are written by a thread: the owner waits for no disk that hangs."""
        until = time.monotonic() + CLOSING
        super().forget()
        self._mover.drain(until - time.monotonic())

    def _write_seals(self, slots: Sequence[int]) -> None:
        with self._sealing:
            try:
                for slot in slots:
                    self._write_seal(slot)
            except OSError:  # then no process must find any of the pages
                with suppress(OSError):
                    self._path("json").unlink(missing_ok=True)

    def _end(self) -> None:
        files, self._file, self._seals_file = (self._file, self._seals_file), -1, -1
        for file in files:
            if file >= 0:
                os.close(file)
        self._seals = np.zeros(0, SEAL)
        if self._lock is not None:
            self._lock.release()
