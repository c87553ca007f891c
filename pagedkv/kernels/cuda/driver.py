"""One GPU: kernels loaded in this process, memory that outlives launches, and the launch itself, through CuPy's view of the driver.

What this file asks of CUDA is `Cuda`, six functions of cupy.cuda.driver, one that CuPy lacks (cuda_early.py), and four of torch and of the
runtime (`Torch`): the tests put recorders there. That one sets the only launch attribute there is a use for, so cuda.core is not needed; no
kernel forms a cluster. This file knows no attention.

    on a launch    nothing is allocated but torch's memory of the current stream, nothing waits, nothing reads the device back: it is
                   captured in a CUDA graph as it is. What is loaded on the way would not be: that is refused, with the remedy.
    tickets        are of no allocator's pool and never given back: a stream has its own, and so has every launch in a graph (`Tickets`).
    contexts       the device's primary context, torch's. A thread that has none, or another device's, is given it for the launch.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import TYPE_CHECKING, Final, Protocol, cast

import torch

from pagedkv.errors import InvalidRequest
from pagedkv.kernels.cuda import compiler, programmatic_launch

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import Tensor

    from pagedkv.kernels.cuda.shapes import Specialisation

CARVEOUT: Final = 100
"""Percent of an SM's memory that is shared, as a wish: nothing here lives from the first cache."""


CHUNK: Final = 1 << 20
"""Tickets that are taken from the device at once, 4 MB: those of 2000 captured decodes on 132 SMs."""

RESERVE: Final = CHUNK // 4
"""With fewer left for captures, a launch outside of them takes another chunk."""

LINE: Final = 32
"""Tickets in 128 bytes: no two launches count in one line of the second cache."""


class Cuda(Protocol):
    """The functions of cupy.cuda.driver that are used here; all raise CUDADriverError."""

    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: int
    CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: int

    def ctxGetCurrent(self) -> int: ...  # noqa: D102
    def ctxSetCurrent(self, context: int) -> None: ...  # noqa: D102
    def moduleLoadData(self, cubin: bytes) -> int: ...  # noqa: D102
    def moduleGetFunction(self, module: int, name: str) -> int: ...  # noqa: D102
    def funcSetAttribute(self, function: int, attribute: int, value: int) -> None: ...  # noqa: D102
    def launchKernel(self, function: int, *arguments: int) -> None: ...  # noqa: D102


class Torch:
    """What torch, and the runtime, know of a device."""

    def __init__(self, device: torch.device) -> None:
        from cupy.cuda import runtime

        self._runtime = runtime
        # an id is all that is wanted: torch.cuda.current_stream makes an object of it, for a microsecond or two
        self._stream_of = getattr(torch._C, "_cuda_getCurrentRawStream", None) or _stream_of

        def asked(attribute: int) -> int:
            return int(runtime.deviceGetAttribute(attribute, device.index))

        self.device = device
        self.arch = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
        self.num_sms = asked(runtime.cudaDevAttrMultiProcessorCount)
        self.shared_per_block = asked(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin)
        self.shared_per_sm = asked(runtime.cudaDevAttrMaxSharedMemoryPerMultiprocessor)

    def context(self, cuda: Cuda) -> int:
        """Its primary context, current in this thread from here on: by cudaSetDevice, which torch leaves out where it can."""
        from cupy.cuda import runtime

        with torch.cuda.device(self.device):
            runtime.setDevice(self.device.index)
            return cuda.ctxGetCurrent()

    def stream(self) -> int:
        """The current one's handle."""
        return self._stream_of(self.device.index)

    def is_capturing(self, stream: int) -> bool:
        """Is that stream captured into a graph? The default one cannot be."""
        return stream not in (0, self._runtime.streamLegacy) and bool(self._runtime.streamIsCapturing(stream))

    def beside_captures(self) -> AbstractContextManager[None]:
        """Inside, what takes memory of the device breaks no capture of another thread."""
        return programmatic_launch.beside_captures()

    def zeros(self, count: int) -> Tensor:
        """int32 [count] of this device, not from torch's allocator and never given back; zero for all streams. Raises: CUDARuntimeError."""
        from cupy.cuda import runtime

        with torch.cuda.device(self.device), self.beside_captures():
            runtime.setDevice(self.device.index)
            stream = runtime.streamCreateWithFlags(runtime.streamNonBlocking)
            try:
                at = runtime.malloc(4 * count)
                runtime.memsetAsync(at, 0, 4 * count, stream)
                runtime.streamSynchronize(stream)  # of this memory only: no other stream is waited for
            finally:
                runtime.streamDestroy(stream)
        return torch.as_tensor(_Taken(at, count), device=self.device)


