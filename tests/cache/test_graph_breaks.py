"""torch.compile steps over the calls of a cache: a compiled function that plans and commits does what it did before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from pagedkv import KVSpec, PagedKVCache, paged_attention, write_kv
from pagedkv.core import FramePool, Group, MemoryManager
from pagedkv.errors import InvalidRequest

SPEC = KVSpec(1, 1, 64, block_size=4, dtype="float32")
MODES = {"grad": nullcontext, "inference_mode": torch.inference_mode}


def beam_search(cache: PagedKVCache, x: torch.Tensor) -> torch.Tensor:
    """Open two prompts, compute, reorder, and compute again; return what attention gave."""
    spaces, _ = cache.open_batch([[1] * 6, [2] * 6])
    total = torch.zeros(64)
    for turn in range(3):
        # no comprehension: from Python 3.12 on, dynamo fails at one that breaks a graph
        counts = [1, 1] if turn else [6 - len(spaces[0]), 6 - len(spaces[1])]
        batch = cache.plan(spaces, counts)
        kv = (x * (turn + 1)).expand(sum(counts), 1, 64).contiguous()
        write_kv(kv, kv + 1, cache[0], batch)
        total = total + paged_attention(kv * 2, cache[0], batch).sum((0, 1))
        cache.commit(batch, [turn + 5] * sum(counts) if turn else [1] * counts[0] + [2] * counts[1])
        spaces = cache.reorder(spaces, [1, 1])
    cache.abort(cache.plan(spaces, [1, 1]))
    one = cache.open([2] * 6)
    known = cache.lookup([2] * 6)
    for space in (one, *spaces):
        space.release()
    return total * (x + 1).sum() + known


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", MODES)
def test_a_compiled_function_opens_plans_and_commits(mode: str) -> None:
    x = torch.arange(64, dtype=torch.float32) / 64
    plain, traced = (PagedKVCache(SPEC, num_frames=32) for _ in range(2))
    compiled = torch.compile(beam_search, backend="eager")
    with MODES[mode]():
        for _ in range(2):
            assert torch.equal(compiled(traced, x), beam_search(plain, x))
    assert traced.stats() == plain.stats()
    traced.check()


def speculate(mm: MemoryManager, pool: FramePool, x: torch.Tensor) -> torch.Tensor:
    """Commit a prompt and rejected drafts of two forks by the classes of core; return a figure of every call."""
    one, (two, _) = mm.open([1, 2, 3, 4, 5]), mm.open_batch([[1] * 6, [2] * 6], pads=[0, 0]).spaces
    x = x * (len(one) + len(two) + 2)
    mm.commit(mm.plan([one, two], [5, 1]), [1, 2, 3, 4, 5, 1])
    child, pin = one.fork(), mm.pin(one)
    x = x + mm.lookup([1, 2, 3, 4, 5]) + mm.pending
    mm.commit(mm.plan([child], [4]), [7, 8], [2])
    child.truncate(6)
    mm.abort(mm.plan([child, one], [2, 2]))
    x = x * len(child) + mm.stats().evictions
    (child,) = mm.reorder([child], [0])
    mm.unpin(pin)
    for space in (one, two, child):
        space.release()
    frames = pool.take(3)
    pool.drop(frames)
    return x + len(frames) + mm.evict(1) + pool.stats().free


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_function_calls_the_classes_of_core() -> None:
    plain, traced = (MemoryManager(32, 4, groups=(Group(), Group(window=3))) for _ in range(2))
    pools, x = [FramePool(8) for _ in range(2)], torch.ones(3)
    compiled = torch.compile(speculate, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(traced, pools[0], x), speculate(plain, pools[1], x))
    assert traced.stats() == plain.stats()
    traced.check()


def test_the_code_that_all_context_managers_share_is_traced() -> None:
    """`MemoryManager.restoring` is a function of contextlib. A mark on its code would be on every context manager."""

    @contextmanager
    def nothing() -> Iterator[None]:
        yield

    @torch.compile(backend="eager", fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        with nothing():
            return x + 1

    assert step(torch.ones(1)).tolist() == [2]


def test_what_follows_a_call_is_compiled_again_and_errors_pass() -> None:
    cache, graphs = PagedKVCache(SPEC, num_frames=8), list[torch.fx.GraphModule]()

    def count(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=count)
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        cache.lookup([1, 2])
        return y + 3

    x = torch.ones(3)
    assert step(x).tolist() == [5, 5, 5]
    assert len(graphs) == 2

    @torch.compile(backend="eager")
    def wrong(x: torch.Tensor) -> torch.Tensor:
        cache.open("no ids")  # type: ignore[arg-type]
        return x

    with pytest.raises(InvalidRequest):
        wrong(x)
    assert step(x).tolist() == [5, 5, 5]
    assert len(graphs) == 2


CACHE, MANAGER = PagedKVCache(SPEC, num_frames=8), MemoryManager(8, 4)
SPACE = MANAGER.open([1])
BREAKS: dict[str, Callable[[], object]] = {
    "open": lambda: CACHE.open([1, 2]),
    "lookup": lambda: MANAGER.lookup([1, 2]),
    "fork": SPACE.fork,
    "pending": lambda: MANAGER.pending,
    "__len__": lambda: len(SPACE),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_whole_graph_says_which_call_breaks_it(name: str) -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        BREAKS[name]()
        return x

    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"{name} of a KV cache is no part of a graph"):
        step(torch.ones(3))
