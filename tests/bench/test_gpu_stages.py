"""The stages of `make gpu` over tiny cells on the CPU: what they print, what they find, and how they refuse.

A stand-in takes the place of CUDA graphs and streams. The kernels are the reference, with seeded faults.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import re
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedkv import KernelUnavailable, paged_attention
from pagedkv.bench.gpu import attention, environment, host, pool, prefill, race, timing
from pagedkv.bench.gpu.inside import profile, stamps
from pagedkv.errors import InvalidRequest
from pagedkv.kernels.cuda import compiler
from pagedkv.kernels.cuda.specialisation import CLASSES, KeyLayout, specialise

TINY = replace(attention.BASE, batch=3, context=50, heads=4, kv_heads=2, head_dim=64, dtype="bfloat16")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pools small and put them on the CPU; run a captured step again at each replay."""

    def captured(step: Any) -> tuple[Any, torch.Tensor]:
        result = step().clone()
        return types.SimpleNamespace(replay=lambda: result.copy_(step())), result

    class Pool(pool.GpuPool):
        def __init__(self, cell: Any) -> None:
            super().__init__(cell, "cpu")

    monkeypatch.setattr(pool, "ROTATED_BYTES", 1 << 17)
    monkeypatch.setattr(race, "captured", captured)
    monkeypatch.setattr(race, "second_stream", contextlib.nullcontext)
    for module in (race, host, prefill):
        monkeypatch.setattr(module, "GpuPool", Pool)
        monkeypatch.setattr(module, "require_gpu", lambda: None)
        monkeypatch.setattr(module, "provenance", lambda: {"gpu": "NVIDIA H200"})
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def backends_that(monkeypatch: pytest.MonkeyPatch, **spoil: Any) -> None:
    """Let race call the reference by any name; `spoil` changes the results of calls of that name, in place."""
    count = dict.fromkeys(spoil, 0)

    def called(q: Any, layer: Any, batch: Any, *, backend: str) -> torch.Tensor:
        out = paged_attention(q, layer, batch, backend="reference")
        if backend in spoil:
            spoil[backend](out, count[backend])
            count[backend] += 1
        return out

    monkeypatch.setattr(race, "paged_attention", called)


@pytest.mark.parametrize("kv", ["", "fp8_e4m3", "int8", "int4"])
@pytest.mark.parametrize("peak", race.PEAKS)
def test_a_kernel_that_is_right_is_good(kv: str, peak: float, monkeypatch: pytest.MonkeyPatch) -> None:
    backends_that(monkeypatch)
    drawn = race.GpuPool(replace(TINY, kv=kv, lengths="zipf", new=3))
    found = list(race.judge(drawn, ["triton", "cuda"], peak, 6))
    assert all(verdict.is_good for verdict in found), "\n".join(map(str, found))
    assert all(0 < verdict.error <= 1 for verdict in found)


def test_a_peaked_softmax_gives_few_keys_most_of_the_weight() -> None:
    cell = replace(TINY, context=4096, batch=1)
    drawn = race.GpuPool(cell)
    k = drawn.layer.k.float().flatten(0, 1)[:4096, 0]
    weights = [(drawn.query(peak)[0, 0].float() @ k.T * 64**-0.5).softmax(-1) for peak in race.PEAKS]
    most = [float(each.topk(8).values.sum()) for each in weights]
    assert most[0] < 0.1
    assert most[1] > 0.5


def flipped(out: torch.Tensor, call: int) -> None:
    if call == 7:
        out.view(torch.int16)[0, 0, 3] ^= 1


def shifted(out: torch.Tensor, call: int) -> None:
    out += 0.5


def refused(out: torch.Tensor, call: int) -> None:
    raise KernelUnavailable("decode", {"it": ["has no card"]})


