"""The width of address arithmetic in TTIR, the IR that Triton's front end makes of a kernel.

    address = pointer + sum of terms        a term is a load, a range, a constant, a quotient, a remainder or a product

A product of two numbers unknown at compile time (a frame and its stride, a token and its stride) may pass 2^31. So it
must be computed in 64 bits: a 32-bit product has overflowed before it is widened. The operands of a 64-bit product are
indices and are not examined. Names carry no information: each version of Triton prints other names.
"""

from __future__ import annotations

import re

SUM = {
    *("arith.addi", "arith.subi", "arith.extsi", "arith.select"),
    *("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.addptr", "tt.unsplat"),
}
"""Operations on terms: if the result is a term, so are the operands."""


def products(ttir: str) -> tuple[int, list[str]]:
    """Return the number of 64-bit products that reach an address, and the lines of narrower products that do."""
    definitions: dict[str, tuple[str, list[str], str]] = {}
    wide: set[str] = set()
    narrow: dict[str, None] = {}

    def look(name: str) -> None:
        operation, operands, line = definitions.get(name, ("", [], ""))
        if operation in SUM:
            for operand in operands:
                look(operand)
        elif operation == "arith.muli" and "i64" in line.rpartition(":")[2]:
            wide.add(line)
        elif operation == "arith.muli" and not any(
            definitions.get(operand, ("",))[0] == "arith.constant" for operand in operands
        ):
            narrow[line] = None
        elif operation == "arith.muli":
            for operand in operands:
                look(operand)

    # TTIR reuses names: at an address, the definition of a name is the latest one above
    for line in (text.split(" loc(")[0].strip() for text in ttir.splitlines()):
        # a value carried around a loop is a term if its first value is; a loop's counter is not in iter_args
        for carried, first in re.findall(r"(%[\w.]+) = (%[\w.]+)", line.partition("iter_args")[2]):
            definitions[carried] = ("arith.extsi", [first], line)
        found = re.match(r'(%[\w.]+)(?::\d+)? = "?([\w.]+)"?', line)
        if found:
            definitions[found[1]] = (found[2], re.findall(r"%[\w.]+", line[found.end() :]), line)
            if found[2] == "tt.addptr":
                look(found[1])
    return len(wide), list(narrow)
