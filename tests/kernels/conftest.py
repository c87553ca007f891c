"""Every kernel of the registry, on every device it runs on; CUDA only with `-m gpu`.

Without a GPU its two kernels run on the CPU: `cuda` on the emulator (cuda/emulator.py), `triton` in Triton's
interpreter. Both take seconds for a case. So each law has one of its cases on the emulator, each sixth law has one in
the interpreter, and all cases run with `-m slow`.
"""

from __future__ import annotations

import importlib.util
import os
import zlib
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from pagedkv import KernelUnavailable
from pagedkv.errors import InvalidRequest
from pagedkv.kernels import cpu, numba, ops, registry
from tests.cases import Built, Case, moved
from tests.kernels.cuda import backend as emulated
from tests.kernels.cuda.emulator import COMPILER, Emulator
from tests.kernels.oracle import assert_right, oracle, same_precision, solved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

torch.set_num_threads(1)
EMULATED = emulated.KERNEL.name


class Runner(NamedTuple):
    """One kernel on one device, called as users call it. A kernel that objects skips the test.

    way: an instruction set of `cpu`, or the threads of `numba`; "" for the usual one
    """

    backend: str
    device: str = "cpu"
    way: str = ""

    def __str__(self) -> str:
        return "-".join(filter(None, self))

    @property
    def is_slow(self) -> bool:
        """Whether a case takes seconds."""
        return (self.backend, self.device) in ((EMULATED, "cpu"), ("triton", "cpu"))

    @property
    def spoils_rows(self) -> bool:
        """Whether a value that is not finite spoils all columns of the rows that see it: so the kernels for GPUs."""
        on_gpu = self.backend == "library" and self.device == "cuda"
        return on_gpu or self.backend in ("triton", "cuda", EMULATED)

    def prepare(self, patch: pytest.MonkeyPatch) -> None:
        """Let the registry find this kernel, for functions that take no name of a kernel too."""
        if self.device == "cpu":
            patch.setenv("PAGEDKV_KERNELS", self.backend)
        elif not torch.cuda.is_available():
            pytest.skip("no CUDA device here")
        if self.is_slow and self.backend == "triton":
            patch.setenv("TRITON_INTERPRET", "1")
        elif self.is_slow:
            patch.setattr(emulated, "machine", Emulator())
            patch.setattr(registry, "KERNELS", (emulated.KERNEL, *registry.KERNELS))
        if self.backend == "cpu" and self.way:
            patch.setenv("PAGEDKV_CPU_ISA", self.way)
        elif self.way == "Python threads":
            patch.setattr(numba, "_openmp", lambda: None)
        elif self.way and numba._openmp() is None:
            pytest.skip("no OpenMP runtime in this process")

    def attend(self, built: Built, **changes: object) -> tuple[Tensor, Tensor]:
        """Return out and lse on the CPU; `changes` override the options of the case."""
        q, layer, batch = (moved(x, self.device) for x in built[:3])
        options = {name: moved(x, self.device) for name, x in (built.options | changes).items()}
        try:
            out, lse = ops.paged_attention(q, layer, batch, return_lse=True, backend=self.backend, **options)
        except KernelUnavailable as refused:
            pytest.skip(str(refused))
        return out.cpu(), lse.cpu()

    def check(self, case: Case, built: Built | None = None) -> None:
        """Compare with the oracle: a case, or tensors of this case that were changed."""
        states = solved(case) if built is None else (built, oracle(built), same_precision(built))
        assert_right(case, self.attend(states[0]), *states[1:])


INTERPRETS = (
    importlib.util.find_spec("triton") is not None
    and "asan" not in os.environ.get("LD_PRELOAD", "")
    and (os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available())
)
"""Whether the Triton kernels of this process belong to the interpreter. On a machine with a GPU, they are the GPU's.
With a sanitizer there is no Triton."""
if INTERPRETS:  # before another test imports the kernels: Triton decides then, for the life of the process
    with pytest.MonkeyPatch.context() as _environment:
        _environment.setenv("TRITON_INTERPRET", "1")
        import pagedkv.kernels.triton.backend  # noqa: F401
SETS: tuple[str, ...] = tuple(cpu._cpu.sets()) if cpu._cpu else ()


def param(runner: Runner) -> Any:
    return pytest.param(runner, id=str(runner), marks=[] if runner.device == "cpu" else [pytest.mark.gpu])


ON_CPU = [kernel.name for kernel in registry.KERNELS if kernel.name not in ("cuda", "triton", "library")]
ON_CPU = [name for name in ON_CPU if name != "cpu" or SETS]
"""The kernels that serve on this machine without a GPU."""
RUNNERS = [
    *(param(Runner(name)) for name in ON_CPU),
    *(param(Runner(name, "cuda")) for name in ("cuda", "triton", "reference")),  # library: tests/kernels/library
    *[param(Runner("triton"))] * INTERPRETS,
    *[param(Runner(EMULATED))] * bool(COMPILER),
]
WAYS = [
    *(param(Runner("cpu", way=name)) for name in SETS),
    *(param(Runner("numba", way=name)) for name in ("OpenMP", "Python threads")),
]
"""The compiled kernels of the CPU: each instruction set of this processor, and either team of threads."""
COMPILED = [*WAYS, *(each for each in RUNNERS if each.values[0].backend not in ("cpu", "numba", "reference"))]
"""All kernels but the reference."""
FOR_GPUS = [each for each in RUNNERS if each.values[0].spoils_rows]


@pytest.fixture(params=RUNNERS)
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    """Each kernel on each of its devices."""
    runner: Runner = request.param
    runner.prepare(monkeypatch)
    yield runner
    if runner.is_slow:
        registry._resolve.cache_clear()  # other tests must not get its choices


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    """The kernel `triton` in Triton's interpreter."""
    if not INTERPRETS:
        pytest.skip("Triton is not installed, or its kernels belong to the GPU")
    runner = Runner("triton")
    runner.prepare(monkeypatch)
    yield runner
    registry._resolve.cache_clear()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow all cases but one of the laws that a slow runner keeps; the law's name chooses the one.

    A law that marks some of its cases itself is left as it is. numpy, in which the interpreter computes, warns of NaN.
    """
    of_law: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        runner = getattr(getattr(item, "callspec", None), "params", {}).get("runner")
        if getattr(runner, "is_slow", False):
            of_law[item.nodeid.partition("[")[0], runner.backend].append(item)
        if getattr(runner, "is_slow", False) or "interpreter" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"))
    for (law, backend), cases in of_law.items():
        if any(item.get_closest_marker("slow") for item in cases):
            continue
        number = zlib.crc32(law.encode())
        kept = None if backend == "triton" and number % 6 else cases[number % len(cases)]
        for item in cases:
            if item is not kept:
                item.add_marker(pytest.mark.slow)


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
