"""`pagedkv bench generate` on a tiny model: every case has a row, and a picture is drawn."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from pagedkv.bench import clock
from pagedkv.bench.generate import events, models, runner, weights
from pagedkv.bench.generate.peers.process import Lost
from pagedkv.kernels import cpu

pytestmark = pytest.mark.skipif(bool(cpu.missing()), reason="the C++ extension is not built")


@pytest.fixture
def tiny(monkeypatch):
    """Measure a tiny model, two shapes and a small vocabulary."""
    monkeypatch.setenv("PAGEDKV_DEBUG", "0")
    monkeypatch.setattr(runner, "QUICK", ((1, 32), (3, 64)))
    monkeypatch.setattr(runner, "PARTS", ((3, 64),))
    monkeypatch.setattr(runner, "VOCABULARY", 1000)
    monkeypatch.setattr(runner, "PROMPT", 64)
    monkeypatch.setattr(runner, "measure", partial(runner.measure, config=models.TINY))
    monkeypatch.setattr(models, "quick_config", lambda: models.TINY)


def test_every_case_has_rows_with_its_bound(command, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(runner.linear, "is_slow_in_torch", lambda _: False)  # then transformers reads a prompt, too
    kept = tmp_path / "rows.jsonl"
    status, out, _ = command("bench", "generate", "--quick", "--turns", 1, "--json", "--record", kept)
    assert status == 0
    rows = json.loads(out)
    assert [json.loads(line) for line in kept.read_text().splitlines()] == rows
    assert {row["case"] for row in rows} == {"decode", "part", "prefill", "overhead", "sampling"}
    steps = [row for row in rows if row["case"] == "decode"]
    assert {row["variant"] for row in steps} == {runner.OURS, runner.TORCH, runner.STATIC, runner.DYNAMIC}
    for row in steps:
        assert row["over_bound"] == pytest.approx(row["median"] / row["bound"])  # of one turn
        assert row["ratios"] == [pytest.approx(row["over_bound"])]
    parts = {row["variant"]: row["median"] for row in rows if row["case"] == "part"}
    assert {"norm_linear", "norm_rotate", "linear_add", "norm_gate_up", "logits", "paged_attention"} <= set(parts)
    assert all(row["median"] > 0 and row["machine"] and row["commit"] for row in rows)
    assert not any("layers" in row for row in rows)


def test_a_quick_run_has_a_shallow_model_where_torch_is_slow(monkeypatch):
    for is_slow in (True, False):
        monkeypatch.setattr(models, "is_slow_in_torch", lambda _, is_slow=is_slow: is_slow)
        config = models.quick_config()
        assert (config["num_hidden_layers"] < models.CONFIG["num_hidden_layers"]) is is_slow
        row = {"case": "decode", "unit": "ms", "must": 1.0}
        shallow = {"layers": config["num_hidden_layers"]} | row | {"must": None}
        assert models.of_model(config, row) == (shallow if is_slow else row)


def test_rows_of_a_shallow_model_say_so_and_promise_nothing(command, tiny, monkeypatch):
    monkeypatch.setattr(models, "SHALLOW", models.TINY)
    status, out, _ = command("bench", "generate", "--quick", "--turns", 1, "--json", "--record", "/dev/null")
    assert status == 0
    rows = [row for row in json.loads(out) if row["case"] != "sampling"]
    assert rows
    assert all((row["layers"], row["must"]) == (2, None) for row in rows)


def test_a_variant_beside_which_the_machine_changed_is_left_out_and_a_lost_peer_costs_no_other_its_turn(monkeypatch):
    speeds = iter([40.0, 40.0, 80.0, *[80.0] * 20])  # before the first turn, then after each variant

    def run(variant):
        if variant == "peer":
            raise Lost("it ended")
        return 1.0, True

    monkeypatch.setattr(clock, "by_lot", lambda variants, turns, text, warm_up: [["ours", "peer", "theirs"]] * 4)
    monkeypatch.setattr(clock, "spin", lambda: 1.0)
    lost: dict[str, str] = {}
    found = runner._in_turns(("ours", "peer", "theirs"), 3, run, lambda: next(speeds), lost)
    assert lost == {"peer": "it ended"}
    assert [timing.turns for timing, _ in found.values()] == [(1.0,) * 3] * 2
    assert found["theirs"][1] == [80.0] * 3, "not the mean with a reading from before the peer was lost"
    speeds = iter([40.0, 40.0, 40.0, 40.0, 40.0, 80.0, 80.0, 80.0])  # before and after each of four turns
    monkeypatch.setattr(clock, "by_lot", lambda variants, turns, text, warm_up: [["ours"]] * 4)
    found = runner._in_turns(("ours",), 3, lambda _: (1.0, True), lambda: next(speeds))
    assert found["ours"][0].turns == (1.0, None, 1.0)


@pytest.mark.parametrize("is_slow", [True, False])
def test_a_prompt_of_transformers_is_timed_only_where_torch_is_not_slow(command, tiny, monkeypatch, is_slow):
    monkeypatch.setattr(runner.linear, "is_slow_in_torch", lambda _: is_slow)
    options = ("--turns", 1, "--shape", "1x32", "--json", "--record", "/dev/null")
    status, out, _ = command("bench", "generate", *options)
    assert status == 0
    (row,) = (r for r in json.loads(out) if (r["case"], r["variant"]) == ("prefill", runner.DYNAMIC))
    assert "without oneDNN" in row["why_not"] if is_slow else row["median"] > 0
    assert (row["median"] is None) is is_slow
    assert row.get("product") == ("float32" if is_slow else None)


@pytest.mark.parametrize(("is_slow", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_the_product_that_bounds_a_prefill_has_the_dtype_that_torch_multiplies_fast(monkeypatch, is_slow, dtype):
    seen, plain = [], torch.nn.functional.linear
    monkeypatch.setattr(runner.linear, "is_slow_in_torch", lambda _: is_slow)
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, w: seen.append(x.dtype) or plain(x, w))
    assert runner.product_speed(4) > 0
    assert set(seen) == {dtype}


def test_a_picture_is_drawn(command, tiny, tmp_path):
    picture = tmp_path / "steps.svg"
    options = ("--turns", 1, "--record", tmp_path / "rows", "--plot", picture)
    status, out, _ = command("bench", "generate", "--shape", "2x32", *options)
    assert status == 0
    assert "2 x 32" in out
    assert "2 sequences of 32 tokens" in picture.read_text()
    status, _, err = command("bench", "generate", "--shape", "2", *options)
    assert status == 2
    assert "such as 8x2048" in err


def test_poisoned_pools_are_not_timed(command, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEDKV_DEBUG", "2")
    status, _, error = command("bench", "generate", "--quick", "--turns", 1, "--record", tmp_path / "rows")
    assert status == 2
    assert "PAGEDKV_DEBUG is 2" in error


def test_torch_linear_layers_are_torchs_and_come_back(monkeypatch):
    import torch

    from pagedkv.kernels import linear

    monkeypatch.delenv("PAGEDKV_KERNELS", raising=False)
    with runner.torch_linear_layers():
        assert type(linear.choose(torch.device("cpu"), torch.bfloat16, 1)) is linear.Operations
    assert type(linear.choose(torch.device("cpu"), torch.bfloat16, 1)) is not linear.Operations


def test_a_step_is_timed_with_the_weights_that_its_row_names(tiny, tmp_path):
    class Counted(models.Skipped):
        calls = 0

        def forward(self, *args, **options):
            self.calls += 1
            return super().forward(*args, **options)

    models.write_checkpoint(tmp_path, models.TINY)
    engine = models.engine_of(tmp_path, 2000)
    own, decoders = engine.forward.decoder, {kind: Counted(engine.decoder) for kind in weights.KINDS}
    taken = weights.decode(engine, decoders, (1, 32))
    assert {kind: len(seconds) for kind, seconds in taken.items()} == dict.fromkeys(weights.KINDS, weights.TURNS)
    steps = (weights.TURNS + 1) * runner.STEPS
    assert [decoder.calls for decoder in decoders.values()] == [steps] * len(weights.KINDS)
    assert engine.forward.decoder is own


def test_events_on_and_off_take_turns_and_a_row_says_which_were_undisturbed(monkeypatch):
    monkeypatch.setenv("PAGEDKV_DEBUG", "0")
    monkeypatch.setattr(events, "STEPS", 2)
    on, off, share = events.measured((2,), turns=3)
    assert (on["variant"], off["variant"], share["case"]) == ("on", "off", "events, record")
    assert on["of_off"] > 0
    for row in (on, off):
        assert len(row["turns"]) == 3
        assert 0 <= row["clean"] <= 3
    assert 0 < share["best"] <= share["median"] < 1
