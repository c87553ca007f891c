"""Threads of the CPU backends: torch's OpenMP team, even with another runtime; our own in a step of the engine and in a
fork.

A fork does not have the threads of its parent, so OpenMP would wait for them for ever.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.kernels.conftest import ON_CPU

BACKENDS = [pytest.param(x, marks=[pytest.mark.slow] * (x == "numba")) for x in ON_CPU if x != "reference"]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")
on_each = pytest.mark.parametrize(
    "backend", [ON_CPU[0], *(pytest.param(name, marks=pytest.mark.slow) for name in ON_CPU[1:-1])]
)

BEGIN = """
import os, re, signal, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # a fork of a process with threads warns
backend, what = sys.argv[1:3]
def runtimes():
    return set(re.findall(r"/\\S*/lib(?:gomp|omp|iomp5)[-.]\\S*", open("/proc/self/maps").read()))
def ids():
    return set(os.listdir("/proc/self/task"))
def threads():
    return len(ids())
import torch
from pagedkv import paged_attention
from tests.cases import Case
torch.set_num_threads(3)
built = Case(q_lens=(1, 1), kv_lens=(9000, 9000), heads=(8, 8), split_tokens=1000).build()
def attend():
    return paged_attention(built.q, built.layer, built.batch, backend=backend, **built.options)
def parallel_work():
    torch.randn(1 << 22).exp_()
"""


def run(code: str, *arguments: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "3", "PAGEDKV_DEBUG": "0"}
    command = [sys.executable, "-c", code, *arguments]
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return result.stdout.strip()


FORK = """
parallel_work()
if what == "after a call":
    want = attend()
pid = os.fork()
if pid == 0:
    signal.alarm(600)  # it hangs, however busy the machine is
    try:
        first, second = attend(), attend()
        if what == "after a call":
            assert torch.equal(first, want)
        assert torch.equal(first, second)
        os._exit(0)
    except BaseException as why:
        print(repr(why), flush=True)
        os._exit(1)
status = os.waitpid(pid, 0)[1]
assert os.WIFEXITED(status), f"the child hung: signal {os.WTERMSIG(status)}"
attend()
print("the child ended", os.WEXITSTATUS(status))
"""


@on_each
@pytest.mark.parametrize("what", ["after a call", pytest.param("before any", marks=pytest.mark.slow)])
def test_a_fork_of_a_process_that_computed_on_threads_computes(backend: str, what: str) -> None:
    assert run(BEGIN + FORK, backend, what) == "the child ended 0"


SECOND = """
import ctypes, re, sys
from pathlib import Path
source, own = Path(sys.argv[3]), Path(sys.argv[4])
name = re.search(rb"libgomp[-0-9a-z.]*\\.so[.0-9]*\\0", source.read_bytes())[0]
own.write_bytes(source.read_bytes().replace(name, b"libgomz" + name[7:]))  # the loader's key for a library
ctypes.CDLL(str(own), mode=ctypes.RTLD_GLOBAL if sys.argv[2] == "global" else ctypes.RTLD_LOCAL)
"""


@cache
def torchs_runtimes() -> list[str]:
    return run(BEGIN + "print(*runtimes())", "", "").split()


@on_each
@pytest.mark.parametrize("what", ["global", pytest.param("local", marks=pytest.mark.slow)])
def test_with_another_runtime_that_of_torch_computes(backend: str, what: str, tmp_path: Path) -> None:
    """The other runtime is loaded first, and its name sorts first. If it computed, its team would be a second one."""
    torchs = torchs_runtimes()
    if len(torchs) != 1 or "libgomp" not in torchs[0]:
        pytest.skip(f"torch's runtime is no libgomp: {torchs}")
    other = tmp_path / "libgomp-0000.so.1.0.0"
    code = """
parallel_work()
before = threads()
attend()
parallel_work()
print(threads() - before, len(runtimes()))
"""
    assert run(SECOND + BEGIN + code, backend, what, torchs[0], str(other)) == "0 2"


needs_cpu = pytest.mark.skipif("cpu" not in ON_CPU, reason="the C++ extension is not built")


@needs_cpu
def test_a_step_of_the_engine_has_its_own_threads_and_starts_them_once() -> None:
    """Teams of three and of two take turns. OpenMP would end a thread each time, and start one."""
    code = """
from pagedkv.kernels.linear import choose
few = Case(q_lens=(1,), kv_lens=(600,), heads=(4, 4)).build()
def attend_to_few():
    return paged_attention(few.q, few.layer, few.batch, backend=backend, **few.options)
step = choose(torch.device("cpu"), torch.float32, 1).step
before = ids()
with step():
    want = attend()
    own = ids()
    for _ in range(100):
        attend_to_few()
        assert torch.equal(attend(), want)
    print(len(own - before), own == ids())
parallel_work()
both = ids()  # with torch's
for _ in range(100):  # on torch's threads, outside a step
    attend_to_few()
    assert torch.equal(attend(), want)
print(both == ids())
"""
    assert run(BEGIN + code, "cpu", "").split() == ["2", "True", "True"]


@needs_cpu
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("flags", [(), pytest.param(("-fsanitize=thread",), marks=pytest.mark.slow)])
def test_the_laws_of_a_team(flags: tuple[str, ...], tmp_path: Path) -> None:
    """ThreadSanitizer knows no process that forks and then starts threads."""
    folder, program = Path(__file__).parent, tmp_path / "laws"
    sources = [folder / "team_laws.cpp", folder.parents[2] / "csrc/cpu/team.cpp"]
    command = ["g++", "-std=c++17", "-O1", "-g1", *flags, f"-I{sources[1].parent}", *sources, "-o", program]
    subprocess.run([*command, "-ldl", "-lpthread"], check=True)
    result = subprocess.run([program, "" if flags else "fork"], stdout=subprocess.PIPE, text=True, timeout=600)
    assert result.returncode == 0, result.stdout
    assert result.stdout.splitlines()[:4] == ["parts", "threads", "absent threads", "callers"]
