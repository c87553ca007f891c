"""The text that a scraper gets has every figure of stats(), once: of a manager, a cache, an engine."""

from __future__ import annotations

from dataclasses import fields

import pytest

from pagedkv import PagedKVCache
from pagedkv.core import MemoryManager, StatePool, Stats
from pagedkv.engine import Engine
from pagedkv.engine.step.meter import EngineStats
from tests.core.oracle import grown

client = pytest.importorskip("prometheus_client", reason="the metrics extra is not installed")
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from pagedkv.integrations import prometheus  # noqa: E402

DERIVED = {"slots_mapped", "tenants", "states"}
"""Fields without a metric: slots_mapped is mapped x block_size; each tenant has metrics, and states have theirs."""


@pytest.fixture
def mm() -> MemoryManager:
    mm = MemoryManager(num_frames=16, block_size=4)
    parent = grown(mm, [1] * 9)
    child = parent.fork()
    mm.commit(mm.plan([child], [1]), [2])
    grown(mm, [3] * 6).release()
    mm.evict(1)
    mm.open([3] * 6)
    mm.open([1] * 6)
    return mm


def scraped(mm: MemoryManager | PagedKVCache) -> dict[str, float]:
    registry = client.CollectorRegistry()
    prometheus.register(mm, pool="gpu0", registry=registry)
    lines = client.generate_latest(registry).decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def test_a_scrape_shows_what_stats_says(mm: MemoryManager) -> None:
    now, shown = mm.stats(), scraped(mm)
    for state in ("free", "mapped", "cached", "retired"):
        assert shown[f'pagedkv_frames{{pool="gpu0",state="{state}"}}'] == getattr(now, state)
    assert sum(value for name, value in shown.items() if name.startswith("pagedkv_frames{")) == now.num_frames
    assert shown['pagedkv_copies_total{pool="gpu0"}'] == now.copies == 1
    assert shown['pagedkv_evictions_total{pool="gpu0"}'] == now.evictions == 1
    assert shown['pagedkv_matched_tokens_total{pool="gpu0"}'] == now.tokens_matched > 0
    assert shown['pagedkv_missed_tokens_total{pool="gpu0",reason="evicted"}'] == now.missed_evicted == 4
    assert shown['pagedkv_missed_tokens_total{pool="gpu0",reason="below_one_page"}'] == now.below_one_page > 0


def test_every_figure_of_stats_is_shown_or_derived() -> None:
    named = {field for field, _ in [*prometheus.GAUGES.values(), *prometheus.COUNTERS.values()]}
    shown = named | set(prometheus.FRAME_STATES) | set(prometheus.MISSES.values())
    assert {field.name for field in fields(Stats)} - shown == DERIVED


def test_recurrent_states_are_shown() -> None:
    mm = MemoryManager(32, 4, states=StatePool(8))
    space = mm.open([1, 2, 3, 4, 5])
    mm.commit(mm.plan([space], [5]), [1, 2, 3, 4, 5])
    shown = {family.name: family for family in prometheus._Collector(mm).collect()}
    frames = {sample.labels["state"]: sample.value for sample in shown["pagedkv_state_frames"].samples}
    assert frames == {"free": 6, "mapped": 1, "cached": 1, "retired": 0}
    assert shown["pagedkv_state_computed_tokens"].samples[0].value == 5


def test_tenants_with_quotas_are_shown_by_name() -> None:
    mm = MemoryManager(num_frames=16, block_size=4)
    mm.set_quota(b"acme", hard=8, protected=2)
    mm.set_quota(b"\xff\x01", hard=8)
    space = grown(mm, [1] * 9, b"acme")
    space.fork()
    mm.open([1] * 9, tenant=b"acme")
    shown = scraped(mm)
    label = 'pool="gpu0",tenant="acme"'
    assert {kind: shown[f'pagedkv_tenant_frames{{kind="{kind}",{label}}}'] for kind in prometheus.TENANT_FRAMES} == {
        "used": 3,
        "unique": 0,
        "shared": 3,
        "cached": 0,
        "evictable": 0,
        "protected": 2,
    }
    assert shown[f'pagedkv_tenant_tokens_total{{kind="matched",{label}}}'] == 8
    assert shown['pagedkv_tenant_evictions_total{pool="gpu0",tenant="ff01"}'] == 0


PAGE = "Mira keeps a red lamp in the cellar. Otto lives in Ghent and works as a baker."


@pytest.fixture(scope="module")
def engine() -> Engine:
    engine = Engine.load(num_frames=16, speculate="prompt-lookup")
    engine.generate([f"{PAGE} Where is the lamp of Mira?", f"{PAGE} Who is Otto?"])
    engine.generate([f"{PAGE} {PAGE} Where does Otto live?"], retain_s=600.0)
    engine.cancel(engine.submit(PAGE))
    engine.submit(PAGE)
    return engine


def scraped_from(engine: Engine) -> dict[str, float]:
    registry = client.CollectorRegistry()
    prometheus.register_engine(engine, pool="gpu0", registry=registry)
    families = text_string_to_metric_families(client.generate_latest(registry).decode())
    return {
        " ".join([sample.name, *(v for k, v in sample.labels.items() if k != "pool")]): sample.value
        for family in families
        for sample in family.samples
        if sample.labels["pool"] == "gpu0"
    }


def test_a_scrape_of_an_engine_shows_what_stats_says(engine: Engine) -> None:
    now, shown = engine.stats(), scraped_from(engine)
    for name, (field, _) in prometheus.ENGINE_GAUGES.items():
        assert shown[f"pagedkv_{name}"] == getattr(now, field)
    for name, (field, _) in prometheus.ENGINE_COUNTERS.items():
        assert shown[f"pagedkv_{name}_total"] == getattr(now, field)
    assert shown["pagedkv_completions_total stop"] == now.finished["stop"] == 3
    assert shown["pagedkv_prompts_total new"] == now.receipts["new"] > 0
    assert shown["pagedkv_retained_total clipped"] == now.retained["clipped"] == 1  # a tenth of the pool is one frame
    assert shown["pagedkv_completions_total cancelled"] == 1
    assert shown["pagedkv_num_requests_waiting"] == 1
    assert shown["pagedkv_spec_decode_num_accepted_tokens_total"] > 0
    assert shown["pagedkv_frames mapped"] == engine.cache.stats().mapped


def test_every_figure_of_an_engine_is_shown() -> None:
    tables = (*prometheus.ENGINE_GAUGES.values(), *prometheus.ENGINE_COUNTERS.values())
    others = {"finished", "receipts", "retained", "latency"}
    assert {field for field, _ in tables} == {field.name for field in fields(EngineStats)} - others
