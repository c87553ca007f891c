"""Compile the Triton kernels without a GPU: `python -m tests.kernels.triton.compiled < jobs.json`.

A job is [name of a launch below, architecture, optionally a tuning to try]. The host wrapper runs as on that machine,
over CPU tensors of a typical call. Each launch is intercepted, specialised as Triton's launcher does, and compiled by
ptxas or LLVM. The output is a report of each launch: registers, spills, shared memory, and instructions that show
whether loads are wide and tensor cores are used.
This must be another process: in pytest's process the kernels may have been imported for the interpreter.
"""

from __future__ import annotations

import collections
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.kernels.triton.addresses import products

ROOT = Path(__file__).parents[3]
PROCESSORS = {
    "sm_80": 108,
    "sm_86": 84,
    "sm_89": 142,
    "sm_90": 132,
    "sm_100": 148,
    "sm_120": 188,
    "gfx942": 304,
    "gfx950": 256,
}


def typical_call(**changes: Any) -> Any:
    """Return an AttentionCall as an engine makes it: 8 sequences, HND pool, page 16, bfloat16, 32/8 heads of 128."""
    import torch

    from pagedkv.kernels.args import AttentionCall
    from pagedkv.spec import BITS, ELEMENTS
    from tests.cases import DTYPES

    sizes = {"B": 8, "q_len": 1, "n": 4096, "H": 32, "K": 8, "D": 128, "Dv": 128, "S": 16, "pages": 8192}
    given = sizes | {"dtype": "bfloat16", "kv": "", "mla": False}
    options = {name: changes.pop(name) for name in [*changes] if name not in given}
    g = given | changes
    B, T = g["B"], g["B"] * g["q_len"]
    kind, _, scales = g["kv"].partition("/")
    dtype, elements = DTYPES[g["dtype"]], ELEMENTS[kind or g["dtype"]]

    def pool(dim: int, element: str) -> torch.Tensor:
        stored = DTYPES[element]
        size = dim * BITS[element] // 8 // stored.itemsize
        return torch.empty(4, g["K"], g["S"], size, dtype=stored).transpose(1, 2)

    k = pool(g["D"], elements[0])
    v = k[..., : g["Dv"]] if g["mla"] else pool(g["Dv"], elements[1])
    scale = torch.ones(()) if scales == "tensor" else torch.ones(4, g["K"], g["S"]).half().transpose(1, 2)
    scale = scale if scales else None
    calibration = torch.ones(g["K"], 2, g["D"]) if scales == "calibrated" else None
    ints = {"table": torch.zeros(B, g["pages"], dtype=torch.int32), "lens": torch.full((B,), g["n"], dtype=torch.int32)}
    starts = torch.arange(B + 1, dtype=torch.int32) * g["q_len"]
    heads = torch.ones(g["H"])
    q, out = (torch.empty(T, g["H"], dim, dtype=dtype) for dim in (g["D"], g["Dv"]))
    lse = torch.empty(T, g["H"])
    tree = torch.ones(T, g["q_len"], dtype=torch.bool) if options.get("tree") else None
    return AttentionCall(
        k, v, scale, scale, calibration,
        0.1, options.get("causal", True), options.get("window"), options.get("right"), options.get("softcap", 0.0),
        heads if options.get("sinks") else None, heads if options.get("alibi") else None, options.get("split_tokens"),
        q, ints["table"], None, ints["lens"], starts, g["q_len"], g["n"],
        tree, torch.ones(B, dtype=torch.bool) if options.get("some") else None, out, lse,
    )  # fmt: skip


def attention(**changes: Any) -> None:
    from pagedkv.kernels.triton.backend import paged_attention

    paged_attention(typical_call(**changes))