@pytest.mark.parametrize(
    ("backend", "spoil", "words"),
    [
        ("cuda", flipped, r"BAD .* moved 1 \+ 0 times|BAD .* moved 0 \+ 1 times"),
        ("cuda", shifted, r"BAD .* error \d\d+"),
        ("triton", refused, "BAD .*KernelUnavailable"),
        ("library", refused, "ok .*KernelUnavailable"),
    ],
)
def test_a_fault_is_found_and_named(
    backend: str, spoil: Any, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    backends_that(monkeypatch, **{backend: spoil})
    monkeypatch.setattr(race, "CELLS", (TINY,))
    monkeypatch.setattr(race, "PEAKS", (1.0,))
    names = ["cuda"] if backend == "cuda" else ["cuda", backend]
    status = race.main(["--backends", *names, "--rounds", "8", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert status == ("BAD" in words)
    assert any(re.match(words, line.removeprefix("= ")) for line in printed.splitlines()), printed
    rows = [json.loads(line) for line in (tmp_path / "gpu-race.jsonl").read_text().splitlines()]
    assert [row["backend"] for row in rows] == names
    assert rows[-1]["good"] is ("BAD" not in words)


def test_a_race_check_that_ran_nothing_did_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    backends_that(monkeypatch, library=refused)
    monkeypatch.setattr(race, "CELLS", (TINY,))
    assert race.main(["--backends", "library", "--rounds", "1"]) == 1


def test_prefill_counts_only_the_pairs_that_are_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cell = replace(prefill.cell_of(3, 5), heads=1, head_dim=8)
    assert prefill.flop(cell) == 4 * 8 * (3 + 4 + 5)  # rows see 3, 4 and 5 keys
    monkeypatch.setattr(prefill, "BASE", replace(TINY, head_dim=128))
    monkeypatch.setattr(prefill, "SHAPES", ((20, 50), (33, 33)))
    monkeypatch.setattr(prefill, "ceiling", lambda repetitions: 790.0)

    def timed(variants: dict[str, list[Any]], repetitions: int) -> tuple[dict[str, float], dict[str, str]]:
        whys = {}
        for name, steps in variants.items():
            try:
                steps[0]()
            except (RuntimeError, KernelUnavailable) as why:
                whys[name] = timing.error_line(why)
        return {name: 100.0 for name in variants if name not in whys}, whys

    monkeypatch.setattr(prefill, "in_turn", timed)
    assert prefill.main(["--backends", "reference", "cuda", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "= TFLOP/s; matmul 790" in printed
    assert "cuda: KernelUnavailable" in printed
    rows = [json.loads(line) for line in (tmp_path / "gpu-prefill.jsonl").read_text().splitlines()]
    ours = [row for row in rows if row["who"] == "reference"]
    assert ours[0]["TFLOP_per_s"] == round(prefill.flop(replace(prefill.cell_of(20, 50))) / 100 / 1e6, 1)
    assert any(row["who"] == "gather" and row["us"] and "TFLOP_per_s" not in row for row in rows)
    assert prefill.main(["--backends", "cuda"]) == 1, "nothing of ours was measured"


def test_torchs_library_attends_to_the_same_keys_as_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "BASE", TINY)
    drawn = prefill.GpuPool(prefill.cell_of(20, 50))
    q = drawn.query()
    monkeypatch.setattr(drawn, "query", lambda: q)
    batch = prefill.batch_of(drawn)
    monkeypatch.setattr(prefill, "batch_of", lambda pool: batch)
    theirs = prefill.sdpa(drawn, prefill.SDPBackend.MATH)()
    ours = paged_attention(q, drawn.layer, batch, backend="reference")
    assert (theirs[0].transpose(0, 1) - ours).abs().max() < 2**-5


def test_the_hosts_cost_is_of_each_call_and_a_backend_that_objects_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host, "ONE", TINY)
    monkeypatch.setattr(host, "served", lambda: ["reference", "cuda"])
    monkeypatch.setattr(host, "host_us", lambda call: (call(), 5.0)[1])
    assert host.main([]) == 0
    printed = capsys.readouterr().out
    assert "= reference: paged_attention 5.0 us, attend, bound 5.0 us, write_kv 5.0 us, store, bound 5.0 us" in printed
    assert "cuda, paged_attention: KernelUnavailable" in printed
    assert "= cuda: refused" in printed
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert host.host_us(lambda: None, calls=10, repetitions=3) < 1000


RAW_PAGE = """==PROF== Disconnected
"ID","Process ID","Kernel Name","gpu__time_duration.sum","dram__throughput.avg.pct_of_peak_sustained_elapsed",\
"smsp__issue_active.avg.pct_of_peak_sustained_active",\
"smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_wait_per_issue_active.ratio","launch__registers_per_thread"
"","","","nsecond","%","%","inst","inst","register/thread"
"0","4242","paged_attention","131,072","91.5","47.25","3.5","1.25","201"
"""


def test_the_metrics_of_a_profile_are_read_with_their_units() -> None:
    """A page as ncu prints it, cut short; no ncu has been run here."""
    found = profile.metrics_of(RAW_PAGE)
    assert found == {
        "kernel": "paged_attention", "us": 131.07, "dram %": 91.5, "issue %": 47.25, "registers": 201.0,
        "stalls": ["long_scoreboard", "wait"],
    }  # fmt: skip
    with pytest.raises(InvalidRequest, match="ncu printed no metrics: ==ERROR== no kernels were profiled"):
        profile.metrics_of("==ERROR== no kernels were profiled")


def test_a_profile_that_fails_is_named_and_the_next_cell_is_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = tmp_path / "ncu"
    tool.write_text(f"#!{sys.executable}\nimport sys\nprint('''{RAW_PAGE}''' if '-i' in sys.argv else 'profiled')\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(profile, "require_gpu", lambda: None)
    monkeypatch.setattr(profile, "provenance", lambda: {"gpu": "NVIDIA H200"})
    monkeypatch.setattr(profile, "CELLS", {"32x4k": TINY, "1x1k": TINY})
    assert profile.main(["--out", str(tmp_path)]) == 0
    assert "= 1x1k: us 131.07, dram % 91.5, issue % 47.25, registers 201; stalls" in capsys.readouterr().out
    assert len((tmp_path / "gpu-profile.jsonl").read_text().splitlines()) == 2
    tool.write_text(f"#!{sys.executable}\nimport sys, time\n'--once' in sys.argv and time.sleep(60)\n")
    assert profile.main(["--seconds", "0.1"]) == 1
    assert capsys.readouterr().out.count("no report within 1 s") == 2


def test_the_environment_says_what_is_missing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert environment.main(["--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].startswith("torch finds no GPU on this machine")
    assert json.loads((tmp_path / "environment.json").read_text())["versions"]["torch"] == importlib.metadata.version(
        "torch"
    )
    assert environment.objections()["cuda"], "each backend says what it lacks"
    for stage in (race, host, prefill, profile):
        assert stage.__doc__
        assert f"python -m {stage.__name__}" in stage.__doc__


def test_stamps_become_microseconds_since_each_cta_began() -> None:
    """The clock of SM 0 begins at 1000, that of SM 1 at 5000; both tick 2000 times in a microsecond."""
    words = torch.zeros(4, stamps.WORDS, dtype=torch.int64)
    for cta, (first, passed) in enumerate([(1000, (1, 2, 9)), (5000, (1, 9)), (9000, (1, 3, 9))]):
        words[cta, 0], words[cta, 14], words[cta, 15] = first, 10**9, 10**9 + 1000 * (cta + 4)
        for place in passed:
            words[cta, place] = first + (2000 * (cta + 4) if place == 9 else 1000 * place)
    rows = {row["place"]: row for row in stamps.phases(words)}
    assert list(rows) == ["share recalled", "first keys asked for", "queries there", "ended"]
    assert rows["share recalled"] == {"place": "share recalled", "ctas": 3, "min": 0.5, "median": 0.5, "max": 0.5}
    assert (rows["first keys asked for"]["ctas"], rows["first keys asked for"]["max"]) == (1, 1.0)
    assert [rows["ended"][key] for key in ("min", "median", "max")] == [4.0, 5.0, 6.0]


def test_kernels_have_stamps_only_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    loaded: list[bytes] = []
    driver = types.SimpleNamespace(
        _cuda=types.SimpleNamespace(moduleLoadData=lambda cubin: loaded.append(cubin) or len(loaded)), _functions={1: 2}
    )
    monkeypatch.setattr("pagedkv.kernels.cuda.driver.driver_of", lambda device: driver)
    keys = KeyLayout(page_runs=2)
    kernel = specialise((1, 1), (64, 64), CLASSES[0], keys, compiler.ARCHITECTURES["sm_90"])
    with stamps.stamped() as modules:
        assert not driver._functions
        driver._cuda.moduleLoadData(compiler.compile_cubin(kernel.name, kernel.macros, "sm_90").cubin)
    assert modules == [1]
    assert b"stamps" in loaded[0]
    assert driver._functions == {1: 2}
    assert b"stamps" not in compiler.compile_cubin(kernel.name, kernel.macros, "sm_90").cubin


def test_the_places_are_those_of_the_kernel() -> None:
    names = re.search(r"enum Place \{ (.*?) \};", compiler.sources()["ptx.cuh"])
    assert names
    assert len(names[1].split(", ")) == len(stamps.PLACES)
    kernel = compiler.sources()["paged_attention.cuh"]
    assert all(kernel.count(f"ptx::stamp({name})") == 1 for name in names[1].split(", "))
