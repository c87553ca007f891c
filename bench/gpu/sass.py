"""SASS, the machine code of NVIDIA GPUs, as text of nvdisasm: the instructions of one tile in the loop over the keys,
and the cycles that they take. `python -m pagedkv.bench.gpu.sass` counts the decode kernels of the backend `cuda`.

    entry         the shortest way from the first instruction to the first copy
    steady tile   the shortest way through the loop, from its first instruction back to it, that issues all products
                  and all copies of a tile: no mask, no soft cap, every key present, no maximum that moved
    cycles        of one scheduler of a Hopper SM, for a tile of one of the warps that share it; memory costs no time

A loop is counted as often as the way goes round it, so unrolling does not change the count. Nothing here needs a GPU.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from pagedkv.errors import InvalidRequest
from pagedkv.kernels.cuda import compiler
from pagedkv.kernels.cuda.specialisation import AttentionSpecialisation, KeyLayout, RowClass, specialise
from pagedkv.spec import ELEMENTS, NUMBERS

_INSTRUCTION: Final = re.compile(r"\s+/\*([0-9a-f]{4,6})\*/\s+(.*);")
_LABEL: Final = re.compile(r"(\.L_x_\d+):")
_TARGET: Final = re.compile(r"`\((\.L_x_\d+)\)")
_PREDICATE: Final = re.compile(r"@!?U?P[\dT]+\s+")
ENDS: Final = ("EXIT", "RET", "BREAK")
PRODUCT, COPY, LOOK_UP = "HMMA", "LDGSTS", "LDG.E"
"""Prefixes of names: a product of the tensor cores, an asynchronous copy, a load of 32 bits from the page table."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: its text without the predicate, whether it has one, and the instruction it may jump to."""

    text: str
    is_predicated: bool
    target: int | None

    @property
    def name(self) -> str:
        """The name with its suffixes, such as HMMA.16816.F32.BF16."""
        return self.text.split()[0]

    @property
    def kind(self) -> str:
        """The name without suffixes."""
        return self.name.partition(".")[0]

    def is_a(self, name: str) -> bool:
        """Return whether this is `name`, with any suffixes but those of 8 or 16 bits."""
        return self.name == name or (self.name.startswith(f"{name}.") and not re.search(r"\.U(8|16)\b", self.name))


def disassembled(cubin: bytes) -> str:
    """Return nvdisasm's text of a cubin. Raises: InvalidRequest if there is no nvdisasm."""
    found = [*Path(sys.prefix).glob("lib/python*/site-packages/nvidia/cu*/bin/nvdisasm")]
    tool = str(found[0]) if found else shutil.which("nvdisasm")
    if tool is None:
        raise InvalidRequest("there is no nvdisasm here: pip install nvidia-cuda-nvdisasm")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        return subprocess.run([tool, "-c", str(file)], check=True, stdout=subprocess.PIPE, text=True).stdout


def parsed(text: str) -> list[Instruction]:
    """Return the instructions of the first function in nvdisasm's text."""
    lines: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if found := _INSTRUCTION.match(line):
            lines.append(found[2].strip())
        elif found := _LABEL.match(line):
            labels[found[1]] = len(lines)
    code = []
    for line in lines:
        body = _PREDICATE.sub("", line, count=1) if line.startswith("@") else line
        jump = _TARGET.search(body) if body.startswith("BRA") else None
        code.append(Instruction(body, body is not line or ", " in body.split("`")[0], jump and labels.get(jump[1])))
    return code


def steady_tile(code: list[Instruction], needed: Mapping[str, int]) -> list[Instruction]:
    """Return the instructions of the steady tile: the shortest cycle that issues exactly the `needed` instructions.

    needed: how many of each name (`PRODUCT`, `COPY`, `LOOK_UP`)
    Raises: InvalidRequest if no loop issues that many.
    """
    heads = sorted({i.target for at, i in enumerate(code) if i.target is not None and i.target <= at})
    begins = _begins(code)
    blocks = [BasicBlock(code, begin, end, tuple(needed)) for begin, end in itertools.pairwise([*begins, len(code)])]
    ways = [way for head in heads if (way := _shortest(dict(zip(begins, blocks, strict=True)), head, needed))]
    if not ways:
        raise InvalidRequest(f"no loop of this code has a way with exactly {dict(needed)}")
    return [code[at] for at in min(ways, key=len)]


