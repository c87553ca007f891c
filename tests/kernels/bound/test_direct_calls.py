"""merge_states and copy_frames without torch's dispatcher: the same bytes, the same words, and no call is missed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from pagedkv import copy_frames, merge_states
from pagedkv.kernels import cpu, operators, registry
from tests.kernels.conftest import Names

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

pytestmark = pytest.mark.skipif(cpu.MERGE_AT_ONCE is None, reason="the extension serves direct calls")


@pytest.fixture(autouse=True)
def _without_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAGEDKV_DEBUG", "PAGEDKV_KERNELS", "PAGEDKV_CPU_ISA", "PAGEDKV_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the operations for which an operator asks the registry."""
    seen: list[str] = []

    def resolve(case: Any, *others: Any, old: Callable[..., Any] = registry.resolve) -> Any:
        seen.append(case.op)
        return old(case, *others)

    monkeypatch.setattr(operators.registry, "resolve", resolve)
    return seen


def states(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    out = torch.randn(2, 5, 6, 64, generator=draw).to(dtype)
    lse = torch.randn(2, 5, 6, generator=draw)
    lse[0, 1] = lse[1, 2] = -torch.inf
    return out[0], lse[0], out[1], lse[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_direct_merge_has_the_bits_of_the_operator(dtype: torch.dtype, asked: list[str]) -> None:
    plain = states(dtype)
    for form in (plain, [x.transpose(0, 1).contiguous().transpose(0, 1) for x in plain], [x[:0] for x in plain]):
        found = merge_states(*form)
        assert asked == []
        expected = torch.ops.pagedkv.merge_states.default(*form)
        assert asked == ["merge_states"]
        asked.clear()
        for x, y in zip(found, expected, strict=True):
            assert x.is_contiguous()
            assert x.dtype == y.dtype
            assert torch.equal(x, y)


@pytest.mark.usefixtures("reader")
def test_a_direct_copy_moves_whole_frames(asked: list[str]) -> None:
    storage = torch.arange(6 * 64).view(6, 64).to(torch.uint8)
    for pool in (storage.clone(), torch.cat([storage, storage], 1)[:, :64]):
        copy_frames(pool, torch.tensor([[0, 1], [1, 0], [5, 2]], dtype=torch.int32))
        assert torch.equal(pool, storage[[1, 0, 5, 3, 4, 5]])
        copy_frames(pool, torch.empty(0, 2, dtype=torch.int32))
    assert asked == []
    other = storage.float()
    copy_frames(other, torch.tensor([[0, 1]], dtype=torch.int32))
    copy_frames(storage, torch.tensor([[0, 1]], dtype=torch.int32), backend="reference")
    assert asked == ["copy_frames"] * 2
    assert torch.equal(other[1], other[0])
    assert torch.equal(storage[1], storage[0])


def test_what_observes_operators_sees_both_calls(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    storage, pairs = torch.zeros(4, 8, dtype=torch.uint8), torch.tensor([[0, 1]], dtype=torch.int32)
    with Names() as names:
        merge_states(*states())
        copy_frames(storage, pairs)
    assert {"pagedkv.merge_states.default", "pagedkv.copy_frames.default"} <= set(names.seen)
    asked.clear()
    for name, value in (("PAGEDKV_DEBUG", "1"), ("PAGEDKV_KERNELS", "reference"), ("PAGEDKV_NUM_THREADS", "1")):
        with monkeypatch.context() as inner:
            inner.setenv(name, value)
            merge_states(*states())
            copy_frames(storage, pairs)
    a, la, b, lb = states()
    merge_states(torch.complex(a, -a).conj().imag, la, b, lb)  # a view of negated memory
    assert asked == ["merge_states", "copy_frames"] * 3 + ["merge_states"]
