"""Compile the sources of csrc/cuda to machine code. A cubin comes from the user's cache folder, else from NVRTC, which
compiles it.

    kernel, macros, options, all sources, architecture, NVRTC's version    --sha256-->  <cache>/cubins/<key>.cubin

The key holds no time, path or version of torch. A file is written under another name and then renamed, so it appears
complete or not at all, and processes share the folder without locks. A checksum shows a damaged file, which is compiled
again. Neither nvcc nor a CUDA header is needed to run: the sources include none. This file knows no attention.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from pagedkv import debug

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

OPTIONS: Final = ("-std=c++17", "--ptxas-options=-v", "--device-as-default-execution-space")
"""Without the last one NVRTC 13.0 refuses a generic lambda inside a kernel, as if it were a host function."""

ARCHITECTURES: Final = {
    "sm_80": (163 << 10, 164 << 10),
    "sm_86": (99 << 10, 100 << 10),
    "sm_89": (99 << 10, 100 << 10),
    "sm_90": (227 << 10, 228 << 10),
    "sm_100": (227 << 10, 228 << 10),
    "sm_120": (99 << 10, 100 << 10),
}
"""The architectures that tests compile for, each with its bytes of shared memory: the most of a CTA, and of an SM. Code
of one architecture runs on later ones of the same major number."""

_HOMES: Final = (Path(__file__).parents[1] / "cuda_sources", Path(__file__).parents[3] / "csrc/cuda")
"""The folders of the sources: in a wheel, and in a checkout."""


class _Compiled(NamedTuple):
    """A cubin and the log of its compiler (registers, spills)."""

    cubin: bytes
    log: str


@cache
def _sources() -> Mapping[str, str]:
    """Return the sources of csrc/cuda, by file name."""
    home = next(path for path in _HOMES if path.is_dir())
    return {path.name: path.read_text() for path in sorted(home.iterdir()) if path.suffix in (".cuh", ".h")}


def _key(kernel: str, macros: Mapping[str, int], arch: str, version: tuple[int, int]) -> str:
    """Return the name of a cubin; equal code has equal names. version: of NVRTC."""
    text = repr((kernel, sorted(macros.items()), arch, OPTIONS, version, sorted(_sources().items())))
    return f"{kernel}-{arch}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def _nearest(arch: str, supported: Iterable[str]) -> str:
    """Return the newest of the `supported` architectures whose code runs on `arch`: of the same major number, and no
    newer. Return `arch` if there is none."""
    mine = int(arch.removeprefix("sm_"))
    older = [n for n in (int(name.removeprefix("sm_")) for name in supported) if n // 10 == mine // 10 and n <= mine]
    return f"sm_{max(older)}" if older else arch


def compile_cubin(kernel: str, macros: Mapping[str, int], arch: str) -> _Compiled:
    """Compile `kernel`.cuh with -D `macros` for an architecture such as "sm_90". It needs NVRTC, but no GPU.

    Raises: NVRTCError, with the compiler's log.
    """
    from cupy.cuda import nvrtc

    texts = _sources()
    options = [f"-arch={arch}", *OPTIONS, *(f"-D{name}={value}" for name, value in macros.items())]
    headers = [name for name in texts if name != f"{kernel}.cuh"]
    program = nvrtc.createProgram(
        texts[f"{kernel}.cuh"],
        f"{kernel}.cuh",
        [texts[name].encode() for name in headers],
        [n.encode() for n in headers],
    )
    try:
        nvrtc.compileProgram(program, options)
        cubin = nvrtc.getCUBIN(program) + b"\0"  # CuPy treats it as a string and drops the last byte, a 0
        return _Compiled(cubin, nvrtc.getProgramLog(program).rstrip("\0"))
    except nvrtc.NVRTCError as why:
        why.add_note(nvrtc.getProgramLog(program))
        raise
    finally:
        nvrtc.destroyProgram(program)


def cubin_for(kernel: str, macros: Mapping[str, int], arch: str) -> bytes:
    """Return machine code that runs on `arch`: from the cache folder, or compiled and then kept there.

    Raises: NVRTCError.
    """
    from cupy.cuda import nvrtc

    arch = _nearest(arch, (f"sm_{n}" for n in nvrtc.getSupportedArchs()))  # NVRTC may be older than the GPU
    file = debug.cache_folder() / "cubins" / f"{_key(kernel, macros, arch, nvrtc.getVersion())}.cubin"
    found = _read(file)
    if found is None:
        found = compile_cubin(kernel, macros, arch).cubin
        _write(file, found)
    return found


def _read(file: Path) -> bytes | None:
    """Return the cubin in `file`, or None if the file is missing or damaged."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    digest, cubin = content[:32], content[32:]
    return cubin if hashlib.sha256(cubin).digest() == digest else None


def _write(file: Path, cubin: bytes) -> None:
    """Write a checksum and the cubin. A folder that cannot be written is no error: the next process compiles again."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as aside:
            try:
                aside.write(hashlib.sha256(cubin).digest() + cubin)
                aside.flush()
                os.replace(aside.name, file)
            except OSError:
                os.unlink(aside.name)
                raise
