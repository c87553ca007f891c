"""The last step before a GPU, with a recorder where the driver's API is: what it is given, and that nothing else is asked of it.

The recorder follows the pointers of a launch as the driver would, and runs it on the emulator: so bytes are packed, and grids counted, as
the kernels expect.
"""

from __future__ import annotations

import ctypes
import importlib.util
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pagedkv.errors import InvalidRequest
from pagedkv.kernels import cuda_compile, cuda_early, cuda_launch, cuda_moves
from pagedkv.kernels.cuda_driver import Driver
from pagedkv.kernels.cuda_launch import LAYOUT, PARAMS
from pagedkv.kernels.cuda_moves import COPY_LAYOUT, MERGE_LAYOUT, WRITE_LAYOUT
from pagedkv.kernels.cuda_shapes import CopyShape
from tests.cases import Case
from tests.cuda.emulator import COMPILER, Emulator, call_of, compiled

if TYPE_CHECKING:
    from pagedkv.kernels.cuda_shapes import Specialisation

LAYOUTS = {
    "paged_attention": LAYOUT,
    "merge_pieces": LAYOUT,
    "write_kv": WRITE_LAYOUT,
    "merge_states": MERGE_LAYOUT,
    "copy_frames": COPY_LAYOUT,
}
TORCH_CONTEXT, OTHER_CONTEXT = 7000, 7001


class Recorder:
    """cupy.cuda.driver, and torch's stream: writes down what is asked, and checks what the real ones would object to."""

    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT = 8, 9
    arch, num_sms, shared_per_block, shared_per_sm = "sm_90", 3, 227 << 10, 228 << 10

    def __init__(self, monkeypatch: pytest.MonkeyPatch, emulator: Emulator | None = None) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.launches: list[tuple[int, ...]] = []
        self.loaded: list[Specialisation] = []
        self.allowed_shared: dict[int, int] = {}
        self.current, self.capturing, self.stream_handle = TORCH_CONTEXT, False, 0x5000
        self.emulator, self.run = emulator, emulator is not None
        self.driver = Driver(self, self, self.launch_early)  # type: ignore[arg-type]
        self.early: list[int] = []
        load = self.driver._load
        monkeypatch.setattr(self.driver, "_load", lambda shape: (self.loaded.append(shape), load(shape))[1])
        monkeypatch.setattr(cuda_compile, "cubin_for", lambda kernel, macros, arch: f"{kernel} {arch}".encode())

    def context(self, cuda: object) -> int:
        return TORCH_CONTEXT

    def stream(self) -> int:
        return self.stream_handle

    def is_capturing(self) -> bool:
        return self.capturing

    def ctxGetCurrent(self) -> int:
        return self.current

    def ctxSetCurrent(self, context: int) -> None:
        self.asked.append(("ctxSetCurrent", context))
        self.current = context

    def moduleLoadData(self, cubin: bytes) -> int:
        self.asked.append(("moduleLoadData", cubin))
        return 100 + len(self.loaded)

    def moduleGetFunction(self, module: int, name: str) -> int:
        assert module == 100 + len(self.loaded)
        assert name == self.loaded[-1].kernel
        self.allowed_shared[len(self.loaded)] = 48 << 10
        return len(self.loaded)

    def funcSetAttribute(self, function: int, attribute: int, value: int) -> None:
        self.asked.append(("funcSetAttribute", attribute, value))
        if attribute == self.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
            assert value <= self.shared_per_block
            self.allowed_shared[function] = value

    def launch_early(self, function: int, *arguments: int) -> None:
        self.early.append(len(self.launches))
        self.launchKernel(function, *arguments)

    def launchKernel(self, function: int, *arguments: int) -> None:
        grid, block, (shared, stream, pointers, extra) = arguments[:3], arguments[3:6], arguments[6:]
        assert self.current == TORCH_CONTEXT, "the function belongs to this context"
        assert 0 < grid[0] < 2**31
        assert grid[1:] == (1, 1)
        assert block[1:] == (1, 1)
        assert shared <= self.allowed_shared[function]
        assert (stream, extra) == (self.stream_handle, 0)
        self.launches.append((function, grid[0], block[0], shared))
        if self.run:
            shape = self.loaded[function - 1]
            assert block[0] == shape.threads
            assert shared == shape.shared_bytes
            at = ctypes.c_void_p.from_address(pointers).value
            size = LAYOUTS[shape.kernel].size
            assert self.emulator
            self.emulator.launch(shape, grid[0], ctypes.string_at(at, size))


