"""The benchmark and the search of `make gpu`, over small cells and without a GPU.

Stand-ins take the place of CUDA graphs and events; the stand-in of a graph calls the steps that it would capture.
Kernels are interpreted (test_triton.py, imported here, explains how). These tests cannot show times, capture itself,
and the behaviour of peers that are not installed here.
"""

from __future__ import annotations

import functools
import json
import operator
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedkv.errors import InvalidRequest
from pagedkv.kernels.cuda.specialisation import CLASSES, KeyLayout
from tests.cases import GRID, SMALL, Case, call_of
from tests.kernels import by_hand
from tests.kernels.triton.test_triton import interpreted, interpreting, tuning

__all__ = ["interpreting"]  # a fixture

constants, gpu_attention, gpu_ceiling, gpu_peers, gpu_pool, gpu_prefill, gpu_timing, record, tune = (
    interpreted(f"pagedkv.bench.{name}")
    for name in (
        *(f"gpu.{each}" for each in "constants attention ceiling peers pool prefill timing".split()),
        "record",
        "gpu.tune",
    )
)
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"), pytest.mark.usefixtures("interpreting")]
ROOT = Path(__file__).parents[3]
TINY = replace(gpu_attention.BASE, batch=3, context=50, heads=4, kv_heads=2, head_dim=64)


class Graph:
    """A stand-in for a CUDA graph: it runs the steps once in place of capturing them."""

    def __init__(self, steps: list[Any]) -> None:
        for step in steps:
            step()

    def replay(self) -> None: ...


class Event:
    """A stand-in for a CUDA event: any two of them are half a millisecond apart."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def elapsed_time(self, other: Event) -> float:
        return 0.5


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pools small and put them on the CPU; keep no rows in bench/results."""
    monkeypatch.setattr(gpu_pool, "ROTATED_BYTES", 1 << 18)
    for module in (gpu_attention, tune):
        monkeypatch.setattr(module, "GpuPool", functools.partial(gpu_pool.GpuPool, device="cpu"))
    monkeypatch.setattr(gpu_timing, "graph_of", Graph)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for module in (gpu_attention, gpu_timing):
        monkeypatch.setattr(module, "provenance", lambda: {"gpu": "NVIDIA H200", "commit": "abc", "when": "now"})
    monkeypatch.setattr(record, "results", lambda: None)
    monkeypatch.setattr(gpu_attention, "PEERS", {"sdpa": gpu_peers.sdpa, "flashinfer": gpu_peers.flashinfer})


@pytest.fixture
def said_to_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gpu_attention, gpu_timing):
        monkeypatch.setattr(module, "require_gpu", lambda: None)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("kv", ["", "fp8_e4m3", "int4"])
def test_steps_read_frames_of_their_own_and_run(kv: str) -> None:
    cell = replace(TINY, kv=kv, lengths="zipf")
    pool = gpu_pool.GpuPool(cell, "cpu")
    batches = pool.batches()
    drawn = [set(batch.block_table[batch.block_table >= 0].tolist()) for batch in batches]
    assert len(set.union(*drawn)) == sum(map(len, drawn))  # no call finds in a cache the frames of another call
    step = batches[0]
    assert step.seq_lens.tolist() == cell.lens()
    assert pool.kv_bytes == 150 * 2 * 2 * 64 * {"": 16, "fp8_e4m3": 8, "int4": 4}[kv] // 8
    frames = step.block_table[step.block_table >= 0]
    assert len(frames.unique()) == len(frames) == sum(pool.pages)
    steps = gpu_attention.ours("triton", pool)
    assert len(steps) == pool.calls
    assert pool.calls * pool.kv_bytes >= gpu_pool.ROTATED_BYTES or pool.calls == 128
    assert torch.equal(steps[0](), steps[0]())
    assert steps[1]().isfinite().all()