def bytes_in_flight(way: list[Instruction]) -> int:
    """Return the bytes that a warp has under way while it computes a tile: the copies of a tile, times the groups that
    its wait lets pass and the one that follows the wait.

    Raises: InvalidRequest if the tile does not wait for copies.
    """
    waits = [int(found[1], 0) for i in way if (found := re.match(r"DEPBAR\.LE SB0, (\w+)", i.text))]
    if not waits:
        raise InvalidRequest("this tile waits for no copies")
    widths = [16 if ".128" in i.name else 8 if ".64" in i.name else 4 for i in way if i.is_a(COPY)]
    return 32 * sum(widths) * (min(waits) + 1)


def entry(code: list[Instruction]) -> list[Instruction]:
    """Return the shortest way from the first instruction to the first copy. Raises: InvalidRequest if there is none."""
    before, waiting = {0: -1}, deque([0])
    while waiting:
        at = waiting.popleft()
        if code[at].is_a(COPY):
            way = []
            while at >= 0:
                way.append(code[at])
                at = before[at]
            return way[::-1]
        for to in _after(code, at):
            if to not in before:
                before[to] = at
                waiting.append(to)
    raise InvalidRequest("this code has no copy")


class BasicBlock:
    """Instructions in a row, with no jump into them and none out of them but by the last.

    places: the instructions, by number. next: the places that may follow. counts: how often each needed name occurs.
    """

    def __init__(self, code: list[Instruction], begin: int, end: int, needed: tuple[str, ...]) -> None:
        self.places, self.next = range(begin, end), _after(code, end - 1)
        self.counts = tuple(sum(code[at].is_a(name) for at in self.places) for name in needed)


def _shortest(blocks: dict[int, BasicBlock], head: int, needed: Mapping[str, int]) -> list[int]:
    """Return the shortest cycle from `head` as the places of its instructions; [] for none.

    A node is (where a block begins, how many of each needed name came before), so the search goes round an inner loop
    as often as it must.
    """
    last = max(at for at, block in blocks.items() if head in block.next and at >= head)
    most = tuple(needed.values())
    inside = [block.counts for at, block in blocks.items() if head <= at <= last]
    if any(want and not any(some) for want, some in zip(most, zip(*inside, strict=True), strict=True)):
        return []
    start, end = (head, *(0 for _ in needed)), (-1, *most)
    costs: dict[tuple[int, ...], int] = {start: 0}
    before: dict[tuple[int, ...], tuple[int, ...]] = {}
    waiting = [(0, start)]
    while waiting:
        cost, node = heapq.heappop(waiting)
        if node == end:
            way = []
            while node != start:
                node = before[node]
                way.append(blocks[node[0]].places)
            return [place for places in reversed(way) for place in places]
        at, *counts = node
        block = blocks[at]
        counts = [count + more for count, more in zip(counts, block.counts, strict=True)]
        if any(n > limit for n, limit in zip(counts, most, strict=True)):
            continue
        cost += len(block.places)
        for to in block.next:
            following = end if to == head and tuple(counts) == most else (to, *counts)
            if (following == end or head < to <= last) and cost < costs.get(following, cost + 1):
                costs[following], before[following] = cost, node
                heapq.heappush(waiting, (cost, following))
    return []


def _begins(code: list[Instruction]) -> list[int]:
    """Return the places at which blocks begin: the first, targets of jumps, and those after a jump or an end."""
    after = {at + 1 for at, i in enumerate(code) if i.target is not None or i.kind in ENDS}
    begins = {0, *(i.target for i in code if i.target is not None), *after}
    return sorted(at for at in begins if at < len(code))


def _after(code: list[Instruction], at: int) -> list[int]:
    """Return the places that may follow an instruction."""
    i = code[at]
    if i.kind in ENDS and not i.is_predicated:
        return []
    if i.target is None or i.name.startswith("BRA.DIV"):
        return [at + 1]
    return [i.target, *([at + 1] if i.is_predicated else [])]


# The pipes of a scheduler. It issues at most one instruction a cycle; a pipe with fewer than 32 lanes is taken for more
# than one. Lanes: the CUDA C++ programming guide, compute capability 9.0. Latencies: published microbenchmarks.

_ALU: Final = """IADD3 LOP3 ISETP SHF SEL VIADD FMNMX FSETP FSEL LEA IABS PRMT PLOP3 VIMNMX HSET2 HSETP2 HMNMX2 I2FP
F2FP VOTE VOTEU LOP SHL SHR BMSK SGXT FLO POPC IMNMX VABSDIFF P2R R2P IADD IADD32I""".split()
_FMA: Final = "FADD FMUL FFMA HADD2 HMUL2 HFMA2 FADD32I FMUL32I FFMA32I HFMA2_MMA".split()
_XU: Final = "MUFU I2F F2I F2F FRND".split()
_LSU: Final = "LDS LDSM STS STSM LDG STG LD ST LDGSTS SHFL LDL STL ATOM ATOMG ATOMS RED MEMBAR CCTL MOVM".split()
_NO_RESULT: Final = "STS STSM STG ST STL LDGSTS BRA BSSY BSYNC WARPSYNC NOP DEPBAR LDGDEPBAR RED BAR EXIT".split()
_TWO_RESULTS: Final = ("ISETP", "FSETP", "PLOP3", "SHFL", "VOTE", "HSETP2")
_REGISTER: Final = re.compile(r"\b(U?R\d+|U?P\d+)\b")
_BYTES: Final = {"128": 16, "64": 8}

