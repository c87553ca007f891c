"""What pyproject.toml cannot say: the folders that become packages elsewhere, and the optional C++ extension.

The extension `pagedkv.kernels._cpu` is pybind11 over raw pointers and strides, built from csrc/cpu. It never links against torch, so
one wheel serves every torch version, and it is optional: without pybind11 or a compiler the install succeeds, one line says what is missing
and what serves instead (pip shows the line with -v; `pagedkv doctor` says the same at run time).

Where nvcc is found, a wheel also carries the most used CUDA kernels as machine code (pagedkv/kernels/cuda_cubins); all others, and all of
them in a wheel built without nvcc, are compiled at first use.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import BaseError, CCompilerError

SOURCES = sorted(path.as_posix() for path in Path("csrc/cpu").rglob("*.cpp"))


AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
X86_FLAGS = {  # a source per instruction set, each with its own flags; which one runs is decided by what the processor has
    "avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
    "avx512.cpp": [*AVX512, "-mfma", "-mf16c"],
    "avx512_bf16.cpp": [*AVX512, "-mavx512bf16", "-mavx512vbmi", "-mavx512vnni", "-mfma", "-mf16c"],
}
FLAGS = ["-O3", "-g0", "-std=c++17", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno", "-Wall"]
FLAGS += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]  # gcc's own AVX-512 headers leave unread lanes undefined
REMEDY = "The numba kernels serve instead, at a third of the speed. To have the C++ kernels, install {} and then pagedkv again."


ELSEWHERE = {  # package: its folder. A top-level `triton_kernels` is another project's name, and `bench` would be anybody's
    "pagedkv.kernels.triton": "triton_kernels",
    "pagedkv.bench": "bench",
    "pagedkv.kernels.cuda_sources": "csrc/cuda",  # no Python: texts for NVRTC
}


def say(line: str) -> None:
    """One line, on the stream that pip shows with -v."""
    print(f"pagedkv: {line}", flush=True)


def extensions() -> list[Extension]:
    """The C++ extension; or nothing, and the reason is said."""
    if not SOURCES:
        say("csrc/cpu holds no C++ source: no extension to build.")
        return []
    if importlib.util.find_spec("pybind11") is None:
        say(f"the C++ kernels are not built: pybind11 is missing. {REMEDY.format('pybind11')}")
        return []
    import pybind11

    headers = sorted(path.as_posix() for end in ("hpp", "inc") for path in Path("csrc/cpu").rglob(f"*.{end}"))
    paths = {"include_dirs": [pybind11.get_include(), "csrc/cpu"], "depends": headers}
    return [
        Extension(
            "pagedkv.kernels._cpu",
            SOURCES,
            **paths,
            libraries=["dl", "pthread"],
            extra_compile_args=FLAGS,
            optional=True,
        )
    ]


class OptionalBuild(build_ext):
    """Builds the extension if this machine can; says why not if it cannot."""

    def build_extension(self, ext: Extension) -> None:
        """Build, or say in one line what is missing; either way the install goes on."""
        try:
            self._flags_per_source()
            super().build_extension(ext)
        except (BaseError, CCompilerError, OSError) as why:
            say(f"the C++ kernels are not built: {why}. {REMEDY.format('a C++17 compiler')}")

    def _flags_per_source(self) -> None:
        """setuptools knows only flags for all sources: add each one's own as it is compiled."""
        compile_one, x86 = self.compiler._compile, platform.machine().lower() in ("x86_64", "amd64")

        def with_own_flags(
            obj: str, src: str, ext: str, cc_args: list[str], extra_postargs: list[str], pp_opts: list[str]
        ) -> None:
            own = X86_FLAGS.get(Path(src).name, []) if x86 else []
            compile_one(obj, src, ext, cc_args, [*extra_postargs, *own], pp_opts)

        self.compiler._compile = with_own_flags


class WithCubins(build_py):
    """Compiles CUDA kernels ahead where nvcc is. An editable install compiles each at first use: its sources change."""

    def run(self) -> None:
        """Copy the packages, then compile."""
        super().run()
        nvcc = shutil.which("nvcc")
        if nvcc and not self.editable_mode:
            build_cubins(nvcc, Path(self.build_lib) / "pagedkv/kernels/cuda_cubins")


def build_cubins(nvcc: str, folder: Path) -> None:
    """The most used kernels of each architecture (or PAGEDKV_CUDA_ARCHS), into `folder`. What nvcc has no longer is left to NVRTC."""
    sys.path.insert(0, str(Path(__file__).parent.resolve()))
    from pagedkv import debug
    from pagedkv.kernels.cuda import compiler, shapes

    sizes = compiler.ARCHITECTURES
    wishes = [(arch, shape) for arch in debug.cuda_architectures(sizes) for shape in shapes.common(sizes[arch])]
    if not wishes:
        return
    folder.mkdir(parents=True, exist_ok=True)

    def build(wish: tuple[str, shapes.Specialisation]) -> bool:
        arch, shape = wish
        target = folder / f"{compiler.key(shape.kernel, shape.macros, arch)}.cubin"
        macros = [f"-D{name}={value}" for name, value in shape.macros.items()]
        options = ["-cubin", f"-arch={arch}", *compiler.OPTIONS, *macros]
        command = [nvcc, *options, "-x", "cu", f"csrc/cuda/{shape.kernel}.cuh", "-o", str(target)]
        return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = sum(pool.map(build, wishes))
    say(f"{built} of {len(wishes)} CUDA kernels were compiled by {nvcc}; the others are compiled at first use.")


if __name__ == "__main__":
    setup(
        packages=[
            *find_packages(include=["pagedkv*"]),
            *ELSEWHERE,
            *(f"pagedkv.bench.{name}" for name in find_packages("bench")),
        ],
        package_dir=ELSEWHERE,
        ext_modules=extensions(),
        cmdclass={"build_ext": OptionalBuild, "build_py": WithCubins},
    )
