"""One GPU: the kernels loaded in this process, the memory that outlives a launch, and the launch itself.

The file calls CUDA through two interfaces, where the tests put recorders: `_Cuda`, six functions of cupy.cuda.driver,
and `_TorchDevice`, functions of torch, of the runtime and of streams.py. No launch has an attribute and no kernel forms
a cluster, so cuda.core is not needed. This file knows no attention.

    a launch       allocates only torch's memory of the current stream. It neither waits nor reads the device back, so a
                   CUDA graph captures it as it is. A capture cannot load a kernel: that is refused, with the remedy.
    kept memory    belongs to no allocator's pool and is never freed. Each stream has a set, and so has each capture
                   (`_Kept`).
    contexts       kernels are loaded in the device's primary context, which torch uses too. If the calling thread has
                   no context, or another device's, the primary context is current during the launch.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import TYPE_CHECKING, Final, Protocol, cast

import torch

from pagedkv.errors import InvalidRequest
from pagedkv.kernels.cuda import compiler, streams

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor

    from pagedkv.kernels.cuda.specialisation import Specialisation

CARVEOUT: Final = 100
"""Preferred percent of an SM's L1 memory that is shared memory: no kernel here depends on the L1 cache."""

CHUNK: Final = 1 << 19
"""Words of 8 bytes that are allocated at once, 4 MB: enough for 100 captured graphs on 132 SMs."""

RESERVE: Final = CHUNK // 4
"""If fewer words than this are left for captures, a launch outside of a capture allocates another chunk."""

LINE: Final = 16
"""Words in 128 bytes, a line of the L2 cache. No two kinds of launches write in the same line."""


class _Cuda(Protocol):
    """The functions of cupy.cuda.driver that this file calls; all raise CUDADriverError."""

    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: int
    CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: int

    def ctxGetCurrent(self) -> int: ...
    def ctxSetCurrent(self, context: int) -> None: ...
    def moduleLoadData(self, cubin: bytes) -> int: ...
    def moduleGetFunction(self, module: int, name: str) -> int: ...
    def funcSetAttribute(self, function: int, attribute: int, value: int) -> None: ...
    def launchKernel(self, function: int, *arguments: int) -> None: ...


class _TorchDevice:
    """A device as torch and the CUDA runtime see it: architecture, sizes, current stream, memory."""

    def __init__(self, device: torch.device) -> None:
        from cupy.cuda import runtime

        self._runtime = runtime
        # torch.cuda.current_stream makes an object of the stream, which costs 1 to 2 us; only the handle is needed.
        self._stream_of = getattr(torch._C, "_cuda_getCurrentRawStream", None) or _stream_of

        def device_attribute(attribute: int) -> int:
            return int(runtime.deviceGetAttribute(attribute, device.index))

        self.device = device
        self.arch: str = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
        self.num_sms: int = device_attribute(runtime.cudaDevAttrMultiProcessorCount)
        self.shared_per_block: int = device_attribute(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin)
        self.shared_per_sm: int = device_attribute(runtime.cudaDevAttrMaxSharedMemoryPerMultiprocessor)

    def context(self, cuda: _Cuda) -> int:
        """Return the device's primary context, and make it current in this thread. cudaSetDevice does that; torch skips
        the call if the device is already current."""
        from cupy.cuda import runtime

        with torch.cuda.device(self.device):
            runtime.setDevice(self.device.index)
            return cuda.ctxGetCurrent()

    def stream(self) -> int:
        """Return the handle of the current stream."""
        return self._stream_of(self.device.index)

    def is_capturing(self, stream: int) -> bool:
        """Return whether this stream is being captured into a graph. The default stream cannot be."""
        return stream not in (0, self._runtime.streamLegacy) and bool(self._runtime.streamIsCapturing(stream))

    def beside_captures(self) -> AbstractContextManager[None]:
        """Return a context in which allocating device memory does not break a capture of another thread."""
        return streams.beside_captures()

    def order(self) -> tuple[int, int]:
        """Return a name of the current stream's order of launches: launches of equal names run one after another.

        It is (the number of the capture, the stream's handle) in a capture, else (0, the stream's number). CUDA gives
        the number of a stream once, while a handle may be given again when the stream is destroyed but still runs.
        """
        stream = self.stream()
        if self.is_capturing(stream):
            return streams.capture_of(stream), stream
        return 0, 0 if stream == 0 else streams.number_of(stream)

    def zeros(self, count: int) -> Tensor:
        """Return int64 [count] of zeros on this device, which all streams see as zeros. The memory is not from torch's
        allocator and is never freed. Raises: CUDARuntimeError."""
        from cupy.cuda import runtime

        with torch.cuda.device(self.device), self.beside_captures():
            runtime.setDevice(self.device.index)
            stream = runtime.streamCreateWithFlags(runtime.streamNonBlocking)
            try:
                at = runtime.malloc(8 * count)
                runtime.memsetAsync(at, 0, 8 * count, stream)
                runtime.streamSynchronize(stream)  # waits for the memset only, not for other streams
            finally:
                runtime.streamDestroy(stream)
        return torch.as_tensor(_DeviceMemory(at, count), device=self.device)


