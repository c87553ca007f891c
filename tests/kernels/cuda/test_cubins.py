"""Compiled kernels on disk: their names, and folders that are damaged, shared, read-only or filled by a build."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from pagedkv.kernels.cuda import attention, compiler, moves, specialisation
from pagedkv.kernels.cuda.compiler import Compiled, cubin_for, key
from tests.cases import Case, call_of, write_of
from tests.kernels.cuda.emulator import Emulator

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
MACROS = {"Q_KIND": 0, "HEAD_DIM_V": 64}


class Recorder:
    """A stand-in for NVRTC that records each compilation."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from cupy.cuda import nvrtc

        self.calls: list[tuple[str, str]] = []
        self.version, self.archs = (13, 0), (80, 86, 89, 90, 100, 120)
        monkeypatch.setattr(compiler, "compile_cubin", self.compile)
        monkeypatch.setattr(nvrtc, "getVersion", lambda: self.version)
        monkeypatch.setattr(nvrtc, "getSupportedArchs", lambda: self.archs)

    def compile(self, kernel: str, macros: dict[str, int], arch: str) -> Compiled:
        self.calls.append((kernel, arch))
        return Compiled(f"{kernel} {arch} {sorted(macros.items())}".encode() * 100, "")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "PREBUILT", tmp_path / "none")
    return tmp_path / "cache" / "cubins"


@pytest.fixture
def recorder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def test_a_compiled_kernel_is_found_again(recorder: Recorder, folder: Path) -> None:
    first = cubin_for("merge_states", MACROS, "sm_90")
    assert cubin_for("merge_states", dict(reversed(MACROS.items())), "sm_90") == first
    assert recorder.calls == [("merge_states", "sm_90")]
    assert [path.name[:19] for path in folder.iterdir()] == ["merge_states-sm_90-"]


def test_every_change_of_the_code_changes_the_name(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {key("merge_states", MACROS, "sm_90", (13, 0))}
    names |= {
        key("write_kv", MACROS, "sm_90", (13, 0)),
        key("merge_states", MACROS | {"HEAD_DIM_V": 80}, "sm_90", (13, 0)),
    }
    names |= {
        key("merge_states", MACROS, "sm_80", (13, 0)),
        key("merge_states", MACROS, "sm_90", (13, 1)),
        key("merge_states", MACROS, "sm_90"),
    }
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "OPTIONS", (*compiler.OPTIONS, "-G"))
        names.add(key("merge_states", MACROS, "sm_90", (13, 0)))
    texts = dict(compiler.sources())
    for name in texts:  # included files count too
        with monkeypatch.context() as patch:
            patch.setattr(compiler, "sources", lambda name=name: texts | {name: texts[name] + " "})
            names.add(key("merge_states", MACROS, "sm_90", (13, 0)))
    assert len(names) == 7 + len(texts)


@pytest.mark.parametrize("damage", ["cut", "empty", "a bit", "another file's"])
def test_a_damaged_file_is_compiled_again(damage: str, recorder: Recorder, folder: Path) -> None:
    right = cubin_for("merge_states", MACROS, "sm_90")
    file = next(folder.iterdir())
    content = file.read_bytes()
    flipped = bytes([*content[:-1], content[-1] ^ 1])
    file.write_bytes({"cut": content[:-7], "empty": b"", "a bit": flipped, "another file's": b"\x7fELF" * 50}[damage])
    assert cubin_for("merge_states", MACROS, "sm_90") == right
    assert len(recorder.calls) == 2
    assert file.read_bytes() == content


def test_a_folder_that_cannot_be_written_costs_a_compilation_not_the_result(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", str(tmp_path / "file"))  # even root cannot make a folder in a file
    assert cubin_for("merge_states", MACROS, "sm_90") == cubin_for("merge_states", MACROS, "sm_90")
    assert len(recorder.calls) == 2


def test_code_of_the_wheel_is_used_before_any_is_compiled(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{key('merge_states', MACROS, 'sm_90')}.cubin").write_bytes(b"built for 90")
    (tmp_path / f"{key('merge_states', MACROS, 'sm_100')}.cubin").write_bytes(b"built for 100")
    monkeypatch.setattr(compiler, "PREBUILT", tmp_path)
    assert cubin_for("merge_states", MACROS, "sm_90") == b"built for 90"
    assert cubin_for("merge_states", MACROS, "sm_103") == b"built for 100"
    assert recorder.calls == []
    cubin_for("merge_states", MACROS, "sm_120")
    cubin_for("merge_states", MACROS | {"HEAD_DIM_V": 80}, "sm_90")
    assert recorder.calls == [("merge_states", "sm_120"), ("merge_states", "sm_90")]


def test_naming_code_needs_no_torch() -> None:
    """setup.py names and builds cubins in an environment that has only setuptools."""
    program = "import sys; from pagedkv.kernels.cuda import compiler, specialisation; "
    program += "print('torch' in sys.modules, 'numpy' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True)
    assert run.stdout.split() == ["False", "False"]


def setup_py() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_of_pagedkv", ROOT / "setup.py")
    assert spec
    assert spec.loader
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    return setup


def test_cubins_built_with_nvcc_are_found_at_run_time(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for nvcc writes its arguments to the output file, and refuses one architecture."""
    setup = setup_py()
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(
        '#!/bin/sh\nfor last; do :; done\ncase "$*" in *sm_120*) exit 1;; esac\n'
        'test -f csrc/cuda/ptx.cuh && printf "%s" "$*" > "$last"\n'
    )
    nvcc.chmod(0o755)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PAGEDKV_CUDA_ARCHS", "all")
    setup.build_cubins(str(nvcc), tmp_path / "built")
    monkeypatch.setattr(compiler, "PREBUILT", tmp_path / "built")
    for arch, shared in compiler.ARCHITECTURES.items():
        for kernel in specialisation.common(shared):
            code = cubin_for(kernel.name, kernel.macros, arch).decode()
            if arch != "sm_120":
                assert code.startswith(f"-cubin -arch={arch} -std=c++17 ")
                assert all(f" -D{name}={value} " in code for name, value in kernel.macros.items())
                assert f"csrc/cuda/{kernel.name}.cuh" in code
    assert {arch for _, arch in recorder.calls} == {"sm_120"}


def test_the_kernels_in_the_wheel_are_those_that_calls_launch() -> None:
    """A decode, a prefill and a write of a model with head dim 128 launch no other kernels."""
    machine = LaunchRecorder()
    for dtype, kv in (("bfloat16", ""), ("bfloat16", "fp8_e4m3/token_head")):
        built = Case(q_lens=(40, 1), kv_lens=(64, 16), dims=(128, 128), dtype=dtype, kv=kv, layout="HND").build()
        attention.attend(call_of(built), machine)
        k, layer = torch.zeros(41, 2, 128, dtype=torch.bfloat16), built.layer
        moves.write_kv(write_of(layer, k, k, built.batch.slots), machine)
    state = torch.zeros(4, 2, 128, dtype=torch.bfloat16), torch.zeros(4, 2)
    moves.merge_states(*state, *state, machine)
    moves.copy_frames(torch.zeros(8, 1024), torch.tensor([[0, 1]], dtype=torch.int32), machine)
    assert set(machine.launches) <= set(specialisation.common((machine.shared_per_block, machine.shared_per_sm)))
    assert len(set(machine.launches)) == 3 * 2 + 2 + 2


class LaunchRecorder(Emulator):
    """A machine that records launches and runs nothing."""

    def launch(self, kernel: specialisation.Specialisation, blocks: int, params: bytes) -> None:
        self.launches.append(kernel)
