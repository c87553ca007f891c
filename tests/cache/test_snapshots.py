"""Snapshots: a restored page is the stored page, bit by bit; a damaged page is a miss, never garbage."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedkv import KVSpec, PagedKVCache, regular_files
from pagedkv.cache import snapshots
from pagedkv.core import AddressSpace, Observe
from pagedkv.errors import InvalidRequest

SPEC = KVSpec(2, 2, 64, block_size=4, dtype="float32")
LOCAL = replace(SPEC, window=6)
KINDS: dict[str, Callable[..., PagedKVCache]] = {
    "one group": lambda n=64: PagedKVCache(SPEC, num_frames=n),
    "int8": lambda n=64: PagedKVCache(replace(SPEC, kv_dtype="int8"), num_frames=n),
    "two groups": lambda n=64: PagedKVCache([SPEC, LOCAL], num_frames=2 * n),
}
PROMPTS = [(b"", [1] * 21), (b"", [1] * 8 + [2] * 9), (b"acme", [1] * 13), (b"", list(range(40)))]


def page_bytes(tenant: bytes, prefix: list[int], group: int, num_bytes: int) -> torch.Tensor:
    """Return the bytes of a page's frame: a function of tenant, tokens up to the end of the page, and group."""
    seed = hash((tenant, tuple(prefix), group)) % 2**31
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def prefill(cache: PagedKVCache, tenant: bytes, tokens: list[int]) -> AddressSpace:
    space = cache.open(tokens, tenant=tenant)
    matched = len(space)
    batch = cache.plan([space], [len(tokens) - matched])
    for group in range(len(cache.specs)):
        for page, frame in enumerate(space.pages_in(group).tolist()):
            if page >= matched // 4:
                cache.storage.frames[frame] = page_bytes(tenant, tokens[: 4 * page + 4], group, cache.frame_bytes)
    cache.commit(batch, tokens[matched:])
    return space


def assert_holds(cache: PagedKVCache, tenant: bytes, tokens: list[int]) -> int:
    """Assert that the pages found of `tokens` have the bytes computed for them. Return how many tokens are found."""
    space = cache.open([*tokens, 7], tenant=tenant)
    for group in range(len(cache.specs)):
        for page, frame in enumerate(space.pages_in(group).tolist()):
            if frame >= 0:
                assert torch.equal(
                    cache.storage.frames[frame], page_bytes(tenant, tokens[: 4 * page + 4], group, cache.frame_bytes)
                )
    found = len(space)
    space.release()
    return found


def filled(kind: str = "one group") -> PagedKVCache:
    cache = KINDS[kind]()
    for tenant, tokens in PROMPTS[:-1]:
        prefill(cache, tenant, tokens).release()
    prefill(cache, *PROMPTS[-1])  # the last sequence is still open
    return cache


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {snapshots.LOCK}


def pages_of(cache: PagedKVCache) -> int:
    return int((cache.manager.state.frames["published"] == 1).sum())


@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_page_is_the_stored_page(kind: str, tmp_path: Path) -> None:
    old, new = filled(kind), KINDS[kind]()
    assert old.snapshot(tmp_path) == pages_of(old) == 5 + 2 + 3 + 10
    assert new.restore(tmp_path) == snapshots.Restored(pages=20)
    new.check()
    assert (new.stats().mapped, new.stats().cached) == (0, 20 * len(new.specs))
    for tenant, tokens in PROMPTS:
        assert assert_holds(new, tenant, tokens) == len(tokens) // 4 * 4
    assert assert_holds(new, b"umbra", [1] * 21) == 0


def test_a_snapshot_leaves_the_cache_as_it_was_and_can_be_taken_again(tmp_path: Path) -> None:
    cache = filled()
    before = cache.stats()
    cache.snapshot(tmp_path)
    assert cache.stats() == before
    cache.evict(4)
    cache.snapshot(tmp_path)
    manifest = json.loads((tmp_path / snapshots.MANIFEST).read_text())
    assert names_in(tmp_path) == {snapshots.MANIFEST, *(entry["name"] for entry in manifest["files"])}
    assert KINDS["one group"]().restore(tmp_path).pages == pages_of(cache) == 16


