"""Prometheus: the counters of a memory manager as metrics. Needs the extra `metrics` (prometheus-client).

    from pagedkv.integrations.prometheus import register
    register(cache)                                  # a PagedKVCache or a MemoryManager
    prometheus_client.start_http_server(8000)        # or a handler in the engine's own server

Each scrape reads `stats()`: no counter is kept twice, and a step pays nothing. A scrape in the middle of a step may mix
two moments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from pagedkv.core import MemoryManager, Stats

try:
    from prometheus_client import REGISTRY
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
except ImportError as _error:
    raise ImportError("pagedkv.integrations.prometheus needs prometheus-client; install pagedkv[metrics]") from _error

if TYPE_CHECKING:
    from pagedkv import PagedKVCache

FRAME_STATES: Final = ("free", "mapped", "cached", "retired")

GAUGES: Final = {
    "pool_frames": ("num_frames", "Frames in the pool."),
    "evictable_frames": ("evictable", "Cached frames that may be evicted now."),
    "pending_frames": ("pending", "Frames without an owner that plans or epochs under way still hold."),
    "pinned_frames": ("pinned", "Frames held by user pins, counted once for each pin."),
    "peak_mapped_frames": ("peak_mapped", "Most frames mapped at once."),
    "spaces": ("spaces", "Open address spaces."),
    "tokens": ("tokens", "Committed tokens of all open spaces."),
    "wasted_slots": ("slots_wasted", "Slots of mapped frames that hold no token."),
}
"""metric: (field of Stats, help text)."""

COUNTERS: Final = {
    "asked_tokens": ("tokens_asked", "Prompt tokens looked for in the prefix cache."),
    "matched_tokens": ("tokens_matched", "Prompt tokens found in the prefix cache."),
    "evictions": ("evictions", "Frames evicted."),
    "copies": ("copies", "Frames copied on write."),
    "deduplicated_pages": ("deduplicated", "Pages computed that turned out to exist already."),
}
"""metric: (field of Stats, help text)."""

MISSES: Final = {
    "evicted": "missed_evicted",
    "never_published": "missed_new",
    "other_root": "missed_other_root",
    "below_one_page": "below_one_page",
}
"""reason: field of Stats."""

TENANT_FRAMES: Final = ("used", "unique", "shared", "cached", "evictable", "protected")
"""Fields of Usage. Its other fields are limits: configuration, and None if not set."""


class Collector:
    """The object that prometheus-client asks at each scrape. The label `pool` names one manager of the process."""

    def __init__(self, manager: MemoryManager | PagedKVCache, pool: str = "default") -> None:
        self._manager, self._pool = manager, pool

    def collect(self) -> Iterator[Any]:
        """Yield the metric families; their names begin with pagedkv_."""
        stats = self._manager.stats()
        frames = GaugeMetricFamily(
            "pagedkv_frames", "Frames by state; the four add up to the pool.", labels=["pool", "state"]
        )
        for state in FRAME_STATES:
            frames.add_metric([self._pool, state], getattr(stats, state))
        yield frames
        for family, table in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, (field, help_text) in table.items():
                metric = family(f"pagedkv_{name}", help_text, labels=["pool"])
                metric.add_metric([self._pool], getattr(stats, field))
                yield metric
        yield self._misses(stats)
        yield from self._tenants(stats)

    def _misses(self, stats: Stats) -> Any:
        help_text = "Prompt tokens not found in the prefix cache, by reason."
        missed = CounterMetricFamily("pagedkv_missed_tokens", help_text, labels=["pool", "reason"])
        for reason, field in MISSES.items():
            missed.add_metric([self._pool, reason], getattr(stats, field))
        return missed

    def _tenants(self, stats: Stats) -> Iterator[Any]:
        """Yield the metrics of the tenants that have quotas. A name that is not printable is shown in hexadecimal."""
        frames = GaugeMetricFamily(
            "pagedkv_tenant_frames", "Frames of a tenant that has a quota, by kind.", labels=["pool", "tenant", "kind"]
        )
        tokens = CounterMetricFamily(
            "pagedkv_tenant_tokens", "Prompt tokens of a tenant that has a quota.", labels=["pool", "tenant", "kind"]
        )
        evictions = CounterMetricFamily(
            "pagedkv_tenant_evictions", "Frames of a tenant that were evicted.", labels=["pool", "tenant"]
        )
        for tenant, usage in stats.tenants.items():
            name = tenant.decode() if _is_text(tenant) else tenant.hex()
            for kind in TENANT_FRAMES:
                frames.add_metric([self._pool, name, kind], getattr(usage, kind))
            tokens.add_metric([self._pool, name, "asked"], usage.tokens_asked)
            tokens.add_metric([self._pool, name, "matched"], usage.tokens_matched)
            evictions.add_metric([self._pool, name], usage.evictions)
        yield from (frames, tokens, evictions)


def _is_text(name: bytes) -> bool:
    try:
        return name.decode().isprintable()
    except UnicodeDecodeError:
        return False


def register(manager: MemoryManager | PagedKVCache, *, pool: str = "default", registry: Any = REGISTRY) -> Collector:
    """Show the counters of `manager` at every scrape of `registry`; return the collector.

    Raises: ValueError of prometheus-client if `registry` has a manager already; give each manager its own registry
    """
    collector = Collector(manager, pool)
    registry.register(collector)
    return collector