LATENCY: Final = {
    "HMMA": 33, "LDSM": 30, "LDS": 24, "SHFL": 24, "MUFU": 22, "I2F": 20, "F2I": 20, "F2F": 20, "LDC": 30, "ULDC": 14,
    "S2R": 22, "LDG": 1, "VOTE": 12, "R2UR": 12, "POPC": 16, "FLO": 16, "LDL": 30, "MOVM": 30,
}  # fmt: skip
"""Cycles until a result may be used. A load from the page table counts as landed: it was asked for a tile ahead."""

USUAL_LATENCY: Final = 5
STALL: Final = {"BRA": 6, "BSYNC": 6, "BSSY": 2, "WARPSYNC": 2, "BAR": 20}
"""Cycles until the next instruction of the same warp may issue, where it is more than one."""

TILES, SKIPPED = 6, 2
"""Tiles that are run for each warp. The first ones fill the pipes and do not count."""


class Needs(NamedTuple):
    """The needs of one instruction.

    pipe, cycles:  "" for no pipe: it takes only its issue slot.      latency: cycles until its results may be used.
    stall:         cycles until the warp's next instruction.          reads, writes: registers.
    """

    pipe: str
    cycles: int
    latency: int
    stall: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def needs_of(text: str) -> Needs:
    """Return the needs of an instruction, given without its predicate."""
    name, _, rest = text.partition(" ")
    kind, *suffixes = name.split(".")
    reads, writes = _registers(kind, suffixes, rest)
    return Needs(*_pipe(kind, suffixes), LATENCY.get(kind, USUAL_LATENCY), STALL.get(kind, 1), reads, writes)


def _pipe(kind: str, suffixes: list[str]) -> tuple[str, int]:
    if kind == "HMMA":  # 512 products a cycle; mma.sync runs at two thirds of the rate of wgmma
        return "tensor", 6 if "16816" in suffixes else 3
    if kind in _LSU:  # 8 lanes
        return "lsu", 4 * _passes(kind, suffixes)
    if kind == "IMAD":  # half of the lanes of other products
        return "fma", 1 if suffixes[:1] in (["MOV"], ["SHL"]) else 2
    for names, pipe, cycles in ((_FMA, "fma", 1), (_ALU, "alu", 2), (_XU, "xu", 8)):
        if kind in names:
            return pipe, cycles
    return ("uniform", 2) if kind.startswith("U") or kind in ("R2UR", "S2UR") else ("", 0)


def _passes(kind: str, suffixes: list[str]) -> int:
    """Return how many passes of 128 bytes an access of a whole warp takes."""
    if kind in ("LDSM", "STSM"):
        return int(suffixes[-1]) if suffixes and suffixes[-1] in ("2", "4") else 1
    return 1 if kind == "SHFL" else max((_BYTES.get(suffix, 4) for suffix in suffixes), default=4) // 4


