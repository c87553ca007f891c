"""driver.py calls CUDA's driver rightly, and calls nothing else. A recorder takes the driver's place.

The recorder follows the pointers of a launch as the driver would, and runs the launch on the emulator. So the tests
show that parameters are packed and grids computed as the kernels expect.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pagedkv.errors import InvalidRequest
from pagedkv.kernels.cuda import attention, compiler, streams
from pagedkv.kernels.cuda import driver as cuda_driver
from pagedkv.kernels.cuda.attention import LAYOUT, PARAMS
from pagedkv.kernels.cuda.driver import CHUNK, LINE, RESERVE, Driver
from pagedkv.kernels.cuda.moves import COPY_LAYOUT, MERGE_LAYOUT, WRITE_LAYOUT
from tests.cases import Case, call_of
from tests.kernels.cuda.emulator import COMPILER, Emulator, compiled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagedkv.kernels.cuda.specialisation import Specialisation

LAYOUTS = {
    "paged_attention": LAYOUT,
    "write_kv": WRITE_LAYOUT,
    "merge_states": MERGE_LAYOUT,
    "copy_frames": COPY_LAYOUT,
}
TORCH_CONTEXT, OTHER_CONTEXT = 7000, 7001


class Recorder:
    """cupy.cuda.driver and `TorchDevice` in one: records each call, and checks what the real functions would refuse."""

    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT = 8, 9
    arch, num_sms, shared_per_block, shared_per_sm = "sm_90", 3, 227 << 10, 228 << 10

    def __init__(self, monkeypatch: pytest.MonkeyPatch, emulator: Emulator | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.launches: list[tuple[int, ...]] = []
        self.loaded: list[Specialisation] = []
        self.allowed_shared: dict[int, int] = {}
        self.current, self.capturing, self.stream_handle = TORCH_CONTEXT, False, 0x5000
        self.emulator, self.run = emulator, emulator is not None
        self.driver = Driver(self, self)  # type: ignore[arg-type]
        self.is_relaxed = False
        self.chunks: list[torch.Tensor] = []
        self.kept: list[int] = []  # its address, of each launch of attention
        self.streams = {0x5000: 1, 0x6000: 2}  # the number of each handle
        self.capture = 70
        load = self.driver._load
        monkeypatch.setattr(self.driver, "_load", lambda kernel: (self.loaded.append(kernel), load(kernel))[1])
        monkeypatch.setattr(compiler, "cubin_for", lambda kernel, macros, arch: f"{kernel} {arch}".encode())

    def context(self, cuda: object) -> int:
        return TORCH_CONTEXT

    def stream(self) -> int:
        return self.stream_handle

    def is_capturing(self, stream: int) -> bool:
        assert stream == self.stream_handle
        return self.capturing

    def order(self) -> tuple[int, int]:
        return (self.capture, self.stream_handle) if self.capturing else (0, self.streams[self.stream_handle])

    def zeros(self, count: int) -> torch.Tensor:
        assert not self.capturing, "a capture cannot allocate device memory"
        chunk = torch.zeros(count + LINE, dtype=torch.int64)
        # The chunk begins at a cache line, as memory of the device does.
        self.chunks.append(chunk[-chunk.data_ptr() // 8 % LINE :][:count])
        return self.chunks[-1]

    def ctxGetCurrent(self) -> int:
        return self.current

    def ctxSetCurrent(self, context: int) -> None:
        self.calls.append(("ctxSetCurrent", context))
        self.current = context

    @contextlib.contextmanager
    def beside_captures(self) -> Iterator[None]:
        self.is_relaxed = True
        yield
        self.is_relaxed = False

    def moduleLoadData(self, cubin: bytes) -> int:
        assert self.is_relaxed, "another thread may be capturing"
        assert self.current == TORCH_CONTEXT, "a module belongs to the current context"
        self.calls.append(("moduleLoadData", cubin))
        return 100 + len(self.loaded)

    def moduleGetFunction(self, module: int, name: str) -> int:
        assert module == 100 + len(self.loaded)
        assert name == self.loaded[-1].name
        self.allowed_shared[len(self.loaded)] = 48 << 10
        return len(self.loaded)

    def funcSetAttribute(self, function: int, attribute: int, value: int) -> None:
        assert self.current == TORCH_CONTEXT
        self.calls.append(("funcSetAttribute", attribute, value))
        if attribute == self.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
            assert value <= self.shared_per_block
            self.allowed_shared[function] = value

    def launchKernel(self, function: int, *arguments: int) -> None:
        grid, block, (shared, stream, pointers, extra) = arguments[:3], arguments[3:6], arguments[6:]
        assert self.current == TORCH_CONTEXT, "the function belongs to this context"
        assert 0 < grid[0] < 2**31
        assert grid[1:] == (1, 1)
        assert block[1:] == (1, 1)
        assert shared <= self.allowed_shared[function]
        assert (stream, extra) == (self.stream_handle, 0)
        self.launches.append((function, grid[0], block[0], shared))
        kernel = self.loaded[function - 1]
        params = ctypes.string_at(ctypes.c_void_p.from_address(pointers).value or 0, LAYOUTS[kernel.name].size)
        if LAYOUTS[kernel.name] is LAYOUT:
            self.kept.append(dict(zip(PARAMS, LAYOUT.unpack(params), strict=True))["kept"])
        if self.run:
            assert block[0] == kernel.threads
            assert shared == kernel.shared_bytes
            assert self.emulator
            self.emulator.launch(kernel, grid[0], params)


@pytest.mark.skipif(not COMPILER, reason="the emulator needs g++")
@pytest.mark.parametrize("split_tokens", [pytest.param(None, marks=pytest.mark.slow), 64])
def test_a_call_is_launched_as_the_emulator_would_launch_it(
    split_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(
        q_lens=(1, 40, 3), kv_lens=(400, 64, 77), heads=(8, 2), dtype="bfloat16", sinks=True, split_tokens=split_tokens
    )
    emulator = Emulator()
    recorder, call, expected = Recorder(monkeypatch, emulator), call_of(case.build()), call_of(case.build())
    Emulator().attend(expected)
    emulator._may_touch(*call)
    for name in ("workspace", "kept"):
        taken = getattr(recorder.driver, name)
        monkeypatch.setattr(
            recorder.driver, name, lambda *asked, taken=taken: emulator.memory.append(got := taken(*asked)) or got
        )
    attention.attend(call, recorder.driver)
    assert len(recorder.launches) == 4
    assert torch.equal(call.out.view(torch.int16), expected.out.view(torch.int16))
    assert torch.equal(call.lse, expected.lse)
    assert [name for name, *_ in recorder.calls] == ["moduleLoadData", "funcSetAttribute", "funcSetAttribute"] * 4
    after_first = len(recorder.calls)
    attention.attend(call, recorder.driver)
    assert len(recorder.calls) == after_first, "the second call loads nothing and sets nothing"


def attend_nowhere(recorder: Recorder) -> None:
    recorder.run = False
    attention.attend(call_of(Case(dtype="bfloat16").build()), recorder.driver)


def test_another_device_s_context_is_put_back_even_if_the_launch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    recorder.current = 0  # a thread without a context is given torch's
    attend_nowhere(recorder)
    assert recorder.current == TORCH_CONTEXT
    recorder.current = OTHER_CONTEXT
    attend_nowhere(recorder)
    assert recorder.current == OTHER_CONTEXT

    def refuse(*arguments: int) -> None:
        raise RuntimeError("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")

    monkeypatch.setattr(recorder, "launchKernel", refuse)
    with pytest.raises(RuntimeError, match="OUT_OF_RESOURCES"):
        attend_nowhere(recorder)
    assert recorder.current == OTHER_CONTEXT


def apart(*taken: torch.Tensor) -> bool:
    """Return whether no two of these share a cache line."""
    lines = sorted((x.data_ptr() // 128, (x.data_ptr() + 8 * x.numel() - 1) // 128) for x in taken)
    return all(last < first for (_, last), (first, _) in itertools.pairwise(lines))


def test_each_stream_keeps_memory_for_each_kind_and_sets_that_became_too_small_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = (recorder := Recorder(monkeypatch)).driver
    like = torch.zeros(1)
    first = driver.kept(1, 10, like)
    assert driver.kept(1, 10, like) is first
    other_kind = driver.kept(2, 10, like)
    larger = driver.kept(1, 4097, like)
    assert driver.kept(1, 10, like) is larger
    recorder.stream_handle = 0x6000
    other_stream = driver.kept(1, 10, like)
    recorder.stream_handle, recorder.streams[0x5000] = 0x5000, 3
    same_handle = driver.kept(1, 10, like)
    assert apart(first, other_kind, larger, other_stream, same_handle), "a launch that still runs may use it"
    assert not torch.cat((first, other_kind, larger, other_stream, same_handle)).any()
    assert len(recorder.chunks) == 1
    assert driver.kept(1, 3 * CHUNK, like).numel() >= 3 * CHUNK
    assert len(recorder.chunks) == 2


def test_each_capture_keeps_memory_of_its_own_and_records_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs that were captured on the same stream may be replayed side by side. The layers of one capture share."""
    recorder = Recorder(monkeypatch)
    attend_nowhere(recorder)
    before, recorder.capturing = len(recorder.calls), True
    built = Case(dtype="bfloat16").build()
    monkeypatch.setattr(torch, "zeros", None)  # it would add a node to the graph, and memory to the graph's pool
    for recorder.stream_handle, recorder.capture in ((0x5000, 70), (0x5000, 70), (0x6000, 70), (0x5000, 71)):
        attention.attend(call_of(built), recorder.driver)
    assert len(recorder.launches) == 5
    assert len(recorder.calls) == before, "a captured call launches once and calls nothing else of the driver"
    eager, first, second, *others = recorder.kept
    assert first == second
    assert len({eager, first, *others}) == 4
    (chunk,) = recorder.chunks
    assert all(chunk.data_ptr() <= at < chunk.data_ptr() + 8 * chunk.numel() for at in recorder.kept)


