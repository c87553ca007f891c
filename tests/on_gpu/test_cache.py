"""A cache on a GPU: its steps, graphs, growth and tiers hold what a cache on a CPU holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from pagedkv import KVSpec, PagedKVCache
from pagedkv.cache import sizes
from pagedkv.tiers import DiskTier, HostTier, Tier

if TYPE_CHECKING:
    from pathlib import Path

    from pagedkv.cache import PlannedBatch
    from pagedkv.core import AddressSpace

H, K, D, S = 8, 2, 64, 16
SPEC = KVSpec(num_layers=2, num_kv_heads=K, head_dim=D, block_size=S, dtype="float32")
NEAR = 2e-5
"""The most by which two kernels may differ in float32, for results of about 1."""


class Layers:
    """The bound calls of a cache. Keys, values and queries follow from token, position and layer alone."""

    def __init__(self, cache: PagedKVCache) -> None:
        self.cache = cache
        self.attend = [cache.attention(layer) for layer in range(len(cache))]
        self.write = [cache.write(layer) for layer in range(len(cache))]

    def run(self, ids: Tensor, batch: PlannedBatch) -> Tensor:
        """Store the new tokens `ids` (int64 [T], on the device) and return the last layer's result [T, H, D]."""
        angles = torch.arange(1, D + 1, device=ids.device) * 0.05
        out = torch.zeros(())
        for layer in range(len(self.cache)):
            x = torch.sin((ids + 1)[:, None] * angles + batch.positions[: len(ids), None] * 0.3 + layer)
            k = torch.stack([x, x.roll(7, 1)], 1)
            self.write[layer](k, k * 0.5 - 1, batch[layer])
            out = self.attend[layer](torch.stack([x.roll(h, 1) for h in range(H)], 1).contiguous(), batch[layer])
        return out

    def extend(self, spaces: list[AddressSpace], tokens: list[list[int]]) -> Tensor:
        """Append tokens to each space in one step; return the results on the CPU."""
        batch = self.cache.plan(spaces, [len(ids) for ids in tokens])
        whole = [token for ids in tokens for token in ids]
        out = self.run(torch.tensor(whole, device=self.cache.device), batch)
        self.cache.commit(batch, whole)
        return out.cpu()


def life(cache: PagedKVCache) -> list[Tensor]:
    """Return the results of prompts, forks with a shared tail, decode steps and a prompt that is found again."""
    layers, generator = Layers(cache), torch.Generator().manual_seed(1)
    prompts = [torch.randint(500, (n,), generator=generator).tolist() for n in (70, 5, 33)]
    spaces = [cache.open(prompt) for prompt in prompts]
    found = [layers.extend(spaces, prompts)]
    spaces += [spaces[0].fork(), spaces[0].fork()]
    found += [layers.extend(spaces, [[step + i] for i in range(5)]) for step in range(20)]
    found.append(layers.extend(spaces[:3], [[1, 2, 3, 4], [9], [7] * 40]))  # drafts, a decode and a chunk
    for space in spaces:
        space.release()
    again = cache.open(prompts[0])
    assert len(again) == 70 // S * S
    found.append(layers.extend([again], [prompts[0][len(again) :]]))
    again.release()
    cache.check()
    return found


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_a_life_gives_the_results_of_a_cpu(device: str, kv_dtype: str | None) -> None:
    spec = SPEC if kv_dtype is None else KVSpec(2, K, D, block_size=S, dtype="float32", kv_dtype=kv_dtype)
    want = life(PagedKVCache(spec, num_frames=64, kernels="reference"))
    found = life(PagedKVCache(spec, num_frames=64, device=device))
    for one, other in zip(found, want, strict=True):
        assert (one - other).abs().max() <= (NEAR if kv_dtype is None else 2e-2)


