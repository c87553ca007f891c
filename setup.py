"""The part of the build that pyproject.toml cannot express: packages whose folder lies elsewhere, and the optional C++
extension.

The extension `pagedkv.kernels._cpu` is built from csrc/cpu: pybind11 over raw pointers and strides. It does not link
against torch, so one wheel serves every torch version. The extension is optional: without pybind11 or a compiler the
install succeeds, and one line says what is missing and which kernels serve instead. pip shows the line with -v;
`pagedkv doctor` prints the same at run time.

If nvcc is found, a wheel also carries the most used CUDA kernels as machine code (pagedkv/kernels/cuda_cubins): for the
GPUs of this machine, or for PAGEDKV_CUDA_ARCHS. All other kernels are compiled at first use.
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
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
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


class WithCubins(build_py):
    """A build_py that compiles CUDA kernels ahead if nvcc is found, but not for an editable install."""

    def run(self) -> None:
        """Copy the packages, then compile."""
        super().run()
        nvcc = shutil.which("nvcc")
        if nvcc and not self.editable_mode:
            build_cubins(nvcc, Path(self.build_lib) / "pagedkv/kernels/cuda_cubins")


def present_architectures() -> set[str]:
    """Return the architectures of the GPUs in this machine, as sm_90."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return set()
    return {f"sm_{line.strip().replace('.', '')}" for line in listed.splitlines() if line.strip()}


def build_cubins(nvcc: str, folder: Path) -> None:
    """Compile the most used kernels of the GPUs in this machine, or of PAGEDKV_CUDA_ARCHS, into `folder`.

    A kernel that nvcc cannot compile, because nvcc has dropped the architecture, is left to NVRTC.
    """
    sys.path.insert(0, str(Path(__file__).parent.resolve()))
    from pagedkv import debug
    from pagedkv.kernels.cuda import compiler, specialisation

    sizes = compiler.ARCHITECTURES
    wanted = debug.cuda_architectures(sizes, present_architectures())
    jobs = [(arch, kernel) for arch in wanted for kernel in specialisation.common(sizes[arch])]
    if not jobs:
        return
    folder.mkdir(parents=True, exist_ok=True)

    def build(job: tuple[str, specialisation.Specialisation]) -> bool:
        arch, kernel = job
        target = folder / f"{compiler.key(kernel.name, kernel.macros, arch)}.cubin"
        macros = [f"-D{name}={value}" for name, value in kernel.macros.items()]
        options = ["-cubin", f"-arch={arch}", *compiler.OPTIONS, *macros]
        command = [nvcc, *options, "-x", "cu", f"csrc/cuda/{kernel.name}.cuh", "-o", str(target)]
        return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = sum(pool.map(build, jobs))
    say(f"{built} of {len(jobs)} CUDA kernels were compiled by {nvcc}; the others are compiled at first use.")


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