QUANTISED = ("fp8_e4m3/tensor", "fp8_e5m2/token_head", "int8/token_head", "k8v4/token_head", "k5v4/calibrated")
INVARIANT = {"B": 3, "q_len": 40, "n": 150, "H": 8, "K": 1, "D": 64, "Dv": 64, "split_tokens": 128}
"""A batch with both tiles of decode, and prefill."""
NEIGHBOURS = {"alone": {"B": 1}, "many": {"B": 40, "n": 9000}, "a long table": {"pages": 8191}, "some": {"some": True}}
"""The batch may have other sequences. "some" are causal: one that is not makes `causal` a tensor."""
EVERYTHING = {"window": 1024, "softcap": 30.0, "sinks": True, "alibi": True, "tree": True}


LAUNCHES: dict[str, Any] = {
    "decode": lambda: attention(),
    "decode, page 64": lambda: attention(S=64),
    "decode, head 64": lambda: attention(D=64, Dv=64),
    "decode, head 80": lambda: attention(D=80, Dv=80),
    "decode, head 256": lambda: attention(D=256, Dv=256),
    "decode, 192/128": lambda: attention(D=192),
    "decode, float16": lambda: attention(dtype="float16"),
    "decode, float32": lambda: attention(dtype="float32"),
    "decode, float32, head 256": lambda: attention(dtype="float32", D=256, Dv=256),
    "decode, float32 over fp8, head 256": lambda: attention(dtype="float32", D=256, Dv=256, kv="fp8_e4m3/token_head"),
    "decode, every option": lambda: attention(q_len=4, **EVERYTHING),
    "decode, split": lambda: attention(split_tokens=1024),
    "decode, window": lambda: attention(window=1024, sinks=True),
    "decode, window on both sides": lambda: attention(q_len=4, causal=False, window=1024, right=3, some=True),
    **{f"decode, {kv}": (lambda kv=kv: attention(kv=kv)) for kv in QUANTISED},
    # Triton makes an argument of value 1 a constant
    "decode, one of everything": lambda: attention(B=1, H=1, K=1, D=64, Dv=64, S=2, n=1, window=1),
    "decode, far bounds": lambda: attention(window=2**40, split_tokens=2**40),
    "decode, mla": lambda: attention(H=128, K=1, D=576, Dv=512, S=64, mla=True),
    "decode, mla fp8": lambda: attention(H=128, K=1, D=576, Dv=512, S=64, mla=True, kv="fp8_e4m3/token_head"),
    "decode, mla, V next to K": lambda: attention(H=128, K=1, D=576, Dv=512, S=64),
    "decode, mla float32": lambda: attention(H=128, K=1, D=576, Dv=512, S=64, mla=True, dtype="float32"),
    "decode, mla float32, V next to K": lambda: attention(H=128, K=1, D=576, Dv=512, S=64, dtype="float32"),
    "decode, other steps": lambda: [attention(B=B, n=n) for B, n in ((9, 1040), (16, 17), (12, 4096), (15, 50000))],
    "drafts": lambda: attention(q_len=8),
    "drafts, every option": lambda: attention(q_len=8, **EVERYTHING),
    "prefill": lambda: attention(q_len=1024),
    "prefill, one chunk": lambda: attention(B=1, q_len=64, n=32768),
    "prefill, head 64": lambda: attention(q_len=1024, D=64, Dv=64),
    "prefill, head 256": lambda: attention(q_len=1024, D=256, Dv=256),
    "prefill, float32": lambda: attention(q_len=1024, dtype="float32"),
    "prefill, float32 over k5v4, head 256": lambda: attention(
        q_len=1024, D=256, Dv=256, dtype="float32", kv="k5v4/calibrated"
    ),
    "prefill, every option": lambda: attention(q_len=1024, **EVERYTHING),
    "prefill, fp8": lambda: attention(q_len=1024, kv="fp8_e4m3/token_head"),
    "decode, k5v4, head 80": lambda: attention(D=80, Dv=80, kv="k5v4/token_head"),
    "decode, k5v4, every option": lambda: attention(q_len=4, kv="k5v4/calibrated", **EVERYTHING),
    "prefill, k5v4": lambda: attention(q_len=1024, kv="k5v4/calibrated"),
    "invariant": lambda: attention(**INVARIANT),
    "invariant, tree": lambda: attention(**INVARIANT, tree=True),
    **{f"invariant, {name}": (lambda one=one: attention(**INVARIANT | one)) for name, one in NEIGHBOURS.items()},
    "split, every option": lambda: attention(q_len=64, split_tokens=512, **EVERYTHING),
    "split, 32 heads of 128": lambda: attention(q_len=1024, split_tokens=512),
    "split, mla": lambda: attention(q_len=64, H=128, K=1, D=576, Dv=512, S=64, mla=True, split_tokens=512),
    "prefill, mla": lambda: attention(q_len=1024, H=128, K=1, D=576, Dv=512, S=64, mla=True),
    "prefill, mla, V next to K": lambda: attention(B=1, q_len=1024, H=128, K=1, D=576, Dv=512, S=64),
}  # fmt: skip


