"""From the texts of csrc/cuda to machine code: what a build of the wheel left behind, else a folder of this user's, else NVRTC.

    kernel, macros, options, all sources, architecture                   --sha256-->  <package>/cuda_cubins/<key>.cubin    by setup.py
    kernel, macros, options, all sources, architecture, NVRTC's version  --sha256-->  <cache>/cubins/<key>.cubin

Nothing is keyed by time, path or torch's version. Files appear complete or not at all (written aside, then renamed), so processes share the
folder without locks; one that is damaged all the same is seen by its checksum and made anew. No nvcc and no CUDA header is needed to
run: the sources include none. This file knows no attention and no torch, so that setup.py can use it.
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

OPTIONS: Final = ("-std=c++17", "--ptxas-options=-v")
NVRTC_ONLY: Final = ("--device-as-default-execution-space",)
"""NVRTC 13.0 takes a generic lambda inside a kernel for a function of the host, and refuses it; later ones do not."""
ARCHITECTURES: Final = {
    "sm_80": (163 << 10, 164 << 10),
    "sm_86": (99 << 10, 100 << 10),
    "sm_89": (99 << 10, 100 << 10),
    "sm_90": (227 << 10, 228 << 10),
    "sm_100": (227 << 10, 228 << 10),
    "sm_120": (99 << 10, 100 << 10),
}
"""What cubins are prebuilt for, and its bytes of shared memory: of a CTA at most, and of an SM. Code of one runs on later ones of the same
major number."""

PREBUILT: Final = Path(__file__).parents[1] / "cuda_cubins"
_HOMES: Final = (Path(__file__).parents[1] / "cuda_sources", Path(__file__).parents[3] / "csrc/cuda")
"""In a wheel, and in a checkout."""


class Compiled(NamedTuple):
    """A cubin, and what the compiler said of it (registers, spills)."""

    cubin: bytes
    log: str


@cache
def sources() -> Mapping[str, str]:
    """The texts of csrc/cuda by name."""
    home = next(path for path in _HOMES if path.is_dir())
    return {path.name: path.read_text() for path in sorted(home.iterdir()) if path.suffix in (".cuh", ".h")}


def key(kernel: str, macros: Mapping[str, int], arch: str, version: tuple[int, int] | None = None) -> str:
    """The name of a cubin: equal for equal code. version: of NVRTC; None for what was built with the wheel."""
    text = repr(
        (
            kernel,
            sorted(macros.items()),
            arch,
            (*OPTIONS, *(NVRTC_ONLY if version else ())),
            version,
            sorted(sources().items()),
        )
    )
    return f"{kernel}-{arch}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def nearest(arch: str, known: Iterable[str]) -> str:
    """The newest of `known` architectures whose code runs on `arch`: of the same major number, and no newer. `arch` if there is none."""
    mine = int(arch.removeprefix("sm_"))
    older = [n for n in (int(name.removeprefix("sm_")) for name in known) if n // 10 == mine // 10 and n <= mine]
    return f"sm_{max(older)}" if older else arch


def compile_cubin(kernel: str, macros: Mapping[str, int], arch: str) -> Compiled:
    """`kernel`.cuh with -D `macros` for an architecture such as "sm_90". Needs NVRTC, no GPU. Raises: NVRTCError, with its log."""
    from cupy.cuda import nvrtc

    texts = sources()
    options = [f"-arch={arch}", *OPTIONS, *NVRTC_ONLY, *(f"-D{name}={value}" for name, value in macros.items())]
    headers = [name for name in texts if name != f"{kernel}.cuh"]
    program = nvrtc.createProgram(
        texts[f"{kernel}.cuh"],
        f"{kernel}.cuh",
        [texts[name].encode() for name in headers],
        [n.encode() for n in headers],
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


def cubin_for(kernel: str, macros: Mapping[str, int], arch: str) -> bytes:
    """Machine code that runs on `arch`: prebuilt, from the cache, or compiled and then kept there. Raises: NVRTCError."""
    built = PREBUILT / f"{key(kernel, macros, nearest(arch, ARCHITECTURES))}.cubin"
    with contextlib.suppress(OSError):
        return built.read_bytes()
    from cupy.cuda import nvrtc

    arch = nearest(arch, (f"sm_{n}" for n in nvrtc.getSupportedArchs()))  # an NVRTC older than the GPU
    file = debug.cache_folder() / "cubins" / f"{key(kernel, macros, arch, nvrtc.getVersion())}.cubin"
    found = _read(file)
    if found is None:
        found = compile_cubin(kernel, macros, arch).cubin
        _write(file, found)
    return found


def _read(file: Path) -> bytes | None:
    """What `_write` left there; None if it is missing or damaged."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    digest, cubin = content[:32], content[32:]
    return cubin if hashlib.sha256(cubin).digest() == digest else None


def _write(file: Path, cubin: bytes) -> None:
    """Checksum and cubin. A folder that cannot be written costs time, not the result."""
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
