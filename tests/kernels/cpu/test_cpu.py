"""The C++ kernels: each instruction set keeps the contract, extreme options included, on the threads that torch has."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from pagedkv import paged_attention, write_kv
from pagedkv.errors import InvalidRequest
from pagedkv.kernels import cpu, registry
from pagedkv.kernels.args import KVLayer, PagedBatch
from tests.cases import GRID, SMALL, Case
from tests.kernels.conftest import Runner
from tests.kernels.hostile.test_values import HIDDEN, check_hidden_values
from tests.kernels.oracle import allowed_error, oracle, same_precision, stored_values

if cpu._cpu is None:
    pytest.skip(registry.KERNELS[0].refuse(registry.Case())[0], allow_module_level=True)

SETS = cpu._cpu.sets()
ON_CPU = Runner("cpu", "cpu")


@pytest.fixture(params=SETS)
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PAGEDKV_CPU_ISA", request.param)
    return str(request.param)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("case", [*SMALL, *(pytest.param(case, marks=pytest.mark.slow) for case in GRID)], ids=str)
def test_each_instruction_set_keeps_the_contract(case: Case) -> None:
    built = case.build()
    exact, plain = oracle(built), same_precision(built)
    out, lse = (x.double().numpy()[: sum(case.q_lens)] for x in ON_CPU.attend(built))
    seen = ~np.isneginf(exact.lse[: len(lse)])
    assert np.abs(out - exact.out[: len(out)]).max(initial=0.0) <= allowed_error(case, exact.out, plain.out)
    assert (np.isneginf(lse) == ~seen).all()
    right, low = exact.lse[: len(lse)][seen], plain.lse[: len(lse)][seen]
    assert np.abs(lse[seen] - right).max(initial=0.0) <= allowed_error(case, right, low)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)], ids=str)
def test_every_bfloat16_and_every_tie_becomes_the_fp8_that_torch_says(dtype: torch.dtype, limit: float) -> None:
    every = (torch.arange(1 << 16, dtype=torch.int32) << 16).view(torch.float32)
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    codes = codes[codes.isfinite()].unique()
    ties = (codes[1:] + codes[:-1]) / 2
    beside = [ties.nextafter(torch.tensor(far)) for far in (torch.inf, -torch.inf)]
    x = torch.cat([every, ties, *beside])
    new, one = torch.nn.functional.pad(x, (0, -len(x) % 128)).view(-1, 1, 128), torch.ones(())
    T = len(new)
    k = torch.zeros(T, 1, 1, 128, dtype=dtype)
    lengths = {"cu_seqlens_q": torch.tensor([0, T], dtype=torch.int32), "seq_lens": torch.tensor([T]).int()}
    tables = {"block_table": torch.zeros(1, T, dtype=torch.int32), "rows": None, "positions": torch.arange(T)}
    batch = PagedBatch(**tables, **lengths, slots=torch.arange(T), max_seqlen_q=T, max_seqlen_k=T)
    write_kv(new, new, KVLayer(k, k.clone(), one, one), batch, backend="cpu")
    stored, wanted = k.view(torch.uint8).flatten()[: len(x)], x.clamp(-limit, limit).to(dtype).view(torch.uint8)
    assert torch.equal(stored[~x.isnan()], wanted[~x.isnan()])
    assert stored.view(dtype).float()[x.isnan()].isnan().all()


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8], ids=str)
def test_every_byte_of_a_value_is_read_as_what_it_says(dtype: torch.dtype) -> None:
    """A sequence has one key, so its output is the value: in vectors, and in the elements that no vector covers."""
    every = torch.arange(256, dtype=torch.uint8)
    for width in (128, 64, 23):  # bytes of a vector
        v = torch.nn.functional.pad(every, (0, -256 % width)).view(-1, 1, 1, width).view(dtype)
        wanted = torch.from_numpy(stored_values(v, None)).flatten(1).float()
        (B, D), one = wanted.shape, torch.ones(())
        ones, steps = torch.ones(B, dtype=torch.int32), torch.arange(B + 1, dtype=torch.int32)
        tables = {"block_table": steps[:B, None].contiguous(), "rows": None, "positions": torch.zeros(B).long()}
        batch = PagedBatch(
            **tables, cu_seqlens_q=steps, seq_lens=ones, slots=torch.arange(B), max_seqlen_q=1, max_seqlen_k=1
        )
        layer = KVLayer(torch.zeros_like(v.view(torch.uint8)).view(dtype), v, one, one)
        out = paged_attention(torch.zeros(B, 1, D), layer, batch, backend="cpu").view(B, D)
        assert torch.equal(out.isnan(), wanted.isnan())
        assert torch.equal(out.nan_to_num(), wanted.nan_to_num())


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("backend", ["cpu", "numba"])
def test_a_sink_of_infinity_takes_everything_and_one_of_minus_infinity_nothing(backend: str) -> None:
    built = Case(q_lens=(1, 3), kv_lens=(40, 3), heads=(4, 2)).build()
    out, lse = Runner(backend, "cpu").attend(built, sinks=torch.tensor([torch.inf, -torch.inf, 0.0, torch.inf]))
    plain, plain_lse = Runner(backend, "cpu").attend(built)
    assert (out[:, [0, 3]] == 0).all()
    assert (lse[:, [0, 3]] == torch.inf).all()
    assert torch.equal(out[:, 1], plain[:, 1])
    assert torch.equal(lse[:, 1], plain_lse[:, 1])
    assert (out[:, 2].abs() < plain[:, 2].abs()).all()


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("mask", ["causal", "all", "tree"])
def test_a_window_longer_than_any_sequence_hides_nothing(mask: str) -> None:
    case = Case(q_lens=(64, 1, 7), kv_lens=(300, 97, 7), mask=mask)
    built = case.build()
    for far in (2**31, 2**40, 2**63 - 1):
        assert torch.equal(ON_CPU.attend(built, window=far)[0], ON_CPU.attend(built)[0])


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("backend", ["cpu", "numba"])
def test_one_vector_may_lie_in_all_slots(backend: str) -> None:
    built = Case(kv_lens=(97, 16, 33)).build()
    k, v = (torch.randn(len(built.layer.k), 1, 2, 64).expand(-1, 16, -1, -1) for _ in range(2))
    built = built._replace(layer=KVLayer(k, v))
    want = Runner("reference", "cpu").attend(built)[0]
    assert (Runner(backend, "cpu").attend(built)[0] - want).abs().max() < 1e-5


def test_an_unknown_instruction_set_is_refused_with_a_list_of_those_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDKV_CPU_ISA", "avx1024")
    with pytest.raises(InvalidRequest, match="PAGEDKV_CPU_ISA is 'avx1024'; this processor and build have: .*portable"):
        ON_CPU.attend(Case().build())


@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads of the process in /proc")
def test_calls_on_several_threads_start_no_thread_beside_those_of_torch() -> None:
    code = """
import os
import torch
from pagedkv.kernels import cpu
from tests.cases import Case
from tests.kernels.conftest import Runner
torch.set_num_threads(3)
if cpu._cpu.runtime() == "OpenMP":
    big = torch.randn(1 << 22)
    big.exp_()
    before = len(os.listdir("/proc/self/task"))
    built = Case(q_lens=(1, 1), kv_lens=(9000, 9000), heads=(8, 8)).build()
    Runner("cpu", "cpu").attend(built)
    big.exp_()
    assert len(os.listdir("/proc/self/task")) == before, before
print("no thread was started")
"""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    run = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True, env=environment)
    assert run.stdout == "no thread was started\n"


def test_threads_are_those_of_torch_if_torch_has_openmp() -> None:
    assert cpu._cpu is not None
    assert cpu._cpu.runtime() == (
        "OpenMP" if "OpenMP" in torch.__config__.parallel_info().partition("parallel backend:")[2] else "threads"
    )


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("case", HIDDEN, ids=str)
def test_each_instruction_set_keeps_hidden_values_hidden(case: Case) -> None:
    check_hidden_values(case, ON_CPU)