def write(kv: str = "", rope: bool = False) -> None:
    import torch

    from pagedkv.kernels.args import WriteCall
    from pagedkv.kernels.triton.backend import write_kv

    call = typical_call(kv=kv)
    new = torch.empty(256, call.k.shape[2], 128, dtype=torch.bfloat16)
    ints, table = torch.zeros(256, dtype=torch.int64), torch.zeros(4096, 64) if rope else None
    write_kv(WriteCall(*call[:5], table, table, False, new, new, ints, ints))


def gather(kv: str = "") -> None:
    import torch

    from pagedkv.kernels.args import GatherCall, GatherSource
    from pagedkv.kernels.triton.backend import gather_kv

    call = typical_call(kv=kv)
    source = GatherSource(*call[:5], call.block_table, call.rows, call.seq_lens, torch.zeros_like(call.seq_lens))
    out = torch.empty(4096, call.k.shape[2], 128, dtype=torch.bfloat16)
    gather_kv(GatherCall(source, source.starts(), out, out.clone()))


def merge() -> None:
    import torch

    from pagedkv.kernels.triton.backend import merge_states

    out, lse = torch.empty(64, 32, 128, dtype=torch.bfloat16), torch.empty(64, 32)
    merge_states(out, lse, out.clone(), lse.clone())