def test_a_graph_of_a_decode_step_replays_each_later_step(device: str) -> None:
    """Captured once with three sequences, and replayed with fewer; without a GPU the step is called."""
    cache = PagedKVCache(SPEC, num_frames=64, device=device)
    layers, fixed = Layers(cache), cache.fixed_batch(4, 256)
    ids = torch.zeros(4, dtype=torch.int64, device=device)
    spaces = [cache.open() for _ in range(3)]
    layers.extend(spaces, [[1] * 20, [2] * 100, [3]])
    graph: Any = None
    captures = 0
    out = torch.zeros(())
    for step in range(60):
        some = spaces[: 3 - step % 2]
        batch = cache.plan(some, [1] * len(some), into=fixed)
        ids[: len(some)] = step
        if fixed.moved:
            graph, captures = None, captures + 1
        if graph is not None:
            graph.replay()
        elif device == "cuda":
            layers.run(ids, batch)  # as a first run compiles and allocates
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = layers.run(ids, batch)
            graph.replay()
        else:
            out = layers.run(ids, batch)
        replayed = out[: len(some)].cpu()
        cache.commit(batch, [step] * len(some))
        assert (replayed - again(cache, layers, some)).abs().max() <= NEAR, step
    assert captures <= 3


def again(cache: PagedKVCache, layers: Layers, spaces: list[AddressSpace]) -> Tensor:
    """Return the results for the last token of each space, computed in a copy of it by an eager step."""
    results = []
    for space in spaces:
        ids = space.token_ids.tolist()
        copy = cache.open(tenant=b"copy")
        results.append(layers.extend([copy], [ids])[-1:])
        copy.release()
    return torch.cat(results)


def test_a_pool_grows_and_keeps_its_bytes(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "_memory_for_a_pool", lambda device: 64 * SPEC.frame_bytes)
    if device == "cpu":  # as on a GPU
        real = sizes.pool_sizes
        monkeypatch.setattr(sizes, "pool_sizes", lambda *args: real(*args[:3], torch.device("meta")))
    cache = PagedKVCache(SPEC, device=device)
    layers, resized = Layers(cache), []
    cache.on_resize(lambda cache: resized.append(cache.num_frames))
    assert cache.num_frames == 8
    spaces = [cache.open() for _ in range(6)]
    for space in spaces:
        layers.extend([space], [[space.asid] * 100])
    assert resized == [16, 32, 64]
    last = layers.extend(spaces, [[5]] * 6)
    assert (last - again(cache, layers, spaces)).abs().max() <= NEAR


@pytest.mark.parametrize("kind", ["host", "disk", "both"])
def test_evicted_pages_come_back_from_the_tiers(device: str, kind: str, tmp_path: Path) -> None:
    """The pool holds two prompts of four, so each was evicted when it comes again."""
    tiers: list[Tier] = [HostTier("8MiB")] if kind != "disk" else []
    tiers += [DiskTier(tmp_path, "16MiB")] if kind != "host" else []
    cache = PagedKVCache(SPEC, num_frames=16, device=device, tiers=tiers, model="m")
    layers, prompts = Layers(cache), [[at + i for i in range(100)] for at in (0, 1000, 2000, 3000)]
    want = []
    for prompt in prompts:
        space = cache.open(prompt)
        want.append(layers.extend([space], [prompt])[-1])
        space.release()
        assert cache.tiers.flush(600)
    for _ in range(3):
        for prompt, first in zip(prompts, want, strict=True):
            assert cache.fetch(prompt).wait(600)
            space = cache.open(prompt)
            assert len(space) == 96
            last = layers.extend([space], [prompt[96:]])[-1]
            assert (last - first).abs().max() <= NEAR
            space.release()
            assert cache.tiers.flush(600)
    stats = cache.tiers.stats()
    assert sum(each.loaded for each in stats.values()) > 50
    assert not any(each.corrupt for each in stats.values())
    cache.tiers.close()


def test_pages_on_disk_move_between_devices(device: str, tmp_path: Path) -> None:
    def on(place: str) -> PagedKVCache:
        return PagedKVCache(SPEC, num_frames=16, device=place, model="m", tiers=[DiskTier(tmp_path, "64MiB")])

    old, prompt = on(device), list(range(100))
    want = Layers(old).extend([old.open(prompt)], [prompt])[-1]
    assert old.tiers.close()
    for target in {"cpu", device}:
        new = on(target)
        assert new.fetch(prompt).wait(600)
        space = new.open(prompt)
        assert len(space) == 96
        assert (Layers(new).extend([space], [prompt[96:]])[-1] - want).abs().max() <= NEAR
        new.tiers.close()
