"""The numba kernels: tests of this backend alone. Others test the grid and the laws that every backend keeps."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from pagedkv import write_kv
from pagedkv.kernels.numba import elements
from tests.cases import Case, empty_layer
from tests.kernels.test_write import batch_of

if TYPE_CHECKING:
    from collections.abc import Callable


def test_a_write_of_many_tokens_is_cut_without_losing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDKV_NUM_THREADS", "3")
    layer = empty_layer(Case(dtype="bfloat16"), 64)
    k, slots = torch.randn(1000, 2, 64).bfloat16(), torch.randperm(1024)[:1000]
    write_kv(k, k, layer, batch_of(slots.tolist()), backend="numba")
    assert torch.equal(layer.k.flatten(0, 1)[slots], k)


@pytest.mark.parametrize(("dtype", "kind"), [(torch.float8_e4m3fn, elements.E4M3), (torch.float8_e5m2, elements.E5M2)])
def test_every_fp8_byte_has_torchs_value(dtype: torch.dtype, kind: int) -> None:
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    np.testing.assert_array_equal(elements.FP8[kind - elements.E4M3], values)


@pytest.mark.parametrize(
    ("dtype", "encode", "decode"),
    [(torch.float16, elements._to_half, elements._of_half), (torch.bfloat16, elements._to_bfloat, None)],
)
def test_two_byte_floats_round_as_torch_does(
    dtype: torch.dtype, encode: Callable[..., int], decode: Callable[..., float] | None
) -> None:
    bits = torch.randint(-(2**31), 2**31, (20_000,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    edges = torch.tensor(
        [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65504.0, 65519.9, 65520.0, 6.1e-5, 5.96e-8, 2.98e-8, 2.99e-8]
    )
    x = torch.cat([bits.view(torch.float32), edges, -edges])
    codes = torch.tensor([int(encode(np.float32(value))) for value in x.numpy()], dtype=torch.int32)
    stored, right = codes.to(torch.uint16).view(dtype), x.to(dtype)
    assert torch.equal(stored.isnan(), right.isnan())
    assert torch.equal(stored[~right.isnan()].view(torch.int16), right[~right.isnan()].view(torch.int16))
    if decode is not None:
        read = [decode(np.uint16(code)) for code in range(65536)]
        np.testing.assert_array_equal(read, torch.arange(65536).to(torch.uint16).view(dtype).float().numpy())


def test_without_the_extension_numba_serves() -> None:
    code = """
import sys
sys.modules["pagedkv.kernels._cpu"] = None
from pagedkv.kernels.registry import KERNELS, Case, resolve
print(resolve(Case()).name, "numba" in sys.modules, KERNELS[0].refuse(Case())[0])
"""
    run = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    # resolve() chose numba without importing it
    assert run.stdout.startswith("numba False the extension is not built: ")
