"""Prometheus: the figures of a memory manager, or of an engine, as metrics. Needs the extra `metrics`.

    from pagedkv.integrations.prometheus import register, register_engine
    register(cache)                                  # a PagedKVCache or a MemoryManager
    register_engine(engine)                          # the reference engine, and its cache
    prometheus_client.start_http_server(8000)        # or a handler in the engine's own server

Each scrape reads `stats()` and the distributions that an engine keeps in any case: no counter is kept twice, and a step
pays nothing. A scrape in the middle of a step may mix two moments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol

from pagedkv.core import MemoryManager, Stats

try:
    from prometheus_client import REGISTRY
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
except ImportError as _error:
    raise ImportError("pagedkv.integrations.prometheus needs prometheus-client; install pagedkv[metrics]") from _error

if TYPE_CHECKING:
    from pagedkv import PagedKVCache


class Engine(Protocol):
    """The parts of the reference engine that are shown."""

    @property
    def cache(self) -> PagedKVCache:
        """Its pages."""

    @property
    def meter(self) -> Any:
        """Its counters: `times` has a histogram for each of ENGINE_TIMES."""

    def stats(self) -> Any:
        """Return an object with the fields of ENGINE_GAUGES and ENGINE_COUNTERS, and `finished`."""


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

STATE_COUNTERS: Final = {
    "state_evictions": ("evictions", "Checkpoints of recurrent states evicted."),
    "state_computed_tokens": ("tokens_computed", "Tokens committed, those computed again included."),
    "state_replayed_tokens": ("tokens_replayed", "Tokens computed again, for their recurrent state."),
}
"""metric: (field of StateStats, help text)."""

MISSES: Final = {"evicted": "missed_evicted", "never_published": "missed_new", "below_one_page": "below_one_page"}
"""reason: field of Stats."""

TENANT_FRAMES: Final = ("used", "unique", "shared", "cached", "evictable", "protected")
"""Fields of Usage. Its other fields are limits: configuration, and None if not set."""

ENGINE_GAUGES: Final = {
    "num_requests_running": ("running", "Sequences that run; each sample of a request is one."),
    "num_requests_waiting": ("waiting", "Sequences that wait, for the first time or after a preemption."),
}
"""metric: (field of EngineStats, help text). Names that vLLM has, too, mean the same as vllm:name."""

ENGINE_COUNTERS: Final = {
    "num_preemptions": ("preemptions", "Sequences that were preempted."),
    "steps": ("steps", "Steps that computed tokens."),
    "requests": ("requests", "Requests that were queued."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of queued requests."),
    "generation_tokens": ("output_tokens", "Tokens that completions got."),
    "computed_tokens": ("computed_tokens", "Tokens whose KV was computed, of prompts, outputs and drafts."),
    "spec_decode_num_draft_tokens": ("drafts", "Drafts that were computed."),
    "spec_decode_num_accepted_tokens": ("drafts_accepted", "Drafts that came true."),
}
"""metric: (field of EngineStats, help text)."""

ENGINE_TIMES: Final = {
    "step_seconds": ("step", "A step that computed tokens."),
    "time_to_first_token_seconds": ("first_token", "From submission to the first token."),
    "inter_token_latency_seconds": ("between_tokens", "From a step that gave tokens to the next one that did."),
    "request_queue_time_seconds": ("queue", "From submission until the prompt was first scheduled."),
    "request_prefill_time_seconds": ("prefill", "From the first schedule of the prompt to the first token."),
    "request_decode_time_seconds": ("decode", "From the first token to the end."),
    "e2e_request_latency_seconds": ("total", "From submission to the end."),
}
"""metric: (field of Times, help text)."""

EXPONENTS: Final = range(-13, 10)
"""The bounds of buckets are 2 ** e seconds, from 0.12 ms to 512 s: at these the engine's counts are exact."""


