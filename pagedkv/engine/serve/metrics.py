"""Metrics of a server for Prometheus: the figures of its engine and its cache, and answers. Knows no HTTP.

pagedkv/integrations/prometheus.py has the figures of the engine. They are read at a scrape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, generate_latest

from pagedkv.integrations import prometheus

if TYPE_CHECKING:
    from pagedkv.engine.step.engine import Engine


class Metrics:
    """The metrics of one server. Their names begin with pagedkv_."""

    def __init__(self, engine: Engine) -> None:
        self._registry = registry = CollectorRegistry()
        prometheus.register_engine(engine, registry=registry)
        meaning = "Answers under /v1 by status, refusals too; 499: the client went away before."
        self._answers = Counter("pagedkv_answers", meaning, ["status"], registry=registry)

    def answered(self, status: int) -> None:
        """Count an answer."""
        self._answers.labels(str(status)).inc()

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return bytes(generate_latest(self._registry))
