"""The steady tile of each kernel, counted in machine code for sm_90: `python -m pagedkv.bench.gpu.model --count`.

It compiles the CUDA kernels by NVRTC and the Triton kernels by Triton, in a checkout and without a GPU, and writes
counts.json. The predictions are made from that file alone. A test counts again and compares.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pagedkv.bench.gpu.model import scheduler
from pagedkv.bench.gpu.model.predict import Count
from pagedkv.errors import InvalidRequest
from pagedkv.spec import BITS, KINDS

if TYPE_CHECKING:
    from pagedkv.kernels.cuda.specialisation import AttentionSpecialisation

FILE: Final = Path(__file__).with_name("counts.json")
ARCH: Final = "sm_90"
KVS: Final = ("bfloat16", "fp8_e4m3", "int8", "int4")
DIM: Final = 128
REGISTERS, SHARED = 65536, 228 << 10
"""The registers and the bytes of shared memory of an SM."""

EXECUTED: Final = 0.45
"""Share of Triton's instructions before the first copy that run."""

LENGTHS: Final = 60
"""Instructions of a round over lengths in the CUDA kernels, which the shortest way to the first copy leaves out."""

LOADS: Final = {"cuda": 3, "triton": 4}
"""Dependent loads before the first key. CUDA, in all layers of a step but the first: share and lengths, page table,
key. Triton: the lengths' places, the lengths, page table, key."""

AT_ONCE: Final = 16
"""Pieces that Triton's merge loads together: triton_kernels/merge.py. CUDA's copies as many as the stages hold."""

MATRIX: Final = ("HMMA", "HGMMA")


@cache
def load() -> tuple[Count, ...]:
    """Return the counts that are kept."""
    return tuple(Count(**row) for row in json.loads(FILE.read_text())["counts"])


def count_of(backend: str, kind: str, kv: str) -> Count | None:
    """Return the kept count of a kernel; None if there is none."""
    return next((c for c in load() if (c.backend, c.kind, c.kv) == (backend, kind, kv)), None)


def save(counts: list[Count]) -> None:
    """Keep counts, one a line."""
    lines = ",\n".join("  " + json.dumps(asdict(count)) for count in counts)
    FILE.write_text(f'{{"arch": "{ARCH}", "counts": [\n{lines}\n]}}\n')


def every() -> Iterator[Count]:
    """Count all kernels. Raises: InvalidRequest if a loop is not found"""
    for kv in KVS:
        yield cuda(kv, "decode")
        yield triton(kv, "decode")
    yield cuda("bfloat16", "prefill")
    yield triton("bfloat16", "prefill")


def cuda_kernel(kv: str, kind: str) -> AttentionSpecialisation:
    """Return the kernel that `cuda` counts."""
    from pagedkv.kernels.cuda import compiler
    from pagedkv.kernels.cuda.specialisation import CLASSES, KeyLayout, specialise

    keys, kinds = KeyLayout(token_scales=int(kv != "bfloat16"), page_runs=2), (KINDS["bfloat16"], KINDS[kv])
    return specialise(kinds, (DIM, DIM), CLASSES[0 if kind == "decode" else -1], keys, compiler.ARCHITECTURES[ARCH])


def pieces_at_once(kernel: AttentionSpecialisation) -> int:
    """Return the pieces that a merge copies together: `AT_ONCE` in csrc/cuda/merge.cuh."""
    return kernel.stages_bytes // (16 * kernel.threads + 8 * kernel.rows)


