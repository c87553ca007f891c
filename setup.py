"""What pyproject.toml cannot say: the folder that becomes `pagedkv.kernels.triton`, and the optional C++ extension.

The extension `pagedkv.kernels._cpu` is pybind11 over raw pointers and strides, built from csrc/cpu/*.cpp. It never links against torch, so
one wheel serves every torch version, and it is optional: without pybind11 or a compiler the install succeeds, one line says what is missing
and what serves instead (pip shows the line with -v; `pagedkv doctor` says the same at run time).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

SOURCES = sorted(path.as_posix() for path in Path("csrc/cpu").glob("*.cpp"))


REMEDY = "The numba kernels serve instead. To have the C++ ones, install {} and then pagedkv again."


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

    flags = ["-O3", "-std=c++17", "-fvisibility=hidden"]
    return [Extension("pagedkv.kernels._cpu", SOURCES, include_dirs=[pybind11.get_include()], extra_compile_args=flags, optional=True)]


class OptionalBuild(build_ext):
    """Builds the extension if this machine can; says why not if it cannot."""

    def build_extension(self, ext: Extension) -> None:
        """Build, or say in one line what is missing; either way the install goes on."""
        try:
            super().build_extension(ext)
        except (BaseError, CCompilerError, OSError) as why:
            say(f"the C++ kernels are not built: {why}. {REMEDY.format('a C++17 compiler')}")


if __name__ == "__main__":
    setup(
        packages=[*find_packages(include=["pagedkv*"]), "pagedkv.kernels.triton"],
        package_dir={"pagedkv.kernels.triton": "triton_kernels"},  # a top-level `triton_kernels` is another project's name
        ext_modules=extensions(),
        cmdclass={"build_ext": OptionalBuild},
    )
