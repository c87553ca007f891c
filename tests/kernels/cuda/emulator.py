"""csrc/cuda on the host: g++ compiles its sources against csrc/simt, and `Emulator` is the `Machine` that runs them.

The user's cache folder keeps compiled files, named by a hash of all sources and options: a second run compiles none.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from pagedkv.kernels.cuda import attention, moves

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from pagedkv.kernels.args import AttentionCall, WriteCall
    from pagedkv.kernels.cuda.specialisation import Specialisation

CSRC = Path(__file__).parents[3] / "csrc"
SIMT = sorted((CSRC / "simt").glob("*.cpp"))
FLAGS = (
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
    "-ffp-contract=off",
    "-march=native",
)
# test_sanitizers.py sets this variable, and loads the sanitizers' libraries into Python.
if SANITIZERS := os.environ.get("SIMT_SANITIZE"):
    FLAGS = (*FLAGS, "-g1", f"-fsanitize={SANITIZERS}", "-fno-sanitize-recover=all")
ENTRY = """
#include "{kernel}.cuh"
extern "C" const unsigned shared_bytes = {shared};
extern "C" const unsigned params_bytes = sizeof({params});
extern "C" void enter(const void* params) {{ {kernel}(*static_cast<const {params}*>(params)); }}
"""
PARAMS = {
    "paged_attention": "AttentionParams",
    "write_kv": "WriteParams",
    "merge_states": "MergeParams",
    "copy_frames": "CopyParams",
}
COMPILER = shutil.which("g++")


class Fault(Exception):
    """A fault of a kernel, found by the emulator."""


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagedkv" / "simt"


def compiled(name: str, sources: Mapping[str, str], flags: tuple[str, ...], inputs: tuple[Path, ...] = ()) -> Path:
    """Compile with g++, and return the path of the result. Equal sources and flags are compiled once.

    sources: text by file name; files that end in .cpp are compiled. inputs: objects to link.
    """
    assert COMPILER
    digest = hashlib.sha256(
        repr((sorted(sources.items()), flags, [path.name for path in inputs])).encode()
    ).hexdigest()[:32]
    target = cache_folder() / f"{name}-{digest}{'.o' if '-c' in flags else '.so' if '-shared' in flags else ''}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as work:
            for file, text in sources.items():
                (Path(work) / file).write_text(text)
            units = [file for file in sources if file.endswith(".cpp")]
            command = [COMPILER, *flags, "-I.", *units, *map(str, inputs), "-o", target.name]
            run = subprocess.run(command, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if run.returncode:  # not a Fault: test_faults.py must not count an error of the compiler as a caught fault
                raise RuntimeError(f"{' '.join(command)}\n{run.stdout}")
            (Path(work) / target.name).replace(target)
    return target


def texts(folder: str, *suffixes: str) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted((CSRC / folder).iterdir()) if path.suffix in suffixes}


def runtime() -> tuple[Path, ...]:
    """Return the object files of the emulator itself, one for each source."""
    headers = texts("simt", ".hpp")
    return tuple(compiled(path.stem, headers | {path.name: path.read_text()}, (*FLAGS, "-c")) for path in SIMT)


class Emulator:
    """A GPU of a few SMs.

    sources: the sources of csrc/cuda, which a test may change to plant a fault. seed: the seed of the order of blocks
    and threads. arch: the value of `CUDA_ARCH`.
    """

    def __init__(
        self, num_sms: int = 3, *, seed: int = 0, shared: tuple[int, int] = (227 << 10, 228 << 10), arch: int = 900
    ) -> None:
        self.num_sms, self.seed, self.arch = num_sms, seed, arch
        self.shared_per_block, self.shared_per_sm = shared
        self.sources: dict[str, str] = texts("cuda", ".cuh", ".h") | {
            "ptx_twin.hpp": texts("simt", ".hpp")["ptx_twin.hpp"]
        }
        self.memory: list[Tensor] = []
        self.sets: dict[int, Tensor] = {}
        self.launches: list[Specialisation] = []

    def build(self, kernel: Specialisation) -> ctypes.CDLL:
        """Return the library of a kernel, which contains its emulator."""
        entry = ENTRY.format(
            kernel=kernel.name,
            params=PARAMS[kernel.name],
            shared="SHARED_BYTES" if kernel.name == "paged_attention" else kernel.shared_bytes,
        )
        macros = tuple(f"-D{name}={value}" for name, value in kernel.macros.items())
        headers = self.sources | {"simt.hpp": texts("simt", ".hpp")["simt.hpp"]}
        flags = (*FLAGS, "-DSIMT_HOST", f"-DSIMT_ARCH={self.arch}", *macros, "-shared")
        path = compiled(kernel.name, headers | {"entry.cpp": entry}, flags, runtime())
        library = ctypes.CDLL(str(path))
        library.simt_launch.restype = ctypes.c_char_p
        library.simt_launch.argtypes = [ctypes.c_void_p, ctypes.c_char_p, *[ctypes.c_uint32] * 3, ctypes.c_uint64]
        library.simt_allow.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
        return library

    def workspace(self, floats: int, like: Tensor) -> Tensor:
        """Return a workspace of exactly this many floats, filled with NaN."""
        partials = torch.full((floats,), torch.nan)
        self.memory.append(partials)
        return partials

    def kept(self, kind: int, words: int, like: Tensor) -> Tensor:
        """Return the words that the launch of this kind before left; zeros if there was none, or it had fewer."""
        found = self.sets.get(kind)
        if found is None or found.numel() < words:
            memory = np.zeros(words + attention.RECORD_WORDS, np.int64)
            first = -memory.ctypes.data // 8 % attention.RECORD_WORDS  # its size divides the address of a record
            found = self.sets[kind] = torch.from_numpy(memory[first : first + words])  # no word more is allowed
        self.memory.append(found)
        return found

    def scratch(self, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
        """Return a scratch buffer, filled with 0xA5."""
        scratch = torch.empty(shape, dtype=dtype)
        scratch.view(-1).view(torch.uint8).fill_(0xA5)
        self.memory.append(scratch)
        return scratch

    def launch(self, kernel: Specialisation, blocks: int, params: bytes) -> None:
        """Run a kernel, block by block. Raises: Fault."""
        self.launches.append(kernel)
        library = self.build(kernel)
        assert ctypes.c_uint.in_dll(library, "shared_bytes").value == kernel.shared_bytes
        assert ctypes.c_uint.in_dll(library, "params_bytes").value == len(params)
        library.simt_forbid_all()
        for tensor in self.memory:
            storage = tensor.untyped_storage()
            library.simt_allow(storage.data_ptr(), storage.nbytes())
        fault = library.simt_launch(
            ctypes.cast(library.enter, ctypes.c_void_p), params, blocks, kernel.threads, kernel.shared_bytes, self.seed
        )
        if fault:
            raise Fault(fault.decode())

    def attend(self, call: AttentionCall) -> None:
        """`paged_attention` of the backend, on this machine. Raises: Fault."""
        self._may_touch(*call)
        attention.attend(call, self)

    def write_kv(self, call: WriteCall) -> None:
        """`write_kv` of the backend. Raises: Fault."""
        self._may_touch(*call)
        moves.write_kv(call, self)

    def merge_states(self, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
        """`merge_states` of the backend. Raises: Fault."""
        self._may_touch(out_a, lse_a, out_b, lse_b)
        return moves.merge_states(out_a, lse_a, out_b, lse_b, self)

    def copy_frames(self, storage: Tensor, copies: Tensor) -> None:
        """`copy_frames` of the backend. Raises: Fault."""
        self._may_touch(storage, copies)
        moves.copy_frames(storage, copies, self)

    def _may_touch(self, *arguments: object) -> None:
        self.memory = [x for x in arguments if isinstance(x, torch.Tensor)]
