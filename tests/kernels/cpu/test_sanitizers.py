"""csrc/cpu under AddressSanitizer and UndefinedBehaviorSanitizer: a build in a temporary folder keeps the laws.

The sanitized extension replaces the installed one in another process. That process preloads the runtime of the
sanitizers, because torch and Python are not built with it. Every tensor of a case is one allocation, so the sanitizer
finds each read beyond a tensor.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-O1", "-g1"]
# These halve the time to compile: a call, not inline code, checks each access, and only ASan finds null pointers and
# objects that are too short or of a wrong type.
CHEAPER = ["--param=asan-instrumentation-with-call-threshold=100", "-fno-sanitize=null,object-size,vptr"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None or sys.platform != "linux", reason="needs g++ and its sanitizers"),
]


def recipe():
    """Return setup.py as a module: it lists the sources and the flags of each."""
    spec = importlib.util.spec_from_file_location("pagedkv_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    before = Path.cwd()
    os.chdir(ROOT)  # setup.py names the sources relative to its folder
    try:
        spec.loader.exec_module(module)
    finally:
        os.chdir(before)
    return module


@pytest.fixture(scope="module")
def extension(tmp_path_factory):
    pybind11 = pytest.importorskip("pybind11")
    setup, folder = recipe(), tmp_path_factory.mktemp("sanitized")
    include = ["-Icsrc/cpu", f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}"]
    plain = [flag for flag in setup.FLAGS if not flag.startswith(("-O", "-g"))]

    def compiled(source):
        target = folder / (source.replace("/", "-") + ".o")
        own = setup.X86_FLAGS.get(Path(source).name, [])
        command = ["g++", *plain, *own, *SANITIZE, *CHEAPER, "-fPIC", *include, "-c", ROOT / source, "-o", target]
        subprocess.run(command, check=True, cwd=ROOT)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as compilers:
        objects = list(compilers.map(compiled, setup.SOURCES))
    built = folder / f"_cpu{sysconfig.get_config_var('EXT_SUFFIX')}"
    subprocess.run(["g++", "-shared", *SANITIZE, *objects, "-o", built, "-ldl", "-lpthread"], check=True)
    return built


def under_sanitizers(extension: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m arguments...` with the sanitized extension, and with the runtime preloaded."""
    runtime = [
        subprocess.run(
            ["g++", f"-print-file-name=lib{name}.so"], check=True, stdout=subprocess.PIPE, text=True
        ).stdout.strip()
        for name in ("asan", "ubsan")
    ]
    env = os.environ | {
        "SANITIZED": str(extension),
        "LD_PRELOAD": " ".join(runtime),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=99:allocator_may_return_null=1",  # Python leaks
        "UBSAN_OPTIONS": "print_stacktrace=1:exitcode=98",
        "PYTHONMALLOC": "malloc",
        "OMP_NUM_THREADS": "2",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run([sys.executable, "-m", *arguments], env=env, cwd=ROOT, capture_output=True, text=True)


def test_the_sanitizers_find_a_read_past_the_end_of_q(extension: Path) -> None:
    """Without this test, silent runs of the laws would prove nothing."""
    run = under_sanitizers(extension, "tests.kernels.cpu.sanitized")
    assert run.returncode == 99, run.stderr[-3000:]
    assert "heap-buffer-overflow" in run.stderr


LAWS = {
    "attention": ("test_conformance.py", "test_laws.py"),
    "moves": ("test_write.py", "gather/test_gather.py", "partition/test_merge.py"),
    "linear": ("linear/test_linear.py",),
    "recurrent": ("recurrent/test_recurrent.py",),
}


@pytest.mark.parametrize("laws", LAWS)
def test_the_laws_read_and_write_only_what_they_may(laws: str, extension: Path) -> None:
    files = (f"tests/kernels/{file}" for file in LAWS[laws])
    chosen = [] if laws in ("linear", "recurrent") else ["-k", "cpu-cpu"]
    plugins = ["-p", "tests.kernels.cpu.sanitized", "-p", "no:xdist", "-p", "no:cacheprovider"]
    run = under_sanitizers(extension, "pytest", "-q", "-x", "--capture=sys", *plugins, *files, *chosen)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-5000:]
    assert " passed" in run.stdout
