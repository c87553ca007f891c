"""One GPU: kernels loaded in this process, memory that outlives launches, and the launch itself, through CuPy's view of the driver.

What this file asks of CUDA is `Cuda`, six functions of cupy.cuda.driver, one that CuPy lacks (cuda_early.py), and three of torch (`Torch`):
the tests put recorders there. That one sets the only launch attribute there is a use for, so cuda.core is not needed; no kernel forms a
cluster. This file knows no attention.

    on a launch    nothing is allocated but torch's memory of the current stream, nothing waits, nothing reads the device back: it is
                   captured in a CUDA graph as it is. What is loaded on the way would not be: that is refused, with the remedy.
    contexts       the device's primary context, torch's. A thread that has none, or another device's, is given it for the launch.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Final, Protocol, cast

import torch

from pagedkv.errors import InvalidRequest
from pagedkv.kernels import cuda_compile, cuda_early

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from pagedkv.kernels.cuda_shapes import Specialisation

CARVEOUT: Final = 100
"""Percent of an SM's memory that is shared, as a wish: nothing here lives from the first cache."""


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
        return torch.cuda.current_stream(self.device).cuda_stream

    def is_capturing(self) -> bool:
        """Is it captured into a graph?"""
        return torch.cuda.is_current_stream_capturing()


class Driver:
    """A `Machine` that is a GPU."""

    def __init__(self, about: Torch, cuda: Cuda, launch_early: Callable[..., None] = cuda_early.launch_early) -> None:
        self._early = launch_early
        self.num_sms, self.shared_per_block, self.shared_per_sm = about.num_sms, about.shared_per_block, about.shared_per_sm
        self._torch, self._cuda, self._context = about, cuda, about.context(cuda)
        self._functions: dict[Specialisation, tuple[int, int, int]] = {}
        self._tickets: dict[int, list[Tensor]] = {}

    def workspace(self, slots: int, floats: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Partial states: torch's, and its again when the launch has run. Tickets: one set for each stream, which launches leave at zero.

        Outgrown tickets are kept, for launches that still run. A captured launch has its own, set to zero by the graph at each replay.
        """
        partials = torch.empty(slots * floats, dtype=torch.float32, device=like.device)
        if self._torch.is_capturing():
            return partials, torch.zeros(slots, dtype=torch.int32, device=like.device)
        sets = self._tickets.setdefault(self._torch.stream(), [])
        if not sets or sets[-1].numel() < slots:
            sets.append(torch.zeros(max(4096, 2 * slots), dtype=torch.int32, device=like.device))
        return partials, sets[-1]

    def room(self, size: int, like: Tensor) -> Tensor:
        """torch's, and its again when the launches so far have run."""
        return torch.empty(size, dtype=torch.uint8, device=like.device)

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
            buffer = ctypes.create_string_buffer(params, len(params))
            pointers = ctypes.c_void_p(ctypes.addressof(buffer))  # an array of one; the driver copies what it points to before it returns
            run = self._early if early else cuda.launchKernel
            run(function, blocks, 1, 1, threads, 1, 1, shared, self._torch.stream(), ctypes.addressof(pointers), 0)
        finally:
            if before not in (0, self._context):
                cuda.ctxSetCurrent(before)

    def _load(self, shape: Specialisation) -> tuple[int, int, int]:
        """The kernel's handle, for as long as the process lives; its threads, and its shared memory."""
        if self._torch.is_capturing():
            raise InvalidRequest(
                f"the kernel {shape.kernel} for {shape.macros} is not loaded yet, and loading cannot be captured in a CUDA graph: "
                f"run the same step once before capturing it"
            )
        cuda = self._cuda
        module = cuda.moduleLoadData(cuda_compile.cubin_for(shape.kernel, shape.macros, self._torch.arch))
        function = cuda.moduleGetFunction(module, shape.kernel)
        if shape.shared_bytes:  # beyond 48 KB only on request
            cuda.funcSetAttribute(function, cuda.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shape.shared_bytes)
            cuda.funcSetAttribute(function, cuda.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, CARVEOUT)
        self._functions[shape] = loaded = (function, shape.threads, shape.shared_bytes)
        return loaded


@cache
def _driver(index: int) -> Driver:
    from cupy.cuda import driver as cupy_driver

    return Driver(Torch(torch.device("cuda", index)), cast("Cuda", cupy_driver))


def driver(device: torch.device) -> Driver:
    """The driver of a device, made at its first use."""
    return _driver(torch.cuda.current_device() if device.index is None else device.index)
