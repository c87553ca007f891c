"""The tuning of a kernel per architecture: sizes of tiles, tiles in flight. It is data; a serving step never searches.

tuning.json   {architecture: {"source": origin of the numbers, kernel: {size: {field: value}}}}
size          "B/W": B = bytes of a stored head of K and of V together; W = elements of the wider of the two; both
              rounded up to a power of two
source        "rule": the values of `_by_rule`, not measured; otherwise, the GPU and the date of the measurement

A field or size without an entry follows `_by_rule`, which derives it from shared memory, registers and the latency that
loads in flight must hide. This file launches nothing.
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
"""Bytes of shared memory that one program may use. Other NVIDIA architectures have 99 KiB, other AMD ones 64 KiB."""

INTERPRETER: Final = "interpreter"


@dataclass(frozen=True)
class Tuning:
    """The sizes of one kernel.

    N:        keys of a tile.
    M:        the most rows of a tile.
    stages:   tiles in flight.
    programs: programs of a launch, per processor (decode).
    """

    N: int = 64
    M: int = 64
    num_warps: int = 4
    stages: int = 3
    programs: int = 2


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(Path(__file__).with_name("tuning.json").read_text())
    return table


@dataclass(frozen=True)
class Target:
    """The GPU that kernels are compiled and sized for.

    arch: "sm_90", "gfx942", ...   processors: streaming multiprocessors or compute units.
    """

    arch: str
    processors: int

    @property
    def native_fp8(self) -> bool:
        """Whether a cast from e4m3 is an instruction: on NVIDIA from sm_89. (The e4m3 of gfx942 is another format.)"""
        return self.arch.startswith("sm_") and int(self.arch[3:]) >= 89

    @property
    def float32_products(self) -> str:
        """The tensor cores' way to float32's precision: three TF32 passes on NVIDIA, an instruction on AMD."""
        return "tf32x3" if self.arch.startswith("sm_") else "ieee"

    @property
    def shared(self) -> int:
        """Bytes of shared memory that one program may use."""
        return SHARED_BYTES.get(self.arch, 64 << 10 if self.arch.startswith("gfx") else 99 << 10)


def target(device: torch.device) -> Target:
    """Return the target of a device; without an index, of the current GPU.

    The CPU stands for the interpreter. It has few processors, so that small cases are split, too.
    """
    if device.type != "cuda":
        return Target(INTERPRETER, 6)
    return _gpu(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache(maxsize=64)
def _gpu(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return Target(str(properties.gcnArchName).split(":")[0], properties.multi_processor_count)
    return Target(f"sm_{properties.major}{properties.minor}", properties.multi_processor_count)


def _size_key(head_bytes: int, widest: int) -> str:
    """Return the key of a size in tuning.json."""
    return f"{triton.next_power_of_2(head_bytes)}/{triton.next_power_of_2(widest)}"


@lru_cache(maxsize=1024)
def tuning(kernel: str, on: Target, head_bytes: int, widest: int) -> Tuning:
    """Return the tuning of `kernel`, "decode", "decode_16" or "prefill". "decode_16" is decode with tiles of 16 rows; a
    size that it lacks is tuned as "decode".

    head_bytes: bytes of K and V of one token and kv head, as stored.   widest: elements of the wider of the two.
    """
    general = "decode" if kernel == "decode_16" else kernel
    table, size = _table().get(on.arch, {}), _size_key(head_bytes, widest)
    found = table.get(kernel, {}).get(size) or table.get(general, {}).get(size, {})
    return replace(_by_rule(general, on, head_bytes, widest), **found)


def _by_rule(kernel: str, on: Target, head_bytes: int, widest: int) -> Tuning:
    if on.arch == INTERPRETER:  # small tiles, so that a case with few keys has several
        return Tuning(N=32, M=64 if kernel == "decode" else 32, programs=1)
    amd, decode, wide = on.arch.startswith("gfx"), kernel == "decode", widest > 256
    float32, one_byte = head_bytes > 4 * widest, head_bytes <= 2 * widest
    stages, resident = 2 if amd else 3, 2 if decode and not wide else 1
    if wide:  # an output of 512 columns fills the registers: few rows; MLA takes V from the columns of K in registers
        M, num_warps = 16 if amd or float32 else 32, 4 if amd else 8
    elif float32:  # three TF32 products for each product: few rows; twice the warps in prefill and for wide outputs
        M, num_warps = 32 if widest <= 128 else 16, 4 if amd or (decode and widest <= 128) else 8
    elif decode:
        M, num_warps = 64, 8 if widest > 128 else 4
    else:  # sm_90 and sm_100 multiply from shared memory, so the output has the registers
        M, num_warps = 128 if widest <= 128 or on.arch in ("sm_90", "sm_100") else 64, 8
    if wide and float32:  # these products use no tensor cores and take longer than any load
        stages = 1
    if wide and (amd or one_byte or float32):  # converted keys lie in registers beside the wide output
        N = 16
    else:
        N = 32 if wide or amd or float32 or (not decode and (widest > 128 or on.shared < 128 << 10)) else 64
    # bytes for tiles in flight: without q (prefill) and the fifth that p and scales take
    budget = on.shared * 4 // 5 // resident - (0 if decode else M * widest * (4 if float32 else 2))
    while N > 16 and (stages - 1) * N * head_bytes > budget:
        N //= 2
    if decode and not amd and stages > 1 and stages * N * head_bytes <= budget:
        stages += 1  # latency times bandwidth: an H200 needs at least 30 KB in flight
    while stages > 2 and stages * N * head_bytes > on.shared:  # heads of 576/512 in bfloat16 with separate V
        stages -= 1
    return Tuning(N=N, M=M, num_warps=num_warps, stages=stages, programs=resident)
