"""Layer groups through PagedKVCache: layers with windows give frames back, and all other layers and tokens stay."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from pagedkv import KVSpec, PagedKVCache, paged_attention, write_kv
from pagedkv.cache.batch import on_device
from pagedkv.cache.mirror import DeviceMirror
from pagedkv.core import AddressSpace, Group
from pagedkv.errors import InvalidRequest

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