class _Collector:
    """The object that prometheus-client asks at each scrape. The label `pool` names one manager of the process."""

    def __init__(self, manager: MemoryManager | PagedKVCache, pool: str = "default") -> None:
        self._manager, self._pool = manager, pool

    def collect(self) -> Iterator[Any]:
        """Yield the metric families; their names begin with pagedkv_."""
        stats, pool = self._manager.stats(), self._pool
        states = {(pool, state): getattr(stats, state) for state in FRAME_STATES}
        text = "Frames by state; the four add up to the pool."
        yield _family(GaugeMetricFamily, "frames", text, ("pool", "state"), states)
        yield from _plain(stats, pool, GAUGES, COUNTERS)
        missed = {(pool, reason): getattr(stats, field) for reason, field in MISSES.items()}
        text = "Prompt tokens not found in the prefix cache, by reason."
        yield _family(CounterMetricFamily, "missed_tokens", text, ("pool", "reason"), missed)
        yield from self._tenants(stats)
        if stats.states is not None:
            yield from self._states(stats.states)

    def _states(self, states: Any) -> Iterator[Any]:
        """Yield the metrics of the recurrent states of hybrid models. states: a StateStats."""
        frames = {(self._pool, state): getattr(states, state) for state in FRAME_STATES}
        yield _family(GaugeMetricFamily, "state_frames", "Frames for recurrent states.", ("pool", "state"), frames)
        yield from _plain(states, self._pool, {}, STATE_COUNTERS)

    def _tenants(self, stats: Stats) -> Iterator[Any]:
        """Yield the metrics of the tenants that have quotas. A name that is not printable is shown in hexadecimal."""
        frames, tokens, evictions = dict[Any, float](), dict[Any, float](), dict[Any, float]()
        for tenant, usage in stats.tenants.items():
            of = self._pool, tenant.decode() if _is_text(tenant) else tenant.hex()
            frames |= {(*of, kind): getattr(usage, kind) for kind in TENANT_FRAMES}
            tokens |= {(*of, "asked"): usage.tokens_asked, (*of, "matched"): usage.tokens_matched}
            evictions[of] = usage.evictions
        labels = ("pool", "tenant", "kind")
        text = "Frames of a tenant that has a quota, by kind."
        yield _family(GaugeMetricFamily, "tenant_frames", text, labels, frames)
        text = "Prompt tokens of a tenant that has a quota."
        yield _family(CounterMetricFamily, "tenant_tokens", text, labels, tokens)
        text = "Frames of a tenant that were evicted."
        yield _family(CounterMetricFamily, "tenant_evictions", text, labels[:2], evictions)


class _EngineCollector:
    """The object that prometheus-client asks at each scrape. The label `pool` names one engine of the process."""

    def __init__(self, engine: Engine, pool: str = "default") -> None:
        self._engine, self._pool = engine, pool

    def collect(self) -> Iterator[Any]:
        """Yield the metric families; their names begin with pagedkv_."""
        stats, times = self._engine.stats(), self._engine.meter.times
        yield from _plain(stats, self._pool, ENGINE_GAUGES, ENGINE_COUNTERS)
        ended = {(self._pool, reason): count for reason, count in stats.finished.items()}
        text = "Completions that ended, by reason."
        yield _family(CounterMetricFamily, "completions", text, ("pool", "finish_reason"), ended)
        found = {(self._pool, reason): count for reason, count in stats.receipts.items()}
        text = "Prompts by the reason why no more of them was found in the cache."
        yield _family(CounterMetricFamily, "prompts", text, ("pool", "reason"), found)
        asked = {(self._pool, answer): count for answer, count in stats.retained.items()}
        text = "Outputs whose pages were to be retained, by the answer of the cache."
        yield _family(CounterMetricFamily, "retained", text, ("pool", "answer"), asked)
        for name, (field, help_text) in ENGINE_TIMES.items():
            histogram = getattr(times, field)
            shown = HistogramMetricFamily(f"pagedkv_{name}", help_text, labels=["pool"])
            bounds = [*(str(2.0**exponent) for exponent in EXPONENTS), "+Inf"]
            shown.add_metric([self._pool], list(zip(bounds, histogram.up_to(EXPONENTS), strict=True)), histogram.sum)
            yield shown


def _plain(
    stats: object, pool: str, gauges: dict[str, tuple[str, str]], counters: dict[str, tuple[str, str]]
) -> Iterator[Any]:
    """Yield the metrics that are one field of `stats` each. gauges, counters: as GAUGES"""
    for family, table in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
        for name, (field, help_text) in table.items():
            yield _family(family, name, help_text, ("pool",), {(pool,): getattr(stats, field)})


def _family(kind: Any, name: str, text: str, labels: tuple[str, ...], figures: dict[Any, float]) -> Any:
    """Return a metric with a figure for each set of labels."""
    family = kind(f"pagedkv_{name}", text, labels=labels)
    for values, figure in figures.items():
        family.add_metric(values, figure)
    return family


def _is_text(name: bytes) -> bool:
    try:
        return name.decode().isprintable()
    except UnicodeDecodeError:
        return False


def register(manager: MemoryManager | PagedKVCache, *, pool: str = "default", registry: Any = REGISTRY) -> _Collector:
    """Show the counters of `manager` at every scrape of `registry`; return the collector.

    Raises: ValueError of prometheus-client if `registry` has a manager already; give each manager its own registry
    """
    collector = _Collector(manager, pool)
    registry.register(collector)
    return collector


def register_engine(engine: Engine, *, pool: str = "default", registry: Any = REGISTRY) -> _EngineCollector:
    """Show the figures of `engine` and of its cache at every scrape of `registry`; return the collector of the engine.

    Raises: ValueError of prometheus-client if `registry` has an engine or a manager already
    """
    collector = _EngineCollector(engine, pool)
    registry.register(collector)
    register(engine.cache, pool=pool, registry=registry)
    return collector
