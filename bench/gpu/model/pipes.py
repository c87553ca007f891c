"""The pipes of one scheduler of a Hopper SM, and what an instruction asks of them.

A scheduler issues at most one instruction a cycle. A pipe with fewer than 32 lanes is taken for more than a cycle:

    pipe     lanes of a scheduler   cycles of a warp's instruction
    fma      32                     1       FADD FMUL FFMA, and two halves at a time; IMAD has half of the lanes: 2
    alu      16                     2       integers, logic, comparisons, selections, packing to 16 bits
    xu       4                      8       MUFU and conversions between integers and floats
    lsu      8 (32 of the SM)       4       loads, stores, shuffles; 16 bytes for each lane take four times as long
    tensor   512 products           4       HMMA.16816, which runs at two thirds of the rate of wgmma: 6
    uniform  one                    2

Latencies are those commonly measured on Hopper. Sources: the CUDA C++ programming guide (throughput of instructions,
compute capability 9.0) for lanes; published microbenchmarks for latencies. No GPU of ours has confirmed them.
This file knows names of instructions. It knows no kernel.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_ALU: Final = """IADD3 LOP3 ISETP SHF SEL VIADD FMNMX FSETP FSEL LEA IABS PRMT PLOP3 VIMNMX HSET2 HSETP2 HMNMX2 I2FP
F2FP VOTE VOTEU LOP SHL SHR BMSK SGXT FLO POPC IMNMX VABSDIFF P2R R2P IADD IADD32I""".split()
_FMA: Final = "FADD FMUL FFMA HADD2 HMUL2 HFMA2 FADD32I FMUL32I FFMA32I HFMA2_MMA".split()
_XU: Final = "MUFU I2F F2I F2F FRND".split()
_LSU: Final = "LDS LDSM STS STSM LDG STG LD ST LDGSTS SHFL LDL STL ATOM ATOMG ATOMS RED MEMBAR CCTL".split()

LATENCY: Final = {
    "HMMA": 33, "LDSM": 30, "LDS": 24, "SHFL": 24, "MUFU": 22, "I2F": 20, "F2I": 20, "F2F": 20, "LDC": 30, "ULDC": 14,
    "S2R": 22, "LDG": 1, "VOTE": 12, "R2UR": 12, "POPC": 16, "FLO": 16, "LDL": 30,
}  # fmt: skip
"""Cycles until a result may be used. A load from the page table counts as landed: it was asked for a tile ahead."""

USUAL_LATENCY: Final = 5
STALL: Final = {"BRA": 6, "BSYNC": 6, "BSSY": 2, "WARPSYNC": 2, "BAR": 20}
"""Cycles until the next instruction of the same warp may issue, where it is more than one."""

PIPES: Final = ("issue", "alu", "fma", "xu", "tensor", "lsu", "uniform")
_BYTES: Final = {"128": 16, "64": 8, "U8": 4, "S8": 4, "U16": 4, "S16": 4}


@dataclass(frozen=True, slots=True)
class Needs:
    """The needs of one instruction.

    pipe, cycles:  "" for no pipe: it takes only its issue slot.
    latency:       cycles until its results may be used.      stall: cycles until the warp's next instruction.
    reads, writes: registers.
    starts, waits: it starts products of a warpgroup, or waits for those of its warp.      meets: it is a barrier.
    """

    pipe: str
    cycles: int
    latency: int
    stall: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    starts: bool = False
    waits: bool = False
    meets: bool = False


def needs_of(text: str) -> Needs:
    """Return the needs of an instruction, given without its predicate."""
    name, _, rest = text.partition(" ")
    kind, *suffixes = name.split(".")
    pipe, cycles = _pipe(kind, suffixes)
    reads, writes = _registers(kind, suffixes, rest)
    is_group = kind == "HGMMA"
    return Needs(
        pipe,
        cycles,
        LATENCY.get(kind, USUAL_LATENCY),
        STALL.get(kind, 1),
        () if is_group else reads,
        () if is_group else writes,
        starts=is_group,
        waits=kind == "WARPGROUP" and "DEPBAR" in suffixes,
        meets=kind == "BAR" and "SYNC" in suffixes,
    )


def _pipe(kind: str, suffixes: list[str]) -> tuple[str, int]:
    if kind == "HMMA":
        return "tensor", 6 if "16816" in suffixes else 3
    if kind == "HGMMA":  # 64 x N x 16: each of the four warps has a quarter on its own scheduler's 512 products a cycle
        return "tensor", int(suffixes[0].split("x")[1]) // 2
    if kind in _LSU:
        return "lsu", 4 * _wide(kind, suffixes)
    if kind == "IMAD":
        return ("fma", 1) if suffixes[:1] in (["MOV"], ["SHL"]) else ("fma", 2)
    for names, pipe, cycles in ((_FMA, "fma", 1), (_ALU, "alu", 2), (_XU, "xu", 8)):
        if kind in names:
            return pipe, cycles
    is_uniform = kind.startswith("U") or kind in ("R2UR", "S2UR")
    return ("uniform", 2) if is_uniform else ("", 0)


def _wide(kind: str, suffixes: list[str]) -> int:
    """Return how many passes of 128 bytes an access of a whole warp takes."""
    if kind in ("LDSM", "STSM"):
        matrices = suffixes[-1] if suffixes else "1"
        return int(matrices) if matrices in ("2", "4") else 1
    return max((_BYTES.get(suffix, 4) for suffix in suffixes), default=4) // 4 if kind != "SHFL" else 1


_REGISTER: Final = re.compile(r"\b(U?R\d+|U?P\d+)\b")
_NO_RESULT: Final = "STS STSM STG ST STL LDGSTS BRA BSSY BSYNC WARPSYNC NOP DEPBAR LDGDEPBAR RED BAR EXIT".split()
_TWO_RESULTS: Final = ("ISETP", "FSETP", "PLOP3", "SHFL", "VOTE", "HSETP2")
_HMMA_WIDTH: Final = {0: 4, 1: 4, 2: 2, 3: 4}
"""Registers of each operand of HMMA.16816 with float32 sums."""


def _registers(kind: str, suffixes: list[str], rest: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the registers that an instruction reads, and those that it writes."""
    operands = rest.split(",")
    has_carry = kind in ("LOP3", "IADD3") and len(operands) > 1 and re.match(r"\s*U?P", operands[1])
    results = 0 if kind in _NO_RESULT else 2 if has_carry or kind in _TWO_RESULTS else 1
    reads: list[str] = []
    writes: list[str] = []
    for place, operand in enumerate(operands):
        for register in _REGISTER.findall(operand):
            width = _width(kind, suffixes, place, operand)
            (writes if place < results else reads).extend(_run(register, width))
    return tuple(reads), tuple(writes)


def _width(kind: str, suffixes: list[str], place: int, operand: str) -> int:
    if kind == "HMMA":
        return _HMMA_WIDTH.get(place, 1)
    if kind == "LDSM" and place == 0:
        return _wide(kind, suffixes)
    if "WIDE" in suffixes and place in (0, 3):
        return 2
    if place == 0 and kind in ("LDS", "LDG", "LDC", "ULDC", "LD"):
        return 4 if "128" in suffixes else 2 if "64" in suffixes else 1
    return 2 if ".64" in operand else 1


def _run(register: str, width: int) -> list[str]:
    found = re.fullmatch(r"(U?R)(\d+)", register)
    return [f"{found[1]}{int(found[2]) + i}" for i in range(width)] if found else [register]
