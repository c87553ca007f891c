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
import torch

from pagedkv.kernels import threads
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


SOURCES = Path(__file__).parents[3] / "csrc/cpu"


def compiled(folder: Path, name: str, *arguments: str) -> Path:
    """Compile a program of this folder, with further arguments for the compiler."""
    sources = [Path(__file__).with_name(name), *arguments, "-ldl", "-lpthread"]
    subprocess.run(["g++", "-std=c++17", "-O1", "-g1", f"-I{SOURCES}", *sources, "-o", folder / "program"], check=True)
    return folder / "program"


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@needs_compiler
@pytest.mark.parametrize("flags", [(), pytest.param(("-fsanitize=thread",), marks=pytest.mark.slow)])
def test_the_laws_of_a_team(flags: tuple[str, ...], tmp_path: Path) -> None:
    """ThreadSanitizer knows no process that forks and then starts threads."""
    program = compiled(tmp_path, "team_laws.cpp", str(SOURCES / "team.cpp"), *flags)
    result = subprocess.run([program, "" if flags else "fork"], stdout=subprocess.PIPE, text=True, timeout=600)
    assert result.returncode == 0, result.stdout
    assert result.stdout.splitlines()[:4] == ["parts", "threads", "absent threads", "callers"]


@needs_compiler
@pytest.mark.slow
def test_many_threads_neither_add_to_the_same_lines_nor_wait_for_each_other(tmp_path: Path) -> None:
    sizes = (2, 4, 8, 16, 24, 32, 64, 100, 128)
    command = [compiled(tmp_path, "many_threads.cpp"), *map(str, sizes)]
    lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=600).stdout.splitlines()
    assert len(lines) == 6 * len(sizes)
    for line in lines:
        num, _, _, adds, longest, _, num_bytes = map(float, line.split())
        assert adds <= 100 + 26 * num, line
        least = num_bytes / num / 5000  # us: each thread reads 5 GB/s
        allowed = 1.2 if num <= 24 else 1.35 if num <= 64 else 2.5  # 1,024 rows and 8 MB of K and V keep 64 busy
        assert longest <= allowed * least, (line, longest / least)


SPLIT = """
built = Case(q_lens=(1, 3, 1), kv_lens=(5000, 700, 260), heads=(8, 4), split_tokens=512).build()
attend = lambda: paged_attention(built.q, built.layer, built.batch, backend="cpu", return_lse=True, **built.options)
import os
seen = []
for threads in (1, 2, 5, 16, 33, 64, 128):
    os.environ["PAGEDKV_NUM_THREADS"] = str(threads)
    seen += [(attend(), attend())]
assert all(torch.equal(a, b) for each in seen for one in each for a, b in zip(one, seen[0][0]))
print("equal")
"""


@needs_cpu
def test_with_split_tokens_no_number_of_threads_changes_a_bit() -> None:
    """From 16 threads on the states are folded head by head, and kv heads are cut where there are few keys."""
    assert run(BEGIN + SPLIT, "cpu", "") == "equal"


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "4:cpu:/x\n0::/\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "250000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/not/mounted\n", "sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3),
    ],
)
def test_the_quota_of_a_cgroup_limits_the_threads(files: dict[str, str], want: int | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert threads._quota_of_cgroups(str(tmp_path)) == want


def test_no_more_threads_than_the_quota_unless_a_variable_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.delenv("PAGEDKV_NUM_THREADS", raising=False)
    assert threads.num_threads() == min(8, threads.QUOTA or 8)
    monkeypatch.setattr(threads, "QUOTA", 3)
    assert threads.num_threads() == 3
    monkeypatch.setenv("PAGEDKV_NUM_THREADS", "5")
    assert threads.num_threads() == 5