def _registers(kind: str, suffixes: list[str], rest: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the registers that an instruction reads, and those that it writes."""
    operands = rest.split(",")
    has_carry = kind in ("LOP3", "IADD3") and len(operands) > 1 and re.match(r"\s*U?P", operands[1])
    results = 0 if kind in _NO_RESULT else 2 if has_carry or kind in _TWO_RESULTS else 1
    reads: list[str] = []
    writes: list[str] = []
    for place, operand in enumerate(operands):
        for register in _REGISTER.findall(operand):
            (writes if place < results else reads).extend(_run(register, _width(kind, suffixes, place, operand)))
    return tuple(reads), tuple(writes)


def _width(kind: str, suffixes: list[str], place: int, operand: str) -> int:
    """Return how many registers an operand takes."""
    if kind == "HMMA":  # 16816 with float32 sums
        return (4, 4, 2, 4)[place] if place < 4 else 1
    if kind == "LDSM" and place == 0:
        return _passes(kind, suffixes)
    if "WIDE" in suffixes and place in (0, 3):
        return 2
    if place == 0 and kind in ("LDS", "LDG", "LDC", "ULDC", "LD"):
        return 4 if "128" in suffixes else 2 if "64" in suffixes else 1
    return 2 if ".64" in operand else 1


def _run(register: str, width: int) -> list[str]:
    found = re.fullmatch(r"(U?R)(\d+)", register)
    return [f"{found[1]}{int(found[2]) + i}" for i in range(width)] if found else [register]


def pipe_cycles(code: Sequence[str]) -> dict[str, int]:
    """Return the cycles of each pipe that one pass through the code takes; "issue" has one for each instruction."""
    found = Counter(issue=len(code))
    for needs in map(needs_of, code):
        found[needs.pipe] += needs.cycles
    return {pipe: count for pipe, count in found.items() if pipe and count}


def cycles(code: Sequence[str], warps: int) -> float:
    """Return the cycles of a tile of one warp when `warps` warps run `code` on one scheduler, without predicates.

    In each cycle the scheduler issues the next instruction of one warp: of the last one again if it can, else of
    another. A warp can issue if its registers are there, the pipe is free and it has waited for its stall.
    """
    needs = [needs_of(text) for text in code]
    at, may_issue, ended = [0] * warps, [0] * warps, list[int]()
    ready: list[dict[str, int]] = [{} for _ in range(warps)]
    free: dict[str, int] = {}
    last = now = 0
    while len(ended) < TILES * warps:
        for warp in (*range(last, warps), *range(last)):
            i = needs[at[warp]]
            waits_for = (ready[warp].get(register, 0) for register in (*i.reads, *i.writes))
            if may_issue[warp] > now or free.get(i.pipe, 0) > now or any(there > now for there in waits_for):
                continue
            if i.pipe:
                free[i.pipe] = now + i.cycles
            ready[warp].update(dict.fromkeys(i.writes, now + i.latency))
            may_issue[warp], last = now + i.stall, warp
            at[warp] = (at[warp] + 1) % len(needs)
            if at[warp] == 0:
                ended.append(now)
            break
        now += 1
    return (ended[-1] - ended[SKIPPED * warps - 1]) / (TILES - SKIPPED)


def work_of(kernel: AttentionSpecialisation) -> dict[str, int]:
    """Return how many products, copies and look-ups a warp of a decode kernel issues for a tile of keys."""
    dims, runs = (kernel.head_dim, kernel.head_dim_v), kernel.tile // 16
    products = sum(dims) // 16 * kernel.tile // (16 if kernel.keys_as_rows else 8)
    parts = kernel.row_bytes
    if kernel.k_kind == NUMBERS["int5"]:
        parts = (kernel.head_dim // 2, kernel.head_dim // 8, *parts[1:])
    copies = runs * sum(-(-16 * row // kernel.copy // 32) for row in parts)
    return {PRODUCT: products, COPY: copies, LOOK_UP: runs}


def counted(kv: str, arch: str = "sm_90") -> dict[str, Any]:
    """Return the counts of a decode kernel of `cuda`: bfloat16 queries, heads of 128, pages of 16, scales per token.

    Raises: InvalidRequest if there is no compiler or no nvdisasm, or no loop that does the work of a tile.
    """
    keys = KeyLayout(token_scales=int(kv != "bfloat16"), page_runs=2)
    of_k, of_v = ELEMENTS[kv]
    kinds, dims = (NUMBERS["bfloat16"], NUMBERS[of_k], NUMBERS[of_v]), (128, 128)
    kernel = specialise(kinds, dims, RowClass.of(kinds, dims)[0], keys, compiler.ARCHITECTURES[arch])
    cubin, log = compiler.compile_cubin(kernel.name, kernel.macros, arch)
    code = parsed(disassembled(cubin))
    tile = steady_tile(code, work_of(kernel))
    way = [i.text for i in tile]
    warps = max(1, kernel.blocks * kernel.threads // 128)
    wanted = {"registers": r"(\d+) registers", "spilt": r"(\d+) bytes spill stores"}
    used = {name: re.search(pattern, log) for name, pattern in wanted.items()}
    found = {"kv": kv, "keys": kernel.tile, "instructions": len(way), "cycles": round(cycles(way, warps) / warps)}
    found |= {"in flight": 4 * warps * bytes_in_flight(tile), "entry": len(entry(code))}
    return found | {name: int(match[1]) for name, match in used.items() if match} | pipe_cycles(way)


def main() -> None:
    """Print a line for each kind of keys."""
    parser = argparse.ArgumentParser(prog="pagedkv.bench.gpu.sass", description="Count a tile of the decode kernels.")
    parser.add_argument("--arch", default="sm_90", choices=compiler.ARCHITECTURES)
    arch = parser.parse_args().arch
    for kv in ("bfloat16", "fp8_e4m3", "int8", "k8v4", "k5v4"):
        print(", ".join(f"{name} {value}" for name, value in counted(kv, arch).items()), flush=True)


if __name__ == "__main__":
    main()
