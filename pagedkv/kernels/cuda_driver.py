"""Compiling and launching on NVIDIA GPUs: NVRTC, a folder of compiled kernels, and CuPy's view of the driver.

    source + options + NVRTC version + architecture  --sha256-->  <cache>/cubins/<key>.cubin  -->  a module of this process

Nothing is keyed by time, path or torch's version, and files appear complete or not at all (written aside, then renamed), so processes share
the folder without locks. No nvcc and no CUDA header is needed: the sources include none. This file knows no attention.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from pagedkv import debug

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from pagedkv.kernels.cuda_launch import Specialisation

OPTIONS: Final = ("-std=c++17", "--ptxas-options=-v")
_HOMES: Final = (Path(__file__).parent / "cuda_sources", Path(__file__).parents[2] / "csrc/cuda")
"""In a wheel, and in a checkout."""


class Compiled(NamedTuple):
    """A cubin, and what the compiler said of it (registers, spills); no log if it was on disk."""

    cubin: bytes
    log: str


@cache
def sources() -> Mapping[str, str]:
    """The texts of csrc/cuda by name."""
    home = next(path for path in _HOMES if path.is_dir())
    return {path.name: path.read_text() for path in sorted(home.iterdir()) if path.suffix in (".cuh", ".h")}


def compile_cubin(kernel: str, macros: Mapping[str, int], arch: str) -> Compiled:
    """`kernel`.cuh with -D `macros` for an architecture such as "sm_90". Needs NVRTC, no GPU. Raises: NVRTCError, with its log."""
    from cupy.cuda import nvrtc

    texts = sources()
    options = [f"-arch={arch}", *OPTIONS, *(f"-D{name}={value}" for name, value in macros.items())]
    headers = [name for name in texts if name != f"{kernel}.cuh"]
    program = nvrtc.createProgram(
        texts[f"{kernel}.cuh"], f"{kernel}.cuh", [texts[name].encode() for name in headers], [n.encode() for n in headers]
    )
    try:
        nvrtc.compileProgram(program, options)
        cubin = nvrtc.getCUBIN(program) + b"\0"  # CuPy takes it for a string and drops the last byte, a 0
        return Compiled(cubin, nvrtc.getProgramLog(program).rstrip("\0"))
    except nvrtc.NVRTCError as why:
        why.add_note(nvrtc.getProgramLog(program))
        raise
    finally:
        nvrtc.destroyProgram(program)


def cached_cubin(kernel: str, macros: Mapping[str, int], arch: str) -> bytes:
    """As `compile_cubin`, from disk if it is there."""
    from cupy.cuda import nvrtc

    key = repr((kernel, sorted(macros.items()), arch, OPTIONS, nvrtc.getVersion(), sorted(sources().items())))
    file = debug.cache_folder() / "cubins" / f"{kernel}-{arch}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"
    try:
        return file.read_bytes()
    except OSError:
        cubin = compile_cubin(kernel, macros, arch).cubin
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as aside:
            aside.write(cubin)
        os.replace(aside.name, file)
    except OSError:
        pass  # a folder that cannot be written costs time, not the result
    return cubin


class Driver:
    """One GPU: kernels loaded in this process, and memory that outlives launches."""

    def __init__(self, device: torch.device) -> None:
        from cupy.cuda import runtime

        def asked(attribute: int) -> int:
            return int(runtime.deviceGetAttribute(attribute, device.index))

        self.device = device
        self.arch = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
        self.num_sms = asked(runtime.cudaDevAttrMultiProcessorCount)
        self.shared_per_block = asked(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin)
        self.shared_per_sm = asked(runtime.cudaDevAttrMaxSharedMemoryPerMultiprocessor)
        self._functions: dict[Specialisation, int] = {}
        self._tickets: dict[int, list[Tensor]] = {}

    def workspace(self, slots: int, floats: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Partial states: torch's, and its again when the launch has run. Tickets: one set for each stream, which launches leave at zero.

        Outgrown tickets are kept, for launches that still run. A captured launch has its own, set to zero by the graph at each replay.
        """
        partials = torch.empty(slots * floats, dtype=torch.float32, device=like.device)
        if torch.cuda.is_current_stream_capturing():
            return partials, torch.zeros(slots, dtype=torch.int32, device=like.device)
        sets = self._tickets.setdefault(torch.cuda.current_stream(self.device).cuda_stream, [])
        if not sets or sets[-1].numel() < slots:
            sets.append(torch.zeros(max(4096, 2 * slots), dtype=torch.int32, device=like.device))
        return partials, sets[-1]

    def room(self, size: int, like: Tensor) -> Tensor:
        """torch's, and its again when the launches so far have run."""
        return torch.empty(size, dtype=torch.uint8, device=like.device)

    def launch(self, shape: Specialisation, blocks: int, params: bytes) -> None:
        """Run the kernel of that shape on torch's current stream."""
        from cupy.cuda import driver

        function = self._functions.get(shape)
        if function is None:
            function = self._functions[shape] = self._load(shape)
        buffer = ctypes.create_string_buffer(params, len(params))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))  # the driver copies what they point to before it returns
        stream = torch.cuda.current_stream(self.device).cuda_stream
        driver.launchKernel(function, blocks, 1, 1, shape.threads, 1, 1, shape.shared_bytes, stream, ctypes.addressof(pointers), 0)

    def _load(self, shape: Specialisation) -> int:
        from cupy.cuda import driver

        with torch.cuda.device(self.device):
            module = driver.moduleLoadData(cached_cubin(shape.kernel, shape.macros, self.arch))  # for as long as the process lives
            function: Any = driver.moduleGetFunction(module, shape.kernel)
            driver.funcSetAttribute(function, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shape.shared_bytes)
        return int(function)


@cache
def _driver(index: int) -> Driver:
    return Driver(torch.device("cuda", index))


def driver(device: torch.device) -> Driver:
    """The driver of a device, made at its first use."""
    return _driver(torch.cuda.current_device() if device.index is None else device.index)
