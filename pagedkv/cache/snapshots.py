"""Snapshots: the prefix cache on disk, so that a restart does not begin cold. What cannot be proven to be right is a miss, never garbage.

    folder/manifest.json              what follows: files, tenants, fingerprint. Replaced in one step, last: a crash leaves the old snapshot
    folder/frames-<draw>-00000.safetensors     pages [n]: token_ids int32 [n, S], parent int64 [n], tenant int32 [n],
                                      frames uint8 [n, G, frame_bytes], digest uint8 [n, 32]

    digest = sha256(fingerprint ‖ name of the page ‖ bytes of its frames)       name: chained over tenant and all tokens (core/digests.py)
    fingerprint = sha256(format, model, KVSpecs, layer groups, windows, byte order)

So a flipped bit anywhere, in bytes, tokens, order or tenant, is seen, and pages that come after a bad one are missed with it. Numbers of
frames are not stored: restoring is planning and committing, into frames that are free, and what was known already stays what it was.

It knows the layout of the folder; it must not know how storage is laid out in a frame.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from pagedkv.core.prefix.digests import page_digest, root_digest
from pagedkv.core.prefix.export import Page
from pagedkv.errors import OutOfFrames

if TYPE_CHECKING:
    from pagedkv.cache.paged import PagedKVCache
    from pagedkv.core.handles import AddressSpace

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"
FILE_BYTES: Final = 2**28
"""About so many bytes of frames in one file."""


@dataclass(frozen=True)
class Restored:
    """What `restore` did. `pages` can be found now; `bad` were damaged, or came after one that was; `left` found no free frame.

    refused: why nothing was looked at, "" if it was: no snapshot, an unreadable one, or that of another model or layout.
    """

    pages: int = 0
    bad: int = 0
    left: int = 0
    refused: str = ""


def fingerprint(cache: PagedKVCache, model: str) -> dict[str, Any]:
    """What must be equal for bytes to mean the same."""
    return {
        "format": FORMAT,
        "model": model,
        "specs": [asdict(spec) for spec in cache.specs],
        "layer_groups": list(cache.layer_groups),
        "groups": [asdict(group) for group in cache.manager.groups],
        "byte_order": sys.byteorder,
    }


def save(cache: PagedKVCache, folder: Path, model: str) -> int:
    """Write every findable page of `cache` to `folder`; returns how many. What was there before stays valid until all is written."""
    pages = cache.manager.findable_pages()
    tenants = sorted({page.tenant for page in pages})
    facts, draw = fingerprint(cache, model), secrets.token_hex(8)
    sealed = _Seal(facts)
    names: list[bytes] = []
    for page in pages:
        names.append(page_digest(names[page.parent] if page.parent >= 0 else root_digest(page.tenant), page.token_ids))
    folder.mkdir(parents=True, exist_ok=True)
    files: list[dict[str, Any]] = []
    at_once = max(1, FILE_BYTES // (len(cache.specs) * cache.frame_bytes))
    for first in range(0, len(pages), at_once):
        part = pages[first : first + at_once]
        tensors = _tensors(cache, part, tenants)
        digests = [
            sealed.digest(name, held) for name, held in zip(names[first:], tensors["frames"].numpy(), strict=False)
        ]
        tensors["digest"] = torch.from_numpy(np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32).copy())
        files.append({"name": f"frames-{draw}-{len(files):05}.safetensors", "pages": len(part)})
        _write(folder / files[-1]["name"], lambda path, tensors=tensors: save_file(tensors, path))
    manifest = {"fingerprint": facts, "tenants": [tenant.hex() for tenant in tenants], "files": files}
    _write(folder / MANIFEST, lambda path: path.write_text(json.dumps(manifest, indent=1), encoding="utf-8"))
    for path in folder.glob("frames-*"):
        if path.name not in {entry["name"] for entry in files}:
            path.unlink(missing_ok=True)
    return len(pages)


class _Seal:
    """Digests under one fingerprint."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self._begun = hashlib.sha256(hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest())

    def digest(self, name: bytes, frames: np.ndarray) -> bytes:
        """32 bytes for a page of that name whose frames (uint8 [G, frame_bytes]) hold these bytes."""
        sealed = self._begun.copy()
        sealed.update(name)
        sealed.update(np.ascontiguousarray(frames).data)
        return sealed.digest()


def _tensors(cache: PagedKVCache, part: list[Page], tenants: list[bytes]) -> dict[str, torch.Tensor]:
    frames = torch.tensor([page.frames for page in part], dtype=torch.int64)
    return {
        "token_ids": torch.from_numpy(np.stack([page.token_ids for page in part])),
        "parent": torch.tensor([page.parent for page in part], dtype=torch.int64),
        "tenant": torch.tensor([tenants.index(page.tenant) for page in part], dtype=torch.int32),
        "frames": cache.storage.frames[frames.to(cache.device)].cpu(),
    }


