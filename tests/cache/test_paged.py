"""PagedKVCache: bytes and integers in step. Each token reads back as it was written, after forks, copies and growth."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from pagedkv import (
    KernelUnavailable,
    KVSpec,
    OutOfFrames,
    PagedBatch,
    PagedKVCache,
    copy_frames,
    explain,
    paged_attention,
    write_kv,
)
from pagedkv.cache import PlannedBatch
from pagedkv.cache import batch as cache_batch
from pagedkv.cache import mirror as mirror_module
from pagedkv.cache.batch import on_device
from pagedkv.cache.mirror import DeviceMirror
from pagedkv.core import AddressSpace, FramePool, MemoryManager
from pagedkv.errors import ConcurrentUse, InvalidRequest
from pagedkv.kernels import registry
from pagedkv.tiers import HostTier

SPEC = KVSpec(2, 2, 64, block_size=4, dtype="float32")


@pytest.fixture
def cache() -> PagedKVCache:
    return PagedKVCache(SPEC, num_frames=32)


def kv_of(prefix: list[int], layer: int) -> torch.Tensor:
    """Return float32 [K, D], a different one for every prefix and layer."""
    return torch.randn(2, 64, generator=torch.Generator().manual_seed(hash((*prefix, layer)) % 2**31))


def write(cache: PagedKVCache, batch: PlannedBatch, prefixes: list[list[int]]) -> None:
    for layer in range(2):
        k = torch.stack([kv_of(prefix, layer) for prefix in prefixes])
        write_kv(k, -k, cache[layer], batch[layer])


def extend(cache: PagedKVCache, space: AddressSpace, tokens: list[int]) -> None:
    before = space.token_ids.tolist()
    batch = cache.plan([space], [len(tokens)])
    write(cache, batch, [[*before, *tokens[: i + 1]] for i in range(len(tokens))])
    cache.commit(batch, tokens)


def assert_holds(cache: PagedKVCache, space: AddressSpace) -> None:
    tokens = space.token_ids.tolist()
    for position in range(len(tokens)):
        frame, offset = int(space.pages[position // 4]), position % 4
        for layer in range(2):
            expected = kv_of(tokens[: position + 1], layer)
            assert torch.equal(cache[layer].k[frame, offset], expected)
            assert torch.equal(cache[layer].v[frame, offset], -expected)


@pytest.mark.parametrize("num_frames", [16, 64])
def test_every_position_reads_back_after_a_resize(cache: PagedKVCache, num_frames: int) -> None:
    first, second, third = cache.open(), cache.open(), cache.open()
    for turn in range(20):
        for space in (first, second, third):
            extend(cache, space, [space.asid, turn])
    third.release()
    fork = first.fork()
    first.truncate(8)
    fork.truncate(22)
    second.truncate(14)
    with pytest.raises(OutOfFrames):
        cache.resize(3)
    with pytest.raises(InvalidRequest):
        cache.resize(0)
    moving = [frame for space in (first, fork, second) for frame in space.pages.tolist() if frame >= num_frames]
    assert bool(moving) == (num_frames == 16)
    cache.resize(num_frames)
    cache.check()
    assert cache.num_frames == num_frames == cache[0].k.shape[0]
    for space in (first, fork, second):
        assert_holds(cache, space)
        extend(cache, space, [5, 6, 7])
        assert_holds(cache, space)
    fork.release()
    found = cache.open([first.asid, 0, first.asid, 1, first.asid, 2, first.asid, 3, 0])
    assert len(found) == 8
    assert_holds(cache, found)


def test_every_position_reads_back_through_forks_and_copies(cache: PagedKVCache) -> None:
    root = cache.open()
    extend(cache, root, [1, 2, 3, 4, 5, 6])
    children = [root.fork() for _ in range(3)]
    for i, child in enumerate(children):
        extend(cache, child, [10 + i] * (i + 1))
    extend(cache, root, [7])
    children[1].truncate(5)
    extend(cache, children[1], [8, 9, 8, 9])
    for space in (root, *children):
        assert_holds(cache, space)
    cache.check()


def test_a_batch_of_writers_of_one_tail_is_copied_before_it_is_written(cache: PagedKVCache) -> None:
    root = cache.open()
    extend(cache, root, [1, 2, 3, 4, 5])
    spaces = [root, root.fork(), root.fork()]
    batch = cache.plan(spaces, [1, 1, 1])
    assert len(batch.plan.copies) == 2
    write(cache, batch, [[1, 2, 3, 4, 5, 6 + i] for i in range(3)])
    cache.commit(batch, [6, 7, 8])
    for space in spaces:
        assert_holds(cache, space)


@pytest.mark.strict
def test_frames_are_nan_until_they_are_written() -> None:
    cache = PagedKVCache(SPEC, num_frames=32)
    for _ in range(3):  # fresh, then freed and taken again
        space = cache.open()
        batch = cache.plan([space], [5])
        frames = torch.from_numpy(space.pages).long()
        assert cache[1].k[frames].isnan().all()
        write(cache, batch, [[i] for i in range(5)])
        cache.commit(batch, [1, 2, 3, 4, 5])
        assert int(cache[1].k[frames].isnan().any(-1).any(-1).sum()) == 3
        space.release()
        cache.evict(32)


def test_a_plan_that_fails_leaves_the_bytes(cache: PagedKVCache) -> None:
    space = cache.open()
    extend(cache, space, [1, 2, 3])
    before = cache.storage.bytes.clone()
    with pytest.raises(OutOfFrames):
        cache.plan([space], [200])
    assert torch.equal(cache.storage.bytes, before)


@pytest.mark.parametrize("place", ["_copy_frames", "on_cpu", "fill"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_plan_that_breaks_on_the_way_to_the_device_is_undone(
    place: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDKV_DEBUG", "2")  # so that there is poison
    cache = PagedKVCache(SPEC, num_frames=32)
    space = cache.open()
    extend(cache, space, [1, 2, 3])
    twin = space.fork()
    before, tables = cache.stats(), (space.pages.tolist(), twin.pages.tolist())

    def breaking(*args: object, **options: object) -> None:
        raise error("broken off")

    with monkeypatch.context() as patch:
        patch.setattr({"on_cpu": cache_batch, "fill": cache._poison}.get(place, cache), place, breaking)
        with pytest.raises(error, match="broken off"):
            cache.plan([space, twin], [3, 3])
    assert (space.pages.tolist(), twin.pages.tolist()) == tables
    now = cache.stats()
    assert (now.free, now.mapped) == (before.free, before.mapped)
    extend(cache, twin, [4, 5, 6])
    for each in (space, twin):
        assert_holds(cache, each)
        each.release()
    cache.check()


@pytest.mark.parametrize(
    ("asked", "variable", "name"),
    [("auto", "", "cpu"), ("reference", "", "reference"), ("auto", "reference", "reference")],
)
def test_tails_are_copied_by_the_kernel_of_the_cache(
    asked: str, variable: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDKV_KERNELS", variable)
    given, kernel = [], next(kernel for kernel in registry.KERNELS if kernel.name == name)
    if kernel.refuse(registry.Case("copy_frames")):
        pytest.skip("the extension is not built")
    monkeypatch.setattr(kernel.load(), "copy_frames", lambda *tensors: given.append(tensors))
    cache = PagedKVCache(SPEC, num_frames=32, kernels=asked)
    space = cache.open()
    extend(cache, space, [1, 2, 3])
    cache.plan([space.fork()], [1])
    assert len(given) == 1


@pytest.mark.parametrize("name", ["quantum", "reference"])
def test_frames_are_copied_by_the_backend_that_is_named(name: str) -> None:
    storage = torch.arange(4.0)[:, None].clone()
    pairs = torch.tensor([[0, 1]], dtype=torch.int32)
    if name == "quantum":
        with pytest.raises(InvalidRequest, match="there is no kernel 'quantum'"):
            copy_frames(storage, pairs, backend=name)
    else:
        copy_frames(storage, pairs, backend=name)
        assert storage.flatten().tolist() == [0, 0, 2, 3]


def test_an_aborted_plan_leaves_what_was_there(cache: PagedKVCache) -> None:
    space = cache.open()
    extend(cache, space, [1, 2, 3])
    twin = space.fork()
    batch = cache.plan([twin], [3])
    write(cache, batch, [[0], [0], [0]])
    cache.abort(batch)
    assert_holds(cache, space)
    assert_holds(cache, twin)


def test_commit_and_abort_refuse_anything_but_a_planned_batch(cache: PagedKVCache) -> None:
    batch = cache.plan([cache.open()], [2])
    for wrong in (None, batch.plan):
        with pytest.raises(InvalidRequest, match="give the batch that plan\\(\\) of this cache returned"):
            cache.commit(wrong, [1, 2])  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="give the batch that plan\\(\\) of this cache returned"):
            cache.abort(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="num_tokens is -5"):
        cache.frames_for(-5)
    cache.commit(batch, [1, 2])


@pytest.mark.parametrize("most_bytes", [2**26, 0], ids=["whole table", "rows of the step"])
def test_the_packed_batch_is_the_plan(cache: PagedKVCache, most_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a GPU, taken on the CPU: the same numbers arrive."""
    monkeypatch.setattr(mirror_module, "MOST_BYTES", most_bytes)
    mirror = DeviceMirror(torch.device("cpu"))
    spaces = [cache.open() for _ in range(3)]
    for step in range(30):
        if step == 20:
            spaces += [spaces[0].fork() for _ in range(20)]  # the table grows
        batch = (
            cache.plan(spaces, [1 + (step + i) % 3 for i in range(len(spaces))])
            if step < 20
            else cache.plan(spaces[3:6], [1, 1, 1])
        )
        sent = on_device(batch.plan, mirror, block_size=4)
        for name in ("seq_lens", "cu_seqlens_q", "slots", "positions"):
            assert torch.equal(sent[name], getattr(batch, name)), name
        for there, row, length in zip(sent["rows"], batch.plan.rows, batch.plan.seq_lens, strict=True):
            pages = -(-int(length) // 4)
            assert torch.equal(sent["block_table"][there, :pages], batch.block_table[row, :pages])
        if cache.available < 8:
            cache.abort(batch)
            break
        cache.commit(batch, np.zeros(batch.plan.num_tokens, np.int32))


def test_the_mirror_keeps_its_address_while_the_table_does() -> None:
    mirror, host = DeviceMirror(torch.device("cpu")), np.full((4, 8), -1, np.int32)
    host[1, :3] = [5, 6, 7]
    row, pages = np.array([1], np.int32), np.array([3], np.int32)
    address = mirror.update(host, row, pages)[0].data_ptr()
    host[1, 1] = 9
    table, rows = mirror.update(host, row, pages)
    assert table.data_ptr() == address
    assert table[rows[0], :3].tolist() == [5, 9, 7]


def test_a_wide_table_takes_device_memory_for_the_pages_of_a_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows overlap; the kernels read no entry behind the pages of a row."""
    wide, specs = 70_000, KVSpec(num_layers=1, num_kv_heads=1, head_dim=8, block_size=1, dtype="float32")
    cache, mirror = PagedKVCache(specs, num_frames=wide + 300, prefix_cache=False), DeviceMirror(torch.device("cpu"))
    spaces = [cache.open() for _ in range(256)]
    long, short = spaces[7], spaces[:7] + spaces[8:20]
    for space in (*short, long):  # a prefill of its own for each
        num_tokens = wide if space is long else 1 + space.asid % 5
        batch = cache.plan([space], [num_tokens])
        k = torch.randn(num_tokens, 1, 8)
        write_kv(k, -k, cache[0], batch)
        cache.commit(batch, None)
    batch = cache.plan([*short, long], [1] * 20)
    sent = on_device(batch.plan, mirror, block_size=1)
    assert batch.block_table.nbytes > 2**26
    assert sent["block_table"].untyped_storage().nbytes() <= 2 * 4 * (wide + 16 * 20)
    q, k = torch.randn(20, 2, 8), torch.randn(20, 1, 8)
    write_kv(k, -k, cache[0], batch)
    for backend in ("cpu", "numba", "reference"):
        out = paged_attention(q, cache[0], PagedBatch(**sent), backend=backend)
        torch.testing.assert_close(out, paged_attention(q, cache[0], batch, backend=backend), rtol=0, atol=0)
    cache.abort(batch)


@pytest.mark.parametrize("by_layer", [True, False])
@pytest.mark.parametrize("specs", [SPEC, [SPEC, replace(SPEC, window=9)]], ids=["one group", "two groups"])
def test_a_compiled_step_writes_and_reads_the_pool(specs: KVSpec | list[KVSpec], by_layer: bool) -> None:
    cache = PagedKVCache(specs, num_frames=32)
    last = len(cache) - 1

    def step(q: torch.Tensor, k: torch.Tensor, batch: PlannedBatch) -> torch.Tensor:
        args = batch[last] if by_layer else batch
        write_kv(k, -k, cache[last], args)
        return paged_attention(q, cache[last], args)

    batch = cache.plan([cache.open()], [5])
    q, k = torch.randn(5, 4, 64), torch.randn(5, 2, 64)
    if not by_layer and len(cache.specs) > 1:
        with pytest.raises(Exception, match=r"give the kernels batch\[layer\]"):  # torch may wrap the InvalidRequest
            torch.compile(step, fullgraph=True, backend="aot_eager")(q, k, batch)
        return
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(q, k, batch)
    cache.storage.bytes.zero_()
    assert torch.equal(compiled, step(q, k, batch))


def test_the_batch_of_one_group_is_the_batch_of_each_layer(cache: PagedKVCache) -> None:
    batch = cache.plan([cache.open()], [5])
    assert isinstance(batch, PagedBatch)
    assert batch[0] is batch[1] is batch
    q, k = torch.randn(5, 4, 64), torch.randn(5, 2, 64)
    write_kv(k, -k, cache[1], batch)
    assert torch.equal(paged_attention(q, cache[1], batch), paged_attention(q, cache[1], batch[1]))
    with pytest.raises(TypeError, match="not iterable"):
        list(batch)  # type: ignore[call-overload]


@pytest.mark.parametrize("has_tier", [False, True])
def test_a_cache_that_is_dropped_gives_its_memory_back_at_once(has_tier: bool) -> None:
    """Not when the garbage collector runs next. With tiers it does so once they are closed."""
    cache = PagedKVCache(SPEC, num_frames=8, tiers=[HostTier("1MiB")] * has_tier)
    cache.commit(cache.plan([space := cache.open(range(5))], [8]), list(range(8)))
    assert cache.fetch(range(9)).wait(10)
    assert cache.tiers.close(10)
    gone = weakref.ref(cache)
    gc.disable()
    try:
        del cache, space
        assert gone() is None
    finally:
        gc.enable()


def test_a_cache_is_a_manager_with_its_verbs() -> None:
    cache = PagedKVCache(SPEC, num_frames=8, watermark=0.25, policy="2q", events=64)
    space = cache.open(range(5), tenant=b"acme")
    cache.commit(cache.plan([space], [8]), list(range(8)))
    assert (cache.available, cache.reserve, cache.pending, cache.max_pinned) == (6, 2, 0, 4)
    assert cache.available_to(b"acme") == 6
    assert [cache.admits(num_frames) for num_frames in (4, 5)] == [True, False]
    pin = cache.pin(space, owner="transfer", deadline=1.0)
    cache.unpin(pin)
    cache.advise(space, "COLD")
    cache.retire(1, [space])
    assert cache.why(list(range(9)), tenant=b"umbra").reason == "other root"
    assert cache.advance(1) == 2
    assert len(cache.events_snapshot().blocks) == len(cache.events(0)) == 2
    assert (cache.evict(1), cache.forget(), cache.mean_run()) == (1, 1, 0.0)
    cache.set_quota(b"umbra", hard=3)
    assert cache.usages() == {b"umbra": cache.usage(b"umbra")}
    cache.own()
    with ThreadPoolExecutor(1) as pool, pytest.raises(ConcurrentUse):
        pool.submit(cache.open).result()
    cache.disown()
    cache.check()


@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "fp8_e4m3", "fp8_e5m2"])
def test_quantised_pools_serve_the_same_calls(kv_dtype: str) -> None:
    pools = [
        PagedKVCache(KVSpec(1, 2, 64, block_size=4, dtype="float32", kv_dtype=name), num_frames=8)
        for name in (None, kv_dtype)
    ]
    q, k = torch.randn(9, 4, 64), torch.randn(9, 2, 64)
    outs = []
    for pool in pools:
        batch = pool.plan([pool.open()], [9])
        write_kv(k, k, pool[0], batch[0])
        outs.append(paged_attention(q, pool[0], batch[0]))
    error = (outs[0] - outs[1]).abs().max()
    assert 0 < error < {"int8": 0.05, "fp8_e4m3": 0.2, "fp8_e5m2": 0.4, "int4": 0.5}[kv_dtype]


def test_the_kernel_is_chosen_once_and_shown(cache: PagedKVCache) -> None:
    assert f"kernels={cache.kernel.name!r}" in repr(cache)
    assert cache.kernel.name in str(explain(SPEC))


def test_impossible_sizes_and_kernels_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="give one of them"):
        PagedKVCache(SPEC, num_frames=1, memory="1GiB")
    with pytest.raises(InvalidRequest, match="num_frames is 2.5"):
        PagedKVCache(SPEC, num_frames=2.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="num_frames is True"):
        PagedKVCache(SPEC, num_frames=True)
    with pytest.raises(InvalidRequest, match="2000000.0 is not an amount of memory"):
        PagedKVCache(SPEC, memory=2e6)  # type: ignore[arg-type]
    with pytest.raises((InvalidRequest, KernelUnavailable), match="quantum"):
        PagedKVCache(SPEC, num_frames=1, kernels="quantum")
    for device in ("foo", 1.5, None):
        with pytest.raises(InvalidRequest, match=f"device is {device!r}.*give 'cpu' or 'cuda'"):
            PagedKVCache(SPEC, num_frames=1, device=device)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=f"device is 'cuda:99'; torch finds {torch.cuda.device_count()} GPUs here"):
        PagedKVCache(SPEC, num_frames=1, device="cuda:99")
    for spec in (None, 3, [], [SPEC, None]):
        with pytest.raises(InvalidRequest, match="spec is .*; give a KVSpec"):
            PagedKVCache(spec, num_frames=1)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="layer_groups is 0; give a list"):
        PagedKVCache(SPEC, num_frames=1, layer_groups=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["4", "-1", "yes", ""])
def test_an_unknown_debug_level_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDKV_DEBUG", value)
    with pytest.raises(InvalidRequest, match="PAGEDKV_DEBUG is .*; it takes 0, 1, 2 or 3"):
        PagedKVCache(SPEC, num_frames=1)


def test_memory_buys_as_many_frames_as_fit() -> None:
    cache = PagedKVCache(SPEC, memory=10 * SPEC.frame_bytes + 5)
    assert cache.num_frames == 10
    assert len(cache) == 2


@pytest.mark.parametrize("of", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda of: of.__name__)
def test_a_pool_is_neither_copied_nor_pickled(of: Callable[[object], object]) -> None:
    cache = PagedKVCache(SPEC, num_frames=8)
    for pool in (cache, MemoryManager(8, 4), FramePool(8)):
        with pytest.raises(
            InvalidRequest, match="cannot be copied or pickled, since both would give out the same frames"
        ):
            of(pool)
    cache.check()
