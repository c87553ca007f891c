"""The cost of a step depends neither on the size of the pool nor on the length of contexts. The plot is docs/img/scaling.svg.

Times, but loosely: the best of many steps in turn, and a factor of three where what would be wrong is a factor of a thousand.
"""

from __future__ import annotations

import pytest

from pagedkv.bench.scaling import CONTEXT, FREE, FULL, Point, measure

pytestmark = pytest.mark.many_steps


@pytest.mark.parametrize(("line", "small", "large"), [(FREE, 1_000, 1_000_000), (FULL, 1_000, 300_000), (CONTEXT, 16, 16_384)])
def test_a_step_costs_the_same_however_large_things_are(line: str, small: int, large: int) -> None:
    points = (Point(line, small), Point(line, large))
    figures = measure(25, points)
    cheap, dear = (figures[point].best for point in points)
    assert cheap
    assert dear
    assert dear < 3 * cheap