def test_the_ceiling_reads_every_word() -> None:
    words = torch.randint(0, 1 << 60, (gpu_ceiling.BLOCK * 2 + 5,))
    assert [int(x) for x in gpu_ceiling.read(words)] == [
        functools.reduce(operator.xor, part.tolist()) for part in words.split(gpu_ceiling.BLOCK)
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("no_gpu", "said_to_have_one")
def test_the_benchmark_measures_ours_and_peers_and_says_which_promises_hold(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ragged = replace(TINY, lengths="zipf")
    drafts = replace(TINY, new=3)
    monkeypatch.setattr(gpu_attention, "BASE", TINY)
    monkeypatch.setattr(gpu_attention, "GROUPS", ((TINY, ragged, drafts),))
    musts = (
        gpu_attention.Must(TINY, "us", 1e9),
        gpu_attention.Must(TINY, "us", 2e9, by="cuda"),
        gpu_attention.Must(ragged, "ratio", 0.1, TINY, everywhere=True),
    )
    monkeypatch.setattr(gpu_attention, "MUSTS", (*musts, gpu_attention.Must(TINY, "of_ceiling", 0.0)))
    gpu_attention.main(["--backends", "triton", "cuda", "--repetitions", "1", "--out", str(tmp_path)])
    rows = [json.loads(line) for line in (tmp_path / "gpu-attention.jsonl").read_text().splitlines()]
    by_case = {(row["case"], row["who"]): row for row in rows}
    for who in ("ceiling", "triton", "sdpa"):
        assert by_case[str(TINY), who]["us"] > 0, by_case[str(TINY), who]
    assert "flashinfer" in by_case[str(TINY), "flashinfer"]["why_not"]
    assert by_case[str(TINY), "cuda"]["why_not"]
    assert "ragged" in by_case[str(ragged), "sdpa"]["why_not"]
    assert by_case[str(drafts), "triton"]["us"] > 0
    assert (str(drafts), "sdpa") not in by_case, "peers decode one token"
    assert (tmp_path / "gpu-attention.svg").exists()
    printed = capsys.readouterr().out
    assert f"triton, {TINY}: us" in printed
    assert f"triton, {TINY}, split at 512: ratio" in printed
    assert "triton: 1 times as fast as sdpa over 1 cells" in printed
    assert "2e+09" not in printed, "a promise of another backend"
    assert "MISSED" in printed
    assert "holds" in printed


@pytest.mark.usefixtures("no_gpu", "said_to_have_one")
def test_rows_and_a_plot_go_to_bench_results_or_where_the_caller_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_attention, "QUICK", ((TINY,), (replace(TINY, batch=2),)))
    monkeypatch.setattr(gpu_pool, "ROTATED_BYTES", 1 << 12)
    monkeypatch.setattr(gpu_attention, "PEERS", {})
    checkout, elsewhere = tmp_path / "checkout", tmp_path / "elsewhere"
    checkout.mkdir(), elsewhere.mkdir()
    monkeypatch.setattr(record, "results", lambda: checkout)
    options = gpu_attention.Asked(["reference"], repetitions=1, quick=True)
    gpu_attention.run(options)
    assert sorted(path.name for path in checkout.iterdir()) == ["gpu-attention.jsonl", "gpu-attention.svg"]
    drawn = (checkout / "gpu-attention.svg").read_text()
    gpu_attention.run(replace(options, out=(elsewhere / "rows",), plot=elsewhere / "picture.svg"))
    assert sorted(path.name for path in elsewhere.iterdir()) == ["picture.svg", "rows"]
    assert (checkout / "gpu-attention.svg").read_text() == drawn, "it was left alone"


def test_the_quick_benchmark_looks_at_every_promise() -> None:
    for cells in (gpu_attention.QUICK, gpu_attention.GROUPS):
        group = {cell: i for i, part in enumerate(cells) for cell in part}
        for must in gpu_attention.MUSTS:
            if must.cell.kind == "prefill":
                assert (must.cell.new, must.cell.context) in gpu_prefill.SHAPES, "prefill.py measures these"
                continue
            assert must.cell in group
            assert must.twin is None or group[must.twin] == group[must.cell], "a ratio is of one moment"


def test_without_a_gpu_benchmark_and_search_refuse_to_run() -> None:
    for main in (gpu_attention.main, tune.main):
        with pytest.raises(InvalidRequest, match="torch finds no GPU on this machine"):
            main([])


@pytest.mark.slow
def test_torchs_paged_attention_computes_the_same_as_ours() -> None:
    """Compare the peer's steps with plain attention over the pages that the peer was given."""
    given: list[tuple[Any, ...]] = []

    def watch(attend: Any) -> Any:
        attend = torch.compile(attend)  # uncompiled, torch uses the mask's function and ignores its blocks

        def watched(q: Any, k: Any, v: Any, *, block_mask: Any, enable_gqa: bool) -> Any:
            out = attend(q, k, v, block_mask=block_mask, enable_gqa=enable_gqa)
            given.append((q, k, v, block_mask, out))
            return out

        return watched

    cell = replace(TINY, context=256)
    pool = gpu_pool.GpuPool(cell, "cpu")
    pool.calls = 2
    for step in gpu_peers.flex(pool, compile=watch):
        step()
    for q, k, v, mask, out in given:
        for b, n in enumerate(cell.lens()):
            assert int(mask.full_kv_num_blocks[b, 0, 0]) == n // gpu_peers.PAGE
            pages = mask.full_kv_indices[b, 0, 0, : n // gpu_peers.PAGE].tolist()
            at = torch.cat([torch.arange(gpu_peers.PAGE) + page * gpu_peers.PAGE for page in pages])
            right = torch.nn.functional.scaled_dot_product_attention(q[b], k[0, :, at], v[0, :, at], enable_gqa=True)
            assert (out[b] - right).abs().max() <= 2**-6
    assert len(given) == 2
    assert not torch.equal(given[0][3].full_kv_indices, given[1][3].full_kv_indices)
    with pytest.raises(ValueError, match="a page of 128 that is not full"):
        gpu_peers.flex(gpu_pool.GpuPool(TINY, "cpu"))


@pytest.mark.slow
@pytest.mark.usefixtures("no_gpu", "said_to_have_one")
def test_the_search_writes_the_fastest_fields_of_each_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []

    def timed(variants: dict[Any, Any], repetitions: int) -> tuple[dict[Any, float], dict[Any, str]]:
        times = {}
        for name, steps in variants.items():
            steps[0]()
            entry = tuning._table()[tuning.INTERPRETER]
            seen.append(entry)
            fields = json.loads(name[0])
            times[name] = 10.0 - 2 * (fields.get("N") == 64) - 3 * (fields.get("one_launch") is True)
        return times, {}

    monkeypatch.setattr(tune, "in_turn", timed)
    monkeypatch.setattr(tune, "CELLS", (TINY,))
    monkeypatch.setattr(
        tune, "AXES", {"decode": {"N": (32, 64), "one_launch": (False, True)}, "prefill": {"N": (32, 64)}}
    )
    monkeypatch.setattr(tuning, "target", lambda device: tuning.Target(tuning.INTERPRETER, 6))
    monkeypatch.setattr(tune, "prefill_steps", functools.partial(tune.prefill_steps, tokens=20))
    monkeypatch.setattr(tune, "ALONE", {"batch": 1, "context": 70})
    before = tuning._table()
    tune.main(["--kernels", "triton", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "tuning.json").read_text())
    assert found["interpreter"]["decode_16"] == {"256/64": {"N": 64, "one_launch": True}}
    assert found["interpreter"]["prefill"] == {"256/64": {"N": 64}}
    assert found["interpreter"]["source"].startswith("measured on NVIDIA H200")
    others = {arch: entry for arch, entry in found.items() if arch != "interpreter"}
    assert others == {arch: before[arch] for arch in tune.REASONED}
    assert len(seen) > 8
    assert tuning._table() is before


def test_kernels_take_their_sizes_from_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    on, size = tuning.Target("sm_90", 132), (512, 128)
    plain = tuning.tuning("decode", on, *size)
    fields = {"N": 16, "one_launch": True, "programs": 7}
    with tune.table({"sm_90": {"source": "measured", "decode": {tuning.size_key(*size): fields}}}):
        assert tuning.tuning("decode", on, *size) == replace(plain, **fields)
        assert tuning.tuning("decode", on, 520, 128) != replace(plain, **fields)  # a larger head is another size
        assert tuning.tuning("decode", tuning.Target("sm_80", 108), *size).programs == 2
        assert tuning.tuning("prefill", on, *size) == tuning._by_rule("prefill", on, *size)
        assert tuning.tuning("decode", on, *size).one_launch
    with tune.table({"gfx942": {"source": "measured", "decode": {tuning.size_key(*size): fields}}}):
        assert not tuning.tuning("decode", tuning.Target("gfx942", 304), *size).one_launch, "see Tuning"
    assert tuning.tuning("decode", on, *size) == plain


def test_tiles_of_16_rows_have_a_tuning_of_their_own_or_that_of_all_tiles() -> None:
    on = tuning.Target("sm_90", 132)
    narrow, plain = (tuning.tuning("decode_16", on, size, 128) for size in (256, 512))
    assert (narrow.num_warps, narrow.programs, narrow.N) == (1, 8, 32)
    assert tuning.tuning("decode", on, 256, 128).num_warps == 4
    assert plain == tuning.tuning("decode", on, 512, 128)


@pytest.mark.parametrize(("new_tokens", "asked"), [(1, "decode_16"), (4, "decode_16"), (8, "decode")])
def test_a_decode_asks_for_the_tuning_of_its_rows(new_tokens: int, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagedkv.kernels.triton import backend, decode

    seen: list[str] = []
    real = decode.tuning
    monkeypatch.setattr(decode, "tuning", lambda kernel, *where: seen.append(kernel) or real(kernel, *where))
    backend.paged_attention(call_of(Case((new_tokens,), (70,), heads=(8, 2), dtype="bfloat16").build()))
    assert (seen[-1] == "decode_16") == (asked == "decode_16")


@pytest.mark.parametrize(("heads", "narrow"), [((2, 2), True), ((8, 2), False)])
def test_with_split_tokens_the_tuning_of_a_sequence_follows_from_its_own_rows(
    heads: tuple[int, int], narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour with drafts changes no bit, even if tiles of 16 rows have other keys: it has a launch of its own."""
    from pagedkv.kernels.triton import backend, decode

    entries = {"decode": {"256/64": {"N": 64}}, "decode_16": {"256/64": {"N": 16}}}
    monkeypatch.setattr(tuning, "_table", lambda: {"interpreter": entries})
    monkeypatch.setattr(decode, "tuning", tuning.tuning.__wrapped__)
    found = []
    for new_tokens in ((1,), (1, 7), (1, 16)):
        built = Case((1, 16), (150, 40), heads=heads, dtype="bfloat16", split_tokens=100).build()
        call = call_of(built)
        starts = torch.tensor([0, 1, sum(new_tokens)][: len(new_tokens) + 1], dtype=torch.int32)
        call = call._replace(
            q=call.q[: starts[-1]], out=call.out[: starts[-1]], lse=call.lse[: starts[-1]], cu_seqlens_q=starts,
            seq_lens=call.seq_lens[: len(new_tokens)], max_seqlen_q=max(new_tokens),
        )  # fmt: skip
        seen: list[int] = []
        real = decode.specialisation_of
        monkeypatch.setattr(
            decode,
            "specialisation_of",
            lambda call, real=real, seen=seen, **of: seen.append(of["N"]) or real(call, **of),
        )
        backend.paged_attention(call)
        monkeypatch.setattr(decode, "specialisation_of", real)
        assert seen == ([16] if narrow or max(new_tokens) == 1 else [16, 64])
        found.append((call.out[0].clone(), call.lse[0].clone()))
    for out, lse in found[1:]:
        assert torch.equal(out, found[0][0])
        assert torch.equal(lse, found[0][1])


def test_the_search_can_find_every_measured_entry() -> None:
    measured = [
        (kernel.removesuffix("_16"), fields)
        for entry in tuning._table().values()
        for kernel, sizes in entry.items()
        if kernel != "source" and entry["source"] != tune.RULE
        for size, fields in sizes.items()
        if kernel == "decode_16" or (kernel, size) == ("prefill", "512/128")
    ]
    assert measured
    for kernel, fields in measured:
        assert all(fields.get(name, values[0]) in values for name, values in tune.AXES[kernel].items()), fields


def test_entries_that_were_not_measured_have_the_values_of_the_rule_and_its_name() -> None:
    """On AMD, all entries merge by a second launch."""
    kept, rule = tuning._table(), tune.reasoned()
    assert set(kept) >= set(tune.REASONED)
    for arch, entry in kept.items():
        if entry["source"] == tune.RULE:
            assert entry == rule[arch], f"{arch}: python -m pagedkv.bench.gpu.tune --reasoned --apply"
        else:
            assert entry["source"].startswith("measured on ")
        if arch.startswith("gfx"):
            assert not any(fields.get("one_launch") for fields in entry.get("decode", {}).values())


def test_random_runs_are_read_whole_and_only_they() -> None:
    words = torch.randint(0, 1 << 60, (gpu_ceiling.BLOCK * 6,))
    for run in gpu_ceiling.RUNS:
        runs = words.view(-1, run // 8)
        starts = torch.randperm(len(runs)).int()[: len(runs) // 3]
        per_program = max(1, gpu_ceiling.BLOCK * 8 // run)
        chosen = runs[starts.long()].view(-1, per_program * run // 8)
        assert gpu_ceiling.read_runs(words, starts, run).tolist() == [
            functools.reduce(operator.xor, part.tolist()) for part in chosen
        ]


@pytest.mark.usefixtures("no_gpu")
def test_each_ceiling_reads_as_many_bytes_from_places_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[str, int]] = []
    monkeypatch.setattr(gpu_ceiling, "read", lambda x, block, warps: read.append(("run", x.numel() * 8)))
    monkeypatch.setattr(gpu_ceiling, "read_runs", lambda x, at, run: read.append((str(at[:2]), len(at) * run)))
    rows = gpu_ceiling.measured(torch.zeros(1 << 19, dtype=torch.int64), 1, repetitions=1)
    assert {size for _, size in read} == {1_000_000 // 32768 * 32768}
    assert len({name for name, _ in read}) > 60, "each random call reads other runs"
    assert [row["who"] for row in rows] == [
        "contiguous, 2048", "contiguous, 4096", "contiguous, 8192", "random, 4 KB", "random, 32 KB"
    ]  # fmt: skip
    assert rows[0]["TB_per_s"] == pytest.approx(1e6 // 32768 * 32768 / (0.5e-3 / 64) / 1e12, rel=1e-2)


@pytest.mark.usefixtures("no_gpu", "said_to_have_one")
def test_the_search_of_cudas_constants_names_the_fastest_that_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared, cell, kinds, tried = (227 << 10, 228 << 10), (128, 128), (1, 1), []
    own = constants.attention.specialise

    def timed(variants: dict[Any, Any], repetitions: int) -> tuple[dict[Any, float], dict[Any, str]]:
        times, refused = {}, {}
        for name in variants:
            constants.use("decode", json.loads(name[0]))
            try:
                kernel = constants.attention.specialise(kinds, cell, CLASSES[0], KeyLayout(), shared)
            except InvalidRequest as why:
                refused[name] = str(why)
                continue
            assert constants.attention.specialise(kinds, cell, CLASSES[1], KeyLayout(), shared) == own(
                kinds, cell, CLASSES[1], KeyLayout(), shared
            ), "another class keeps its constants"
            tried.append(kernel)
            times[name] = 20.0 - kernel.warps_n - kernel.stages
        return times, refused

    monkeypatch.setattr(tune, "in_turn", timed)
    monkeypatch.setattr(tune, "CELLS", (TINY,))
    monkeypatch.setattr(constants, "AXES", {"decode": {"warps_n": (2, 8), "blocks": (1, 2), "stages": (2, 4, 99)}})
    monkeypatch.setattr(tune, "ALONE", {"batch": 1, "context": 70})
    tune.main(["--kernels", "cuda", "--out", str(tmp_path)])
    row = json.loads((tmp_path / "gpu-tune.jsonl").read_text())
    assert row["fields"]["warps_n"] == 8
    assert row["us"] < row["us_now"]
    assert all(kernel.blocks * (kernel.shared_bytes + 1024) <= shared[1] for kernel in tried)
    assert "= cuda decode" in capsys.readouterr().out
    assert constants.attention.specialise is own, "the code has its own constants again"


def test_cases_without_pytest_are_judged_as_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(by_hand, "SMALL", SMALL[:3])
    monkeypatch.setattr(by_hand, "GRID", GRID[:1])
    monkeypatch.setattr(
        sys, "argv", ["by_hand", "--backend", "reference", "--device", "cpu", "--cases", "small", "grid", "--jobs", "2"]
    )
    assert by_hand.main() == 0
    assert capsys.readouterr().out.splitlines()[-1] == "4 cases, 0 failed"
    monkeypatch.setattr(by_hand, "ratios", lambda *of: {"out": 0.5, "lse": float("nan")})
    monkeypatch.setattr(sys, "argv", ["by_hand", "--backend", "reference", "--device", "cpu", "--cases", "grid"])
    assert by_hand.main() == 1


def test_cases_for_racecheck_run_with_one_team(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def ratios(case: Case, *_: object) -> dict[str, float]:
        calls.append("case")
        return {}

    monkeypatch.setattr(by_hand, "use_one_team", lambda: calls.append("one team"))
    monkeypatch.setattr(by_hand, "ratios", ratios)
    monkeypatch.setattr(by_hand, "SMALL", SMALL[:1])
    monkeypatch.setattr(sys, "argv", ["by_hand", "--one-team", "--cases", "small"])
    assert by_hand.main() == 0
    assert calls == ["one team", "case"]


def test_cases_after_a_gpu_error_count_as_lost_and_the_compilers_log_is_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> dict[str, float]:
        why = RuntimeError("CUDA error: an illegal memory access was encountered")
        why.add_note("paged_attention.cuh(7): error: of the compiler")
        raise why

    monkeypatch.setattr(by_hand, "_lost", [])
    monkeypatch.setattr(by_hand, "ratios", broken)
    good, line = by_hand.judged((SMALL[0], "cuda", "cuda"))
    assert not good
    assert line.endswith("of the compiler")
    good, line = by_hand.judged((SMALL[1], "cuda", "cuda"))
    assert not good
    assert line.startswith("LOST")
    assert str(SMALL[0]) in line
    assert (
        gpu_timing.error_line(KernelUnavailableWithNotes()) == "KernelUnavailableWithNotes: no; the compiler says why"
    )


class KernelUnavailableWithNotes(Exception):
    def __init__(self) -> None:
        super().__init__("no\nand more")
        self.add_note("the compiler says why\nand where")


def test_vllms_kernel_is_called_as_its_own_backend_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in has the parameters of vLLM 0.32; it only records its arguments."""
    seen: list[dict[str, Any]] = []

    def unified_attention(
        q: Any, k: Any, v: Any, out: Any, cu_seqlens_q: Any, max_seqlen_q: int, seqused_k: Any, max_seqlen_k: int,
        softmax_scale: float, causal: bool, window_size: Any, block_table: Any, softcap: float,
        q_descale: Any, k_descale: Any, v_descale: Any, seq_threshold_3D: Any = None,
        num_par_softmax_segments: Any = None, softmax_segm_output: Any = None, softmax_segm_max: Any = None,
        softmax_segm_expsum: Any = None,
    ) -> None:  # fmt: skip
        seen.append(locals())

    for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    module = types.ModuleType("vllm.v1.attention.ops.triton_unified_attention")
    module.unified_attention = unified_attention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(gpu_pool, "ROTATED_BYTES", 1 << 18)
    pool = gpu_pool.GpuPool(TINY, "cpu")
    steps = gpu_peers.vllm(pool)
    for step in steps:
        step()
    assert len(seen) == pool.calls
    assert seen[0]["q"].shape == seen[0]["out"].shape == (TINY.batch, TINY.heads, TINY.head_dim)
    assert seen[0]["k"].shape[1:] == (TINY.block_size, TINY.kv_heads, TINY.head_dim)
    assert not torch.equal(seen[0]["block_table"], seen[1]["block_table"])
    assert seen[0]["softmax_segm_output"].shape[1:] == (TINY.heads, seen[0]["num_par_softmax_segments"], 64)
