"""The process that test_sanitizers.py starts: `python -m tests.kernels.cpu.sanitized EXTENSION grid|break`.

`grid` calls each instruction set with cases of every feature, on one and on three threads, and with writes, copies,
merges and linear operations. Attention and writes are called twice: Python checks the arguments of the first call; the
second has the same signature and skips the checks. Some results are compared with the reference, so that a build which
computes nothing does not pass. `break` makes one call that reads past the end of a tensor.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
from typing import TYPE_CHECKING, TypeVar

import torch

from tests.cases import GRID, SMALL, Case, empty_layer

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")


def load(path: str) -> None:
    """Import the sanitized extension from `path` under the name of the installed one."""
    spec = importlib.util.spec_from_file_location("pagedkv.kernels._cpu", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["pagedkv.kernels._cpu"] = module
    import pagedkv.kernels

    pagedkv.kernels._cpu = module  # type: ignore[attr-defined]


def twice(call: Callable[[], _T], op: str) -> _T:
    """Make `call` twice and return the second result. The second call fails if Python checks its arguments."""
    from pagedkv.kernels import checks

    call()
    check = getattr(checks, op)
    setattr(checks, op, None)
    try:
        return call()
    finally:
        setattr(checks, op, check)


def attend(case: Case, compare: bool) -> bool:
    """Attend twice, with `compare` against the reference; return True if `case` has any query."""
    from pagedkv import paged_attention

    built = case.build()
    rows = sum(case.q_lens)
    out, lse = paged_attention(built.q, built.layer, built.batch, backend="cpu", return_lse=True, **built.options)
    again = twice(
        lambda: paged_attention(built.q, built.layer, built.batch, backend="cpu", **built.options), "attention"
    )
    assert not out[:rows].isnan().any(), case
    assert not again[:rows].isnan().any(), case
    if compare:
        want = paged_attention(built.q, built.layer, built.batch, backend="reference", **built.options)
        for result in (out, again):
            difference = (result[:rows].float() - want[:rows].float()).abs()
            assert not difference.numel() or difference.max() < 0.05 * (1 + want[:rows].float().abs().max()), case
    return lse.numel() > 0


def write(kv: str, dtype: torch.dtype, rotated: bool) -> None:
    from pagedkv import write_kv
    from pagedkv.kernels.args import RotaryTable
    from tests.kernels.test_write import SLOTS, batch_of

    layer = empty_layer(Case(kv=kv, layout="HND", dims=(66, 80)), 4)
    if kv.endswith("/tensor"):
        layer.k_scale.fill_(0.5), layer.v_scale.fill_(0.75)  # type: ignore[union-attr]
    k, v = torch.randn(7, 2, 66).to(dtype), torch.randn(7, 2, 80).to(dtype)
    k[0, 0, [0, 65]] = torch.nan
    rope = RotaryTable(torch.ones(1, 33), torch.zeros(1, 33)) if rotated else None
    twice(lambda: write_kv(k, v, layer, batch_of(SLOTS), rope=rope, backend="cpu"), "write")


def copy() -> None:
    from pagedkv import copy_frames

    storage = torch.arange(8).repeat_interleave(37).view(8, 37).to(torch.uint8)
    pairs = torch.tensor([[1, 2], [2, 3], [3, 1], [5, 0]], dtype=torch.int32)
    copy_frames(storage, pairs, backend="cpu")
    assert storage[:, 0].tolist() == [5, 3, 1, 2, 4, 5, 6, 7]


def merge(dtype: torch.dtype, dim: int) -> None:
    from pagedkv import merge_states
    from tests.kernels.partition.test_merge import States, keep_the_contract, states, strided

    a, lse_a, b, lse_b = states((5, 3, dim), dtype)
    packed = (a, lse_a, b, lse_b)
    for pair in (packed, (strided(a, (2, 1, 0), (1, 2, 3)), lse_a, b, strided(lse_b, (1, 0), (2, 1)))):
        keep_the_contract(States(*pair))
        merge_states(*pair)


def decode_operations(dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    """Call every linear operation; each tensor is one allocation."""
    from pagedkv.kernels.linear import Matrix, Operations
    from pagedkv.kernels.linear import cpu as operations

    tokens, k, n = sizes
    native = operations.Native()
    x, weights, bias = torch.randn(tokens, k).to(dtype), torch.randn(2 * n, k).to(dtype), torch.randn(2 * n).to(dtype)
    norm, residual, eps = torch.ones(k, dtype=dtype), torch.zeros(tokens, n, dtype=dtype), 1e-6
    wanted = Operations().norm_linear(x.double(), norm.double(), weights.double(), bias.double(), eps)
    torch.testing.assert_close(native.norm_linear(x, norm, weights, bias, eps).double(), wanted, rtol=0.1, atol=0.5)
    for activation in ("silu", "gelu_tanh"):
        native.norm_gate_up(x, norm, weights, bias, eps, activation)
    for out_norm in (None, torch.ones(n)):
        native.linear_add(residual, x, weights[:n].clone(), bias[:n].clone(), out_norm, eps)
    native.logits(x, norm, weights, eps)
    for kind in ("int8", "int4"):
        grouped = Matrix.quantised(torch.randn(n, 192), kind)
        native.logits(torch.randn(tokens, 192).to(dtype), torch.randn(192).to(dtype), grouped, eps)
    angles = (torch.ones(tokens, k).to(dtype), torch.zeros(tokens, k).to(dtype))
    native.norm_rotate(torch.randn(tokens, 8 * k).to(dtype), (2, 1), (torch.ones(2 * k), None), angles, eps)


def grid() -> None:
    from pagedkv.kernels import cpu
    from tests.cases import AXES

    assert cpu._cpu is not None
    assert cpu._cpu.__file__ == sys.argv[1]
    os.environ |= {"PAGEDKV_DEBUG": "0", "PAGEDKV_KERNELS": "cpu"}
    count, floats = 0, (torch.float32, torch.bfloat16, torch.float16)
    for isa in cpu._cpu.sets():
        os.environ["PAGEDKV_CPU_ISA"] = isa
        for i, case in enumerate([*SMALL, *GRID[::4]]):
            os.environ["PAGEDKV_NUM_THREADS"] = "3" if i % 3 == 0 else "1"
            count += attend(case, i % 8 == 0)
        for i, (kv, dtype) in enumerate(itertools.product(AXES["kv"], floats)):
            write(kv, dtype, i % 2 == 0)
            count += 1
        for dtype, dim in itertools.product(floats, (1, 70, 300)):
            merge(dtype, dim)
            count += 1
        os.environ["PAGEDKV_NUM_THREADS"] = "3"
        for dtype, sizes in itertools.product(floats, ((1, 64, 32), (3, 100, 37), (9, 7, 5), (12, 2081, 51))):
            decode_operations(dtype, sizes)
            count += 1
        copy()
    print(f"{count} calls, all of them clean")


def broken() -> None:
    from pagedkv import paged_attention
    from pagedkv.kernels import checks

    built = Case(q_lens=(1, 1), kv_lens=(40, 40)).build()
    os.environ["PAGEDKV_DEBUG"] = "0"
    checks._in_memory = lambda *ignored: None  # type: ignore[assignment]  # else it finds the fault before C++ does
    built.q.untyped_storage().resize_(built.q.nbytes // 2)  # the second query has a shape, and no memory
    paged_attention(built.q, built.layer, built.batch, backend="cpu")
    print("no sanitizer stopped this process")


if __name__ == "__main__":
    load(sys.argv[1])
    {"grid": grid, "break": broken}[sys.argv[2]]()