@pytest.mark.skipif(not COMPILER, reason="the emulator needs g++")
@pytest.mark.parametrize("split_tokens", [None, 64])
def test_a_call_is_launched_as_the_emulator_would_launch_it(split_tokens: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(q_lens=(1, 40, 3), kv_lens=(400, 64, 77), heads=(8, 2), dtype="bfloat16", sinks=True, split_tokens=split_tokens)
    emulator = Emulator()
    recorder, call, expected = Recorder(monkeypatch, emulator), call_of(case.build()), call_of(case.build())
    Emulator().attend(expected)
    emulator._may_touch(*(getattr(call, name) for name in call.__slots__))
    workspace = recorder.driver.workspace

    def shown(slots: int, floats: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pair = workspace(slots, floats, like)
        emulator.memory += pair
        return pair

    monkeypatch.setattr(recorder.driver, "workspace", shown)
    cuda_launch.attend(call, recorder.driver)
    assert len(recorder.launches) == 3
    assert torch.equal(call.out.view(torch.int16), expected.out.view(torch.int16))
    assert torch.equal(call.lse, expected.lse)
    assert [name for name, *_ in recorder.asked] == ["moduleLoadData", "funcSetAttribute", "funcSetAttribute"] * 3
    again = len(recorder.asked)
    cuda_launch.attend(call, recorder.driver)
    assert len(recorder.asked) == again, "the second call loads nothing and sets nothing"


def attend_nowhere(recorder: Recorder) -> None:
    recorder.run = False
    cuda_launch.attend(call_of(Case(dtype="bfloat16").build()), recorder.driver)


def test_a_thread_without_a_context_is_given_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    recorder.current = 0
    attend_nowhere(recorder)
    assert recorder.current == TORCH_CONTEXT


def test_another_device_s_context_is_put_back_even_if_the_launch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    recorder.current = OTHER_CONTEXT
    attend_nowhere(recorder)
    assert recorder.current == OTHER_CONTEXT

    def refuse(*arguments: int) -> None:
        raise RuntimeError("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")

    monkeypatch.setattr(recorder, "launchKernel", refuse)
    with pytest.raises(RuntimeError, match="OUT_OF_RESOURCES"):
        attend_nowhere(recorder)
    assert recorder.current == OTHER_CONTEXT


def test_each_stream_has_tickets_of_its_own_and_outgrown_ones_live_on(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = (recorder := Recorder(monkeypatch)).driver
    like = torch.zeros(1)
    first = driver.workspace(10, 4, like)[1]
    assert driver.workspace(4096, 4, like)[1] is first
    larger = driver.workspace(4097, 4, like)[1]
    assert larger.numel() >= 4097
    assert any(kept is first for kept in driver._tickets[recorder.stream_handle]), "a launch that still runs may count in it"
    recorder.stream_handle = 0x6000
    assert driver.workspace(10, 4, like)[1].data_ptr() not in (first.data_ptr(), larger.data_ptr())
    assert not driver.workspace(10, 4, like)[1].any()


def test_a_captured_launch_shares_no_tickets_and_loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    recorder.capturing = True
    with pytest.raises(InvalidRequest, match=r"paged_attention .* is not loaded yet.* run the same step once before capturing it"):
        attend_nowhere(recorder)
    recorder.capturing = False
    attend_nowhere(recorder)
    asked = len(recorder.asked)
    recorder.capturing = True
    attend_nowhere(recorder)
    assert len(recorder.launches) == 2
    assert len(recorder.asked) == asked, "a capture sees one launch, and nothing else of the driver"
    like = torch.zeros(1)
    one, two = (recorder.driver.workspace(10, 4, like)[1] for _ in range(2))
    assert one.data_ptr() != two.data_ptr()


def test_threads_that_launch_at_once_all_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    threads = [threading.Thread(target=attend_nowhere, args=(recorder,)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(recorder.launches) == 6


def test_more_than_48_kb_of_shared_memory_is_asked_for_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    recorder.driver.launch(CopyShape(16, 96 << 10), 5, bytes(COPY_LAYOUT.size))
    assert ("funcSetAttribute", recorder.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 96 << 10) in recorder.asked
    assert recorder.launches == [(1, 5, 128, 96 << 10)]


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
def test_cupy_has_what_is_asked_of_it() -> None:
    from cupy.cuda import driver, runtime

    for name in ("ctxGetCurrent", "ctxSetCurrent", "moduleLoadData", "moduleGetFunction", "funcSetAttribute", "launchKernel"):
        assert callable(getattr(driver, name))
    assert driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES == Recorder.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert driver.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT == Recorder.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    for name in ("MultiProcessorCount", "MaxSharedMemoryPerBlockOptin", "MaxSharedMemoryPerMultiprocessor"):
        assert isinstance(getattr(runtime, f"cudaDevAttr{name}"), int)


PROBE = """
#include "params.h"
{checks}
extern "C" __global__ void probe() {{}}
"""


def offsets() -> list[str]:
    """What the bytes that Python packs say of `AttentionParams`, as C++."""
    lines, at = [], 0
    for code, name in zip(LAYOUT.format.strip("@x4") and expanded(LAYOUT.format), PARAMS, strict=True):
        size = {"Q": 8, "q": 8, "i": 4, "f": 4}[code]
        lines.append(f'static_assert(__builtin_offsetof(AttentionParams, {name}) == {at}, "{name}");')
        at += size
    sizes = {"AttentionParams": LAYOUT, "WriteParams": WRITE_LAYOUT, "CopyParams": COPY_LAYOUT, "MergeParams": MERGE_LAYOUT}
    return lines + [f'static_assert(sizeof({name}) == {layout.size}, "{name}");' for name, layout in sizes.items()]


def expanded(format: str) -> str:
    """ "2Q3i" as "QQiii"; padding left out."""
    codes, count = "", ""
    for letter in format[1:]:
        if letter.isdigit():
            count += letter
        else:
            codes += letter * int(count or 1) if letter != "x" else ""
            count = ""
    return codes


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
def test_the_device_compiler_lays_params_out_as_python_packs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = dict(cuda_compile.sources()) | {"probe.cuh": PROBE.format(checks="\n".join(offsets()))}
    monkeypatch.setattr(cuda_compile, "sources", lambda: texts)
    try:
        assert cuda_compile.compile_cubin("probe", {}, "sm_90").cubin[:4] == b"\x7fELF"
    except (RuntimeError, OSError, ImportError) as why:
        pytest.skip(f"no NVRTC library here: {why}")


def test_a_launch_costs_the_host_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of Python between the checked call and the driver's own. The aim is 10 us; a busy test machine may take six times that."""
    recorder, call = Recorder(monkeypatch), call_of(Case(dtype="bfloat16").build())
    monkeypatch.setattr(recorder, "launchKernel", lambda *arguments: None)
    for _ in range(50):
        cuda_launch.attend(call, recorder.driver)
    took = []
    for _ in range(200):
        began = time.perf_counter()
        cuda_launch.attend(call, recorder.driver)
        took.append(time.perf_counter() - began)
    print(f"attend: {sorted(took)[100] * 1e6:.1f} us")
    assert sorted(took)[20] < 60e-6


def test_pieces_are_merged_by_a_launch_that_may_begin_early(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    for split_tokens in (None, 16):  # 16: one unit, so that its chunks are shared
        built = Case(q_lens=(1,), kv_lens=(64,), heads=(2, 1), dtype="bfloat16", split_tokens=split_tokens).build()
        cuda_launch.attend(call_of(built), recorder.driver, cuda_launch.Ways(second_launch=True))
    assert [shape.kernel for shape in recorder.loaded] == ["paged_attention", "merge_pieces"]
    assert recorder.early == [1, 3]
    first, second = recorder.launches[:2]
    assert first[1:3] == second[1:3], "the same CTAs make the same plan"
    assert second[3] == 0


HEADER = """
#include <cstddef>
typedef struct {
    int id;
    char pad[8 - sizeof(int)];
    union { char pad[64]; int programmaticStreamSerializationAllowed; } value;
} CUlaunchAttribute;
typedef struct {
    unsigned int gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
    void* hStream;
    CUlaunchAttribute* attrs;
    unsigned int numAttrs;
} CUlaunchConfig;
extern "C" size_t seen[15] = {};
extern "C" int cuLaunchKernelEx(const CUlaunchConfig* c, void* function, void** params, void** extra) {
    const size_t all[] = {c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ, c->sharedMemBytes,
        (size_t)c->hStream, c->numAttrs, (size_t)c->attrs->id, (size_t)c->attrs->value.programmaticStreamSerializationAllowed,
        (size_t)function, (size_t)params, (size_t)extra, sizeof(CUlaunchConfig) * 1000 + sizeof(CUlaunchAttribute)};
    for (int i = 0; i < 15; ++i) seen[i] = all[i];
    return (int)c->gridDimZ - 1;
}
"""
"""The driver's side of the launch, as its header lays it out; a grid of a z that is not 1 is an error."""


@pytest.mark.skipif(not COMPILER or importlib.util.find_spec("cupy") is None, reason="needs g++ and CuPy")
def test_the_driver_is_told_that_a_launch_may_begin_early(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupy.cuda import driver

    library = ctypes.CDLL(str(compiled("driver", {"driver.cpp": HEADER}, ("-O1", "-fPIC", "-shared"))))
    monkeypatch.setattr(cuda_early, "library", lambda: library)
    cuda_early.launch_early(0x123456789AB, 7, 1, 1, 128, 1, 1, 4096, 0x23456789ABC, 0x3456789ABCD, 0)
    attributes, sizes = (1, cuda_early.MAY_BEGIN_EARLY, 1), ctypes.sizeof(cuda_early.Config) * 1000 + ctypes.sizeof(cuda_early.Attribute)
    expected = [7, 1, 1, 128, 1, 1, 4096, 0x23456789ABC, *attributes, 0x123456789AB, 0x3456789ABCD, 0, sizes]
    assert list((ctypes.c_size_t * 15).in_dll(library, "seen")) == expected
    raised: list[int] = []
    monkeypatch.setattr(driver, "check_status", raised.append)
    cuda_early.launch_early(1, 7, 1, 2, 128, 1, 1, 0, 0, 0, 0)
    assert raised == [1], "what the driver answers is looked at"


def test_moves_are_launched_through_the_same_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    pool = torch.zeros(4, 64)
    cuda_moves.copy_frames(pool, torch.tensor([[0, 1]], dtype=torch.int32), recorder.driver)
    cuda_moves.merge_states(torch.zeros(2, 1, 64), torch.zeros(2, 1), torch.zeros(2, 1, 64), torch.zeros(2, 1), recorder.driver)
    assert [shape.kernel for shape in recorder.loaded] == ["copy_frames", "merge_states"]
    assert [blocks for _, blocks, *_ in recorder.launches] == [1, 1]
