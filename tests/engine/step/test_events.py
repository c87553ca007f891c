"""The trace of an engine: a slice for each step, and slices of each life that lie within one another."""

from __future__ import annotations

import json

from pagedkv.engine.requests.limits import Limits
from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.engine.step.events import REQUESTS, STEPS, chrome_trace
from tests.engine.conftest import Checkpoints, prompt_of
from tests.engine.step.test_engine import build


def test_a_trace_has_each_step_and_each_life(checkpoint: Checkpoints) -> None:
    engine = build(checkpoint("llama"), limits=Limits(max_batch_tokens=32))
    engine.events = []
    first = engine.submit(prompt_of(50), SamplingParams(max_tokens=4), num_samples=2)
    engine.run()
    engine.cancel(engine.submit(prompt_of(9)))  # it never ran
    cancelled = engine.submit(prompt_of(9, 1), SamplingParams(max_tokens=30))
    engine.step()
    engine.cancel(cancelled)
    engine.run()
    entries = json.loads(json.dumps(chrome_trace(engine.events)))["traceEvents"]

    slices = [entry for entry in entries if entry["ph"] == "X"]
    assert min(entry["ts"] for entry in slices) == 0.0
    assert [e["args"]["tokens"] for e in slices if e["pid"] == STEPS] == [32, 18, 2, 2, 2, 9]
    names = {e["tid"]: e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    assert list(names.values()) == [f"request {n}, sample {s}" for n, s in ((0, 0), (0, 1), (1, 0))]
    for track, name in names.items():
        own = [entry for entry in slices if (entry["pid"], entry["tid"]) == (REQUESTS, track)]
        phases = {entry["name"]: entry for entry in own if entry["name"] != "chunk"}
        assert list(phases) == ["queued", "prefill", "decode"], name
        chunks = [entry for entry in own if entry["name"] == "chunk"]
        assert all(entry["ts"] >= phases["queued"]["ts"] for entry in chunks)
        for before, after in zip(phases.values(), list(phases.values())[1:], strict=False):
            assert before["dur"] >= 0
            assert abs(before["ts"] + before["dur"] - after["ts"]) < 0.01
    computed = sum(e["args"]["tokens"] for e in slices if e["name"] == "chunk")
    assert computed == engine.stats().computed_tokens == 50 + 6 + 9
    assert [len(completion.token_ids) for completion in first.completions] == [4, 4]
