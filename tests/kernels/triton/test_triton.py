"""The Triton kernels under the interpreter: a sample of the grid by default; the grid and all laws in `make test-all`.

Triton decides at the import of a kernel whether it is interpreted, for the life of the process. So this file imports
the kernels with TRITON_INTERPRET=1 before any other test does. On a machine with a GPU it skips itself, because the
kernels of the process belong to the GPU's tests. test_triton_compiled.py tests the compiled kernels.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from pagedkv import KernelUnavailable, copy_frames, explain, paged_attention, write_kv
from pagedkv.kernels import reference, registry
from pagedkv.kernels.args import GatherCall, GatherSource, RotaryTable, WriteCall
from tests.cases import GRID, MASKS, SMALL, Case, empty_layer
from tests.kernels import test_write
from tests.kernels.conftest import Runner
from tests.kernels.gather import test_gather
from tests.kernels.hostile.test_tables import check_that_nothing_beyond_the_pool_is_written
from tests.kernels.hostile.test_values import HIDDEN, check_hidden_tree, check_hidden_values
from tests.kernels.masks import test_padded
from tests.kernels.oracle import allowed_error, oracle, same_precision
from tests.kernels.test_write import SLOTS, batch_of
from tests.kernels.triton.compiled import typical_call

if TYPE_CHECKING:
    from collections.abc import Iterator

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the kernels of this process belong to the GPU", allow_module_level=True)


def interpreted(module: str) -> Any:
    """Import a module for the interpreter: one of the Triton kernels, or one that has kernels of its own."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        return importlib.import_module(module if "." in module else f"pagedkv.kernels.triton.{module}")
    finally:
        os.environ.update({"TRITON_INTERPRET": before} if before else {})
        if before is None:
            del os.environ["TRITON_INTERPRET"]


tuning, decode, prefill, backend, specialisation = (
    interpreted(name) for name in ("tuning", "decode", "prefill", "backend", "specialisation")
)
INTERPRETER = Runner("triton", "cpu")
PAIRS = torch.tensor([[1, 2], [2, 3], [3, 1], [5, 0]], dtype=torch.int32)
"""Copies of frames: a cycle, and one copy more."""
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"), pytest.mark.usefixtures("interpreting")]

_DRAFTS = Case(q_lens=(1, 4, 3), kv_lens=(70, 4, 33))
SAMPLE = (
    Case(),
    Case(q_lens=(1,), kv_lens=(0,)),
    Case(q_lens=(3, 0, 4), kv_lens=(2, 5, 17), heads=(5, 1), sinks=True, mask="all"),
    replace(
        _DRAFTS, heads=(28, 4), dims=(80, 80), block_size=5, dtype="bfloat16", layout="mixed", window=20, alibi=True
    ),
    replace(_DRAFTS, dims=(192, 128), block_size=64, dtype="float16", layout="HND", mask="tree", softcap=50.0),
    replace(_DRAFTS, block_size=4, punched=True, sinks=True, rows=True, padding=2, split_tokens=32),
    *(
        replace(_DRAFTS, dtype="bfloat16", kv=kv, layout="HND")
        for kv in ("fp8_e4m3/tensor", "fp8_e5m2/token_head", "int8/token_head")
    ),
    replace(_DRAFTS, dtype="float16", kv="int4/token_head", dims=(96, 96), mask="all", window=64, split_tokens=100),
    Case(
        q_lens=(2, 1),
        kv_lens=(40, 9),
        heads=(16, 1),
        dims=(576, 512),
        layout="mla",
        dtype="bfloat16",
        kv="fp8_e4m3/token_head",
    ),
    Case(q_lens=(2, 1), kv_lens=(40, 9), heads=(16, 1), dims=(576, 512), dtype="bfloat16", kv="int4/token_head"),
    Case(q_lens=(1, 33), kv_lens=(130, 50), heads=(4, 1), dtype="bfloat16", sinks=True),
    Case(q_lens=(20,), kv_lens=(150,), heads=(2, 1), window=30, block_size=128, alibi=True),
    Case(
        q_lens=(17, 2, 40),
        kv_lens=(30, 2, 40),
        heads=(7, 1),
        mask="tree",
        kv="int4/tensor",
        punched=True,
        rows=True,
        padding=1,
    ),
    Case(q_lens=(1, 2, 0, 1, 1), kv_lens=(200, 33, 7, 64, 0), heads=(2, 1), window=150, sinks=True),
    *MASKS,
    # the first position is -28; the position less the window must not overflow
    Case(q_lens=(7, 40, 3), kv_lens=(132, 12, 2), mask="all", window=2**31 - 1, split_tokens=16),
)