def test_a_capture_that_finds_too_little_lets_the_graph_zero_some_and_a_later_launch_allocates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver, like = (recorder := Recorder(monkeypatch)).driver, torch.zeros(1)
    monkeypatch.setattr(torch, "empty", lambda count, **options: torch.full((count,), -1, **options))
    recorder.capturing = True
    assert driver.kept(1, 10, like).tolist() == [0] * 10, "nothing was allocated before the capture"
    assert recorder.chunks == []
    recorder.capturing = False
    driver.kept(1, 10, like)
    recorder.capturing = True
    taken = [driver.kept(kind, CHUNK // 8 + 1, like) for kind in range(9)]
    assert all(not words.any() and words.numel() > CHUNK // 8 for words in taken)
    assert apart(*taken[:7])
    assert len({words.untyped_storage().data_ptr() for words in taken}) == 3, (
        "seven sets come from the chunk, and two from torch"
    )
    recorder.capturing = False
    mine = driver.kept(1, 10, like)
    assert [chunk.numel() for chunk in recorder.chunks] == [CHUNK] * 2
    assert driver.kept(1, 10, like) is mine
    recorder.capturing = True
    kept = driver.kept(9, RESERVE, like)
    assert kept.untyped_storage().data_ptr() == recorder.chunks[1].untyped_storage().data_ptr()


def test_a_kernel_that_is_not_loaded_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    recorder.capturing = True
    with pytest.raises(
        InvalidRequest, match=r"paged_attention .* is not loaded yet.* run the same step once before capturing it"
    ):
        attend_nowhere(recorder)
    assert recorder.launches == []


def torch_of(index: int, monkeypatch: pytest.MonkeyPatch) -> cuda_driver._TorchDevice:
    """Return the `TorchDevice` of a device that this machine does not have."""
    from cupy.cuda import runtime

    monkeypatch.setattr(runtime, "deviceGetAttribute", lambda attribute, device: 1000 * device + attribute)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, device.index))
    return cuda_driver._TorchDevice(torch.device("cuda", index))


HEADER = """
#include <cstddef>
extern "C" int cuStreamGetId(void* stream, unsigned long long* id) {
    if ((size_t)stream == 0x7000) return 400;
    return *id = (size_t)stream + 1, 0;
}
extern "C" int cuStreamGetCaptureInfo(void* stream, int* status, unsigned long long* id) {
    if ((size_t)stream == 0x7000) return 400;
    return *status = 1, *id = (size_t)stream + 2, 0;
}
extern "C" int mode = 1;
extern "C" int cuThreadExchangeStreamCaptureMode(int* wanted) {
    const int before = mode;
    mode = *wanted;
    *wanted = before;
    return 0;
}
"""
"""A stand-in for the driver: a capture mode, and numbers of streams and captures, of all streams but 0x7000."""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> tuple[ctypes.CDLL, list[int]]:
    """The stand-in, and the statuses that were checked."""
    if not COMPILER:
        pytest.skip("the stand-in needs g++")
    driver, raised = pytest.importorskip("cupy.cuda").driver, list[int]()
    library = ctypes.CDLL(str(compiled("driver", {"driver.cpp": HEADER}, ("-O1", "-fPIC", "-shared"))))
    monkeypatch.setattr(streams, "_library", lambda: library)
    monkeypatch.setattr(driver, "check_status", raised.append)
    return library, raised


def test_launches_are_in_order_within_a_capture_or_within_a_stream_whatever_its_handle(
    stand_in: tuple[ctypes.CDLL, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = {0x5000: False, 0x6000: True}
    device = torch_of(3, monkeypatch)
    monkeypatch.setattr(device, "is_capturing", lambda stream: captured.get(stream, False))
    orders = []
    for handle in (0, 0x5000, 0x6000):
        monkeypatch.setattr(device, "stream", lambda handle=handle: handle)
        orders.append(device.order())
    assert orders == [(0, 0), (0, 0x5000 + 1), (0x6000 + 2, 0x6000)]
    stand_in[1].clear()
    streams.number_of(0x7000)
    streams.capture_of(0x7000)
    assert stand_in[1] == [400, 400], "the driver's status must be checked"
    monkeypatch.setattr(streams, "_library", lambda: object())  # a driver before 12.0
    assert streams.number_of(0x5000) == 0x5000


def test_memory_is_allocated_in_a_capture_mode_that_is_restored(stand_in: tuple[ctypes.CDLL, list[int]]) -> None:
    library, raised = stand_in
    mode = ctypes.c_int.in_dll(library, "mode")
    with contextlib.suppress(MemoryError), streams.beside_captures():
        assert mode.value == streams.RELAXED
        raise MemoryError
    assert (mode.value, raised) == (1, [0])
