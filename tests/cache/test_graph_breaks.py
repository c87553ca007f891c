"""torch.compile steps over the calls of a cache: a compiled function that plans and commits does what it did before."""

from __future__ import annotations

import pytest
import torch

from pagedkv import KVSpec, PagedKVCache, paged_attention, write_kv
from pagedkv.cache import graph_breaks
from pagedkv.cache.graph_breaks import breaks_graph
from pagedkv.errors import InvalidRequest

SPEC = KVSpec(1, 1, 64, block_size=4, dtype="float32")


def beam_search(cache: PagedKVCache, x: torch.Tensor) -> torch.Tensor:
    """Open two prompts, compute, reorder, and compute again; return what attention gave."""
    spaces, _ = cache.open_batch([[1] * 6, [2] * 6])
    total = torch.zeros(64)
    for turn in range(3):
        counts = [1, 1] if turn else [6 - len(space) for space in spaces]
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
def test_a_compiled_function_opens_plans_and_commits() -> None:
    x = torch.arange(64, dtype=torch.float32) / 64
    plain, traced = (PagedKVCache(SPEC, num_frames=32) for _ in range(2))
    compiled = torch.compile(beam_search, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(traced, x), beam_search(plain, x))
    assert traced.stats() == plain.stats()
    traced.check()


def test_a_torch_without_the_private_function_gets_the_public_decorator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_breaks, "set_eval_frame", None)
    known = list[bool]()

    @breaks_graph
    def look() -> None:
        known.append(torch.compiler.is_compiling())

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        look()
        return y + 3

    assert torch.compile(step, backend="eager")(torch.ones(3)).tolist() == [5, 5, 5]
    assert known == [False]


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


def test_a_whole_graph_says_which_call_breaks_it() -> None:
    cache = PagedKVCache(SPEC, num_frames=8)

    @torch.compile(backend="eager", fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        cache.open([1, 2])
        return x

    with pytest.raises(Exception, match="open of a KV cache is no part of a graph"):
        step(torch.ones(3))


def test_a_decorated_method_keeps_its_name_and_docstring() -> None:
    @breaks_graph
    def method() -> int:
        """Return 3."""
        return 3

    assert (method(), method.__name__, method.__doc__) == (3, "method", "Return 3.")
    assert "longest known prefix" in (PagedKVCache.open.__doc__ or "")