def test_many_files_are_one_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "FILE_BYTES", 3 * SPEC.frame_bytes)
    filled().snapshot(tmp_path)
    assert len(list(tmp_path.glob("pagedkv-*"))) == 7
    new = KINDS["one group"]()
    assert new.restore(tmp_path).pages == 20
    for tenant, tokens in PROMPTS:
        assert assert_holds(new, tenant, tokens) == len(tokens) // 4 * 4


@pytest.mark.parametrize("seed", range(40))
def test_a_flipped_bit_is_a_miss_and_never_garbage(seed: int, tmp_path: Path) -> None:
    filled("two groups" if seed % 4 == 0 else "one group").snapshot(tmp_path)
    [path] = tmp_path.glob("pagedkv-*")
    rng, data = np.random.default_rng(seed), bytearray(path.read_bytes())
    # Anywhere in the file, or in its first bytes: header, tokens and order.
    at = int(rng.integers(len(data) if seed % 2 else 2048))
    data[at] ^= 1 << int(rng.integers(8))
    path.write_bytes(data)
    new = KINDS["two groups" if seed % 4 == 0 else "one group"]()
    done = new.restore(tmp_path)
    assert done.pages + done.bad == 20
    assert (done.refused, done.left) == ("", 0)
    new.check()
    for tenant, tokens in PROMPTS:
        assert_holds(new, tenant, tokens)


@pytest.mark.parametrize("name", ["token_ids", "parent", "tenant", "frames", "digest"])
def test_every_part_of_a_page_is_under_its_digest(name: str, tmp_path: Path) -> None:
    filled().snapshot(tmp_path)
    [path] = tmp_path.glob("pagedkv-*")
    tensors = load_file(path)
    chained = next(at for at in range(20) if int(tensors["parent"][at]) >= 0 and int((tensors["parent"] == at).sum()))
    tensors[name][chained] = tensors[name][chained] + 1 if name != "tenant" else 1 - tensors[name][chained]
    save_file(tensors, path)
    new = KINDS["one group"]()
    done = new.restore(tmp_path)
    assert 0 < done.bad < 20
    assert done.pages == 20 - done.bad
    for tenant, tokens in PROMPTS:
        assert_holds(new, tenant, tokens)


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, 0.999])
def test_a_truncated_file_is_a_miss(keep: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "FILE_BYTES", 8 * SPEC.frame_bytes)
    filled().snapshot(tmp_path)
    path = sorted(tmp_path.glob("pagedkv-*"))[1]
    data = path.read_bytes()
    path.write_bytes(data[: int(keep if keep > 1 else keep * len(data))])
    new = KINDS["one group"]()
    done = new.restore(tmp_path)
    assert done.bad >= 8
    assert done.pages >= 8
    for tenant, tokens in PROMPTS:
        assert_holds(new, tenant, tokens)
    path.unlink()
    assert KINDS["one group"]().restore(tmp_path) == done


OTHERS: dict[str, tuple[PagedKVCache, str]] = {
    "another dtype": (PagedKVCache(replace(SPEC, dtype="bfloat16"), num_frames=64), "specs"),
    "another block size": (PagedKVCache(replace(SPEC, block_size=8), num_frames=64), "specs"),
    "a window": (PagedKVCache(LOCAL, num_frames=64), "specs, groups"),
    "another order of layers": (
        PagedKVCache([SPEC, LOCAL], layer_groups=[1, 0, 1, 0], num_frames=64),
        "specs, layer_groups, groups",
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_snapshot_of_another_layout_is_refused_as_a_whole(other: str, tmp_path: Path) -> None:
    filled().snapshot(tmp_path)
    cache, why = OTHERS[other]
    done = cache.restore(tmp_path)
    assert (done.pages, cache.stats().cached) == (0, 0)
    assert done.refused.endswith(f"made for another {why}")


def test_a_snapshot_of_another_model_is_refused(tmp_path: Path) -> None:
    filled().snapshot(tmp_path, model="gemma")
    assert KINDS["one group"]().restore(tmp_path).refused.endswith("another model")
    assert KINDS["one group"]().restore(tmp_path, model="gemma").pages == 20


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "{",
        "[]",
        "{}",
        '{"fingerprint": 3, "tenants": [], "files": []}',
        '{"tenants": 3}',
        "[" * 100_000,
        '{"fingerprint": 3, "tenants": [], "files": [{"name": "a", "pages": 1e999}]}',
    ],
    ids=range(9),
)
def test_a_folder_without_snapshot_is_a_miss(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / snapshots.MANIFEST).write_text(text)
    done = KINDS["one group"]().restore(tmp_path)
    assert done.pages == 0
    assert done.refused


