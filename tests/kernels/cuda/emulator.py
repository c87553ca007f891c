"""csrc/cuda on the host: the same sources, compiled by g++ against csrc/simt, behind the same `Machine` that drives a GPU.

What is compiled is kept in a folder of the user's cache, by a hash of all sources and options; so a second run compiles nothing.
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

import torch

from pagedkv.kernels.cuda import attention, moves
from tests.cases import Built

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from pagedkv.kernels.args import AttentionCall, WriteCall
    from pagedkv.kernels.cuda.shapes import Specialisation

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
if SANITIZERS := os.environ.get(
    "SIMT_SANITIZE"
):  # set by tests/kernels/cuda/test_sanitizers.py, whose Python has their libraries loaded
    FLAGS = (*FLAGS, "-g1", f"-fsanitize={SANITIZERS}", "-fno-sanitize-recover=all")
ENTRY = """
#include "{kernel}.cuh"
extern "C" const unsigned shared_bytes = {shared};
extern "C" const unsigned params_bytes = sizeof({params});
extern "C" void enter(const void* params) {{ {kernel}(*static_cast<const {params}*>(params)); }}
"""
PARAMS = {
    "paged_attention": "AttentionParams",
    "merge_pieces": "AttentionParams",
    "write_kv": "WriteParams",
    "merge_states": "MergeParams",
    "copy_frames": "CopyParams",
}
COMPILER = shutil.which("g++")


class Fault(Exception):
    """What the emulator found wrong with a kernel."""


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagedkv" / "simt"


def compiled(name: str, sources: Mapping[str, str], flags: tuple[str, ...], inputs: tuple[Path, ...] = ()) -> Path:
    """A file made by g++ from `sources` (by name; those ending .cpp are compiled) and objects; once for equal texts."""
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
            if run.returncode:  # which is nothing that a test of faults may take for a fault that was caught
                raise RuntimeError(f"{' '.join(command)}\n{run.stdout}")
            (Path(work) / target.name).replace(target)
    return target


def texts(folder: str, *suffixes: str) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted((CSRC / folder).iterdir()) if path.suffix in suffixes}


def runtime() -> tuple[Path, ...]:
    """The emulator itself, an object per source."""
    headers = texts("simt", ".hpp")
    return tuple(compiled(path.stem, headers | {path.name: path.read_text()}, (*FLAGS, "-c")) for path in SIMT)


def wrote(library: ctypes.CDLL) -> list[tuple[int, int]]:
    """Where the last launch wrote, and how many bytes: runs that do not touch."""
    start, size, found = ctypes.c_void_p(), ctypes.c_uint64(), []
    while library.simt_wrote(len(found), ctypes.byref(start), ctypes.byref(size)):
        found.append((start.value or 0, size.value))
    runs: list[tuple[int, int]] = []
    for at, count in sorted(found):
        if runs and at <= sum(runs[-1]):
            runs[-1] = (runs[-1][0], max(sum(runs[-1]), at + count) - runs[-1][0])
        else:
            runs.append((at, count))
    return runs


class Emulator:
    """A GPU of a few SMs. `sources` replaces texts of csrc/cuda, to plant faults; seed decides the order of blocks and threads.

    arch: what `CUDA_ARCH` is.
    """

    ways = attention.Ways()

    def __init__(
        self, num_sms: int = 3, *, seed: int = 0, shared: tuple[int, int] = (227 << 10, 228 << 10), arch: int = 900
    ) -> None:
        self.num_sms, self.seed, self.arch = num_sms, seed, arch
        self.shared_per_block, self.shared_per_sm = shared
        self.sources: dict[str, str] = texts("cuda", ".cuh", ".h") | {
            "ptx_twin.hpp": texts("simt", ".hpp")["ptx_twin.hpp"]
        }
        self.memory: list[Tensor] = []
        self.counted = torch.zeros(1, dtype=torch.int32)
        self.launches: list[Specialisation] = []
        self.wrote: list[tuple[int, int]] = []

    def build(self, shape: Specialisation) -> ctypes.CDLL:
        """The kernel of that shape, with an emulator of its own."""
        entry = ENTRY.format(
            kernel=shape.kernel,
            params=PARAMS[shape.kernel],
            shared="SHARED_BYTES" if shape.kernel == "paged_attention" else shape.shared_bytes,
        )
        macros = tuple(f"-D{name}={value}" for name, value in shape.macros.items())
        headers = self.sources | {"simt.hpp": texts("simt", ".hpp")["simt.hpp"]}
        flags = (*FLAGS, "-DSIMT_HOST", f"-DSIMT_ARCH={self.arch}", *macros, "-shared")
        path = compiled(shape.kernel, headers | {"entry.cpp": entry}, flags, runtime())
        library = ctypes.CDLL(str(path))
        library.simt_launch.restype = ctypes.c_char_p
        library.simt_launch.argtypes = [ctypes.c_void_p, ctypes.c_char_p, *[ctypes.c_uint32] * 3, ctypes.c_uint64]
        library.simt_allow.argtypes = library.simt_begin_early.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
        library.simt_wrote.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p]
        library.simt_wrote.restype = ctypes.c_bool
        return library

    def workspace(self, floats: int, like: Tensor) -> Tensor:
        """Poisoned, and just as long as it must be."""
        partials = torch.full((floats,), torch.nan)
        self.memory.append(partials)
        return partials

    def tickets(self, count: int, like: Tensor) -> Tensor:
        """Just as many as there must be."""
        self.counted = torch.zeros(count, dtype=torch.int32)
        self.memory.append(self.counted)
        return self.counted

    def scratch(self, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
        """Poisoned, too."""
        scratch = torch.empty(shape, dtype=dtype)
        scratch.view(-1).view(torch.uint8).fill_(0xA5)
        self.memory.append(scratch)
        return scratch

    def launch(self, shape: Specialisation, blocks: int, params: bytes, *, early: bool = False) -> None:
        """Run it, block by block; early: what the launch before wrote is not there before it is waited for. Raises: Fault."""
        self.launches.append(shape)
        library = self.build(shape)
        for start, size in self.wrote if early else ():
            library.simt_begin_early(start, size)
        assert ctypes.c_uint.in_dll(library, "shared_bytes").value == shape.shared_bytes
        assert ctypes.c_uint.in_dll(library, "params_bytes").value == len(params)
        library.simt_forbid_all()
        for tensor in self.memory:
            storage = tensor.untyped_storage()
            library.simt_allow(storage.data_ptr(), storage.nbytes())
        fault = library.simt_launch(
            ctypes.cast(library.enter, ctypes.c_void_p), params, blocks, shape.threads, shape.shared_bytes, self.seed
        )
        if fault:
            raise Fault(fault.decode())
        self.wrote = wrote(library)
        assert not self.counted.any(), "tickets are left as they were found"

    def attend(self, call: AttentionCall) -> None:
        """`paged_attention` of the backend, on this machine. Raises: Fault."""
        self._may_touch(*(getattr(call, name) for name in call.__slots__))
        attention.attend(call, self, self.ways)

    def write_kv(self, call: WriteCall) -> None:
        """`write_kv` of the backend. Raises: Fault."""
        self._may_touch(*(getattr(call, name) for name in call.__slots__))
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


def call_of(built: Built, **changes: object) -> AttentionCall:
    """The flat call of a case; `changes` override its options."""
    from pagedkv.kernels.args import AttentionCall
    from pagedkv.kernels.quant import head_dim

    q, layer, batch = built[:3]
    options = {"sinks": None, "alibi_slopes": None, "tree_mask": None} | built.options | changes
    out = torch.full((*q.shape[:2], head_dim(layer.v)), torch.nan, dtype=q.dtype)
    lse = torch.full(q.shape[:2], torch.nan)
    tables = (batch.block_table, batch.rows, batch.seq_lens, batch.cu_seqlens_q, batch.max_seqlen_q, batch.max_seqlen_k)
    order = ("causal", "window", "softcap", "sinks", "alibi_slopes", "tree_mask", "split_tokens")
    pool = (layer.k, layer.v, layer.k_scale, layer.v_scale)
    scale = options.get("scale") or q.shape[2] ** -0.5
    return AttentionCall(q, *pool, *tables, scale, *(options[name] for name in order), out, lse)  # type: ignore[arg-type]
