"""SASS, the machine code of NVIDIA GPUs, as text of nvdisasm: the instructions of one tile in the loop over the keys.

    entry         the shortest way from the first instruction to the first copy
    steady tile   the shortest way through the loop, from its first instruction back to it, that issues all products
                  and all copies of a tile: no mask, no soft cap, every key present, no maximum that moved

A loop is counted as often as the way goes round it, so unrolling does not change the count. The count needs no GPU.
This file knows SASS; it knows no kernel.
"""

from __future__ import annotations

import heapq
import itertools
import re
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pagedkv.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

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
        """Return whether this is `name`, with any suffixes but that of a byte."""
        return self.name == name or (self.name.startswith(f"{name}.") and ".U8" not in self.name)


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
