"""Every kernel compiles for every architecture, to the right instructions, and its registers and shared memory fit."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pagedkv.kernels.cuda import compiler
from pagedkv.kernels.cuda.compiler import ARCHITECTURES
from pagedkv.kernels.cuda.specialisation import (
    CLASSES,
    KINDS,
    AttentionSpecialisation,
    CopySpecialisation,
    GatherSpecialisation,
    Keys,
    MergeSpecialisation,
    PiecesSpecialisation,
    RowClass,
    Specialisation,
    WriteSpecialisation,
    specialise,
)

BF16 = KINDS["bfloat16"]

TYPICAL = ("bfloat16", "bfloat16", (128, 128), CLASSES[0], 0)
Wish = tuple[str, str, tuple[int, int], RowClass, int]
VARIANTS: list[Wish] = [
    TYPICAL,
    *(
        ("bfloat16", kv, (128, 128), CLASSES[0], scales)
        for kv in ("fp8_e4m3", "fp8_e5m2", "int8", "int4")
        for scales in (0, 1)
    ),
    ("float16", "float16", (128, 128), CLASSES[0], 0),
    ("float16", "fp8_e4m3", (128, 128), CLASSES[0], 1),
    ("float32", "float32", (128, 128), CLASSES[0], 0),
    ("float32", "int8", (128, 128), CLASSES[0], 1),
    *(
        ("bfloat16", "bfloat16", dims, CLASSES[0], 0)
        for dims in ((64, 64), (80, 80), (96, 96), (192, 192), (256, 256), (192, 128))
    ),
    *(
        ("bfloat16", kv, dims, rows, 0)
        for kv in ("bfloat16", "fp8_e4m3")
        for dims in ((128, 128), (256, 256))
        for rows in CLASSES[1:]
    ),
    *((kind, kind, (128, 128), CLASSES[2], 0) for kind in ("float16", "float32")),
    ("float32", "int8", (128, 128), CLASSES[2], 1),
    *(
        ("bfloat16", kv, (576, 512), rows, scales)
        for kv, scales in (("bfloat16", 0), ("fp8_e4m3", 1))
        for rows in CLASSES
    ),
    ("float16", "float16", (320, 256), CLASSES[0], 0),
    ("float32", "float32", (256, 256), CLASSES[0], 0),
    ("float32", "int8", (192, 192), CLASSES[2], 1),
]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cupy") is None, reason="NVRTC is called through CuPy, which is not installed"
)


@pytest.fixture(autouse=True, scope="module")
def _nvrtc() -> None:
    from cupy.cuda import nvrtc

    try:
        nvrtc.getVersion()
    except (RuntimeError, OSError, ImportError) as why:
        pytest.skip(f"no NVRTC library here (pip install nvidia-cuda-nvrtc): {why}")


def kernel_of(wish: Wish, arch: str) -> AttentionSpecialisation:
    q, kv, dims, row_class, scales = wish
    copy = 8 if kv == "int4" and dims[0] == 80 else 16
    keys = Keys(copy, scales, int(dims == (576, 512)))
    return specialise((KINDS[q], KINDS[kv]), dims, row_class, keys, ARCHITECTURES[arch])


def label(value: object) -> str:
    """Return the id of a test's parameter."""
    if not isinstance(value, tuple):
        return str(value)
    q, kv, dims, row_class, scales = value
    return f"{q}-{kv} {dims[0]}/{dims[1]} rows>={row_class.least} scales={scales}"


QUICK = [(TYPICAL, arch) for arch in ARCHITECTURES] + [(wish, "sm_90") for wish in VARIANTS[1::4]]
REST = [(wish, arch) for wish in VARIANTS for arch in ARCHITECTURES if (wish, arch) not in QUICK]


