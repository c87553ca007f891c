"""The machine code of the Triton kernels stays within budget, for GPUs that this machine lacks.

Host code, Triton's own launcher and ptxas or LLVM do the same as on a GPU, except for the launch. The tests read
registers, spills, shared memory, wide loads and tensor-core instructions from the machine code. So a regression of the
code shows without a GPU; a regression of speed does not.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from tests.kernels.triton.compiled import LAUNCHES, NEIGHBOURS, PROCESSORS, ROOT, reported

SHARED = {
    "sm_80": 163 << 10, "sm_86": 99 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10,
    "sm_120": 99 << 10, "gfx942": 64 << 10, "gfx950": 160 << 10,
}  # fmt: skip
"""Bytes of shared memory that one program may use; the launch of a program with more fails."""

RESIDENT = dict.fromkeys(("decode", "decode, page 64", "decode, head 64", "decode, fp8_e4m3/tensor"), 100 << 10)
"""Bytes of shared memory of the launches that run two programs per processor of sm_90 or sm_100: less than half."""

REGISTERS = {
    "_merge_kernel": 128,
    "_present_kernel": 128,
    **dict.fromkeys(
        (
            "_write_kernel _gather_kernel _copy_kernel _merge_splits_kernel _merge_states_kernel _starts_kernel "
            "_store_states_kernel"
        ).split(),
        64,
    ),
}
"""Registers of kernels that hide latency with many programs at a time; the widest merges rows of 512, or sums 1024
entries of a table.

The attention kernels may use all registers.
"""

SPILLS = 16
"""The most instructions that move registers to memory and back: on NVIDIA's processors in the main loops, on AMD's in
the whole kernel.

MORE_SPILLS has the exceptions, with their causes.
"""

MORE_SPILLS = {
    ("prefill, float32 over k5v4, head 256", "sm_90"): (76, "products of TF32 of each nibble, and 256 columns"),
    ("decode, k5v4, every option", "sm_90"): (64, "as without k5v4, and accumulators of two parts in one warp"),
    ("decode, float32 over fp8, head 256", "sm_90"): (22, "products of TF32, and 256 columns of float32"),
    ("decode, every option", "sm_90"): (22, "a mask's words, slopes, bounds and scales of each row"),
    ("decode, every option", "sm_100"): (29, "as above"),
    ("prefill, head 256", "sm_100"): (28, "accumulators of [64, 256] and scores on their way through tensor memory"),
    ("prefill, head 256", "gfx950"): (64, "accumulators of [64, 256] in vector registers"),
    ("decode, mla float32", "gfx950"): (30, "accumulators and keys of 512 columns of float32"),
    ("prefill, k5v4", "sm_120"): (18, "converted keys, two accumulators of [64, 64]"),
    ("split, every option", "sm_100"): (69, "words of a mask, slopes and bounds of windows, scores of [128, 64]"),
    ("split, every option", "gfx942"): (76, "two walks, each with words of a mask, slopes and bounds of windows"),
    ("split, every option", "gfx950"): (121, "as above"),
    ("split, 32 heads of 128", "gfx942"): (45, "two walks, each with words of a mask, for 64 rows on 8 waves"),
    ("split, 32 heads of 128", "gfx950"): (43, "as above"),
}

ALL = [(name, arch) for arch in PROCESSORS for name in LAUNCHES if not name.startswith("invariant")]
"""All launches, except those that the laws of a batch compare."""

TENSOR_CORES = {
    "sm_80": "HMMA",
    "sm_86": "HMMA",
    "sm_89": "HMMA",
    "sm_90": "HMMA HGMMA",
    "sm_100": "HMMA UTCHMMA",
    "sm_120": "HMMA",
}
"""Tensor-core instructions of each architecture.