def _stream_of(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


class _DeviceMemory:
    """Device memory in the form in which torch accepts it from other libraries."""

    def __init__(self, at: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "<i8",
            "data": (at, False),
            "strides": None,
            "version": 2,
        }


class _Kept:
    """Memory that a launch leaves to the next launch of its kind: shares of the work, and tickets (partition.cuh).

    Launches on one stream run one after another and share a set for each kind, and so do the launches that one capture
    makes on one stream. A graph may be replayed on any stream and beside any other graph, so each capture has sets of
    its own, which are kept even when the graph is deleted. The memory is not torch's: torch.compile's CUDA graph trees
    inspect the graph's pool and would report what stays there as a leak.
    """

    def __init__(self, device: _TorchDevice) -> None:
        self._device, self._left, self._free = device, 0, torch.empty(0, dtype=torch.int64)
        self._sets: dict[tuple[tuple[int, int], int], Tensor] = {}
        self._lock = threading.Lock()

    def take(self, kind: int, words: int) -> Tensor | None:
        """Return int64 [>= words] for a launch on the current stream. Return None if the stream is captured and too few
        are left: a capture cannot allocate device memory."""
        order = self._device.order()
        found = self._sets.get((order, kind))
        is_captured = order[0] != 0
        if found is not None and found.numel() >= words and (is_captured or self._left >= RESERVE):
            return found
        with self._lock:
            # A set that is too small is not freed: a launch may still use it.
            if found is None or found.numel() < words:
                if is_captured and self._left < words:
                    return None
                size = words if is_captured or found is None else max(words, 2 * found.numel())
                self._ensure(size)
                found = self._sets[order, kind] = self._cut(size)
            if not is_captured:
                self._ensure(RESERVE)
        return found

    def _ensure(self, words: int) -> None:
        """Allocate a chunk if fewer than `words` are free."""
        if self._left < words:
            self._free = self._device.zeros(max(CHUNK, 2 * words))
            self._left = self._free.numel()

    def _cut(self, words: int) -> Tensor:
        length = -(-words // LINE) * LINE
        cut, self._free = self._free[:length], self._free[length:]
        self._left = self._free.numel()
        return cut


class Driver:
    """The `Machine` (attention.py) that launches on a GPU."""

    def __init__(self, device: _TorchDevice, cuda: _Cuda) -> None:
        self.num_sms: int = device.num_sms
        self.shared_per_block: int = device.shared_per_block
        self.shared_per_sm: int = device.shared_per_sm
        self._device, self._cuda, self._context = device, cuda, device.context(cuda)
        self._functions: dict[Specialisation, tuple[int, int, int]] = {}
        self._kept = _Kept(device)
        self._floats: Tensor | None = None

    def workspace(self, floats: int, like: Tensor) -> Tensor:
        """Return float32 [floats] from torch's allocator, which reuses it when the launches so far have run. In a
        capture the memory belongs to the graph."""
        if self._floats is None:
            self._floats = like.new_empty(0, dtype=torch.float32)
        return self._floats.new_empty(floats)  # torch.empty with a dtype and a device takes 0.4 us more

    def kept(self, kind: int, words: int, like: Tensor) -> Tensor:
        """Return int64 [>= words] that the launch of this kind before the next one left. If a capture finds too few,
        they come from torch's allocator, and the graph sets them to zero at each replay."""
        found = self._kept.take(kind, words)
        return torch.zeros(words, dtype=torch.int64, device=like.device) if found is None else found

    def scratch(self, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
        """Return a scratch buffer from torch's allocator, which reuses it when the launches so far have run."""
        return torch.empty(shape, dtype=dtype, device=like.device)

    def launch(self, kernel: Specialisation, blocks: int, params: bytes) -> None:
        """Run the kernel on torch's current stream of this device.

        Raises: InvalidRequest in a capture, if the kernel is not loaded.
        """
        cuda = self._cuda
        before = cuda.ctxGetCurrent()
        if before != self._context:
            cuda.ctxSetCurrent(self._context)
        try:
            function, threads, shared = self._functions.get(kernel) or self._load(kernel)
            # An array of one pointer, which keeps `params` alive. The driver copies them before it returns.
            pointers = ctypes.c_char_p(params)
            at = ctypes.addressof(pointers)
            cuda.launchKernel(function, blocks, 1, 1, threads, 1, 1, shared, self._device.stream(), at, 0)
        finally:
            if before not in (0, self._context):
                cuda.ctxSetCurrent(before)

    def _load(self, kernel: Specialisation) -> tuple[int, int, int]:
        """Load a kernel for the life of the process. Return its handle, its threads and its bytes of shared memory."""
        if self._device.is_capturing(self._device.stream()):
            raise InvalidRequest(
                f"the kernel {kernel.name} for {kernel.macros} is not loaded yet, and loading cannot be captured in a "
                f"CUDA graph: run the same step once before capturing it"
            )
        cuda = self._cuda
        cubin = compiler.cubin_for(kernel.name, kernel.macros, self._device.arch)
        with self._device.beside_captures():
            module = cuda.moduleLoadData(cubin)
            function = cuda.moduleGetFunction(module, kernel.name)
        if kernel.shared_bytes:  # more than 48 KB must be requested
            cuda.funcSetAttribute(function, cuda.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel.shared_bytes)
        cuda.funcSetAttribute(function, cuda.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, CARVEOUT)
        self._functions[kernel] = loaded = (function, kernel.threads, kernel.shared_bytes)
        return loaded


@cache
def _driver_at(index: int) -> Driver:
    from cupy.cuda import driver as cupy_driver

    return Driver(_TorchDevice(torch.device("cuda", index)), cast("_Cuda", cupy_driver))


def driver_of(device: torch.device) -> Driver:
    """Return the driver of a device; the first call makes it."""
    return _driver_at(torch.cuda.current_device() if device.index is None else device.index)