def cuda(kv: str, kind: str) -> Count:
    """Count a CUDA kernel: bfloat16 queries, heads of 128, pages of 16, scales per token and head."""
    from pagedkv.bench.gpu import sass
    from pagedkv.kernels.cuda import compiler

    kernel = cuda_kernel(kv, kind)
    cubin, log = compiler.compile_cubin(kernel.name, kernel.macros, ARCH)
    code = sass.parsed(sass.disassembled(cubin))
    row_bytes = kernel.tile * kernel.row_bytes(DIM)
    needed = {
        sass.PRODUCT: 2 * (DIM // 16) * (kernel.tile // 8),
        sass.COPY: 2 * row_bytes // kernel.copy // (32 * kernel.warps_m) + kernel.token_scales * (kernel.tile // 16),
        sass.LOOK_UP: -(-kernel.tile // 16),  # pages of 16
    }
    way = [instruction.text for instruction in sass.steady_tile(code, needed)]
    teams = kernel.warps_n
    return _counted(
        way,
        backend="cuda",
        kind=kind,
        kv=kv,
        registers=int(_found(r"Used (\d+) registers", log)),
        spills=int(_found(r"(\d+) bytes spill stores", log)),
        rows=kernel.rows,
        keys=kernel.tile,
        tile_warps=kernel.warps_m,
        warps=kernel.threads // 32,
        ctas=kernel.blocks,
        in_flight=kernel.blocks * teams * (kernel.stages - 1) * 2 * row_bytes,
        entry=len(sass.entry(code)) + LENGTHS,
        at_once=pieces_at_once(kernel),
    )


def triton(kv: str, kind: str, dim: int = DIM, arch: str = ARCH) -> Count:
    """Count a Triton kernel, compiled as tests/kernels/triton/compiled.py does."""
    from pagedkv.bench.gpu import sass
    from pagedkv.kernels.triton import tuning
    from tests.kernels.triton import compiled

    changes = {} if kv == "bfloat16" else {"kv": f"{kv}/token_head"}
    q_len = 1024 if kind == "prefill" else 1
    compiled.LAUNCHES["counted"] = lambda: compiled.attention(q_len=q_len, D=dim, Dv=dim, **changes)
    launches = dict(compiled.compiled_launches("counted", arch))
    kernel = launches[f"{kind}_kernel"]
    code = sass.parsed(sass.disassembled(kernel.asm["cubin"]))
    way = [instruction.text for instruction in main_loop(code)]
    head_bytes = 2 * dim * BITS[kv] // 8
    size = "decode_16" if kind == "decode" else kind
    tuned = tuning.tuning(size, tuning.Target(arch, 132), head_bytes, dim)
    about = compiled.nvidia(kernel.asm["cubin"])
    warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
    fit = min(REGISTERS // (32 * warps * -(-about["registers"] // 8) * 8), SHARED // (shared + 1024))
    ctas = min(fit, tuned.programs) if kind == "decode" else fit
    tile = tuned.N * head_bytes
    return _counted(
        way,
        backend="triton",
        kind=kind,
        kv=kv,
        registers=about["registers"],
        spills=about["spills"],
        rows=tuned.M if kind == "prefill" else 16,
        keys=tuned.N,
        tile_warps=warps,
        warps=warps,
        ctas=ctas,
        in_flight=ctas * max(1, shared // tile - 1) * tile,
        at_once=AT_ONCE,
        entry=round(EXECUTED * next(at for at, instruction in enumerate(code) if instruction.is_a(sass.COPY))),
    )


def main_loop(code: list[Any]) -> list[Any]:
    """Return the steady tile of the first innermost loop that multiplies matrices: that of finite values."""
    from pagedkv.bench.gpu import sass

    loops = [(i.target, at) for at, i in enumerate(code) if i.target is not None and i.target <= at]
    loops = [(first, last) for first, last in loops if any(i.kind in MATRIX for i in code[first : last + 1])]
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    if not inner:
        raise InvalidRequest("no loop of this code multiplies matrices")
    first, last = min(inner)
    kinds = Counter(i.kind for i in code[first : last + 1])
    return sass.steady_tile(code, {name: kinds[name] for name in (*MATRIX, sass.COPY) if kinds[name]})


def _counted(way: list[str], **about: Any) -> Count:
    warps = max(1, about["warps"] * about["ctas"] // 4)
    together = max(1, about["warps"] // 4)
    cycles = round(scheduler.cycles(way, warps, min(together, warps)), 1)
    pipes = scheduler.pipe_cycles(way)
    return Count(instructions=len(way), pipes=pipes, cycles=cycles, loads=LOADS[about["backend"]], **about)


def _found(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if not found:
        raise InvalidRequest(f"the compiler's log has no {pattern!r}: {text[:300]}")
    return found[1]
