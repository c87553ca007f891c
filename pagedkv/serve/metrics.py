"""Metrics of a server for Prometheus: requests, tokens and latencies, and the counters of its cache. Knows no HTTP.

Gauges and totals of the engine are read at a scrape. A request adds its own figures when it has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from pagedkv.integrations import prometheus
from pagedkv.serve import answers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pagedkv.model.engine import Engine
    from pagedkv.model.request import Request

SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Bounds of the buckets of latencies."""

TOKENS: Final = {
    "prompt": "prompt_tokens",
    "output": "completion_tokens",
}
"""kind: field of usage."""


class Metrics:
    """The metrics of one engine. Their names begin with pagedkv_."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._registry = CollectorRegistry()
        self._registry.register(self)
        prometheus.register(engine.cache, registry=self._registry)
        named: dict[str, Any] = {"registry": self._registry}
        self._answers = Counter("pagedkv_answers", "Answers of the completions routes, by status.", ["status"], **named)
        self._ends = Counter("pagedkv_completions", "Completions that ended, by reason.", ["finish_reason"], **named)
        self._tokens = Counter("pagedkv_request_tokens", "Tokens of ended requests, by kind.", ["kind"], **named)
        self._first = Histogram(
            "pagedkv_first_token_seconds", "Submission of a request to its first token.", buckets=SECONDS, **named
        )
        self._last = Histogram(
            "pagedkv_request_seconds", "Submission of a request to its last token.", buckets=SECONDS, **named
        )

    def collect(self) -> Iterator[Any]:
        """Yield the metrics that are read from the engine."""
        scheduler, meter = self._engine.scheduler, self._engine.meter
        sequences = GaugeMetricFamily("pagedkv_sequences", "Sequences by state.", labels=["state"])
        sequences.add_metric(["running"], len(scheduler.running))
        sequences.add_metric(["waiting"], len(scheduler.waiting))
        yield sequences
        yield CounterMetricFamily("pagedkv_steps", "Steps of the engine.", value=meter.steps)
        yield CounterMetricFamily("pagedkv_preemptions", "Sequences that were preempted.", value=scheduler.preemptions)

    def answered(self, status: int) -> None:
        """Count an answer."""
        self._answers.labels(str(status)).inc()

    def ended(self, requests: Sequence[Request]) -> None:
        """Add the figures of requests that ended, or were cancelled."""
        told = answers.usage(requests)
        for kind, name in TOKENS.items():
            self._tokens.labels(kind).inc(told[name])
        self._tokens.labels("cached").inc(told["prompt_tokens_details"]["cached_tokens"])
        for request in requests:
            for completion in request.completions:
                self._ends.labels(completion.finish_reason or "cancelled").inc()
                if completion.token_ids:
                    self._first.observe(completion.ttft_s)
                    self._last.observe(completion.last_token_at - request.submitted_at)

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return bytes(generate_latest(self._registry))
