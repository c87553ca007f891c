"""The part of the build that pyproject.toml cannot express: packages whose folder lies elsewhere, and the optional C++
extension.

The extension `pagedkv.kernels._cpu` is built from csrc/cpu: pybind11 over raw pointers and strides. It does not link
against torch, so one wheel serves every torch version. The extension is optional: without pybind11 or a compiler the
install succeeds, and one line says what is missing and which kernels serve instead. pip shows the line with -v;
`pagedkv doctor` prints the same at run time.
"""

from __future__ import annotations

import importlib.util
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

SOURCES = sorted(path.as_posix() for path in Path("csrc/cpu").rglob("*.cpp"))

AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
# Each instruction set has a source with flags of its own. The processor decides at run time which of them runs.
X86_FLAGS = {
    "avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
    "avx512.cpp": [*AVX512, "-mfma", "-mf16c"],
    "avx512_bf16.cpp": [*AVX512, "-mavx512bf16", "-mavx512vbmi", "-mavx512vnni", "-mfma", "-mf16c"],
}
FLAGS = ["-O3", "-g0", "-std=c++17", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno", "-Wall"]
# gcc's own AVX-512 headers leave unread lanes undefined.
FLAGS += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
REMEDY = (
    "The numba kernels serve instead, at a third of the speed. "
    "To have the C++ kernels, install {} and then install pagedkv again."
)

# Packages and their folders. `triton_kernels` is another project's top-level name, and `bench` is too common for one.
ELSEWHERE = {
    "pagedkv.kernels.triton": "triton_kernels",
    "pagedkv.bench": "bench",
    "pagedkv.kernels.cuda_sources": "csrc/cuda",  # sources for NVRTC, no Python
}


def say(line: str) -> None:
    """Print one line to the stream that pip shows with -v."""
    print(f"pagedkv: {line}", flush=True)


def extensions() -> list[Extension]:
    """Return the C++ extension, or no extension after a line that says why."""
    if not SOURCES:
        say("csrc/cpu holds no C++ source: there is no extension to build.")
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
    """A build_ext that prints a line if this machine cannot build the extension, and goes on."""

    def build_extension(self, ext: Extension) -> None:
        """Build the extension, or print one line that says what is missing. The install goes on in both cases."""
        try:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                self._compile_at_once(pool)
                super().build_extension(ext)
        except (BaseError, CCompilerError, OSError) as why:
            say(f"the C++ kernels are not built: {why}. {REMEDY.format('a C++17 compiler')}")

    def _compile_at_once(self, pool: ThreadPoolExecutor) -> None:
        """Let the compiler run once for each processor, and add the flags of each source.

        setuptools compiles one source after the other, with the same flags for all.
        """
        compile_all, compile_one = self.compiler.compile, self.compiler._compile
        x86, jobs = platform.machine().lower() in ("x86_64", "amd64"), []

        def with_own_flags(
            obj: str, src: str, ext: str, cc_args: list[str], extra_postargs: list[str], pp_opts: list[str]
        ) -> None:
            own = X86_FLAGS.get(Path(src).name, []) if x86 else []
            jobs.append(pool.submit(compile_one, obj, src, ext, cc_args, [*extra_postargs, *own], pp_opts))

        def compile_and_wait(*sources: Any, **options: Any) -> list[str]:
            objects: list[str] = compile_all(*sources, **options)
            for job in jobs:
                job.result()
            return objects

        self.compiler._compile, self.compiler.compile = with_own_flags, compile_and_wait


if __name__ == "__main__":
    setup(
        packages=[
            *find_packages(include=["pagedkv*"]),
            *ELSEWHERE,
            *(f"pagedkv.bench.{name}" for name in find_packages("bench")),
        ],
        package_dir=ELSEWHERE,
        ext_modules=extensions(),
        cmdclass={"build_ext": OptionalBuild},
    )
