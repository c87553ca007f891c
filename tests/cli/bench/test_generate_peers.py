"""Other engines beside `pagedkv bench generate`: turns, refusals and dying workers, with a stand-in for the engine."""

from __future__ import annotations

import itertools
import json
import sys
import types
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pagedkv.bench.generate import models, runner
from pagedkv.bench.generate.peers import process
from pagedkv.bench.generate.peers import worker as worker_module
from pagedkv.bench.generate.peers.process import Size, Variant, opened, size_of, started
from pagedkv.bench.headlines import headlines
from pagedkv.errors import InvalidRequest
from pagedkv.kernels import cpu

STAND_IN = """
import json, os, threading, time

class Engine:
    def __init__(self, asked):
        self.asked, self.about = asked, {"version": "stand-in 1", "weights": "bf16", "kv": asked.kv}
        self.log = open(os.environ["STAND_IN_LOG"], "a", buffering=1)
        print("noise on stdout")
        LOAD

    def note(self, *what):
        self.log.write(json.dumps(what) + chr(10))

    def open(self, batch, context, steps):
        self.note("open", batch, context, steps)
        OPEN

    def begin(self):
        self.note("begin")

    def step(self):
        self.note("step")
        time.sleep(0.001)
        STEP

    def close(self):
        self.note("close")
"""
SIZE = Size(tokens=100, sequences=3)


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """Return a function that makes a stand-in the only variant. Its arguments are lines of the methods of Engine."""
    log = tmp_path / "log"
    monkeypatch.setenv("STAND_IN_LOG", str(log))

    def make(**lines: str) -> Variant:
        text = STAND_IN
        for name in ("LOAD", "OPEN", "STEP"):
            text = text.replace(name, lines.get(name.lower(), "pass"))
        (tmp_path / "stand_in_steps.py").write_text(text)
        variant = Variant("stand-in", tmp_path / "stand_in_steps.py", "f16")
        monkeypatch.setattr(process, "VARIANTS", (variant,))
        return variant

    make.log = lambda: [json.loads(line) for line in log.read_text().splitlines()]
    return make


@pytest.fixture
def tiny(monkeypatch):
    """Measure decode steps of a tiny model, without transformers."""
    if cpu.missing():
        pytest.skip("the C++ extension is not built")
    monkeypatch.setenv("PAGEDKV_DEBUG", "0")
    monkeypatch.setattr(runner, "find_spec", lambda name: None)
    for name in ("_report_prefill", "_report_overhead", "_report_sampling"):
        monkeypatch.setattr(runner, name, lambda *_: None)
    monkeypatch.setattr(runner, "measure", partial(runner.measure, config=models.TINY))
    monkeypatch.setattr(models, "quick_config", lambda: models.TINY)


def test_a_peer_takes_turns_and_its_rows_say_what_it_computed_with(command, tiny, stand_in, tmp_path):
    stand_in()
    options = ("--shape", "2x32", "--turns", 3, "--json", "--record", tmp_path / "rows")
    status, out, err = command("bench", "generate", *options)
    assert status == 0, err
    rows = {row["variant"]: row for row in json.loads(out)}
    assert set(rows) == {runner.OURS, runner.TORCH, "stand-in"}
    theirs = rows["stand-in"]
    assert (theirs["version"], theirs["weights"], theirs["kv"]) == ("stand-in 1", "bf16", "f16")
    assert theirs["median"] >= 1
    assert theirs["over_pagedkv"] > 0
    assert len(theirs["turns"]) == 3
    assert "over_pagedkv" not in rows[runner.OURS]
    first, *calls, last = (call[0] for call in stand_in.log())
    assert (first, last) == ("open", "close")
    assert calls == 4 * ["begin", *["step"] * (1 + runner.STEPS)]  # a turn before three that count
    assert stand_in.log()[0] == ["open", 2, 32, calls.count("step")]


def test_an_engine_that_is_not_installed_is_one_line_and_has_no_row(command, tiny, stand_in, tmp_path, monkeypatch):
    variant = stand_in(load="import an_engine_that_is_not_there")
    monkeypatch.setattr(process, "VARIANTS", (variant, replace(variant, name="stand-in, u8 KV")))
    options = ("--shape", "1x32", "--turns", 1, "--json", "--record", tmp_path / "rows")
    status, out, err = command("bench", "generate", *options)
    assert status == 0
    assert {row["variant"] for row in json.loads(out)} == {runner.OURS, runner.TORCH}
    (line,) = (line for line in err.splitlines() if "stand-in" in line)
    assert line == (
        "stand-in takes no turns: ModuleNotFoundError: No module named 'an_engine_that_is_not_there' "
        "(--peers-python names a Python that has it)"
    )


def test_a_worker_that_dies_costs_its_own_rows_only(command, tiny, stand_in, tmp_path):
    stand_in(step="if sum(1 for line in open(self.log.name) if 'step' in line) > 20: os._exit(3)")
    picture = tmp_path / "steps.svg"
    shapes = ("--shape", "1x32", "--shape", "2x32", "--turns", 4)
    status, out, err = command("bench", "generate", *shapes, "--record", tmp_path / "rows", "--plot", picture)
    assert status == 0, err
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    found = {(row["batch"], row["variant"]): row for row in rows}
    assert len(found) == len(rows) == 6
    for batch in (1, 2):
        assert found[batch, "stand-in"]["median"] is None
        assert found[batch, "stand-in"]["why_not"] == "its process ended with status 3"
        assert len(found[batch, runner.OURS]["turns"]) == 4
    assert "not measured: stand-in, 2 x 32: its process ended with status 3" in out
    assert "stand-in" not in picture.read_text()


