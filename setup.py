"""The part of the build that pyproject.toml cannot express: packages whose folder lies elsewhere, the links of the
README, and the optional C++ extension.

The extension `pagedkv.kernels._cpu` is built from csrc/cpu: pybind11 over raw pointers and strides. It does not link
against torch, so one wheel serves every torch version. The extension is optional: without pybind11 or a compiler the
install succeeds, and one line says what is missing and which kernels serve instead. pip shows the line with -v;
`pagedkv doctor` prints the same at run time.

An editable install compiles the best instruction set of this machine and the portable one; wheels, and
PAGEDKV_BUILD_SETS=all, compile all that the compiler knows, and so does any install on Arm. Objects of an editable
install stay in build/objects, and only what changed is compiled again. build/compile_commands.json has the commands,
for clangd.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

SOURCES = sorted(path.as_posix() for path in Path("csrc/cpu").rglob("*.cpp"))

AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"]
# Each instruction set has a source with flags of its own. The processor decides at run time which of them runs.
X86_FLAGS = {
    "avx512_bf16.cpp": [*AVX512, "-mavx512bf16", "-mavx512vbmi", "-mavx512vnni"],
    "avx512.cpp": AVX512,
    "avx2_vnni.cpp": ["-mavx2", "-mfma", "-mf16c", "-mavxvnni"],
    "avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
}
ARM_FLAGS = {"neon.cpp": ["-march=armv8.2-a+dotprod"], "neon_bf16.cpp": ["-march=armv8.2-a+dotprod+bf16"]}
MACHINE = platform.machine().lower()
SETS = X86_FLAGS if MACHINE in ("x86_64", "amd64") else ARM_FLAGS if MACHINE in ("aarch64", "arm64") else {}
FLAGS = ["-O3", "-g0", "-std=c++17", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno", "-Wall"]
# gcc's own AVX-512 headers leave unread lanes undefined.
FLAGS += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
INSTEAD = "The numba kernels serve instead, at a third of the speed."
REMEDY = f"{INSTEAD} To have the C++ kernels, install {{}} and then install pagedkv again."

# Packages and their folders. `triton_kernels` is another project's top-level name, and `bench` is too common for one.
ELSEWHERE = {
    "pagedkv.kernels.triton": "triton_kernels",
    "pagedkv.bench": "bench",
    "pagedkv.kernels.cuda_sources": "csrc/cuda",  # sources for NVRTC, no Python
}


def say(line: str) -> None:
    """Print one line to the stream that pip shows with -v."""
    print(f"pagedkv: {line}", flush=True)


def readme() -> str:
    """Return README.md. Its links become addresses, as an index needs, if [project.urls] names the Repository."""
    text = Path("README.md").read_text(encoding="utf-8")
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    address = project.get("urls", {}).get("Repository")
    if address is None:
        return text
    text = re.sub(r"(!\[[^]]*\]\()(?!https?:)", rf"\1{address}/raw/HEAD/", text)
    return re.sub(r"(\]\()(?!https?:|#)", rf"\1{address}/blob/HEAD/", text)


def extensions() -> list[Extension]:
    """Return the C++ extension, or no extension after a line that says why."""
    if not SOURCES:
        say("csrc/cpu holds no C++ source: there is no extension to build.")
        return []
    if sys.platform == "win32":
        say(f"the C++ kernels are not built: they have no flags for the compiler of Windows. {INSTEAD}")
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


def sets_of_this_machine(compiler: list[str]) -> list[str]:
    """Return the source of the best instruction set that this machine has; all sources if the compiler cannot say."""
    command = [*compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
    native = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    if "__x86_64__" not in native:
        return list(X86_FLAGS)
    macros = {name: [f"__{flag.removeprefix('-m').upper()}__" for flag in flags] for name, flags in X86_FLAGS.items()}
    return [name for name, needed in macros.items() if all(f"#define {macro} " in native for macro in needed)][:1]


def is_known(compiler: list[str], name: str) -> bool:
    """Return whether the compiler knows the flags of a set: gcc 10 has no -mavxvnni."""
    command = [*compiler, *SETS[name], "-E", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


class OptionalBuild(build_ext):
    """A build_ext that prints a line if this machine cannot build the extension, and goes on."""

    def run(self) -> None:
        """Build the extension; see setuptools. Its own `run` clears `inplace` while it builds."""
        self.for_checkout = bool(self.inplace or self.editable_mode)
        super().run()

    def build_extension(self, ext: Extension) -> None:
        """Build the extension, or print one line that says what is missing. The install goes on in both cases."""
        try:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                kept = Path("build/objects") if self.for_checkout else None
                if kept:
                    self.build_temp, self.force = str(kept), True  # objects that are up to date are not compiled again
                sets = [name for name in SETS if is_known(self.compiler.compiler_so, name)]
                if kept and SETS is X86_FLAGS and os.environ.get("PAGEDKV_BUILD_SETS") != "all":
                    sets = [name for name in sets_of_this_machine(self.compiler.compiler_so) if name in sets]
                commands = Commands(sets, kept)
                self._compile_at_once(pool, commands)
                super().build_extension(ext)
                commands.write()
        except (BaseError, CCompilerError, OSError) as why:
            say(f"the C++ kernels are not built: {why}. {REMEDY.format('a C++17 compiler')}")

    def _compile_at_once(self, pool: ThreadPoolExecutor, commands: Commands) -> None:
        """Let the compiler run once for each processor, with the flags of each source, for what is not up to date.

        setuptools compiles one source after the other, with the same flags for all.
        """
        compile_all, compile_one = self.compiler.compile, self.compiler._compile
        jobs = []

        def with_own_flags(
            obj: str, src: str, ext: str, cc_args: list[str], extra_postargs: list[str], pp_opts: list[str]
        ) -> None:
            flags = [*extra_postargs, *commands.flags_of(src)]
            if not commands.is_done(obj, src, [*self.compiler.compiler_so, *cc_args, src, "-o", obj, *flags]):
                jobs.append(pool.submit(compile_one, obj, src, ext, cc_args, flags, pp_opts))

        def compile_and_wait(*sources: Any, **options: Any) -> list[str]:
            try:
                objects: list[str] = compile_all(*sources, **options)
                for job in jobs:
                    job.result()
            finally:  # after a failure or Ctrl-C, the sources that still wait are not compiled
                pool.shutdown(cancel_futures=True)
            return objects

        self.compiler._compile, self.compiler.compile = with_own_flags, compile_and_wait


class Commands:
    """The command of each source, and which objects of an earlier build are up to date.

    sets: the sources of SETS that are compiled    kept: the folder of the objects; None if none are kept
    """

    FILE = Path("build/compile_commands.json")

    def __init__(self, sets: list[str], kept: Path | None) -> None:
        self.kept = kept
        self.sets = {name: SETS[name] for name in sets}
        self.without = [f"-DPAGEDKV_WITHOUT_{Path(name).stem.upper()}" for name in SETS if name not in sets]
        self.now: dict[str, str] = {}
        self.before: dict[str, str] = {}
        if kept and self.FILE.exists():
            self.before = {entry["file"]: entry["command"] for entry in json.loads(self.FILE.read_text())}
            self.FILE.unlink()  # it does not describe the objects of a build that fails or is interrupted

    def flags_of(self, src: str) -> list[str]:
        """Return the flags that only this source has."""
        depends = ["-MMD"] if self.kept else []
        return [*depends, *(self.without if src.endswith("bindings.cpp") else self.sets.get(Path(src).name, []))]

    def is_done(self, obj: str, src: str, command: list[str]) -> bool:
        """Record the command, and return whether the object was made by it from files that are older."""
        self.now[src] = shlex.join(command)
        made, depends = Path(obj), Path(obj).with_suffix(".d")
        if self.before.get(src) != self.now[src] or not made.exists() or not depends.exists():
            return False
        files = [Path(name) for name in depends.read_text().partition(":")[2].replace("\\\n", " ").split()]
        return all(file.exists() and file.stat().st_mtime <= made.stat().st_mtime for file in files)

    def write(self) -> None:
        """Write the commands; only after a build that went well, so that a failed one is done again."""
        if self.kept:
            here = str(Path.cwd())
            entries = [{"directory": here, "file": src, "command": command} for src, command in self.now.items()]
            self.FILE.write_text(json.dumps(entries, indent=1))


if __name__ == "__main__":
    setup(
        packages=[
            *find_packages(include=["pagedkv*"]),
            *ELSEWHERE,
            *(f"pagedkv.bench.{name}" for name in find_packages("bench")),
        ],
        package_dir=ELSEWHERE,
        long_description=readme(),
        long_description_content_type="text/markdown",
        ext_modules=extensions(),
        cmdclass={"build_ext": OptionalBuild},
    )
