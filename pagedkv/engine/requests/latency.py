"""Latency: the phases of the time to an outcome, and the distribution of such times in constant memory.

    submitted ──queue──▶ admitted ──prefill──▶ first token ──decode──▶ finished

A preempted output waits in its phase: in decode, or in prefill if it has no token yet. Knows numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil, inf, log2
from typing import Final

BUCKETS_PER_OCTAVE: Final = 16
"""Bounds of neighbouring buckets have the ratio 2 ** (1 / 16), so their middle is at most 2.2 % from any value."""
LEAST_EXPONENT, MOST_EXPONENT = -20, 17
"""The outer bounds are 2 ** -20 s, about a microsecond, and 2 ** 17 s, 36 hours."""

_OFFSET: Final = -LEAST_EXPONENT * BUCKETS_PER_OCTAVE
_LAST: Final = _OFFSET + MOST_EXPONENT * BUCKETS_PER_OCTAVE


@dataclass(frozen=True)
class Latency:
    """Seconds of each phase.

    queue_s:   from submission until the prompt was first scheduled
    prefill_s: from then to the first token
    decode_s:  from then to the end
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The sum of all phases."""
        return self.queue_s + self.prefill_s + self.decode_s


@dataclass(frozen=True)
class Percentiles:
    """Percentiles of `count` values; 0.0 if there are none. Each is within 2.2 % of a value of that rank."""

    p50: float
    p90: float
    p99: float
    count: int


@dataclass
class Histogram:
    """A distribution of seconds in buckets of equal ratio: 593 counters, however many values.

    Bucket i holds values up to its bound, which is included. Values beyond the outer bounds go to the outer buckets.
    sum, least, most: the exact sum, minimum and maximum of all values
    _value, _bucket: the last value and its bucket
    """

    counts: list[int] = field(default_factory=lambda: [0] * (_LAST + 1), repr=False)
    sum: float = 0.0
    least: float = inf
    most: float = 0.0
    _value: float = field(default=0.0, repr=False, compare=False)
    _bucket: int = field(default=0, repr=False, compare=False)

    def add(self, value: float) -> None:
        """Count a value."""
        if value != self._value:  # outputs that decode together wait equally long
            self._bucket, self._value = _bucket(value), value
        self.counts[self._bucket] += 1
        self.sum += value
        if value < self.least:
            self.least = value
        if value > self.most:
            self.most = value

    def up_to(self, exponents: range) -> list[int]:
        """Return how many values are at most 2 ** e seconds, for each rising e, and how many there are in all."""
        totals = list(accumulate(self.counts))
        return [*(totals[_OFFSET + e * BUCKETS_PER_OCTAVE] for e in exponents), totals[-1]]

    def percentiles(self) -> Percentiles:
        """Return the 50th, 90th and 99th percentile: the smallest values that so many percent do not exceed."""
        totals = list(accumulate(self.counts))
        if not totals[-1]:
            return Percentiles(0.0, 0.0, 0.0, 0)
        p50, p90, p99 = (self._of_rank(ceil(totals[-1] * percent / 100), totals) for percent in (50, 90, 99))
        return Percentiles(p50, p90, p99, totals[-1])

    def _of_rank(self, rank: int, totals: list[int]) -> float:
        """Return the geometric middle of the bucket of the value with that rank, from 1."""
        bucket = next(i for i, total in enumerate(totals) if total >= rank)
        middle: float = 2 ** ((bucket - _OFFSET - 0.5) / BUCKETS_PER_OCTAVE)
        return min(max(middle, self.least), self.most)


def _bucket(value: float) -> int:
    """Return the bucket of a value: the first whose bound is not below the value."""
    if value <= 2**LEAST_EXPONENT:
        return 0
    return min(ceil(log2(value) * BUCKETS_PER_OCTAVE) + _OFFSET, _LAST)