def test_a_shape_that_a_peer_refuses_has_a_row_that_says_why(command, tiny, stand_in, tmp_path, monkeypatch):
    stand_in(open="if batch == 2: raise MemoryError('no room')")
    monkeypatch.setattr(process, "MOST_TOKENS", 100)
    shapes = ("--shape", "1x32", "--shape", "2x32", "--shape", "4x32", "--turns", 1)
    status, out, err = command("bench", "generate", *shapes, "--json", "--record", tmp_path / "rows")
    assert status == 0, err
    theirs = {row["batch"]: row for row in json.loads(out) if row["variant"] == "stand-in"}
    assert theirs[1]["median"] > 0
    assert theirs[2]["why_not"] == "MemoryError: no room"
    assert theirs[4]["why_not"] == "it would compute 128 tokens of context, which takes minutes"


def test_the_first_python_that_has_the_engine_runs_it(stand_in, tmp_path):
    stand_in()
    without = tmp_path / "python"
    without.write_text("#!/bin/sh\nexit 1\n")
    without.chmod(0o755)
    with started(tmp_path, [str(without)], SIZE) as (peer,):
        assert peer.about["version"] == "stand-in 1"
        with opened([peer], (3, 8), 9) as lost:
            assert not lost
            seconds, _ = peer.steps(8)
            assert 0.001 <= seconds < 1
    assert peer._worker.process.returncode == 0


def test_a_run_on_a_busy_machine_ends_early():
    worker = worker_module.Worker(Path("steps.py"))
    clock = itertools.count()  # a second from each question to the next, so a step takes one
    worker.engine = types.SimpleNamespace(begin=lambda: None, step=lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_module.time, "perf_counter", lambda: float(next(clock)))
        patch.setattr(worker_module, "LONGEST", 1.5)
        assert len(worker.answer({"do": "run", "steps": 8})["steps"]) == 2
    assert worker.answer({"do": "run", "steps": "8"})["why_not"].startswith("TypeError: ")


def test_a_python_that_cannot_be_started_is_named(stand_in, tmp_path):
    stand_in()
    with (
        pytest.raises(InvalidRequest, match="--peers-python is the path of a Python"),
        started(tmp_path, [str(tmp_path / "none")], SIZE),
    ):
        pass


def test_a_worker_that_does_not_end_is_killed(stand_in, tmp_path, monkeypatch):
    stand_in(load="threading.Thread(target=time.sleep, args=(600,)).start()")
    monkeypatch.setattr(process, "WAIT", 0.5)
    with started(tmp_path, [], SIZE) as (peer,):
        pass
    assert peer._worker.process.returncode == -9


def test_peers_make_room_for_the_shapes_that_they_take(monkeypatch):
    assert size_of([(1, 128), (8, 2048), (8, 8192)], 54) == Size(8 * (2048 + 54), 8)
    assert size_of([(8, 8192)], 54) == Size(55, 1)


def test_every_tensor_of_a_checkpoint_is_in_its_gguf_file(tmp_path, monkeypatch):
    kept: dict[str, tuple[np.ndarray, object]] = {}

    class Writer:
        def __init__(self, path: str, architecture: str) -> None:
            assert architecture == "qwen3"

        def add_tensor(self, name: str, tensor: np.ndarray, raw_dtype: object = None) -> None:
            kept[name] = (tensor, raw_dtype)

        def __getattr__(self, name: str) -> object:
            return lambda *_: None

    types_of = types.SimpleNamespace(MOSTLY_BF16=32, BF16=30)
    stand_in = types.SimpleNamespace(GGUFWriter=Writer, LlamaFileType=types_of, GGMLQuantizationType=types_of)
    monkeypatch.setitem(sys.modules, "gguf", stand_in)
    from pagedkv.bench.generate.peers import gguf_file

    models.write_checkpoint(tmp_path, models.TINY)
    gguf_file.write(tmp_path, tmp_path / "model.gguf")
    given = load_file(tmp_path / "model.safetensors")
    assert len(kept) == len(given)
    layer = {"attn_norm", "ffn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm"}
    layer |= {"ffn_gate", "ffn_up", "ffn_down"}
    names = {f"blk.{i}.{name}.weight" for i in range(2) for name in layer}
    assert set(kept) == names | {"token_embd.weight", "output_norm.weight"}
    bits, dtype = kept["blk.1.ffn_down.weight"]
    wanted = given["model.layers.1.mlp.down_proj.weight"]
    assert dtype == 30
    assert bits.tobytes() == wanted.view(dtype=torch.uint8).numpy().tobytes()
    norm, dtype = kept["output_norm.weight"]
    assert (norm.dtype, dtype) == (np.float32, None)
    assert (norm == 1).all()


def test_the_headline_names_the_engines_beside_ours():
    def row(variant: str, batch: int, over: float | None) -> dict[str, object]:
        made = {"bench": "generate", "case": "decode", "batch": batch, "context": 128, "variant": variant, "unit": "ms"}
        if over is None:
            return made | {"median": None, "why_not": "no room"}
        return made | {"median": 10 * over, "over_bound": over, "clean": 3}

    rows = [row("pagedkv", batch, 1.25) for batch in (1, 8)]
    rows += [row("OpenVINO", 1, 1.5), row("OpenVINO", 8, 2.0), row("OpenVINO, u8 KV", 8, 1.75)]
    rows += [row("llama.cpp", 1, 1.4), row("llama.cpp", 8, None)]
    (line,) = headlines(rows)
    assert line.beside == ("OpenVINO 1.50 to 2.00 ×", "llama.cpp 1.40 ×")
    assert {bar.name: bar.value for bar in line.drawn} == {"pagedkv": 1.25, "OpenVINO": 2.0}
