"""Every kernel of the registry, on every device it runs on; CUDA only with `-m gpu`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from pagedkv import KernelUnavailable
from pagedkv.errors import InvalidRequest
from pagedkv.kernels import cpu, ops, registry
from tests.cases import moved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from tests.cases import Built

torch.set_num_threads(1)


class Runner(NamedTuple):
    """One kernel on one device, called as users call it. A kernel that objects skips the test."""

    backend: str
    device: str

    @property
    def spoils_rows(self) -> bool:
        """Whether a value that is not finite spoils all columns of the rows that see it: so the kernels for GPUs."""
        on_gpu = self.backend == "library" and self.device == "cuda"
        return on_gpu or self.backend in ("triton", "cuda", "cuda-emulated")

    def attend(self, built: Built, **changes: object) -> tuple[Tensor, Tensor]:
        """Return out and lse on the CPU; `changes` override the options of the case."""
        q, layer, batch = (moved(x, self.device) for x in built[:3])
        options = {name: moved(x, self.device) for name, x in (built.options | changes).items()}
        try:
            out, lse = ops.paged_attention(q, layer, batch, return_lse=True, backend=self.backend, **options)
        except KernelUnavailable as refused:
            pytest.skip(str(refused))
        return out.cpu(), lse.cpu()


RUNNERS = [
    pytest.param(
        Runner(kernel.name, device), id=f"{kernel.name}-{device}", marks=[pytest.mark.gpu] if device != "cpu" else []
    )
    for kernel in registry.KERNELS
    if kernel.name != "library"  # it takes plain cases only: tests/kernels/library
    for device in kernel.where or ("cpu", "cuda")
    if (kernel.name, device) != ("triton", "cpu")
    or os.environ.get("TRITON_INTERPRET") == "1"  # slow: see test_triton.py
]


@pytest.fixture(params=RUNNERS)
def runner(request: pytest.FixtureRequest) -> Runner:
    """Each kernel on each of its devices."""
    runner: Runner = request.param
    if runner.device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return runner


@pytest.fixture
def unbound(monkeypatch: pytest.MonkeyPatch) -> None:
    """PAGEDKV_DEBUG is 0 and no kernel is forced."""
    monkeypatch.setenv("PAGEDKV_DEBUG", "0")
    monkeypatch.delenv("PAGEDKV_KERNELS", raising=False)


@pytest.fixture(params=["table", "attributes"])
def reader(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run with tensors described by DLPack's table, where torch has it, and by their attributes."""
    cpu._register_torch(by_table=request.param == "table")
    yield
    cpu._register_torch()


class Names(TorchDispatchMode):
    """The operators that ran while this mode was active."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def objection(check: Callable[[Any], None], call: object) -> str:
    """Return the text of the error that `check` raises, "" if it raises none."""
    try:
        check(call)
    except InvalidRequest as why:
        return str(why)
    return ""


def one_of(draw: st.DrawFn, good: Any, *others: Any) -> Any:
    """Draw `good` nine times out of ten."""
    return good if draw(st.integers(0, 9)) or not others else draw(st.sampled_from(others))