Tiles of 16 rows use HMMA on all of them: the larger instructions take 64 rows and more.
"""


def stays_within_budget(name: str, arch: str, launches: list[dict[str, Any]]) -> None:
    assert launches
    for launch in launches:
        where = f"{launch['kernel']} of {name!r} on {arch}: {launch}"
        assert launch["shared"] <= SHARED[arch], where
        if arch in ("sm_90", "sm_100"):
            assert launch["shared"] <= RESIDENT.get(name, SHARED[arch]), where
        assert launch["registers"] <= REGISTERS.get(launch["kernel"], 255 if arch.startswith("sm_") else 512), where
        allowed, _ = MORE_SPILLS.get((name, arch), (SPILLS, ""))
        assert launch["spills"] <= allowed, where
        assert not launch["narrow"], f"products of 32 bits reach an address in {where}"
        # an address in _starts_kernel is a pointer and the number of a sequence
        assert launch["products"] > 0 or launch["kernel"] == "_starts_kernel", where
        if launch["kernel"] in ("_decode_kernel", "_prefill_kernel"):
            attends_well(name, arch, launch, where)
        if launch["kernel"] in ("_copy_kernel", "_store_states_kernel"):
            assert launch["wide"] > 0, where


def attends_well(name: str, arch: str, launch: dict[str, Any], where: str) -> None:
    # no tensor cores: three products of TF32 would need more than 99 KiB of shared memory
    slow = "mla float32" in name and arch.startswith("sm_")
    if not slow:
        assert launch["mma"] > 0, f"no tensor cores in {where}"
    if arch.startswith("sm_"):
        assert set(launch["cores"]) <= set(TENSOR_CORES[arch].split()), where
        # F2F and I2F convert an element at a time, 16 each cycle; float32 queries take narrow elements through float32
        assert "float32" in name or not launch["slow_conversions"], f"slow conversions in {where}"
        assert slow or launch["async"] > 0, f"loads wait in {where}"
        if "v4" not in name:  # a head of nibbles has 64 bytes, too few for wide loads
            assert launch["wide"] >= 4, f"few loads of 16 bytes in {where}"
    # a tile of 32 one-byte keys has less than 16 bytes for each of 256 threads
    elif not any(kind in name for kind in ("int", "fp8", "v4")) and not {"head 64", "192/128"} & {*name.split(", ")}:
        assert launch["wide"] >= 4, f"few loads of 16 bytes in {where}"


def test_the_kernel_that_serves_most_stays_within_budget() -> None:
    ((job, launches),) = reported([("decode", "sm_90")]).items()
    stays_within_budget(*job, launches)
    assert launches[0]["async"] > 0
    assert launches[0]["narrow_async"] == 0, "keys of bfloat16 are loaded 16 bytes at a time"


@pytest.mark.slow
def test_prefill_masks_the_last_tiles_only() -> None:
    """The first loop compares no position of a query with one of a key: 32 scores of a thread take no 32 compares."""
    (launches,) = reported([("prefill, one chunk", "sm_90")]).values()
    compares = [launch["compares"] for launch in launches if launch["kernel"] == "_prefill_kernel"]
    assert compares
    assert max(compares) < 32


@pytest.mark.slow
def test_steps_of_other_sizes_compile_no_other_kernel() -> None:
    """Batches of 9 to 16 sequences, of 17 to 50000 tokens, share one decode kernel and one merge kernel."""
    (launches,) = reported([("decode, other steps", "sm_90")]).values()
    assert len(launches) > 4
    assert len({launch["hash"] for launch in launches}) == 2


@pytest.mark.slow
def test_with_split_tokens_a_neighbours_tree_mask_compiles_no_other_kernel() -> None:
    """The same machine code adds in the same order, whatever Triton makes of a load of masks. Weights are summed in the
    layout of the products: in that of a mask's loads, each tile of scores would cross shared memory."""
    plain, masked = reported([(name, "sm_90") for name in ("invariant", "invariant, tree")]).values()
    assert [launch["hash"] for launch in plain] == [launch["hash"] for launch in masked]
    kernels = [launch["kernel"] for launch in plain]
    assert kernels == ["_decode_kernel", "_merge_kernel", "_decode_kernel", "_merge_kernel", "_prefill_kernel"]
    for launch in plain:
        sums = [line for line in launch["arithmetic"] if line.startswith("tt.reduce")]
        assert (len(sums) >= 4) == (launch["kernel"] != "_merge_kernel"), launch["kernel"]
        if launch["kernel"] != "_merge_kernel":
            assert [line for line in sums if "parent = #ttg.nvidia_mma" not in line] == []


@pytest.mark.slow
@pytest.mark.parametrize("arch", PROCESSORS)
def test_every_kernel_compiles_for_every_architecture_within_budget(arch: str) -> None:
    for (name, to), launches in reported([job for job in ALL if job[1] == arch]).items():
        stays_within_budget(name, to, launches)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_with_split_tokens_no_neighbour_changes_the_arithmetic(arch: str) -> None:
    """The size of a batch and the stride of its table choose other machine code, with the same operations on floats."""
    names = ["invariant", *(f"invariant, {name}" for name in NEIGHBOURS)]
    found = reported([(name, arch) for name in names])
    for name in names[1:]:
        for launch, usual in zip(found[name, arch], found["invariant", arch], strict=True):
            assert launch["arithmetic"] == usual["arithmetic"], (name, launch["kernel"])
            if arch == "sm_90":  # for sm_80, ptxas writes some loops out twice
                assert launch["floats"] == usual["floats"], (name, launch["kernel"])


def test_no_kernel_calls_zeros() -> None:
    """tl.zeros of Triton 3.7, which torch 2.13 for CUDA needs, takes no int of a specialisation in its shape."""
    sources = list((ROOT / "triton_kernels").glob("*.py"))
    assert len(sources) > 10
    assert [path.name for path in sources if "tl.zeros" in path.read_text()] == []
