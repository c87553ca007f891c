"""PagedKVCache: bytes and integers in step. Each token reads back as it was written, after forks, copies and growth.

Layer groups: layers with windows give frames back, and all other layers and tokens stay.
"""

from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from pagedkv import KernelUnavailable, KVSpec, OutOfFrames, PagedKVCache, paged_attention, write_kv
from pagedkv.cache import PlannedBatch
from pagedkv.cache import batch as cache_batch
from pagedkv.cache import mirror as mirror_module
from pagedkv.cache.batch import on_device
from pagedkv.cache.mirror import DeviceMirror
from pagedkv.core import AddressSpace, FramePool, Group, MemoryManager
from pagedkv.errors import InvalidRequest
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
def test_a_plan_that_breaks_on_the_way_to_the_device_is_undone(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDKV_DEBUG", "2")  # so that there is poison
    cache = PagedKVCache(SPEC, num_frames=32)
    space = cache.open()
    extend(cache, space, [1, 2, 3])
    twin = space.fork()
    before, tables = cache.stats(), (space.pages.tolist(), twin.pages.tolist())

    with monkeypatch.context() as patch:
        owner = {"on_cpu": cache_batch, "fill": cache._poison}.get(place, cache)
        patch.setattr(owner, place, Mock(side_effect=KeyboardInterrupt("broken off")))
        with pytest.raises(KeyboardInterrupt, match="broken off"):
            cache.plan([space, twin], [3, 3])
    assert (space.pages.tolist(), twin.pages.tolist()) == tables
    now = cache.stats()
    assert (now.free, now.mapped) == (before.free, before.mapped)
    extend(cache, twin, [4, 5, 6])
    for each in (space, twin):
        assert_holds(cache, each)
        each.release()
    cache.check()


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


@pytest.mark.parametrize("by_layer", [True, False])
@pytest.mark.parametrize("specs", [SPEC, [SPEC, replace(SPEC, window=9)]], ids=["one group", "two groups"])
def test_a_compiled_step_writes_and_reads_the_pool(specs: KVSpec | list[KVSpec], by_layer: bool) -> None:
    cache = PagedKVCache(specs, num_frames=32)
    last = len(cache) - 1

    def step(q: torch.Tensor, k: torch.Tensor, batch: PlannedBatch) -> torch.Tensor:
        args = batch[last] if by_layer else batch
        write_kv(k, -k, cache[last], args)
        return paged_attention(q, cache[last], args, window=(8, 0))

    batch = cache.plan([cache.open()], [5])
    q, k = torch.randn(5, 4, 64), torch.randn(5, 2, 64)
    if not by_layer and len(cache.specs) > 1:
        # torch may wrap the InvalidRequest; torch 2.8 gives the name of its class alone
        is_old = torch.__version__.startswith("2.8.")
        with pytest.raises(Exception, match="_DiffersByGroup" if is_old else r"give the kernels batch\[layer\]"):
            torch.compile(step, fullgraph=True, backend="aot_eager")(q, k, batch)
        return
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(q, k, batch)
    cache.storage.bytes.zero_()
    assert torch.equal(compiled, step(q, k, batch))


@pytest.mark.parametrize("has_tier", [False, True])
def test_a_cache_that_is_dropped_gives_its_memory_back_at_once(has_tier: bool) -> None:
    """Not when the garbage collector runs next. With tiers it does so once they are closed."""
    cache = PagedKVCache(SPEC, num_frames=8, tiers=[HostTier("1MiB")] * has_tier)
    cache.commit(cache.plan([space := cache.open(range(5))], [8]), list(range(8)))
    assert cache.fetch(range(9)).wait()
    assert cache.tiers.close(600)
    gone = weakref.ref(cache)
    gc.disable()
    try:
        del cache, space
        assert gone() is None
    finally:
        gc.enable()


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


@pytest.mark.parametrize("of", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda of: of.__name__)
def test_a_pool_is_neither_copied_nor_pickled(of: Callable[[object], object]) -> None:
    cache = PagedKVCache(SPEC, num_frames=8)
    for pool in (cache, MemoryManager(8, 4), FramePool(8)):
        with pytest.raises(
            InvalidRequest, match="cannot be copied or pickled, since both would give out the same frames"
        ):
            of(pool)
    cache.check()


WINDOW = 9
FULL = KVSpec(2, 2, 64, block_size=4, dtype="float32")
LOCAL = replace(FULL, window=WINDOW)
LAYERS = (1, 0, 2, 1, 0)  # 1 and 2 are windowed; 2 has one layer, and half of its frames lie idle


def hybrid(num_frames: int = 96) -> PagedKVCache:
    return PagedKVCache([FULL, LOCAL, replace(LOCAL, num_layers=1)], layer_groups=LAYERS, num_frames=num_frames)


def plain(num_frames: int = 96) -> PagedKVCache:
    return PagedKVCache(replace(FULL, num_layers=5), num_frames=num_frames)


def step(cache: PagedKVCache, spaces: list[AddressSpace], tokens: list[list[int]]) -> list[torch.Tensor]:
    """Run a model of five layers whose q, k and v are functions of the token; return the attention of each layer."""
    batch = cache.plan(spaces, [len(new) for new in tokens])
    flat = [token for new in tokens for token in new]
    outs = []
    for layer, group in enumerate(LAYERS):
        q, k, v = (
            torch.stack(
                [
                    torch.randn(heads, 64, generator=torch.Generator().manual_seed(7 * (11 * token + layer) + i))
                    for token in flat
                ]
            )
            for i, heads in enumerate((4, 2, 2))
        )
        write_kv(k, v, cache[layer], batch[layer])
        outs.append(paged_attention(q, cache[layer], batch[layer], window=WINDOW if group else None))
    cache.commit(batch, flat)
    return outs


def test_a_bound_call_has_the_window_of_its_layer_and_no_wider_one() -> None:
    cache = hybrid()
    space = cache.open()
    batch = cache.plan([space], [20])
    q, k, v = torch.randn(20, 4, 64), torch.randn(20, 2, 64), torch.randn(20, 2, 64)
    for layer, group in enumerate(LAYERS):
        write_kv(k, v, cache[layer], batch[layer])
        expected = paged_attention(q, cache[layer], batch[layer], window=WINDOW if group else None)
        assert torch.equal(cache.attention(layer)(q, batch[layer]), expected)
    narrow = paged_attention(q, cache[0], batch[0], window=3)
    assert torch.equal(cache.attention(0, window=3)(q, batch[0]), narrow)
    for window in (None, WINDOW + 1, (WINDOW, 0), (-1, None), np.int64(WINDOW + 1)):
        told = re.escape(f"window is {window}, and the pool keeps {WINDOW} positions of layer 0")
        with pytest.raises(InvalidRequest, match=told):
            cache.attention(0, window=window)


def test_every_layer_attends_to_what_it_would_without_groups() -> None:
    caches, rng = (plain(), hybrid()), np.random.default_rng(5)
    spaces = [[cache.open() for _ in range(2)] for cache in caches]
    for turn in range(12):
        tokens = [rng.integers(0, 99, 1 + (turn * 5 + i) % 7).tolist() for i in range(len(spaces[0]))]
        plainly, grouped = (step(cache, mine, tokens) for cache, mine in zip(caches, spaces, strict=True))
        for one, other in zip(plainly, grouped, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        if turn == 4:
            for mine in spaces:
                mine.append(mine[0].fork())
        if turn == 8:
            for cache in caches:
                cache.resize(110)
    caches[1].check()
    for space in spaces[1]:
        for group in (1, 2):
            assert (space.pages_in(group) >= 0).sum() <= -(-WINDOW // 4) + 1 < len(space.pages)


def test_a_prompt_that_comes_back_is_found_in_every_group() -> None:
    cache, prompt = hybrid(), list(range(40, 61))
    first = cache.open()
    alone = step(cache, [first], [prompt])
    first.release()
    again = cache.open(prompt)
    assert len(again) == 20
    rest = step(cache, [again], [prompt[20:]])
    for one, other in zip(alone, rest, strict=True):
        torch.testing.assert_close(one[20:], other, rtol=1e-5, atol=1e-6)
    cache.check()


@pytest.mark.parametrize("at_once", [1, 4, 7, 30])
def test_no_sequence_holds_more_than_frames_for_says(at_once: int) -> None:
    cache, most = hybrid(num_frames=300), 0
    space = cache.open()
    while len(space) < 60:
        count = min(at_once, 60 - len(space))
        batch = cache.plan([space], [count])
        most = max(most, cache.stats().mapped)
        assert most <= cache.frames_for(len(space) + count, at_once)
        cache.commit(batch, [len(space)] * count)
    assert most > cache.frames_for(60, at_once) - 3  # the bound is tight: one page for each windowed group


def test_each_group_reaches_the_device_with_rows_and_slots_of_its_own() -> None:
    cache, mirror = hybrid(), DeviceMirror(torch.device("cpu"))
    batch = cache.plan([cache.open(), cache.open()], [9, 3])
    for group in range(3):
        sent, here = on_device(batch.plan, mirror, 4, group), vars(batch[LAYERS.index(group)])
        assert torch.equal(sent["rows"], here["rows"])
        assert torch.equal(sent["slots"], here["slots"])
        sent_pages, pages = (fields["block_table"][fields["rows"]][:, :3] for fields in (sent, here))
        assert torch.equal(sent_pages, pages)
    assert len({tuple(batch[layer].slots.tolist()) for layer in range(5)}) == 3
    assert [batch[layer] is batch[0] for layer in range(5)] == [True, False, False, True, False]


def test_the_batch_of_several_groups_is_refused_by_the_kernels() -> None:
    """Each layer attended through the slots of the first group would read the pages of another layer."""
    cache = hybrid()
    batch = cache.plan([cache.open()], [5])
    q, k = torch.randn(5, 4, 64), torch.randn(5, 2, 64)
    for call in (lambda: write_kv(k, k, cache[0], batch), lambda: paged_attention(q, cache[0], batch)):
        with pytest.raises(
            InvalidRequest, match=r"3 layer groups.*give the kernels batch\[layer\], beside cache\[layer\]"
        ):
            call()
    assert not any(hasattr(batch, name) for name in ("slots", "rows", "block_table", "args"))
    assert batch.positions.tolist() == [0, 1, 2, 3, 4]
    assert (batch.seq_lens.tolist(), batch.cu_seqlens_q.tolist(), batch.max_seqlen_k) == ([5], [0, 5], 5)
    assert "1 sequences, 5 new tokens" in repr(batch)
    cache.abort(batch)


@pytest.mark.parametrize(
    ("specs", "layers", "why"),
    [
        ([FULL, replace(LOCAL, block_size=8)], None, "give one size"),
        ([FULL, LOCAL], (0, 0, 0, 1), "name the group of each layer"),
        ([FULL, LOCAL], (0, 1, 0, 2), "name the group of each layer"),
        ([], None, "give a KVSpec"),
        ([5], None, "give a KVSpec"),
    ],
)
def test_groups_that_do_not_fit_together_are_refused(
    specs: list[KVSpec], layers: tuple[int, ...] | None, why: str
) -> None:
    with pytest.raises(InvalidRequest, match=why):
        PagedKVCache(specs, layer_groups=layers, num_frames=4)
    if len(specs) == 2:
        with pytest.raises(InvalidRequest, match="a KVSpec for each group"):
            PagedKVCache(FULL, groups=[Group(), Group()], num_frames=4)


def test_a_spec_keeps_positions_behind_its_window() -> None:
    """A rollback crosses the window, and the frames that a sequence may hold are counted with them."""
    spec = KVSpec(1, 1, 64, block_size=4, dtype="float32", window=4, keep=8)
    cache = PagedKVCache([replace(spec, window=None, keep=0), spec], num_frames=64)
    space = cache.open()
    cache.commit(cache.plan([space], [30]), range(30))
    assert (space.pages_in(1) >= 0).tolist() == [False] * 4 + [True] * 4
    space.truncate(24)
    most = cache.frames_for(30, 1)
    for token in range(24, 30):
        cache.commit(cache.plan([space], [1]), [token])
        assert cache.stats().mapped <= most
    cache.check()
