"""Every kernel compiles for every architecture, to the right instructions, and its registers and shared memory fit."""

from __future__ import annotations

import importlib.util
import re
from functools import cache

import pytest

from pagedkv.bench.gpu import sass
from pagedkv.errors import InvalidRequest
from pagedkv.kernels.cuda import compiler
from pagedkv.kernels.cuda.compiler import ARCHITECTURES
from pagedkv.kernels.cuda.specialisation import (
    AttentionSpecialisation,
    CopySpecialisation,
    KeyLayout,
    MergeSpecialisation,
    RowClass,
    Specialisation,
    WriteSpecialisation,
    specialise,
)
from pagedkv.spec import ELEMENTS, NUMBERS

BF16, F32, E4M3, INT8 = (NUMBERS[name] for name in ("bfloat16", "float32", "fp8_e4m3", "int8"))
INT5, CODE4 = NUMBERS["int5"], NUMBERS["code4"]
EIGHT, *MORE = RowClass.of((BF16, BF16, BF16), (128, 128))
"""Up to 8 query rows, for which keys are the rows of both products; the classes of more rows."""
SIXTEEN = RowClass.of((F32, F32, F32), (128, 128))[0]

TYPICAL = ("bfloat16", "bfloat16", (128, 128), EIGHT, 0)
Wish = tuple[str, str, tuple[int, int], RowClass, int]
VARIANTS: list[Wish] = [
    TYPICAL,
    *(("bfloat16", kv, (128, 128), EIGHT, scales) for kv in ("fp8_e4m3", "fp8_e5m2", "int8") for scales in (0, 1)),
    *(("bfloat16", kv, (dim, dim), EIGHT, 1) for kv in ("k8v4", "k5v4") for dim in (128, 64, 80, 256)),
    *(("bfloat16", kv, (128, 128), rows, 1) for kv in ("k8v4", "k5v4") for rows in MORE),
    ("float16", "k5v4", (128, 128), EIGHT, 1),
    ("float32", "k5v4", (128, 128), SIXTEEN, 1),
    ("float16", "float16", (128, 128), EIGHT, 0),
    ("float16", "fp8_e4m3", (128, 128), EIGHT, 1),
    ("float32", "float32", (128, 128), SIXTEEN, 0),
    ("float32", "int8", (128, 128), SIXTEEN, 1),
    *(
        ("bfloat16", "bfloat16", dims, EIGHT, 0)
        for dims in ((16, 16), (64, 64), (80, 80), (96, 96), (192, 192), (256, 256), (192, 128))
    ),
    ("bfloat16", "fp8_e4m3", (256, 256), EIGHT, 1),
    *(
        ("bfloat16", kv, dims, rows, 0)
        for kv in ("bfloat16", "fp8_e4m3")
        for dims in ((128, 128), (256, 256))
        for rows in MORE
    ),
    *((kind, kind, (128, 128), MORE[-1], 0) for kind in ("float16", "float32")),
    ("float32", "int8", (128, 128), MORE[-1], 1),
    *(
        ("bfloat16", kv, (576, 512), rows, scales)
        for kv, scales in (("bfloat16", 0), ("fp8_e4m3", 1))
        for rows in (SIXTEEN, *MORE[1:])
    ),
    ("float16", "float16", (320, 256), SIXTEEN, 0),
    ("float32", "float32", (256, 256), SIXTEEN, 0),
    ("float32", "int8", (192, 192), MORE[-1], 1),
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


def kernel_of(wish: Wish, arch: str, page_runs: int = 2) -> AttentionSpecialisation:
    q, kv, dims, row_class, scales = wish
    copy = 16 if ELEMENTS[kv][1] != "code4" or dims[0] != 80 else 8
    if kv == "k5v4" and not page_runs:
        copy = {80: 2, 64: 8}.get(dims[0], 16)
    keys = KeyLayout(copy, scales, int(dims == (576, 512)), page_runs=page_runs)
    return specialise(kinds_of(q, kv), dims, row_class, keys, ARCHITECTURES[arch])


def kinds_of(q: str, kv: str) -> tuple[int, int, int]:
    of_k, of_v = ELEMENTS[kv]
    return NUMBERS[q], NUMBERS[of_k], NUMBERS[of_v]


@cache
def compiled(kernel: Specialisation, arch: str) -> compiler._Compiled:
    return compiler.compile_cubin(kernel.name, kernel.macros, arch)


def label(value: object) -> str:
    """Return the id of a test's parameter."""
    if not isinstance(value, tuple):
        return str(value)
    q, kv, dims, row_class, scales = value
    return f"{q}-{kv} {dims[0]}/{dims[1]} rows>={row_class.least} scales={scales}"


each_architecture = pytest.mark.parametrize(
    "arch", [pytest.param(arch, marks=[pytest.mark.slow] * (arch != "sm_90")) for arch in ARCHITECTURES]
)
QUICK = [(wish, "sm_90") for wish in VARIANTS[::24]]
REST = [(wish, arch) for wish in VARIANTS for arch in ARCHITECTURES if (wish, arch) not in QUICK]


def test_an_unmarked_function_is_compiled_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the option NVRTC takes an unmarked function, and 13.0 a generic lambda, for a host function."""
    plain = 'int one() { return 1; }\nextern "C" __global__ void bare(int* to) { *to = one(); }\n'
    monkeypatch.setattr(compiler, "_sources", lambda: {"bare.cuh": plain})
    assert compiler.compile_cubin("bare", {}, "sm_90").cubin.startswith(b"\x7fELF")


JOBS = [
    *((*job, 2) for job in QUICK),
    *(pytest.param(TYPICAL, "sm_90", page_runs, marks=pytest.mark.slow) for page_runs in (0, 1)),
    *(pytest.param(*job, 2, marks=pytest.mark.slow) for job in REST),
    *(pytest.param(wish, arch, 0, marks=pytest.mark.slow) for wish in VARIANTS[1:] for arch in ARCHITECTURES),
]


def local_memory(log: str) -> int:
    """Return the most bytes that the stack frame, the spill stores or the spill loads of a kernel's functions take."""
    found = [int(size) for size in re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", log)]
    assert len(found) in (3, 6)
    return max(found)


SPILLS = {
    "bfloat16-bfloat16 256/256 rows>=9 scales=0": {("sm_100", 0): 24, ("sm_100", 2): 24, ("sm_120", 0): 24},
    "bfloat16-bfloat16 256/256 rows>=17 scales=0": {("sm_100", 0): 24, ("sm_100", 2): 24, ("sm_120", 0): 24},
    "bfloat16-bfloat16 256/256 rows>=33 scales=0": {
        ("sm_80", 2): 28, ("sm_86", 0): 56, ("sm_86", 2): 224, ("sm_89", 0): 56, ("sm_89", 2): 224, ("sm_90", 2): 8,
        ("sm_100", 2): 24,
    },
    "bfloat16-fp8_e4m3 256/256 rows>=9 scales=0": {("sm_100", 2): 8},
    "bfloat16-fp8_e4m3 256/256 rows>=33 scales=0": {
        ("sm_80", 2): 8, ("sm_86", 2): 260, ("sm_89", 2): 260, ("sm_90", 2): 24,
    },
    "float32-float32 128/128 rows>=1 scales=0": {
        ("sm_100", 0): 28, ("sm_100", 2): 32, ("sm_120", 0): 28, ("sm_120", 2): 28,
    },
    "float32-float32 128/128 rows>=33 scales=0": {
        ("sm_80", 2): 32, ("sm_86", 0): 28, ("sm_89", 0): 28, ("sm_90", 2): 28, ("sm_100", 0): 44, ("sm_100", 2): 40,
        ("sm_120", 0): 24, ("sm_120", 2): 124,
    },
}  # fmt: skip
"""Bytes of local memory of kernels that fill the registers with results, by architecture and runs of pages: the most
with NVRTC 13.0, 13.1 and 13.5, which differ. All other kernels need none."""

SPILLS_OF_NVRTC_13_0 = {("bfloat16-bfloat16 256/256 rows>=9 scales=0", "sm_90", 2): 8}
"""The same of kernels that spill if NVRTC 13.0 compiles them, which torch 2.13 brings, and with no later one."""


def spills_of(wish: Wish, arch: str, page_runs: int) -> int:
    """Return the bytes of local memory that a kernel may use."""
    from cupy.cuda import nvrtc

    of_13_0 = SPILLS_OF_NVRTC_13_0 if nvrtc.getVersion() < (13, 1) else {}
    return of_13_0.get((label(wish), arch, page_runs), SPILLS.get(label(wish), {}).get((arch, page_runs), 0))


@pytest.mark.parametrize(("wish", "arch", "page_runs"), JOBS, ids=label)
def test_it_compiles_within_its_budget(wish: Wish, arch: str, page_runs: int) -> None:
    kernel = kernel_of(wish, arch, page_runs)
    _, log = compiled(kernel, arch)
    assert local_memory(log) <= spills_of(wish, arch, page_runs), "local memory is used"
    registers = int(re.search(r"Used (\d+) registers", log)[1])  # type: ignore[index]
    assert kernel.blocks * kernel.threads * -(-registers // 8) * 8 <= 1 << 16, (
        f"{registers} registers: {kernel.blocks} CTAs do not fit on an SM"
    )
    assert "warning" not in log


MOVES: dict[str, tuple[Specialisation, int]] = {
    "write_kv bfloat16": (WriteSpecialisation(BF16, BF16, BF16, BF16, 128, 128, 0, 0, 0, 0), 40),
    "write_kv bfloat16 rope": (WriteSpecialisation(BF16, BF16, BF16, BF16, 128, 128, 0, 0, 1, 64), 48),
    "write_kv fp8_e4m3 token_head rope": (
        WriteSpecialisation(E4M3, E4M3, BF16, BF16, 128, 128, 2, 2, 1, 64),
        48,
    ),
    "write_kv int8 token_head": (WriteSpecialisation(INT8, INT8, BF16, BF16, 128, 128, 2, 2, 0, 0), 40),
    "write_kv k5v4 rope": (WriteSpecialisation(INT5, CODE4, BF16, BF16, 128, 128, 2, 2, 1, 64), 48),
    "write_kv k8v4, float32": (WriteSpecialisation(INT8, CODE4, F32, F32, 256, 256, 2, 2, 2, 128), 64),
    "write_kv mla": (
        WriteSpecialisation(NUMBERS["fp8_e5m2"], NUMBERS["fp8_e5m2"], BF16, BF16, 576, 512, 2, 2, 1, 32),
        72,
    ),
    "merge_states bfloat16": (MergeSpecialisation(BF16, 128), 40),
    "copy_frames": (CopySpecialisation(16, 32 << 10), 48),
    "copy_frames, odd": (CopySpecialisation(1, 32 << 10), 48),
}
"""Each with the most registers that a thread may use."""


@pytest.mark.parametrize(
    ("move", "arch"),
    [
        pytest.param(move, arch, marks=[pytest.mark.slow] * (arch != "sm_90" or number % 4 > 0))
        for number, move in enumerate(MOVES)
        for arch in ARCHITECTURES
    ],
)
def test_write_merge_and_copy_compile_within_their_budgets(move: str, arch: str) -> None:
    kernel, budget = MOVES[move]
    _, log = compiled(kernel, arch)
    assert local_memory(log) == 0, "local memory is used"
    assert int(re.search(r"Used (\d+) registers", log)[1]) <= budget  # type: ignore[index]
    assert "warning" not in log


@each_architecture
def test_rows_move_16_bytes_at_a_time_and_8_bit_floats_are_converted_by_instruction(arch: str) -> None:
    kernel = MOVES["copy_frames"][0]
    code = disassembled(compiled(kernel, arch).cubin)
    assert re.findall(r"LDGSTS\S*128", code)
    assert re.findall(r"STG\S*128", code)
    kernel = MOVES["write_kv fp8_e4m3 token_head rope"][0]
    code = disassembled(compiled(kernel, arch).cubin)
    assert bool(re.findall(r"F2FP\S*E4M3", code)) == (arch >= "sm_89" or len(arch) > 5)
    assert re.findall(r"LDG\S*64", code), "four new elements are one load"


def disassembled(cubin: bytes) -> str:
    try:
        return sass.disassembled(cubin)
    except InvalidRequest as why:
        pytest.skip(str(why))


@each_architecture
def test_keys_are_copied_16_bytes_at_a_time_and_multiplied_by_tensor_cores(arch: str) -> None:
    kernel = kernel_of(TYPICAL, arch)
    code = disassembled(compiled(kernel, arch).cubin)
    copies = re.findall(r"LDGSTS\S*", code)
    assert copies
    assert {copy for copy in copies if ".128" not in copy} <= {"LDGSTS.E.64"}, set(copies)
    assert copies.count("LDGSTS.E.64") == 1, "queries alone are copied 8 bytes at a time"
    assert len(re.findall(r"HMMA\.16816\.F32\.BF16", code)) >= sass.work_of(kernel)[sass.PRODUCT]
    assert "LDSM.16.MT88.4" in code, "values are transposed on the way to registers"
    asks = [".ZFILL" in copy or bool(re.search(r", !?U?P\d+ *$", copy)) for copy in re.findall(r"LDGSTS[^;]*", code)]
    assert any(asks), "zeros land for an absent key: by a flag, or by a predicate"
    assert asks.count(False) >= 16, "copies of a whole run of keys ask for none"
    assert not re.findall(r"\b(?:LDL|STL)\b", code), "local memory is used"


@each_architecture
def test_the_last_cta_to_arrive_sees_what_the_others_stored(arch: str) -> None:
    """The emulator does not show the memory model between CTAs. The code has a fence on each side of the ticket, and
    copies of partial states bypass the L1 cache."""
    code = disassembled(compiled(kernel_of(TYPICAL, arch), arch).cubin)
    fence, ticket = r"\bMEMBAR\.\w+\.GPU", r"\bATOMG\S*ADD\S*"
    assert [name[:5] for name in re.findall(rf"{fence}|{ticket}", code)] == ["MEMBA", "ATOMG", "MEMBA"]
    after = code[list(re.finditer(fence, code))[-1].end() :]
    copies = re.findall(r"\b(?:LDG\b\S*|LDGSTS\S*)", after[: after.index("LDGDEPBAR")])
    assert len(copies) >= 4
    assert all("LDGSTS" in copy and ".BYPASS" in copy for copy in copies), copies


def test_a_source_that_does_not_compile_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_of(TYPICAL, "sm_90")
    with pytest.raises(Exception, match="NVRTC") as refused:
        compiler.compile_cubin("paged_attention", kernel.macros | {"TILE": 8}, "sm_90")
    assert "whole fragments" in "\n".join(refused.value.__notes__)


# The steady tile. The limits of up to 8 rows are the counts of sm_90 with NVRTC 13.5, rounded up; so are those of more
# rows. They lie below what 4.3 TB/s asks of a scheduler of an H200: 500 for bfloat16, 1,360 for fp8, 1,400 for integers
# (docs/explanation/cuda-kernels.md). sm_100 takes fewer.

LIMITS: dict[tuple[str, str, int, int, int, int], int] = {
    ("bfloat16", "bfloat16", 128, 0, 2, 1): 280,
    ("bfloat16", "bfloat16", 128, 0, 1, 1): 325,
    ("bfloat16", "bfloat16", 64, 0, 2, 1): 235,
    ("bfloat16", "bfloat16", 128, 0, 2, 9): 330,
    ("float16", "float16", 128, 0, 2, 1): 285,
    ("bfloat16", "fp8_e4m3", 128, 0, 2, 1): 610,
    ("bfloat16", "fp8_e4m3", 128, 1, 2, 1): 700,
    ("bfloat16", "fp8_e4m3", 128, 1, 1, 1): 760,
    ("bfloat16", "fp8_e4m3", 128, 1, 2, 9): 940,
    ("bfloat16", "fp8_e5m2", 128, 1, 2, 1): 700,
    ("bfloat16", "int8", 128, 1, 2, 1): 960,
    ("bfloat16", "k8v4", 128, 1, 2, 1): 965,
    ("bfloat16", "k5v4", 128, 1, 2, 1): 1088,
    ("float16", "fp8_e4m3", 128, 1, 2, 1): 700,
    ("bfloat16", "fp8_e4m3", 64, 1, 2, 1): 555,
    ("bfloat16", "int8", 64, 1, 2, 1): 685,
    ("bfloat16", "k8v4", 64, 1, 2, 1): 725,
    ("bfloat16", "k5v4", 64, 1, 2, 1): 725,
}
"""The most instructions of a tile, of 16 keys of 16 bits or 32 narrower ones, by (q, kv, head dim, token scales, page
runs, least rows)."""

WRITTEN_TWICE = {((*kind, 64, 1, 2, 1), "sm_100") for kind in (("bfloat16", "k8v4"), ("bfloat16", "k5v4"))}
"""Tiles in which ptxas writes each copy of values out twice, and a predicate chooses one."""


@pytest.mark.parametrize(
    ("kind", "arch"),
    [
        pytest.param(kind, arch, marks=[pytest.mark.slow] * ((place, arch) != (0, "sm_90")))
        for place, kind in enumerate(LIMITS)
        for arch in ("sm_90", "sm_100")
    ],
    ids=str,
)
def test_a_tile_of_decode_takes_no_more_instructions_than_its_limit(
    kind: tuple[str, str, int, int, int, int], arch: str
) -> None:
    q, kv, dim, scales, page_runs, least = kind
    keys = KeyLayout(token_scales=scales, page_runs=page_runs)
    rows = next(rows for rows in (EIGHT, *MORE) if rows.least == least)
    kernel = specialise(kinds_of(q, kv), (dim, dim), rows, keys, compiler.ARCHITECTURES[arch])
    cubin, log = compiled(kernel, arch)
    assert local_memory(log) == 0
    registers = int(re.search(r"Used (\d+) registers", log)[1])  # type: ignore[index]
    assert registers <= (232 if (arch, page_runs, least) == ("sm_90", 2, 1) else 255)
    needed, is_twice = sass.work_of(kernel), (kind, arch) in WRITTEN_TWICE
    needed[sass.COPY] += is_twice * kernel.tile // 16
    way = sass.steady_tile(sass.parsed(disassembled(cubin)), needed)
    assert len(way) <= LIMITS[kind]
    assert len(way) > 6 * needed[sass.PRODUCT], "a way so short does not do the work of a tile"
    in_flight = kernel.blocks * kernel.threads // 32 * sass.bytes_in_flight(way)
    assert in_flight >= 42_000 or dim < 128, "bytes in flight of an SM: 1.3 us at 4.3 TB/s want 42 KB"
    keys_and_values = kernel.blocks * 4 * (kernel.stages - 1) * kernel.tile * sum(kernel.row_bytes)
    some_lanes = 1.8 if is_twice else 1.4 if kv == "k5v4" else 1.0  # a plane may have no copy for some lanes
    assert keys_and_values <= in_flight <= some_lanes * keys_and_values, "without scales"


def test_a_cta_that_finds_its_share_looks_up_its_first_page_after_one_load() -> None:
    """Record, lengths and offsets are loaded together, and then an entry of the page table, before the barrier. Scales
    come after it; the first copy does not wait for them."""
    way = sass.entry(sass.parsed(disassembled(compiled(kernel_of(TYPICAL, "sm_90"), "sm_90").cubin)))
    barrier = next(at for at, i in enumerate(way) if i.kind == "BAR")
    before, after = ([i for i in part if i.kind == "LDG"] for part in (way[:barrier], way[barrier:]))
    assert len(before) >= 12
    assert len(after) <= 2
    assert len(way) <= 380, "instructions, but for the loop over the lengths"