@pytest.mark.parametrize(
    "kv",
    [
        "int4/tensor",
        *(
            pytest.param(kv, marks=pytest.mark.slow)
            for kv in ("", "fp8_e4m3/token_head", "fp8_e5m2/tensor", "int8/token_head")
        ),
    ],
)  # fmt: skip
def test_a_gather_is_what_the_pages_hold(kv: str) -> None:
    test_gather.test_a_gather_is_what_the_pages_hold(kv, "HND", INTERPRETER)


@pytest.mark.slow
def test_one_length_for_all_pads_on_the_left_or_on_the_right() -> None:
    test_gather.test_one_length_for_all_pads_on_the_left_or_on_the_right(INTERPRETER)


@pytest.fixture
def interpreting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the registry choose the interpreter during this test."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    yield
    registry._resolve.cache_clear()  # other tests must not get its choices


NUMBERS = (torch.nan, torch.inf)


def keeps_the_contract(case: Case) -> None:
    built = case.build()
    exact, plain = oracle(built), same_precision(built)
    out, lse = (x.double().numpy()[: sum(case.q_lens)] for x in INTERPRETER.attend(built))
    seen = ~np.isneginf(exact.lse[: len(lse)])
    assert np.abs(out - exact.out[: len(out)]).max(initial=0.0) <= allowed_error(case, exact.out, plain.out)
    assert (np.isneginf(lse) == ~seen).all()
    assert (out[~seen] == 0).all()
    right, low = exact.lse[: len(lse)][seen], plain.lse[: len(lse)][seen]
    assert np.abs(lse[seen] - right).max(initial=0.0) <= allowed_error(case, right, low)


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_a_sample_of_the_grid_keeps_the_contract(case: Case) -> None:
    keeps_the_contract(case)


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.slow) for case in test_padded.CASES], ids=str)
def test_rows_of_a_padded_query_are_those_of_its_tokens(case: Case) -> None:
    case = replace(case, heads=(2, 1))  # the interpreter takes as long again for each head
    built, mask = case.build(), test_padded.mask_of(case, "both")
    test_padded.padded_is_right(built, mask, test_padded.spread(built.q, mask, torch.nan), INTERPRETER)


@pytest.mark.parametrize(
    ("case", "number"),
    [
        pytest.param(
            case, number, marks=[pytest.mark.slow] * (number is not NUMBERS[position % 6 // 3] or position % 3)
        )
        for position, case in enumerate(HIDDEN)
        for number in NUMBERS
    ],
    ids=str,
)
def test_a_value_that_is_not_finite_reaches_only_queries_that_see_it(case: Case, number: float) -> None:
    check_hidden_values(case, INTERPRETER, number)


@pytest.mark.parametrize("seen", [False, True])
def test_a_value_that_a_tree_hides_from_a_single_query_does_not_reach_it(seen: bool) -> None:
    check_hidden_tree(INTERPRETER, seen=seen)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*SMALL, *GRID], ids=str)
def test_the_grid_keeps_the_contract(case: Case) -> None:
    keeps_the_contract(case)