def _write(path: Path, write: Any) -> None:
    """Let `write` fill a file beside `path`, bring it to the disk, and put it in its place."""
    beside = path.with_name(f"{path.name}.part")
    write(beside)
    for opened in (beside, path.parent):
        handle = os.open(opened, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
        if opened is beside:
            os.replace(beside, path)


def load(cache: PagedKVCache, folder: Path, model: str) -> Restored:
    """Make the pages in `folder` findable again, as far as they are whole and frames are free. Nothing is evicted for them."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        there, tenants = manifest["fingerprint"], [bytes.fromhex(tenant) for tenant in manifest["tenants"]]
        files = [(folder / Path(entry["name"]).name, int(entry["pages"])) for entry in manifest["files"]]
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        return Restored(refused=f"{folder} holds no snapshot that can be read ({error!r})")
    if any(pages < 0 for _, pages in files):
        return Restored(refused=f"{folder} holds no snapshot that can be read (a file of fewer than no pages)")
    here = fingerprint(cache, model)
    if there != here:
        wrong = [name for name in here if not isinstance(there, dict) or there.get(name) != here[name]]
        return Restored(refused=f"the snapshot in {folder} was made for another {', '.join(wrong)}")
    if not cache.manager.prefix_cache:
        return Restored(refused="this cache finds no prefixes (prefix_cache=False)")
    restoring = _Restoring(cache, tenants, _Seal(here))
    with cache.manager.restoring():
        try:
            return restoring.run(files)
        finally:
            restoring.stand_nowhere()


Row = dict[str, torch.Tensor]


class _Restoring:
    """One restore under way: a space, grown page by page, and opened anew where the next page does not follow the last."""

    def __init__(self, cache: PagedKVCache, tenants: list[bytes], seal: _Seal) -> None:
        self.cache, self.tenants, self.seal = cache, tenants, seal
        self.found: dict[
            int, tuple[bytes, Page]
        ] = {}  # page that can be found now: its name, and what it says of itself
        self.left: set[int] = set()  # whole pages for which there was no frame
        self.space: AddressSpace | None = None
        self.tip = -1  # the last page of the space

    def run(self, files: list[tuple[Path, int]]) -> Restored:
        """Page by page, in order."""
        number = 0
        for path, count in files:
            for at, row in enumerate(_rows(path, count, self._shapes(count))):
                self._page(number + at, row)
            number += count
        return Restored(len(self.found), number - len(self.found) - len(self.left), len(self.left))

    def stand_nowhere(self) -> None:
        """Let go of the space: its pages stay, cached."""
        if self.space is not None:
            self.space.release()
        self.space = None

    def _shapes(self, count: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        cache = self.cache
        return {
            "token_ids": (torch.int32, (count, cache.spec.block_size)),
            "parent": (torch.int64, (count,)),
            "tenant": (torch.int32, (count,)),
            "frames": (torch.uint8, (count, len(cache.specs), cache.frame_bytes)),
            "digest": (torch.uint8, (count, 32)),
        }

    def _page(self, number: int, row: Row) -> None:
        """One page more can be found, or is left, or, if it is neither, bad."""
        parent, tenant = int(row["parent"]), int(row["tenant"])
        if parent in self.left:
            self.left.add(number)
        if not 0 <= tenant < len(self.tenants) or (parent != -1 and parent not in self.found):
            return
        page = Page((), parent, self.tenants[tenant], row["token_ids"].numpy())
        name = page_digest(self.found[parent][0] if parent >= 0 else root_digest(page.tenant), page.token_ids)
        whole = self.seal.digest(name, row["frames"].numpy()) == row["digest"].numpy().tobytes()
        if not whole or (parent >= 0 and self.found[parent][1].tenant != page.tenant):
            return
        if self._stand_at(parent, page.tenant) and self._grow(page, row["frames"]):
            self.found[number], self.tip = (name, page), number
        else:
            self.left.add(number)

    def _stand_at(self, parent: int, tenant: bytes) -> bool:
        """Have a space that ends with page `parent`. False if that cannot be found any more."""
        if self.space is not None and parent >= 0 and self.tip == parent:
            return True
        self.stand_nowhere()
        chain: list[int] = []
        while parent >= 0:
            chain.append(parent)
            parent = self.found[parent][1].parent
        prefix = [token for number in reversed(chain) for token in self.found[number][1].token_ids.tolist()]
        self.space = self.cache.open([*prefix, 0], tenant=tenant)
        self.tip = chain[0] if chain else -1
        return len(self.space) == len(prefix)

    def _grow(self, page: Page, frames: torch.Tensor) -> bool:
        """Add `page` to the space, whose frames hold the bytes of `frames` (uint8 [G, frame_bytes]); nothing is evicted for it."""
        cache, space = self.cache, self.space
        assert space is not None
        if cache.manager.free_to(page.tenant) < len(cache.specs):
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
    """The `count` pages of a file; none of them if it cannot be read or holds something else."""
    try:
        tensors = load_file(path)
        whole = all(
            name in tensors and (tensors[name].dtype, tuple(tensors[name].shape)) == due for name, due in shapes.items()
        )
    except (
        OSError,
        SafetensorError,
        ValueError,
        KeyError,
        RuntimeError,
        OverflowError,
        MemoryError,
    ):  # whatever a damaged header brings
        return
    for at in range(count if whole else 0):
        yield {name: tensors[name][at] for name in shapes}