def fused(num_states: int) -> None:
    """Both ends of the backend `library`: a prompt of 8192 tokens, or a chunk of 2048 behind 30720."""
    import torch

    from pagedkv.kernels.triton.backend import present, starts_of, store_states

    call = typical_call(B=1, q_len=8192 // num_states**2, n=8192 * num_states**2)
    T, H, D = call.q.shape
    _, (lens, _, doubtful) = present(call, 0)
    starts_of(lens)
    # heads outermost in the LSEs, as libraries have them
    states = [(torch.empty(1, T, H, D, dtype=call.q.dtype), torch.empty(1, H, T).transpose(1, 2))] * num_states
    store_states(call, states, lens, doubtful)


def copy() -> None:
    import torch

    from pagedkv.kernels.triton.backend import copy_frames

    # a frame of more runs than the second dim of a grid can count
    copy_frames(torch.empty(2, 1 << 30, dtype=torch.uint8), torch.zeros(1, 2, dtype=torch.int32))


def ceiling() -> None:
    import torch

    from pagedkv.bench.gpu.ceiling import read

    read(torch.empty(1 << 20, dtype=torch.int64))


LAUNCHES |= {
    "write": write,
    "write, rotated": lambda: write(rope=True),
    **{f"write, {kv}": (lambda kv=kv: write(kv)) for kv in QUANTISED},
    "merge": merge,
    "library, one state": lambda: fused(1),
    "library, two states": lambda: fused(2),
    "gather": gather,
    **{f"gather, {kv}": (lambda kv=kv: gather(kv)) for kv in QUANTISED},
    "copy": copy,
    "ceiling": ceiling,
}


class NoGpu:
    """A stand-in for Triton's driver: it answers the questions of the compiler for a GPU that this machine lacks."""

    def __init__(self, arch: str) -> None:
        from triton.backends.compiler import GPUTarget

        self.arch = arch
        self.target = GPUTarget("cuda", int(arch[3:]), 32) if arch.startswith("sm_") else GPUTarget("hip", arch, 64)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> str:
        """Return a key of Triton's caches of compiled kernels."""
        return self.arch

    def get_current_stream(self, device: str) -> int:
        return 0


def compiled_launches(name: str, arch: str) -> list[tuple[str, Any]]:
    """Return (kernel, compiled kernel) for each launch that the host code of `name` makes on `arch`; nothing runs."""
    import triton
    from triton.runtime import driver

    from pagedkv.kernels.triton import tuning

    launches: list[tuple[str, Any]] = []
    launch = triton.JITFunction.run

    def compiled_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        assert len(grid) <= 3
        for size, limit in zip(grid, (2**31, 2**16, 2**16), strict=False):
            assert isinstance(size, int), grid
            assert 0 < size < limit, grid
        launches.append((kernel.__name__, launch(kernel, *args, grid=grid, warmup=True, **kwargs)))

    driver.set_active(NoGpu(arch))
    tuning.target = lambda device: tuning.Target(arch, PROCESSORS[arch])  # type: ignore[assignment]
    for module in [m for key, m in sys.modules.items() if key.startswith("pagedkv.kernels.triton.")]:
        if hasattr(module, "target"):
            module.target = tuning.target
    triton.JITFunction.run = compiled_only
    try:
        LAUNCHES[name]()
    finally:
        triton.JITFunction.run = launch
    return launches


def report(name: str, arch: str) -> list[dict[str, Any]]:
    """Return one dict for each launch."""
    found = []
    for kernel, compiled in compiled_launches(name, arch):
        asm = compiled.asm
        wide, narrow = products(asm["ttir"])
        about = {"kernel": kernel, "hash": compiled.hash, "shared": compiled.metadata.shared}
        about |= {"loops": asm["ttgir"].count("scf.for"), "products": wide, "narrow": narrow}
        about |= {"arithmetic": arithmetic(asm["ttgir"])}
        about |= nvidia(asm["cubin"]) if arch.startswith("sm_") else amd(asm["amdgcn"])
        found.append(about)
    return found


FLOATS = r"arith\.(?:add|sub|mul|div|neg|cmp|trunc|ext|max\w*|min\w*)f\b|math\.|tt\.(?:dot|fp_to_fp)|warp_group_dot "


def arithmetic(ttgir: str) -> list[str]:
    """Return the operations on float32 tensors in order, sums too, each with the layouts of its operands and result."""
    layouts = dict(re.findall(r"^(#\w+) = (#.*)$", ttgir, re.M))
    found, opened = [], ""
    for line in (text.split(" loc(")[0].strip() for text in ttgir.splitlines()):
        operation = re.search(rf'"(tt\.reduce)"|({FLOATS})', line)
        if operation and operation[1]:
            opened = "tt.reduce" + line.partition("<{")[2].partition("}")[0]
        closes = line.startswith("}) : (tensor") and opened
        if not (closes or (operation and operation[2])):
            continue
        types = line.rpartition(" : ")[2] if operation else line
        if "f32" in types:
            types = re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), types)
            found.append(f"{opened if closes else operation[2]} {types}")  # type: ignore[index]
    return found


MATRIX = ("HMMA", "HGMMA", "UTCHMMA", "UTCMMA", "QGMMA", "OMMA")
"""Instructions of tensor cores."""


