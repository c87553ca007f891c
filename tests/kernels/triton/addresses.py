"""How wide the arithmetic of addresses is in the IR that Triton's front end makes of a kernel (TTIR).

    address = pointer + sum of terms        a term is a load, a range, a constant, a quotient, a remainder: or a product

A product of two numbers that nobody knows when the kernel is compiled (a frame and its stride, a token and its stride) may pass 2^31, so it
must be made in 64 bits; widened afterwards, it is lost already. What a 64-bit product is made of is an index, and not looked into. Nothing
is told from names: each version of Triton prints others.
"""

from __future__ import annotations

import re

SUM = {
    "arith.addi",
    "arith.subi",
    "arith.extsi",
    "arith.select",
    "tt.splat",
    "tt.broadcast",
    "tt.expand_dims",
    "tt.addptr",
    "tt.unsplat",
}
"""Operations whose operands are terms, if they are."""


def products(ttir: str) -> tuple[int, list[str]]:
    """Of the products that reach an address: how many are of 64 bits, and the lines of those that are narrower."""
    made: dict[str, tuple[str, list[str], str]] = {}
    wide: set[str] = set()
    narrow: dict[str, None] = {}

    def look(name: str) -> None:
        operation, operands, line = made.get(name, ("", [], ""))
        if operation in SUM:
            for operand in operands:
                look(operand)
        elif operation == "arith.muli" and "i64" in line.rpartition(":")[2]:
            wide.add(line)
        elif operation == "arith.muli" and not any(
            made.get(operand, ("",))[0] == "arith.constant" for operand in operands
        ):
            narrow[line] = None
        elif operation == "arith.muli":
            for operand in operands:
                look(operand)

    for line in (
        text.split(" loc(")[0].strip() for text in ttir.splitlines()
    ):  # names are reused, so what is known is what came before
        for carried, first in re.findall(
            r"(%[\w.]+) = (%[\w.]+)", line.partition("iter_args")[2]
        ):  # but not a position, which counts
            made[carried] = ("arith.extsi", [first], line)
        found = re.match(r'(%[\w.]+)(?::\d+)? = "?([\w.]+)"?', line)
        if found:
            made[found[1]] = (found[2], re.findall(r"%[\w.]+", line[found.end() :]), line)
            if found[2] == "tt.addptr":
                look(found[1])
    return len(wide), list(narrow)
