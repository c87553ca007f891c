"""The cost of a step depends neither on the size of the pool nor on the length of contexts.

The plot is docs/img/bench/manager.svg. Other costs do not grow with the number of tenants or of shared tails. The tests
compare the CPU time of this thread, which other processes do not lengthen, and loosely: the best of many steps, and a
factor of three where a fault would show a factor of a thousand.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from time import thread_time

import pytest

from pagedkv.bench.manager.scaling import CONTEXT, FREE, FULL, Point
from pagedkv.core import MemoryManager
from pagedkv.core.prefix.roots import Roots
from tests.core.oracle import grown

pytestmark = pytest.mark.many_steps


@pytest.mark.parametrize(
    ("line", "small", "large"), [(FREE, 1_000, 1_000_000), (FULL, 1_000, 100_000), (CONTEXT, 16, 8_192)]
)
def test_a_step_costs_the_same_in_any_pool_and_at_any_length(line: str, small: int, large: int) -> None:
    cheap, dear = (best_of(25, Point(line, size).make()) for size in (small, large))
    assert 0 < dear < 3 * cheap


def best_of(times: int, act: Callable[[], object]) -> float:
    """Return the shortest of `times` runs of `act`, in seconds of CPU time."""
    taken = []
    for _ in range(times):
        begin = thread_time()
        act()
        taken.append(thread_time() - begin)
    return min(taken)


def test_a_new_tenant_costs_the_same_with_few_or_many_others() -> None:
    """The digest of an image is a tenant, so there may be as many tenants as images in the cache."""
    roots, state, names = Roots(), MemoryManager(8, 4).state, count()

    def hundred_more() -> None:
        nonlocal state
        for _ in range(100):
            root, state = roots.of(str(next(names)).encode(), state)
            state.roots[root.number, 0] = 1  # in use from now on

    few = best_of(10, hundred_more)
    for _ in range(80):
        hundred_more()
    assert best_of(10, hundred_more) < 4 * few
    assert sorted(root.number for root in roots.by_tenant.values()) == list(range(10_000))


def test_stats_cost_grows_with_the_spaces_and_not_with_their_square() -> None:
    def shared_tails(pairs: int) -> MemoryManager:
        mm = MemoryManager(16 * pairs, 4)
        for _ in range(pairs):
            grown(mm, [1] * 50).fork()
        return mm

    few, many = (best_of(20, shared_tails(pairs).stats) for pairs in (64, 1024))
    assert many < 40 * few
