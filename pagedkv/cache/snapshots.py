"""Snapshots: the prefix cache on disk, for a restart that is not cold. A page that cannot be verified is a miss.

    folder/pagedkv.json     files, tenants, salts, fingerprint; replaced last, in one step: a crash leaves the old one
    folder/pagedkv-<draw>-00000.safetensors   pages [n]: token_ids int32 [n, S], parent int64 [n], tenant int32 [n],
                                              salts int32 [n], frames uint8 [n, G, frame_bytes], digest uint8 [n, 32]
    folder/pagedkv.writing  the draws of a snapshot that is not whole yet and of the one before: random parts of names
    folder/pagedkv.lock     held while a snapshot is written: a second writer gets BlockingIOError

    name        = of a page: chained over its tenant, and all tokens and salts up to its end (core/prefix/digests.py)
    fingerprint = sha256(format, model, KVSpecs, layer groups, windows, byte order)
    digest      = sha256(fingerprint ‖ name ‖ bytes of its frames), or BLAKE2b under the caller's key

Other files in the folder are not touched: a writer removes the files of the snapshot that it replaced, by the names in
its manifest, and those of a writer that died, by its draw. A reader takes regular files only, and none that is larger
than its pages.

So a flipped bit in bytes, tokens, order, salt or tenant is seen, and the pages behind the damaged page are missed with
it. Frame numbers are not stored: a restore plans and commits into free frames, and a page that the cache has already
stays as it is.

This file knows the layout of the folder; it must not know the layout of a frame.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import re
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as safetensors_bytes

from pagedkv import regular_files
from pagedkv.core.prefix.digests import page_digest, root_digest
from pagedkv.core.prefix.export import Page
from pagedkv.core.prefix.roots import Salts
from pagedkv.errors import InvalidRequest, OutOfFrames

if TYPE_CHECKING:
    import numpy.typing as npt

    from pagedkv.cache.batch import PlannedBatch
    from pagedkv.cache.storage import Storage
    from pagedkv.core.handles import AddressSpace
    from pagedkv.core.manager import MemoryManager
    from pagedkv.spec import KVSpec

FORMAT: Final = 3
MANIFEST: Final = "pagedkv.json"
WRITING: Final = "pagedkv.writing"
LOCK: Final = "pagedkv.lock"
_DRAW: Final = re.compile(r"[0-9a-f]{16}")
_OWN_FILE: Final = re.compile(r"pagedkv-[0-9a-f]{16}-[0-9]{5,9}\.safetensors")
MOST_MANIFEST_BYTES: Final = 2**26
MOST_HEADER_BYTES: Final = 2**16
"""The longest header of a file with frames: safetensors names five tensors there."""
LEAST_KEY: Final = 16
"""Bytes of a key."""
MOST_KEY: Final = hashlib.blake2b.MAX_KEY_SIZE
FILE_BYTES: Final = 2**27
"""Bytes of frames in one file, about. A file is made in memory first."""


class Cache(Protocol):
    """The members of PagedKVCache that a snapshot needs."""

    specs: tuple[KVSpec, ...]
    spec: KVSpec
    layer_groups: tuple[int, ...]
    device: torch.device
    manager: MemoryManager
    storage: Storage

    @property
    def frame_bytes(self) -> int:
        """Bytes of a frame."""

    @property
    def prefix_cache(self) -> bool:
        """True if prompts find published pages."""

    def open(self, token_ids: Sequence[int], /, *, tenant: bytes, salt: Mapping[int, bytes]) -> AddressSpace:
        """Open a space that maps the longest known prefix."""

    def plan(self, batch: Sequence[AddressSpace], counts: Sequence[int], /) -> PlannedBatch:
        """Map frames for new tokens."""

    def commit(self, batch: PlannedBatch, token_ids: npt.NDArray[np.int32], /) -> None:
        """Publish the pages that are full."""

    def free_to(self, tenant: bytes, /) -> int:
        """Return the frames that a plan for `tenant` could take without evicting."""


@dataclass(frozen=True)
class Restored:
    """The result of `restore`, in pages.

    pages:   prompts can find them now.
    bad:     damaged, or behind a damaged page.
    left:    intact, but there was no free frame.
    refused: why no page was read: no snapshot, an unreadable one, or one of another model or layout. "" if pages were
             read.
    """

    pages: int = 0
    bad: int = 0
    left: int = 0
    refused: str = ""


def key_of(key: bytes | None) -> bytes | None:
    """Return the key that a user gave. Raises: InvalidRequest"""
    if key is not None and not (isinstance(key, bytes) and LEAST_KEY <= len(key) <= MOST_KEY):
        given = f"{len(key)} bytes" if isinstance(key, bytes) else repr(type(key).__name__)
        raise InvalidRequest(f"key is {given}; give {LEAST_KEY} to {MOST_KEY} secret bytes, or None")
    return key


def name_of(model: str) -> str:
    """Return the name of the weights that a user gave. Raises: InvalidRequest"""
    if not isinstance(model, str):
        raise InvalidRequest(
            f"model is {model!r}; give text that names the weights, such as the digest of a checkpoint"
        )
    return model


def fingerprint(cache: Cache, model: str, key: bytes | None) -> dict[str, Any]:
    """Return the facts that two caches must share for their bytes to mean the same."""
    return {
        "format": FORMAT,
        "digest": "sha256" if key is None else "blake2b with a key",
        "model": model,
        "specs": [asdict(spec) for spec in cache.specs],
        "layer_groups": list(cache.layer_groups),
        "groups": [asdict(group) for group in cache.manager.groups],
        "byte_order": sys.byteorder,
    }


def save(cache: Cache, folder: Path, model: str, key: bytes | None) -> int:
    """Write every findable page to `folder`; return how many. An older snapshot is valid until all is written.

    Raises: OSError if the disk does; BlockingIOError while another writer is at work in `folder`
    """
    regular_files.make_folder(folder)
    try:
        lock = regular_files.Lock(folder / LOCK)
    except BlockingIOError:
        raise BlockingIOError(errno.EAGAIN, "another process is writing a snapshot here", str(folder)) from None
    try:
        _remove_unfinished(folder)
        try:
            return _save(cache, folder, (fingerprint(cache, model, key), key))
        finally:
            _remove_unfinished(folder)  # the files of the older snapshot, or of this one
    finally:
        lock.release()


def _save(cache: Cache, folder: Path, sealed: tuple[dict[str, Any], bytes | None]) -> int:
    facts, draw, digester = sealed[0], secrets.token_hex(8), _Digester(*sealed)
    pages = cache.manager.findable_pages()
    tenants, salts = sorted({page.tenant for page in pages}), sorted({page.salts for page in pages})
    names: list[bytes] = []
    for page in pages:
        before = names[page.parent] if page.parent >= 0 else root_digest(page.tenant)
        names.append(page_digest(before, page.token_ids, page.salts))
    files: list[dict[str, Any]] = []
    per_file = max(1, FILE_BYTES // (len(cache.specs) * cache.frame_bytes))
    older = {name.split("-")[1] for name in _files_of(folder)}
    _write(folder / WRITING, " ".join([draw, *older]).encode(), draw)
    for first in range(0, len(pages), per_file):
        part = pages[first : first + per_file]
        tensors = _tensors(cache, part, tenants, salts)
        digests = [
            digester.digest(name, frames)
            for name, frames in zip(names[first:], tensors["frames"].numpy(), strict=False)
        ]
        tensors["digest"] = torch.from_numpy(np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32).copy())
        files.append({"name": f"pagedkv-{draw}-{len(files):05}.safetensors", "pages": len(part)})
        _write(folder / files[-1]["name"], safetensors_bytes(tensors), draw)
    manifest = {
        "fingerprint": facts,
        "tenants": [tenant.hex() for tenant in tenants],
        "salts": [[[offset, salt.hex()] for offset, salt in own] for own in salts],
        "files": files,
    }
    content = json.dumps(manifest, indent=1).encode()
    if len(content) > MOST_MANIFEST_BYTES:
        raise OSError(errno.EFBIG, f"the manifest would have {len(content)} bytes, more than restore reads")
    _write(folder / MANIFEST, content, draw)
    return len(pages)


def _files_of(folder: Path) -> list[str]:
    """Return the names of the files of the snapshot in `folder`: those that a snapshot gives."""
    try:
        listed = [
            entry["name"] for entry in json.loads(regular_files.read(folder / MANIFEST, MOST_MANIFEST_BYTES))["files"]
        ]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return []
    return [name for name in listed if isinstance(name, str) and _OWN_FILE.fullmatch(name)]


def _remove_unfinished(folder: Path) -> None:
    """Remove the files of the draws that `pagedkv.writing` names, but for those of the snapshot that is valid now."""
    try:
        draws = regular_files.read(folder / WRITING, MOST_HEADER_BYTES).decode("ascii").split()
    except (OSError, ValueError):
        return
    current = _files_of(folder)
    for draw in filter(_DRAW.fullmatch, draws):
        for path in folder.glob(f"pagedkv-{draw}-*"):
            if path.name not in current:
                path.unlink(missing_ok=True)
    (folder / WRITING).unlink(missing_ok=True)


class _Digester:
    """Digests of pages under one fingerprint, and one key if there is one."""

    def __init__(self, facts: dict[str, Any], key: bytes | None) -> None:
        self._fingerprinted = hashlib.sha256() if key is None else hashlib.blake2b(key=key, digest_size=32)
        self._fingerprinted.update(hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest())

    def digest(self, name: bytes, frames: np.ndarray) -> bytes:
        """Return 32 bytes for the page of this name with these frames (uint8 [G, frame_bytes])."""
        hasher = self._fingerprinted.copy()
        hasher.update(name)
        hasher.update(np.ascontiguousarray(frames).data)
        return hasher.digest()


def _tensors(cache: Cache, part: list[Page], tenants: list[bytes], salts: list[Salts]) -> dict[str, torch.Tensor]:
    frames = torch.tensor([page.frames for page in part], dtype=torch.int64)
    return {
        "token_ids": torch.from_numpy(np.stack([page.token_ids for page in part])),
        "parent": torch.tensor([page.parent for page in part], dtype=torch.int64),
        "tenant": torch.tensor([tenants.index(page.tenant) for page in part], dtype=torch.int32),
        "salts": torch.tensor([salts.index(page.salts) for page in part], dtype=torch.int32),
        "frames": cache.storage.frames[frames.to(cache.device)].cpu(),
    }


def _write(path: Path, content: bytes, draw: str) -> None:
    regular_files.write(path, content, part=path.with_name(f"pagedkv-{draw}-{path.name}.part"))


def load(cache: Cache, folder: Path, model: str, key: bytes | None) -> Restored:
    """Make the intact pages in `folder` findable again, as many as there are free frames for. No frame is evicted."""
    try:
        manifest = json.loads(regular_files.read(folder / MANIFEST, MOST_MANIFEST_BYTES))
        stored, tenants = manifest["fingerprint"], [bytes.fromhex(tenant) for tenant in manifest["tenants"]]
        salts = [_salts(own, cache.spec.block_size) for own in manifest["salts"]] if "salts" in manifest else []
        files = [(folder / Path(entry["name"]).name, int(entry["pages"])) for entry in manifest["files"]]
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        return Restored(refused=f"{folder} holds no snapshot that can be read ({error!r})")
    if len(set(files)) < len(files) or not all(0 <= pages < 2**31 for _, pages in files):
        return Restored(refused=f"{folder} holds no snapshot that can be read (a file that occurs twice, or its pages)")
    facts = fingerprint(cache, model, key)
    if stored != facts:
        wrong = [name for name in facts if not isinstance(stored, dict) or stored.get(name) != facts[name]]
        return Restored(refused=f"the snapshot in {folder} was made for another {', '.join(wrong)}")
    if not cache.prefix_cache:
        return Restored(refused="this cache finds no prefixes (prefix_cache=False)")
    restore = _Restore(cache, tenants, salts, _Digester(facts, key))
    with cache.manager.restoring():
        try:
            return restore.run(files)
        finally:
            restore.close()


def _salts(own: list[list[Any]], block_size: int) -> Salts:
    """Return the salts of a page as a manifest lists them. Raises: ValueError or TypeError if a page has no such."""
    salts = tuple((offset, bytes.fromhex(salt)) for offset, salt in own)
    offsets = [offset for offset, _ in salts]
    if offsets != sorted(set(offsets)) or not all(type(at) is int and 0 <= at < block_size for at in offsets):
        raise ValueError("salts whose offsets are not in order")
    if not all(salt for _, salt in salts):
        raise ValueError("an empty salt")
    return salts


Row = dict[str, torch.Tensor]


class _Restore:
    """One restore: a space that grows page by page. A page that does not follow the last one needs a new space.

    restored: number of a page that can be found now -> its name and its identity (a Page without frames).
    left:     numbers of intact pages for which there was no free frame.
    tip:      the number of the last page of the space, -1 if the space is empty.
    """

    def __init__(self, cache: Cache, tenants: list[bytes], salts: list[Salts], digester: _Digester) -> None:
        self.cache, self.tenants, self.salts, self.digester = cache, tenants, salts, digester
        self.restored: dict[int, tuple[bytes, Page]] = {}
        self.left: set[int] = set()
        self.space: AddressSpace | None = None
        self.tip = -1

    def run(self, files: list[tuple[Path, int]]) -> Restored:
        """Restore the pages of the files, in order."""
        total = 0
        for path, count in files:
            for number, row in enumerate(_rows(path, count, self._shapes(count)), total):
                self._restore_page(number, row)
            total += count
        return Restored(len(self.restored), total - len(self.restored) - len(self.left), len(self.left))

    def close(self) -> None:
        """Release the space; its pages stay cached."""
        if self.space is not None:
            self.space.release()
        self.space = None

    def _shapes(self, count: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        cache = self.cache
        return {
            "token_ids": (torch.int32, (count, cache.spec.block_size)),
            "parent": (torch.int64, (count,)),
            "tenant": (torch.int32, (count,)),
            "salts": (torch.int32, (count,)),
            "frames": (torch.uint8, (count, len(cache.specs), cache.frame_bytes)),
            "digest": (torch.uint8, (count, 32)),
        }

    def _restore_page(self, number: int, row: Row) -> None:
        """Add a page to `restored` or to `left`; a bad page is added to neither."""
        parent, tenant, salts = int(row["parent"]), int(row["tenant"]), int(row["salts"])
        if parent in self.left:
            self.left.add(number)
        if not (0 <= tenant < len(self.tenants) and 0 <= salts < len(self.salts)):
            return
        if parent != -1 and parent not in self.restored:
            return
        page = Page((), parent, self.tenants[tenant], row["token_ids"].numpy(), self.salts[salts])
        before = self.restored[parent][0] if parent >= 0 else root_digest(page.tenant)
        name = page_digest(before, page.token_ids, page.salts)
        intact = self.digester.digest(name, row["frames"].numpy()) == row["digest"].numpy().tobytes()
        if not intact or (parent >= 0 and self.restored[parent][1].tenant != page.tenant):
            return
        if self._open_at(parent, page) and self._grow(page, row["frames"]):
            self.restored[number], self.tip = (name, page), number
        else:
            self.left.add(number)

    def _open_at(self, parent: int, page: Page) -> bool:
        """Make `space` one that ends with page `parent`, before `page`. Return False if `parent` cannot be found."""
        if self.space is not None and parent >= 0 and self.tip == parent and not page.salts:
            return True
        self.close()
        chain: list[int] = []
        while parent >= 0:
            chain.append(parent)
            parent = self.restored[parent][1].parent
        chain.reverse()
        prefix = [token for number in chain for token in self.restored[number][1].token_ids.tolist()]
        size, pages = self.cache.spec.block_size, [*(self.restored[number][1] for number in chain), page]
        salt = {at * size + offset: own for at, each in enumerate(pages) for offset, own in each.salts}
        self.space = self.cache.open([*prefix, 0], tenant=page.tenant, salt=salt)
        self.tip = chain[-1] if chain else -1
        return len(self.space) == len(prefix)

    def _grow(self, page: Page, frames: torch.Tensor) -> bool:
        """Append `page` with the bytes of `frames` (uint8 [G, frame_bytes]). Return False if no frame is free."""
        cache, space = self.cache, self.space
        assert space is not None
        if cache.free_to(page.tenant) < len(cache.specs):
            return False
        try:
            batch = cache.plan([space], [len(page.token_ids)])
        except OutOfFrames:
            return False
        targets = [int(space.pages_in(group)[-1]) for group in range(len(cache.specs))]
        cache.storage.frames[torch.tensor(targets, device=cache.device)] = frames.to(cache.device)
        cache.commit(batch, page.token_ids)
        return True


def _rows(path: Path, count: int, shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> Iterator[Row]:
    """Yield the `count` pages of a file; none if the file cannot be read or has other shapes."""
    try:
        most = sum(math.prod(shape) * dtype.itemsize for dtype, shape in shapes.values()) + MOST_HEADER_BYTES
        regular_files.require(path, most)
        tensors = load_file(path)
        as_expected = all(
            name in tensors and (tensors[name].dtype, tuple(tensors[name].shape)) == expected
            for name, expected in shapes.items()
        )
    # A damaged header can bring any of these.
    except (OSError, SafetensorError, ValueError, KeyError, RuntimeError, OverflowError, MemoryError):
        return
    for page in range(count if as_expected else 0):
        yield {name: tensors[name][page] for name in shapes}