def test_an_unmarked_function_is_compiled_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the option NVRTC takes an unmarked function, and 13.0 a generic lambda, for a host function."""
    plain = 'int one() { return 1; }\nextern "C" __global__ void bare(int* to) { *to = one(); }\n'
    monkeypatch.setattr(compiler, "sources", lambda: {"bare.cuh": plain})
    assert compiler.compile_cubin("bare", {}, "sm_90").cubin.startswith(b"\x7fELF")


EARLY_ARCHS = ("sm_90", "sm_100", "sm_120")
JOBS = [
    *QUICK,
    *(pytest.param(*job, marks=pytest.mark.slow) for job in REST),
]


@pytest.mark.parametrize(("wish", "arch"), JOBS, ids=label)
def test_it_compiles_within_its_budget(wish: Wish, arch: str) -> None:
    kernel = kernel_of(wish, arch)
    _, log = compiler.compile_cubin("paged_attention", kernel.macros, arch)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log, "local memory is used"
    registers = int(re.search(r"Used (\d+) registers", log)[1])  # type: ignore[index]
    assert kernel.blocks * kernel.threads * -(-registers // 8) * 8 <= 1 << 16, (
        f"{registers} registers: {kernel.blocks} CTAs do not fit on an SM"
    )
    assert "warning" not in log


def pieces_of(wish: Wish, arch: str) -> PiecesSpecialisation:
    return PiecesSpecialisation(dataclasses.replace(kernel_of(wish, arch), second_launch=1))


MOVES: dict[str, tuple[Specialisation, int]] = {
    "write_kv bfloat16": (WriteSpecialisation(BF16, BF16, BF16, 128, 128, 0, 0, 0, 0), 40),
    "write_kv bfloat16 rope": (WriteSpecialisation(BF16, BF16, BF16, 128, 128, 0, 0, 1, 64), 48),
    "write_kv fp8_e4m3 token_head rope": (
        WriteSpecialisation(KINDS["fp8_e4m3"], BF16, BF16, 128, 128, 2, 2, 1, 64),
        48,
    ),
    "write_kv int8 token_head": (WriteSpecialisation(KINDS["int8"], BF16, BF16, 128, 128, 2, 2, 0, 0), 40),
    "write_kv int4 tensor, float32": (
        WriteSpecialisation(KINDS["int4"], KINDS["float32"], KINDS["float32"], 256, 256, 1, 1, 2, 128),
        56,
    ),
    "write_kv mla": (WriteSpecialisation(KINDS["fp8_e5m2"], BF16, BF16, 576, 512, 2, 2, 1, 32), 72),
    "gather_kv bfloat16": (GatherSpecialisation(BF16, BF16, 128, 128, 0, 0), 48),
    "gather_kv int4": (GatherSpecialisation(KINDS["int4"], KINDS["float32"], 128, 64, 2, 2), 48),
    "gather_kv mla": (GatherSpecialisation(KINDS["fp8_e4m3"], BF16, 576, 512, 1, 1), 48),
    "merge_states bfloat16": (MergeSpecialisation(BF16, 128), 40),
    "merge_pieces bfloat16": (pieces_of(TYPICAL, "sm_90"), 96),
    "merge_pieces mla": (pieces_of(("bfloat16", "fp8_e4m3", (576, 512), CLASSES[0], 1), "sm_90"), 96),
    "copy_frames": (CopySpecialisation(16, 32 << 10), 48),
    "copy_frames, odd": (CopySpecialisation(1, 32 << 10), 48),
}
"""Each with the most registers that a thread may use."""


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("move", MOVES)
def test_write_merge_and_copy_compile_within_their_budgets(move: str, arch: str) -> None:
    kernel, budget = MOVES[move]
    _, log = compiler.compile_cubin(kernel.name, kernel.macros, arch)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log, "local memory is used"
    assert int(re.search(r"Used (\d+) registers", log)[1]) <= budget  # type: ignore[index]
    assert "warning" not in log


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_rows_move_16_bytes_at_a_time_and_8_bit_floats_are_converted_by_instruction(arch: str, tmp_path: Path) -> None:
    kernel = MOVES["copy_frames"][0]
    sass = disassembled(compiler.compile_cubin(kernel.name, kernel.macros, arch).cubin, tmp_path)
    assert re.findall(r"LDGSTS\S*128", sass)
    assert re.findall(r"STG\S*128", sass)
    kernel = MOVES["write_kv fp8_e4m3 token_head rope"][0]
    sass = disassembled(compiler.compile_cubin(kernel.name, kernel.macros, arch).cubin, tmp_path)
    assert bool(re.findall(r"F2FP\S*E4M3", sass)) == (arch >= "sm_89" or len(arch) > 5)
    assert re.findall(r"LDG\S*64", sass), "four new elements are one load"


def disassembled(cubin: bytes, folder: Path) -> str:
    tools = [*Path(sys.prefix).glob("lib/python*/site-packages/nvidia/cu13/bin/nvdisasm")]
    tool = str(tools[0]) if tools else shutil.which("nvdisasm")
    if tool is None:
        pytest.skip("no nvdisasm here (pip install nvidia-cuda-nvdisasm)")
    (folder / "kernel.cubin").write_bytes(cubin)
    return subprocess.run(
        [tool, "-c", str(folder / "kernel.cubin")], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_keys_are_copied_16_bytes_at_a_time_and_multiplied_by_tensor_cores(arch: str, tmp_path: Path) -> None:
    kernel = kernel_of(TYPICAL, arch)
    sass = disassembled(compiler.compile_cubin("paged_attention", kernel.macros, arch).cubin, tmp_path)
    copies = re.findall(r"LDGSTS\S*", sass)
    assert copies
    assert all(".128" in copy for copy in copies), set(copies)
    assert len(re.findall(r"HMMA\.16816\.F32\.BF16", sass)) >= kernel.tile // 8 * (8 + 8)
    assert "LDSM.16.MT88.4" in sass, "values are transposed on the way to registers"
    whole = re.findall(r"LDGSTS[^;]*", sass)
    assert all(".ZFILL" in copy or re.search(r", !?U?P\d+ *$", copy) for copy in whole), (
        "zeros land for an absent key: by a flag, or by a predicate"
    )
    assert not re.findall(r"\b(?:LDL|STL)\b", sass), "local memory is used"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_last_cta_to_arrive_sees_what_the_others_stored(arch: str, tmp_path: Path) -> None:
    """The emulator does not show the memory model between CTAs. The code has a fence on each side of the ticket, and
    loads of partial states bypass the L1 cache."""
    sass = disassembled(
        compiler.compile_cubin("paged_attention", kernel_of(TYPICAL, arch).macros, arch).cubin, tmp_path
    )
    order = [
        name.split(".")[0] for name in re.findall(r"\b(?:MEMBAR\.\w+\.GPU|ATOMG\S*ADD\S*|LDG\S*128\.STRONG\.GPU)", sass)
    ]
    assert order[:3] == ["MEMBAR", "ATOMG", "MEMBAR"]
    assert order[3:] == ["LDG"] * 4, "four pieces are in flight at once"
    pieces = pieces_of(TYPICAL, arch)
    sass = disassembled(compiler.compile_cubin(pieces.name, pieces.macros, arch).cubin, tmp_path)
    assert len(re.findall(r"LDG\S*128\.STRONG\.GPU", sass)) == 4


@pytest.mark.parametrize("arch", ["sm_89", *EARLY_ARCHS])
def test_a_second_launch_waits_for_the_first_which_lets_it_begin(arch: str, tmp_path: Path) -> None:
    macros = pieces_of(TYPICAL, arch).macros
    for name, instruction in (("paged_attention", "PREEXIT"), ("merge_pieces", "ACQBULK")):
        sass = disassembled(compiler.compile_cubin(name, macros, arch).cubin, tmp_path)
        assert (instruction in sass) == (arch in EARLY_ARCHS)


def test_a_source_that_does_not_compile_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_of(TYPICAL, "sm_90")
    with pytest.raises(Exception, match="NVRTC") as refused:
        compiler.compile_cubin("paged_attention", kernel.macros | {"TILE": 8}, "sm_90")
    assert "whole fragments" in "\n".join(refused.value.__notes__)