@pytest.mark.parametrize("pages", [-1, 10**15])
def test_a_manifest_that_counts_other_pages_than_there_are_is_a_miss_at_once(pages: int, tmp_path: Path) -> None:
    filled().snapshot(tmp_path)
    path = tmp_path / snapshots.MANIFEST
    manifest = json.loads(path.read_text())
    manifest["files"][0]["pages"] = pages
    path.write_text(json.dumps(manifest))
    done = KINDS["one group"]().restore(tmp_path)
    assert (done.pages, done.bad) == (0, 0)
    assert "its pages" in done.refused


def test_a_full_disk_is_an_os_error_and_leaves_the_snapshot_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = filled()
    cache.snapshot(tmp_path)
    before = names_in(tmp_path)
    monkeypatch.setattr(snapshots, "FILE_BYTES", 3 * SPEC.frame_bytes)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for most in (10, 3000, 20_000):  # the draw, the first file, the larger manifest or a file
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
            with pytest.raises(OSError, match="File too large"):
                cache.snapshot(tmp_path)
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            assert names_in(tmp_path) == before
            assert KINDS["one group"]().restore(tmp_path).pages == 20
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)


KILLED = """
import os, sys, torch
from pathlib import Path
from pagedkv.cache import snapshots
from tests.cache.test_snapshots import SPEC, filled
folder, at, calls = Path(sys.argv[1]), int(sys.argv[2]), 0
def dying(real):
    def call(*args, **options):
        global calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), 9)
        return real(*args, **options)
    return call
snapshots.FILE_BYTES = 9 * SPEC.frame_bytes
cache = filled()
for name in ("replace", "fsync", "open"):
    setattr(os, name, dying(getattr(os, name)))
Path.unlink = dying(Path.unlink)
cache.snapshot(folder, model="new")
print(calls)
"""