@pytest.mark.parametrize("kv", ["fp8_e4m3/token_head", pytest.param("fp8_e4m3/tensor", marks=pytest.mark.slow)])
def test_fp8_gives_the_same_numbers_by_its_bits_and_by_a_cast(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built = replace(_DRAFTS, dtype="bfloat16", kv=kv).build()
    by_bits = INTERPRETER.attend(built)
    monkeypatch.setattr(tuning.Target, "native_fp8", True)
    by_cast = INTERPRETER.attend(built)
    # the last bit of bfloat16 may differ: the factor 256 is multiplied at another point
    assert (by_bits[0] - by_cast[0]).abs().max() <= 2.0**-7
    assert (by_bits[1] - by_cast[1]).abs().max() <= 1e-5


@pytest.mark.parametrize("programs", [1, 2, 5, 40])
def test_the_number_of_programs_does_not_change_the_result(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    built = Case(q_lens=(1, 2, 0, 1, 1), kv_lens=(200, 33, 7, 64, 0), heads=(2, 1), window=150, sinks=True).build()
    exact = oracle(built)
    monkeypatch.setattr(decode, "target", lambda device: tuning.Target(tuning.INTERPRETER, programs))
    out, lse = INTERPRETER.attend(built)
    assert np.abs(out.double().numpy() - exact.out).max() <= 2e-6
    assert np.abs(lse.double().numpy() - exact.lse).max() <= 1e-5


def test_with_split_tokens_neither_the_batch_nor_its_kernels_change_a_bit() -> None:
    """The batch has sequences for decode and for prefill.

    A sequence alone is served by one of the two kernels, on another number of programs.
    """
    together = Case(q_lens=(1, 20, 3, 1), kv_lens=(130, 60, 40, 97), split_tokens=32, window=70)
    built = together.build()
    whole = INTERPRETER.attend(built)
    for b in range(4):
        first, end = built.batch.cu_seqlens_q[b : b + 2].tolist()
        batch = replace(
            built.batch,
            block_table=built.batch.block_table[b : b + 1],
            seq_lens=built.batch.seq_lens[b : b + 1],
            cu_seqlens_q=torch.tensor([0, end - first], dtype=torch.int32),
            max_seqlen_q=end - first,
            max_seqlen_k=together.kv_lens[b],
        )
        alone = INTERPRETER.attend(built._replace(q=built.q[first:end].clone(), batch=batch))
        for x, of_all in zip(alone, whole, strict=True):
            assert torch.equal(x, of_all[first:end]), b


@pytest.mark.parametrize(
    ("q_lens", "kv_lens"),
    [((8, 3, 1), (150, 70, 40)), pytest.param((40, 24, 1), (150, 70, 40), marks=pytest.mark.slow)],
)
def test_with_split_tokens_a_neighbours_tree_mask_changes_no_bit(
    q_lens: tuple[int, ...], kv_lens: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rows' mask equals causality. Tiles have a GPU's sizes."""
    on = tuning.Target("sm_90", 4)
    for module in (tuning, decode, prefill):
        monkeypatch.setattr(module, "target", lambda device: on)
    built = Case(q_lens=q_lens, kv_lens=kv_lens, heads=(8, 1), split_tokens=128, dtype="bfloat16").build()
    starts, widest = built.batch.cu_seqlens_q.tolist(), max(q_lens)
    causal = torch.cat([torch.ones(m, widest).tril().bool() for m in q_lens])
    causal[: starts[1]] = torch.rand(q_lens[0], widest) < 0.5
    masked = INTERPRETER.attend(built, tree_mask=causal)
    for x, y in zip(INTERPRETER.attend(built), masked, strict=True):
        assert torch.equal(x[starts[1] :], y[starts[1] :])
        assert not torch.equal(x[: starts[1]], y[: starts[1]])


def test_bounds_that_are_too_high_do_not_change_the_result() -> None:
    """A captured graph is launched with bounds for the longest possible sequence."""
    built = Case(q_lens=(1, 3), kv_lens=(70, 20), sinks=True).build()
    loose = replace(built.batch, max_seqlen_q=24, max_seqlen_k=5000)
    for x, y in zip(INTERPRETER.attend(built), INTERPRETER.attend(built._replace(batch=loose)), strict=True):
        assert (x - y).abs().max() <= 2e-6


@pytest.mark.parametrize(("new", "keys"), [(1, 40), (1, 900), (24, 90), pytest.param(24, 600, marks=pytest.mark.slow)])
def test_a_sink_without_bound_takes_the_whole_weight(new: int, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sink of +inf leaves zeros, one of -inf changes nothing; one program or a merge of several writes the result."""
    monkeypatch.setattr(decode, "target", lambda device: tuning.Target(tuning.INTERPRETER, 5))
    real = prefill.num_splits
    monkeypatch.setattr(prefill, "num_splits", lambda programs, _, tiles: real(programs, 8, tiles))
    built = Case(q_lens=(new,), kv_lens=(keys,), heads=(4, 2), sinks=True).build()
    built.options["sinks"].copy_(torch.tensor([torch.inf, -torch.inf, 0.5, torch.inf]))
    for x, right in zip(INTERPRETER.attend(built), Runner("reference", "cpu").attend(built), strict=True):
        assert torch.allclose(x, right, rtol=1e-5, atol=1e-5)


def test_keys_of_a_long_chunk_are_split_when_queries_are_too_few_to_fill_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(q_lens=(24, 1), kv_lens=(600, 90), heads=(2, 1), window=500, sinks=True)
    built = case.build()
    counts: list[int] = []
    real = prefill.num_splits
    monkeypatch.setattr(
        prefill, "num_splits", lambda programs, _, tiles: counts.append(real(programs, 8, tiles)) or counts[-1]
    )
    out, lse = INTERPRETER.attend(built)
    assert counts == [4]
    assert np.abs(out.double().numpy() - oracle(built).out).max() <= 2e-6
    assert np.abs(lse.double().numpy() - oracle(built).lse).max() <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "kv", ["bfloat16", "fp8_e4m3", "fp8_e4m3/tensor", "fp8_e5m2/token_head", "int8/token_head", "int4/token_head"]
)
def test_what_is_written_has_the_bits_that_the_reference_writes(kv: str, dtype: torch.dtype) -> None:
    plain = kv == "bfloat16"
    case = Case(dtype=kv if plain else "float32", kv="" if plain else kv, dims=(64, 80), heads=(5, 5), layout="HND")
    draw = torch.Generator().manual_seed(3)
    # exponents from subnormals to saturation
    wide = torch.randn(7, 5, 100, generator=draw) * torch.exp2(torch.randint(-20, 9, (7, 5, 100), generator=draw))
    k, v = (x.to(dtype) for x in torch.cat([wide, torch.zeros(7, 5, 44)], -1).split((64, 80), -1))
    layers = [empty_layer(case, 4) for _ in range(2)]
    rope = RotaryTable(torch.rand(4, 24, generator=draw), torch.rand(4, 24, generator=draw), interleaved=True)
    batch = replace(batch_of(SLOTS), positions=torch.arange(7) % 4)
    for layer, name in zip(layers, ("triton", "reference"), strict=True):
        if kv.endswith("/tensor"):
            layer.k_scale.fill_(0.3), layer.v_scale.fill_(1e-3)
        write_kv(k, v, layer, batch, rope=rope, backend=name)
    at = [slot for slot in SLOTS if slot >= 0]
    for name in ("k", "k_scale", "v", "v_scale"):
        ours, theirs = (getattr(layer, name) for layer in layers)
        if ours is None or ours.dim() == 0:
            continue
        ours, theirs = (x.contiguous().view(torch.uint8).flatten(0, 1)[at] for x in (ours, theirs))
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("kv", test_write.NAN_KINDS)
def test_nan_is_stored_as_nan_or_as_zero(kv: str) -> None:
    test_write.test_nan_is_stored_as_nan_or_as_zero_by_integers_whose_scale_then_is_nan(kv, INTERPRETER)


def test_merge_states_agrees_with_the_reference() -> None:
    draw = torch.Generator().manual_seed(0)
    out_a, out_b = (torch.randn(5, 3, 80, generator=draw).bfloat16().transpose(0, 1) for _ in range(2))
    lse_a, lse_b = torch.randn(3, 5, generator=draw), torch.randn(5, 3, generator=draw).T
    lse_a[0], lse_b[:2] = -torch.inf, -torch.inf
    out_a[0] = torch.nan  # the output of a state that saw no key may hold anything
    # an infinite sink takes the whole weight
    lse_a[2, :2], out_a[2, :2] = torch.inf, 0.0
    lse_b[2, 1:3], out_b[2, 1:3] = torch.inf, 0.0
    for ours, right in zip(
        backend.merge_states(out_a, lse_a, out_b, lse_b),
        reference.merge_states(out_a, lse_a, out_b, lse_b),
        strict=True,
    ):
        assert torch.allclose(ours.float(), right.float(), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float8_e4m3fn])
def test_copies_read_every_source_before_one_destination_is_written(dtype: torch.dtype) -> None:
    storage = torch.arange(8).repeat_interleave(5).view(8, 5).to(dtype)
    gaps = storage.repeat(1, 2)[:, :5]  # frames of a larger pool
    for pool in (storage, gaps, storage.T.contiguous().T):
        copy_frames(pool, PAIRS, backend="triton")
        assert pool.float().tolist() == [[f] * 5 for f in (5, 3, 1, 2, 4, 5, 6, 7)]


@pytest.mark.parametrize(("heads", "most"), [((32, 32), 16), ((32, 8), 16), ((28, 4), 9), ((64, 2), 2), ((128, 1), 1)])
def test_the_most_new_tokens_of_decode_depend_on_the_heads_alone(heads: tuple[int, int], most: int) -> None:
    H, K = heads
    call = SimpleNamespace(
        q=torch.empty(1, H, 64, dtype=torch.bfloat16),
        k=torch.empty(1, 16, K, 64),
        v=torch.empty(1, 16, K, 64),
        out=torch.empty(1, H, 64),
    )
    assert decode.most_queries(call) == most


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record launches without running them; a read of a tensor on the host fails.

    On a GPU such a read would wait for the device; in a captured graph it is not allowed.
    """
    launched: list[str] = []

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        launched.append(self.fn.__name__)

    def read(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the host has read a tensor")

    monkeypatch.setattr("triton.runtime.interpreter.GridExecutor.__call__", launch)
    for name in "item tolist numpy cpu __bool__ __int__ __float__ __index__ nonzero unique equal".split():
        monkeypatch.setattr(torch.Tensor, name, read)
    monkeypatch.setattr(torch, "equal", read)
    return launched


@pytest.mark.parametrize(
    ("changes", "kernels"),
    [
        ({}, "_decode_kernel _merge_kernel"),
        ({"split_tokens": 256, "window": 300}, "_decode_kernel _merge_kernel"),
        ({"B": 1, "q_len": 64}, "_prefill_kernel"),
        ({"q_len": 64, "tree": True, "sinks": True}, "_decode_kernel _merge_kernel _prefill_kernel"),
        ({"kv": "int4/token_head", "q_len": 4, "alibi": True, "softcap": 3.0}, "_decode_kernel _merge_kernel"),
    ],
    ids=str,
)
def test_the_host_reads_no_tensor_to_launch(changes: dict[str, Any], kernels: str, unreadable: list[str]) -> None:
    call = typical_call(H=8, K=2, **changes)
    backend.paged_attention(call)
    assert unreadable == kernels.split()
    new, ints = torch.empty(8, 2, 128), torch.zeros(8, dtype=torch.int64)
    angles = torch.zeros(64, 32), torch.zeros(64, 32)
    backend.write_kv(WriteCall(*call[:4], *angles, False, new, new, ints, ints))
    backend.copy_frames(torch.empty(8, 64), PAIRS)
    source = GatherSource(call.k, call.v, *[None] * 2, call.block_table, call.rows, call.seq_lens, call.seq_lens)
    starts, out = torch.zeros(len(call.seq_lens) + 1, dtype=torch.int64), torch.empty(8, 2, call.k.shape[-1])
    backend.gather_kv(GatherCall(source, starts, out, out))
    assert unreadable[-4:] == ["_write_kernel", "_copy_kernel", "_copy_kernel", "_gather_kernel"]


def test_without_the_interpreter_the_refusal_names_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    built = Case().build()
    with pytest.raises(KernelUnavailable, match="it runs on GPUs; on the CPU only Triton's interpreter can"):
        paged_attention(built.q, built.layer, built.batch, backend="triton")


def test_float64_is_refused_with_the_reason() -> None:
    reasons = explain(registry.Case(dtype="float64")).objections["triton"]
    assert reasons == ["q is float64; it takes float32, bfloat16, float16"]


@pytest.mark.parametrize("arch", ["sm_87", "sm_103", "sm_121", "gfx90a", "gfx1100"])
@pytest.mark.parametrize("kernel", ["decode", "prefill"])
@pytest.mark.parametrize(("head_bytes", "widest"), [(512, 128), (256, 128), (1024, 128), (1024, 256), (2176, 576)])
def test_a_gpu_that_no_table_names_gets_tiles_that_fit_it(arch: str, kernel: str, head_bytes: int, widest: int) -> None:
    on = tuning.Target(arch, 100)
    tuned = tuning.tuning(kernel, on, head_bytes, widest)
    assert arch not in tuning._table()
    assert tuned == tuning._by_rule(kernel, on, head_bytes, widest)
    tiles = tuned.stages - arch.startswith("gfx")  # AMD keeps one tile in registers
    assert tuned.programs * tiles * tuned.N * head_bytes <= on.shared
    assert tuned.N in (16, 32, 64)
    assert tuned.M in (16, 32, 64, 128)


@pytest.mark.parametrize(("arch", "refused"), [("sm_89", True), ("sm_90", False)])
def test_float32_over_int4_is_refused_where_such_wide_heads_do_not_fit(
    arch: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "target", lambda device: tuning.Target(arch, 1))
    case = registry.Case(device="cuda", dtype="float32", kv_dtype="int4", head_dim=576, head_dim_v=512)
    found = specialisation.why_no_specialisation(case)
    assert [why.partition(":")[2] for why in found] == [" take q in bfloat16"] * refused
    for served in (
        case._replace(dtype="bfloat16"),
        case._replace(kv_dtype="int8"),
        case._replace(head_dim=256, head_dim_v=256),
    ):
        assert not specialisation.why_no_specialisation(served)


def test_where_triton_is_missing_the_backend_says_so_and_another_serves() -> None:
    code = """
import importlib.util as u; find = u.find_spec
u.find_spec = lambda name, *rest: None if name == "triton" else find(name, *rest)
from pagedkv.kernels.registry import KERNELS, Case, resolve
assert resolve(Case()).name != "triton"
print(next(kernel for kernel in KERNELS if kernel.name == "triton").refuse(Case())[0])
"""
    run = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    assert run.stdout.startswith("triton is not installed")


@pytest.mark.slow
def test_the_laws_of_every_backend_hold() -> None:
    """test_laws and test_write pass in a process that interprets from the start."""
    files = [str(Path(__file__).parents[1] / f"test_{name}.py") for name in ("laws", "write")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-k", "triton-cpu", *files]
    run = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert run.returncode == 0, run.stdout
    assert " passed" in run.stdout


def test_nothing_beyond_the_pool_is_written() -> None:
    check_that_nothing_beyond_the_pool_is_written(backend.write_kv, backend.copy_frames)
