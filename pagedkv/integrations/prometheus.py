"""Prometheus: the figures of a memory manager, for whoever scrapes the process. Needs the extra `metrics` (prometheus-client).

    from pagedkv.integrations.prometheus import register
    register(mm)                                     # prometheus_client.start_http_server(8000) or a handler of the engine's serves them

Each scrape reads `mm.stats()`: nothing is counted twice and no step pays for it. A scrape in the middle of a step may mix two moments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from pagedkv.core import MemoryManager, Stats

try:
    from prometheus_client import REGISTRY
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
except ImportError as why:
    raise ImportError("pagedkv.integrations.prometheus needs prometheus-client; install pagedkv[metrics]") from why

FRAME_STATES: Final = ("free", "mapped", "cached", "retired")

GAUGES: Final = {
    "pool_frames": ("num_frames", "Frames in the pool."),
    "evictable_frames": ("evictable", "Cached frames that may be evicted now."),
    "pending_frames": ("pending", "Frames that nobody maps and that work under way still holds."),
    "pinned_frames": ("pinned", "Frames held by user pins, counted once for each pin."),
    "peak_mapped_frames": ("peak_mapped", "Most frames mapped at once."),
    "spaces": ("spaces", "Open address spaces."),
    "tokens": ("tokens", "Committed tokens of all open spaces."),
    "wasted_slots": ("slots_wasted", "Slots of mapped frames that hold no token."),
}
"""metric: (field of Stats, what it is)."""

COUNTERS: Final = {
    "asked_tokens": ("tokens_asked", "Prompt tokens looked for in the prefix cache."),
    "matched_tokens": ("tokens_matched", "Prompt tokens found in the prefix cache."),
    "evictions": ("evictions", "Frames evicted."),
    "copies": ("copies", "Frames copied on write."),
    "deduplicated_pages": ("deduplicated", "Pages computed that turned out to exist already."),
}

MISSES: Final = {
    "evicted": "missed_evicted",
    "never_published": "missed_new",
    "other_root": "missed_other_root",
    "below_one_page": "below_one_page",
}
"""reason: field of Stats."""


TENANT_FRAMES: Final = ("used", "unique", "shared", "cached", "evictable", "protected")
"""Fields of Usage; its limits are configuration, and may be none."""


class Collector:
    """What prometheus-client asks at each scrape. `pool` tells several managers of one process apart."""

    def __init__(self, manager: MemoryManager, pool: str = "default") -> None:
        self._manager, self._pool = manager, pool

    def collect(self) -> Iterator[Any]:
        """The metric families, all named pagedkv_*."""
        now = self._manager.stats()
        frames = GaugeMetricFamily(
            "pagedkv_frames", "Frames by state; the four add up to the pool.", labels=["pool", "state"]
        )
        for state in FRAME_STATES:
            frames.add_metric([self._pool, state], getattr(now, state))
        yield frames
        for name, (field, told) in GAUGES.items():
            yield self._one(GaugeMetricFamily, name, told, getattr(now, field))
        for name, (field, told) in COUNTERS.items():
            yield self._one(CounterMetricFamily, name, told, getattr(now, field))
        yield self._misses(now)
        yield from self._tenants(now)

    def _one(self, family: Any, name: str, told: str, value: float) -> Any:
        metric = family(f"pagedkv_{name}", told, labels=["pool"])
        metric.add_metric([self._pool], value)
        return metric

    def _misses(self, now: Stats) -> Any:
        told = "Prompt tokens not found in the prefix cache, by reason."
        missed = CounterMetricFamily("pagedkv_missed_tokens", told, labels=["pool", "reason"])
        for reason, field in MISSES.items():
            missed.add_metric([self._pool, reason], getattr(now, field))
        return missed

    def _tenants(self, now: Stats) -> Iterator[Any]:
        """Of the tenants that have quotas. A name that is no text is shown in hexadecimal."""
        held = GaugeMetricFamily(
            "pagedkv_tenant_frames", "Frames of a tenant that has a quota, by kind.", labels=["pool", "tenant", "kind"]
        )
        told = "Prompt tokens of a tenant that has a quota."
        tokens = CounterMetricFamily("pagedkv_tenant_tokens", told, labels=["pool", "tenant", "kind"])
        gone = CounterMetricFamily(
            "pagedkv_tenant_evictions", "Frames of a tenant that were evicted.", labels=["pool", "tenant"]
        )
        for tenant, usage in now.tenants.items():
            name = tenant.decode() if _is_text(tenant) else tenant.hex()
            for kind in TENANT_FRAMES:
                held.add_metric([self._pool, name, kind], getattr(usage, kind))
            tokens.add_metric([self._pool, name, "asked"], usage.tokens_asked)
            tokens.add_metric([self._pool, name, "matched"], usage.tokens_matched)
            gone.add_metric([self._pool, name], usage.evictions)
        yield from (held, tokens, gone)


def _is_text(name: bytes) -> bool:
    try:
        return name.decode().isprintable()
    except UnicodeDecodeError:
        return False


def register(manager: MemoryManager, *, pool: str = "default", registry: Any = REGISTRY) -> Collector:
    """Show `manager` at every scrape of `registry`.

    Raises: ValueError of prometheus-client if `registry` shows a manager already: give each a registry of its own
    """
    collector = Collector(manager, pool)
    registry.register(collector)
    return collector