@pytest.mark.parametrize("step", [1000, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_writer_that_is_killed_leaves_a_whole_snapshot(step: int, tmp_path: Path) -> None:
    """The child dies before its n-th call that changes the folder. One snapshot is whole; the next writer cleans up."""

    def run(at: int, folder: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", KILLED, str(folder), str(at)]
        return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)

    whole = run(0, tmp_path / "whole")
    total = int(whole.stdout)
    assert total > 20
    found = set()
    for at in sorted({*range(1, total + 1, step), total - 4, total - 2, total}):
        folder = tmp_path / str(at)
        filled().snapshot(folder, model="old")
        assert run(at, folder).returncode == -signal.SIGKILL
        pages = tuple(KINDS["one group"]().restore(folder, model=model).pages for model in ("old", "new"))
        assert pages in ((20, 0), (0, 20))
        found.add(pages)
        filled().snapshot(folder, model="next")
        assert KINDS["one group"]().restore(folder, model="next").pages == 20
        assert {name for name in names_in(folder) if not name.endswith("-pagedkv.writing.part")} == whole_names(folder)
    assert found == {(20, 0), (0, 20)}


def whole_names(folder: Path) -> set[str]:
    """Return the names of a snapshot and nothing else. (A first file of 16 bytes, not yet in place, may be left.)"""
    manifest = json.loads((folder / snapshots.MANIFEST).read_text())
    return {snapshots.MANIFEST, *(entry["name"] for entry in manifest["files"])}


def test_other_files_of_the_folder_are_left_alone(tmp_path: Path) -> None:
    others = {
        "frames-of-my-video.mp4",
        "manifest.json",
        "pagedkv-notes.txt",
        "pagedkv-0123456789abcdef-00000.safetensors",
    }
    for name in others:
        (tmp_path / name).write_text("mine")
    (tmp_path / "frames-of-a-folder").mkdir()
    for _ in range(2):
        filled().snapshot(tmp_path)
    assert all((tmp_path / name).read_text() == "mine" for name in others)
    assert len(names_in(tmp_path) - others) == 3


@pytest.mark.parametrize(
    "name", ["pagedkv.json.part", "pagedkv.writing.part", "pagedkv.json", "pagedkv.writing", snapshots.LOCK]
)
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_snapshot_is_written_through_no_link_or_pipe(name: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    folder = tmp_path / "cache"
    folder.mkdir()
    if kind == "link":
        (folder / name).symlink_to(tmp_path / "notes")
    else:
        os.mkfifo(folder / name)
    if name == snapshots.LOCK:
        with pytest.raises(OSError, match=f"it is a .*{kind}, not a regular file.*{snapshots.LOCK}"):
            filled().snapshot(folder)
        (folder / name).unlink()
    assert filled().snapshot(folder) == 20
    assert (tmp_path / "notes").read_text() == "mine"
    assert KINDS["one group"]().restore(folder).pages == 20


def test_a_manifest_that_restore_would_not_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled().snapshot(tmp_path)
    before = names_in(tmp_path)
    monkeypatch.setattr(snapshots, "MOST_MANIFEST_BYTES", 2000)
    monkeypatch.setattr(snapshots, "FILE_BYTES", 1)
    with pytest.raises(OSError, match="more than restore reads"):
        filled().snapshot(tmp_path)
    monkeypatch.undo()
    assert names_in(tmp_path) == before
    assert KINDS["one group"]().restore(tmp_path).pages == 20


def test_a_manifest_names_no_file_of_others(tmp_path: Path) -> None:
    """A manifest that somebody changed does not make the next writer remove the files that it lists."""
    cache = filled()
    cache.snapshot(tmp_path / "cache")
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "cache" / "precious").write_text("mine")
    path = tmp_path / "cache" / snapshots.MANIFEST
    manifest = json.loads(path.read_text())
    manifest["files"] += [
        {"name": name, "pages": 1} for name in ("../precious", "precious", str(tmp_path / "precious"))
    ]
    path.write_text(json.dumps(manifest))
    cache.snapshot(tmp_path / "cache")
    assert (tmp_path / "precious").exists()
    assert (tmp_path / "cache" / "precious").exists()


def test_a_second_writer_is_refused_and_the_first_is_whole(tmp_path: Path) -> None:
    lock = regular_files.Lock(tmp_path / snapshots.LOCK)
    with pytest.raises(BlockingIOError, match="another process is writing a snapshot here"):
        filled().snapshot(tmp_path)
    assert names_in(tmp_path) == set()
    lock.release()
    filled().snapshot(tmp_path)
    assert KINDS["one group"]().restore(tmp_path).pages == 20


@pytest.mark.parametrize("which", [snapshots.MANIFEST, "frames"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "large", "device"])
def test_only_regular_files_of_the_right_size_are_read(which: str, kind: str, tmp_path: Path) -> None:
    filled().snapshot(tmp_path)
    [path] = [tmp_path / which] if which == snapshots.MANIFEST else tmp_path.glob("pagedkv-*")
    content = path.read_bytes()
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(content)
        os.truncate(path, 2**40)  # a hole
    done = KINDS["one group"]().restore(tmp_path)
    assert done.pages == 0
    assert done.refused or done.bad == 20


def test_a_page_needs_the_key_of_its_snapshot(tmp_path: Path) -> None:
    key = b"0123456789abcdef"
    filled().snapshot(tmp_path, key=key)
    assert KINDS["one group"]().restore(tmp_path, key=key).pages == 20
    assert KINDS["one group"]().restore(tmp_path, key=b"another key of 16").bad == 20
    assert "another digest" in KINDS["one group"]().restore(tmp_path).refused
    for wrong in (b"short", b"x" * 65, "0123456789abcdef"):
        with pytest.raises(InvalidRequest, match="give 16 to 64 secret bytes, or None"):
            filled().snapshot(tmp_path, key=wrong)  # type: ignore[arg-type]


def test_a_smaller_pool_takes_what_fits_and_evicts_nothing(tmp_path: Path) -> None:
    filled().snapshot(tmp_path)
    small = KINDS["one group"](12)
    mine = prefill(small, b"", [50] * 9)
    mine.release()
    done = small.restore(tmp_path)
    assert (done.pages + done.left, done.bad) == (20, 0)
    assert 8 <= done.pages <= 10
    assert small.stats().evictions == 0
    assert assert_holds(small, b"", [50] * 8) == 8
    for tenant, tokens in PROMPTS:
        assert_holds(small, tenant, tokens)
    small.check()


def test_restoring_into_a_cache_that_knows_it_already_changes_no_byte(tmp_path: Path) -> None:
    cache = filled()
    cache.snapshot(tmp_path)
    frames = cache.stats()
    assert cache.restore(tmp_path).pages == 20
    assert (cache.stats().cached, cache.stats().mapped) == (frames.cached, frames.mapped)
    for tenant, tokens in PROMPTS:
        assert assert_holds(cache, tenant, tokens) == len(tokens) // 4 * 4


def test_a_page_that_a_group_has_given_up_is_left_out_with_those_behind_it(tmp_path: Path) -> None:
    cache = KINDS["two groups"]()
    prefill(cache, b"", list(range(24)))
    assert cache.evict(2) == 2  # of the group with a window, whose other pages are cached or mapped
    kept = cache.snapshot(tmp_path)
    assert kept < 6
    new = KINDS["two groups"]()
    assert new.restore(tmp_path).pages == kept
    assert assert_holds(new, b"", list(range(24))) == 4 * kept
    new.check()


@pytest.mark.strict
@pytest.mark.parametrize("specs", [LOCAL, [LOCAL, SPEC], [LOCAL, replace(SPEC, window=11)]])
def test_a_window_hides_no_restored_page(specs: KVSpec | list[KVSpec], tmp_path: Path) -> None:
    """A page that is given back may be evicted, so a restore gives none back."""
    old, new = (PagedKVCache(specs, num_frames=50 if specs is LOCAL else 100) for _ in range(2))
    tokens = list(range(101))
    prefill(old, b"", tokens)
    kept = old.snapshot(tmp_path)
    assert kept == 25
    assert new.restore(tmp_path) == snapshots.Restored(pages=kept)
    assert assert_holds(new, b"", tokens) == 4 * kept
    space = prefill(new, b"", tokens)
    assert space.pages[:20].tolist() == [-1] * 20  # windows are what they were
    new.check()


def test_restoring_evicts_nothing_for_a_hard_quota_either(tmp_path: Path) -> None:
    old, new = KINDS["one group"](), KINDS["one group"]()
    for word in range(8):
        prefill(old, b"acme", [word] * 5).release()
    old.snapshot(tmp_path)
    new.set_quota(b"acme", hard=3)
    prefill(new, b"acme", [50] * 4).release()
    assert new.restore(tmp_path) == snapshots.Restored(pages=2, left=6)
    assert new.stats().evictions == 0
    assert sum(assert_holds(new, b"acme", [word] * 4) for word in (*range(8), 50)) == 12


def test_a_cache_that_finds_no_prefixes_refuses_a_snapshot(tmp_path: Path) -> None:
    filled().snapshot(tmp_path)
    cache = PagedKVCache(SPEC, num_frames=64, prefix_cache=False)
    assert cache.restore(tmp_path) == snapshots.Restored(refused="this cache finds no prefixes (prefix_cache=False)")


def test_a_restore_counts_in_no_figure_of_what_prompts_found(tmp_path: Path) -> None:
    filled().snapshot(tmp_path)
    new = PagedKVCache(SPEC, num_frames=64, observe=Observe(reuse=64, events=64, other_roots=True))
    new.set_quota(b"acme", hard=32)
    prefill(new, b"acme", [1] * 9)
    before, curve = new.stats(), new.hit_curve()
    assert new.restore(tmp_path).pages == pages_of(new)
    after = new.stats()
    for name in (
        "tokens_asked",
        "tokens_matched",
        "missed_new",
        "missed_evicted",
        "missed_other_root",
        "below_one_page",
        "hit_rate",
    ):
        assert getattr(after, name) == getattr(before, name), name
    assert after.tenants[b"acme"].tokens_asked == before.tenants[b"acme"].tokens_asked
    assert new.hit_curve() == curve
    new.check()


@pytest.mark.parametrize("verb", ["snapshot", "restore"])
def test_a_folder_and_a_model_are_named_by_text(verb: str, tmp_path: Path) -> None:
    call = getattr(filled(), verb)
    with pytest.raises(InvalidRequest, match=r"model is b'x'; give text"):
        call(tmp_path, model=b"x")
    with pytest.raises(InvalidRequest, match="folder is 7; give a path"):
        call(7)
    with pytest.raises(InvalidRequest, match="a path has no half of a surrogate pair"):
        call("snapshot-\ud800")
    with pytest.raises(InvalidRequest, match="a path has no zero byte"):
        call("a\0b")
    assert not list(tmp_path.iterdir())