def nvidia(cubin: bytes) -> dict[str, Any]:
    """Read from the SASS: registers, spill instructions in the main loops, and counts of other instructions."""
    import triton

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, sass = (
            subprocess.run([tools / "cuobjdump", flag, file.name], check=True, stdout=subprocess.PIPE, text=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    line = r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][\w.]+)(.*)"
    lines = [(int(at, 16), op, rest) for at, op, rest in re.findall(line, sass, re.M)]
    operations = [op for _, op, _ in lines]
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),  # type: ignore[index]
        "spills": sum(op.startswith(("LDL", "STL")) for body in main_loops(lines) for op in body),
        "compares": sum(op.startswith("ISETP") for body in main_loops(lines) for op in body),
        "slow_conversions": sum(op.startswith(("F2F.", "I2F.")) for body in main_loops(lines) for op in body),
        "wide": sum(
            (op.startswith(("LDGSTS", "LDG")) and ".128" in op) or op.startswith("UBLKCP") for op in operations
        ),
        "async": sum(op.startswith("LDGSTS") for op in operations),
        "narrow_async": sum(op.startswith("LDGSTS") and ".128" not in op for op in operations),
        "mma": sum(op.startswith(MATRIX) for op in operations),
        "floats": dict(collections.Counter(op for op in operations if op.startswith(("FADD", "FMUL", "FFMA", "MUFU")))),
        "cores": sorted({op.partition(".")[0] for op in operations if op.startswith(MATRIX)}),
        "instructions": len(operations),
    }


def main_loops(lines: list[tuple[int, str, str]]) -> list[list[str]]:
    """Return the operations of the loops that count, from address, operation and operands of each line.

    These are the innermost loops; if some multiply matrices, the first of the innermost ones that do. It is the first
    walk of tile.py, perhaps around a loop that reads a mask; the second walk serves values that are not finite.
    A branch to a lower address closes a loop.
    """
    index, loops = {at: i for i, (at, _, _) in enumerate(lines)}, set()
    for i, (at, op, rest) in enumerate(lines):
        target = re.search(r"0x([0-9a-f]+)", rest)
        if op.startswith("BRA") and target and int(target[1], 16) < at:
            loops.add((index[int(target[1], 16)], i + 1))
    products = {(a, b) for a, b in loops if any(op.startswith(MATRIX) for _, op, _ in lines[a:b])}
    loops = products or loops
    inner = sorted(a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops))
    return [[op for _, op, _ in lines[first:last]] for first, last in (inner[:1] if products else inner)]


def amd(text: str) -> dict[str, Any]:
    """Read from the assembly and its metadata: registers, spills, and counts of instructions."""
    numbers = {name: int(value) for name, value in re.findall(r"\.(\w+_count|\w+_size):\s+(\d+)", text)}
    return {
        "registers": numbers["vgpr_count"],
        "spills": numbers["vgpr_spill_count"],  # scalar registers spill into lanes of vector ones, not into memory
        "wide": len(re.findall(r"(?:global|buffer)_load_dwordx4", text)),
        "mma": len(re.findall(r"v_mfma_f32", text)),
        "instructions": len(re.findall(r"^\t[a-z]\w+", text, re.M)),
    }


def reported(jobs: list[tuple[str, str]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Compile the jobs in another process, which has no interpreter; return the reports of each job."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env["TRITON_DEFAULT_FP_FUSION"] = "1"
    command = [sys.executable, "-m", "tests.kernels.triton.compiled"]
    run = subprocess.run(command, cwd=ROOT, env=env, input=json.dumps(jobs), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return {(name, arch): launches for name, arch, launches in map(json.loads, run.stdout.splitlines())}


def main() -> None:
    assert os.environ.get("TRITON_INTERPRET") != "1", "unset TRITON_INTERPRET: this process compiles"
    from pagedkv.kernels.triton import tuning

    by_rule = tuning._by_rule
    for name, arch, *tried in json.load(sys.stdin):
        tuning._by_rule = lambda *size, tried=tried: replace(by_rule(*size), **(tried[0] if tried else {}))
        if tried:
            tuning._table = dict  # an empty table, so that no entry overrules the tuning to try
        tuning.tuning.cache_clear()
        print(json.dumps([name, arch, report(name, arch), *tried]), flush=True)


if __name__ == "__main__":
    main()
