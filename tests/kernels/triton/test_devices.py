"""Two kinds of GPUs in one machine: a launch, and what it is compiled for, follow the tensors, not the current GPU.

No GPU is needed: the tensors are fake ones (without memory), torch.cuda's answers are made up, and a launch is recorded
with the GPU that is current then.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pagedkv.kernels.args import GatherCall, GatherSource, WriteCall
from pagedkv.kernels.case import Case
from tests.kernels.triton.compiled import typical_call
from tests.kernels.triton.test_triton import backend, specialisation

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
KINDS = ((9, 0), (8, 9), (7, 5))
"""The compute capability of each GPU; the first is the current one."""


class Gpus:
    """The current GPU, and the launches: name of the kernel, current GPU, keyword arguments."""

    def __init__(self) -> None:
        self.current = 0
        self.launches: list[tuple[str, int, dict[str, Any]]] = []

    def device(self, device: torch.device | int) -> Any:
        """Stand in for torch.cuda.device."""
        gpus, index = self, device if isinstance(device, int) else device.index

        class Context:
            def __enter__(self) -> None:
                self.before, gpus.current = gpus.current, index

            def __exit__(self, *error: object) -> None:
                gpus.current = self.before

        return Context()


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpus]:
    found = Gpus()

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        found.launches.append((self.fn.__name__, found.current, kwargs))

    def properties(index: int) -> Any:
        major, minor = KINDS[index]
        return SimpleNamespace(major=major, minor=minor, multi_processor_count=100 + index)

    monkeypatch.setattr("triton.runtime.interpreter.GridExecutor.__call__", launch)
    monkeypatch.setattr(torch.cuda, "device", found.device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: found.current)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda index=None: KINDS[found.current if index is None else index]
    )
    specialisation.tuning._gpu.cache_clear()
    yield found
    specialisation.tuning._gpu.cache_clear()


def test_every_launch_is_made_on_the_gpu_of_its_tensors(gpus: Gpus) -> None:
    with FakeTensorMode(), torch.device("cuda:1"):
        decode, chunk = typical_call(B=2), typical_call(B=1, q_len=64)
        backend.paged_attention(decode)
        backend.paged_attention(chunk)
        new, slots = torch.empty(8, 8, 128), torch.zeros(8, dtype=torch.int64)
        backend.write_kv(WriteCall(*decode[:5], None, None, False, new, new, slots, None))
        source = GatherSource(*decode[:5], decode.block_table, None, decode.seq_lens, decode.seq_lens)
        backend.gather_kv(GatherCall(source, torch.zeros(3, dtype=torch.int64), new, new))
        backend.merge_states(decode.out, decode.lse, decode.out, decode.lse)
    kernels = {name for name, _, _ in gpus.launches}
    assert {"_decode_kernel", "_prefill_kernel", "_write_kernel", "_gather_kernel"} <= kernels
    assert {"_merge_kernel", "_merge_states_kernel"} <= kernels
    assert {current for _, current, _ in gpus.launches} == {1}
    assert gpus.current == 0


@pytest.mark.parametrize("index", [0, 1])
def test_a_kernel_is_compiled_for_the_gpu_of_its_tensors(index: int, gpus: Gpus) -> None:
    with FakeTensorMode(), torch.device(f"cuda:{index}"):
        backend.paged_attention(typical_call(kv="fp8_e4m3/tensor", D=256, Dv=256))
    tiles = {kwargs["SPEC"].N for name, _, kwargs in gpus.launches if name == "_decode_kernel"}
    on = specialisation.tuning.target(torch.device(f"cuda:{index}"))
    assert on.arch == ["sm_90", "sm_89"][index]
    assert tiles == {specialisation.tuning.tuning("decode", on, 512, 256).N}


def test_objections_are_those_of_the_gpu_of_the_case(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "INTERPRET", False)
    wide = Case(device="cuda", dtype="float32", kv_dtype="int8", head_dim=576, head_dim_v=512)
    for found, index in (([], 0), ([], 1), (["the GPU is sm_75"], 2)):
        reasons = backend.objections(wide._replace(device_index=index))
        assert len(reasons) == len(found)
        assert all(text in why for text, why in zip(found, reasons, strict=True))
    gpus.current = 2
    assert "the GPU is sm_75" in backend.objections(wide)[0]