def _stream_of(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


class _Taken:
    """Memory of the device as torch takes it from others."""

    def __init__(self, at: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "<i4",
            "data": (at, False),
            "strides": None,
            "version": 2,
        }


class Tickets:
    """Counters of one device that are zero between launches, for launches that may run at once.

    Those that follow one another on a stream share a set. A graph may be replayed on any stream, and beside any other graph: each launch
    that is captured has a set of its own for good, whatever becomes of the graph. None is torch's: what stays of its memory when the
    graph's pool is looked at (torch.compile's trees of graphs do) would be taken for a leak.
    """

    def __init__(self, about: Torch) -> None:
        self._torch, self._left, self._free = about, 0, torch.empty(0, dtype=torch.int32)
        self._of_stream: dict[int, Tensor] = {}
        self._lock = threading.Lock()

    def take(self, count: int) -> Tensor | None:
        """int32 [>= count] for a launch on the current stream; None in a capture, which can take no memory, when there are too few left."""
        stream = self._torch.stream()
        if self._torch.is_capturing(stream):
            with self._lock:
                return self._cut(count) if self._left >= count else None
        found = self._of_stream.get(stream)
        if found is not None and found.numel() >= count and self._left >= RESERVE:
            return found
        with self._lock:
            if found is None or found.numel() < count:  # a set that is outgrown may still be counted in
                self._provide(most := max(4096, 2 * count))
                found = self._of_stream[stream] = self._cut(most)
            self._provide(RESERVE)
        return found

    def _provide(self, count: int) -> None:
        if self._left < count:
            self._free = self._torch.zeros(max(CHUNK, 2 * count))
            self._left = self._free.numel()

    def _cut(self, count: int) -> Tensor:
        length = -(-count // LINE) * LINE
        cut, self._free = self._free[:length], self._free[length:]
        self._left = self._free.numel()
        return cut


class Driver:
    """A `Machine` that is a GPU."""

    def __init__(
        self, about: Torch, cuda: Cuda, launch_early: Callable[..., None] = programmatic_launch.launch_early
    ) -> None:
        self._early = launch_early
        self.num_sms, self.shared_per_block, self.shared_per_sm = (
            about.num_sms,
            about.shared_per_block,
            about.shared_per_sm,
        )
        self._torch, self._cuda, self._context = about, cuda, about.context(cuda)
        self._functions: dict[Specialisation, tuple[int, int, int]] = {}
        self._tickets = Tickets(about)

    def workspace(self, floats: int, like: Tensor) -> Tensor:
        """torch's, and its again when the launches so far have run; in a capture, the graph's."""
        return torch.empty(floats, dtype=torch.float32, device=like.device)

    def tickets(self, count: int, like: Tensor) -> Tensor:
        """Zeros for the next launch; where a capture finds none, they are torch's and the graph sets them to zero at each replay."""
        taken = self._tickets.take(count)
        return torch.zeros(count, dtype=torch.int32, device=like.device) if taken is None else taken

    def scratch(self, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
        """torch's, and its again when the launches so far have run."""
        return torch.empty(shape, dtype=dtype, device=like.device)

    def launch(self, shape: Specialisation, blocks: int, params: bytes, *, early: bool = False) -> None:
        """Run the kernel of that shape on torch's current stream of this device. Raises: InvalidRequest in a capture, if not loaded.

        early: it may begin before the launch before it has ended, which it then waits for by itself.
        """
        cuda = self._cuda
        before = cuda.ctxGetCurrent()
        if before != self._context:
            cuda.ctxSetCurrent(self._context)
        try:
            function, threads, shared = self._functions.get(shape) or self._load(shape)
            pointers = ctypes.c_char_p(
                params
            )  # an array of one, which keeps `params`; the driver copies them before it returns
            run = self._early if early else cuda.launchKernel
            run(function, blocks, 1, 1, threads, 1, 1, shared, self._torch.stream(), ctypes.addressof(pointers), 0)
        finally:
            if before not in (0, self._context):
                cuda.ctxSetCurrent(before)

    def _load(self, shape: Specialisation) -> tuple[int, int, int]:
        """The kernel's handle, for as long as the process lives; its threads, and its shared memory."""
        if self._torch.is_capturing(self._torch.stream()):
            raise InvalidRequest(
                f"the kernel {shape.kernel} for {shape.macros} is not loaded yet, and loading cannot be captured in a CUDA graph: "
                f"run the same step once before capturing it"
            )
        cuda = self._cuda
        cubin = compiler.cubin_for(shape.kernel, shape.macros, self._torch.arch)
        with self._torch.beside_captures():
            module = cuda.moduleLoadData(cubin)
            function = cuda.moduleGetFunction(module, shape.kernel)
        if shape.shared_bytes:  # beyond 48 KB only on request
            cuda.funcSetAttribute(function, cuda.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shape.shared_bytes)
            cuda.funcSetAttribute(function, cuda.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, CARVEOUT)
        self._functions[shape] = loaded = (function, shape.threads, shape.shared_bytes)
        return loaded


@cache
def _driver_at(index: int) -> Driver:
    from cupy.cuda import driver as cupy_driver

    return Driver(Torch(torch.device("cuda", index)), cast("Cuda", cupy_driver))


def driver_of(device: torch.device) -> Driver:
    """The driver of a device, made at its first use."""
    return _driver_at(torch.cuda.current_device() if device.index is None else device.index)
