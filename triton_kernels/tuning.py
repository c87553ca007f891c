"""How large tiles are and how many are in flight, per architecture: data (tuning.json), never found out in a serving step.

tuning.json: {architecture: {"source": where the numbers come from, kernel: {size: {field: value}}}}; a size is "B/W": the bytes of a stored
head of K and of V together, rounded up to a power of two, and the elements of the wider of the two, likewise. `python -m
pagedkv.bench.gpu.tune` fills it on a GPU. What an entry does not say, and what has none, follows the rule of `_by_rule`: from shared memory,
registers and the latency that loads in flight must hide. Where the source is "rule", the entries are the rule's: reasoned, not measured.
This file launches nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

import torch
import triton

SHARED_BYTES: Final = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx950": 160 << 10}
"""Shared memory of a processor that one program may use; other NVIDIA ones have 99 KiB, other AMD ones 64."""

INTERPRETER: Final = "interpreter"


@dataclass(frozen=True)
class Tuning:
    """N: keys of a tile.   M: rows of a tile, at most.   stages: tiles in flight.

    programs:   of one launch, per processor (decode).
    one_launch: the last program of a row merges its partials, not a second launch (decode). Never on AMD, whatever a table says: a barrier
                there waits for shared memory only, so a ticket could be seen before the partials of other waves are.
    """

    N: int = 64
    M: int = 64
    num_warps: int = 4
    stages: int = 3
    programs: int = 2
    one_launch: bool = False


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(Path(__file__).with_name("tuning.json").read_text())
    return table


@dataclass(frozen=True)
class Target:
    """What kernels are compiled and sized for: "sm_90", "gfx942", ..., and its streaming multiprocessors or compute units."""

    arch: str
    processors: int

    @property
    def native_fp8(self) -> bool:
        """Whether a cast from e4m3 is an instruction: NVIDIA from sm_89 on. (gfx942 has another e4m3.)"""
        return self.arch.startswith("sm_") and int(self.arch[3:]) >= 89

    @property
    def float32_products(self) -> str:
        """How tensor cores multiply float32 without losing it: NVIDIA's in three passes of TF32, AMD's have an instruction."""
        return "tf32x3" if self.arch.startswith("sm_") else "ieee"

    @property
    def shared(self) -> int:
        """Bytes of shared memory that a program may use."""
        return SHARED_BYTES.get(self.arch, 64 << 10 if self.arch.startswith("gfx") else 99 << 10)


@lru_cache(maxsize=64)
def target(device: torch.device) -> Target:
    """Of a device. Tensors on the CPU are the interpreter's: it gets few processors, so that small cases are cut too."""
    if device.type != "cuda":
        return Target(INTERPRETER, 6)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return Target(str(properties.gcnArchName).split(":")[0], properties.multi_processor_count)
    return Target(f"sm_{properties.major}{properties.minor}", properties.multi_processor_count)


def size_key(head_bytes: int, widest: int) -> str:
    """What tuning.json calls a size."""
    return f"{triton.next_power_of_2(head_bytes)}/{triton.next_power_of_2(widest)}"


@lru_cache(maxsize=1024)
def tuning(kernel: str, on: Target, head_bytes: int, widest: int) -> Tuning:
    """For `kernel`. head_bytes: of K and V of one token and kv head, as stored; widest: elements of the wider of the two."""
    found = _table().get(on.arch, {}).get(kernel, {}).get(size_key(head_bytes, widest), {})
    tuned = replace(_by_rule(kernel, on, head_bytes, widest), **found)
    return replace(tuned, one_launch=tuned.one_launch and not on.arch.startswith("gfx"))


def _by_rule(kernel: str, on: Target, head_bytes: int, widest: int) -> Tuning:
    if on.arch == INTERPRETER:  # small tiles: cases with few keys shall have several
        return Tuning(N=32, M=64 if kernel == "decode" else 32, programs=1)
    amd, decode, wide = on.arch.startswith("gfx"), kernel == "decode", widest > 256
    float32, one_byte = head_bytes > 4 * widest, head_bytes <= 2 * widest
    stages, resident = 2 if amd else 3, 2 if decode and not wide else 1
    if wide:  # an output of 512 columns fills the registers: few rows, and V from the columns of K that are there already (MLA)
        M, num_warps = (
            16 if amd or float32 or head_bytes <= widest else 32,
            4 if amd else 8,
        )  # int4: both nibbles of as many columns
    elif float32:  # three products of TF32 for each: few rows, and twice the warps in prefill and beside wide outputs
        M, num_warps = 32 if widest <= 128 else 16, 4 if amd or (decode and widest <= 128) else 8
    elif decode:
        M, num_warps = 64, 8 if widest > 128 else 4
    else:  # sm_90 and sm_100 multiply from shared memory and leave the registers to the output
        M, num_warps = 128 if widest <= 128 or on.arch in ("sm_90", "sm_100") else 64, 8
    if wide and float32:  # products without tensor cores take longer than any load
        stages = 1
    if wide and (amd or one_byte or float32):  # converted keys lie in registers, beside that output
        N = 16
    else:
        N = 32 if wide or amd or float32 or (not decode and (widest > 128 or on.shared < 128 << 10)) else 64
    budget = on.shared * 4 // 5 // resident - (
        0 if decode else M * widest * (4 if float32 else 2)
    )  # beside q; the rest is for p and scales
    while N > 16 and (stages - 1) * N * head_bytes > budget:
        N //= 2
    if decode and not amd and stages > 1 and stages * N * head_bytes <= budget:
        stages += 1  # latency times bandwidth: an H200 wants 30 KB and more in flight
    while stages > 2 and stages * N * head_bytes > on.shared:  # heads of 576/512 in bfloat16, V beside K
        stages -= 1
    return Tuning(N=N, M=M, num_warps=num_warps, stages=stages, programs=resident)
