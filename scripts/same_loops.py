"""Compare the innermost loops that multiply vectors in two object files, by their sorted mnemonics.

    python scripts/same_loops.py OLD.o NEW.o

Prints the loops that only one file has; the exit status is 1 if there are any. The three forms of a fused product count
as one; moves and the arithmetic of addresses are left out: the compiler chooses them by the registers that are free.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter

PRODUCT, KEPT = re.compile(r"vfn?madd|vpdp|vdpbf16|vpmadd"), re.compile(r"v(?!mov|zero)|prefetch")
Loop = tuple[tuple[str, int], ...]  # mnemonics, sorted, and the number of each


def loops(path: str) -> Counter[Loop]:
    """Return how often the object file has each loop."""
    found: Counter[Loop] = Counter()
    text = subprocess.run(["objdump", "-d", "--no-show-raw-insn", path], check=True, capture_output=True, text=True)
    for function in text.stdout.split("\n\n"):
        code = [(int(a, 16), name, to) for a, name, to in re.findall(r"^ +(\w+):\t(\S+) *(\w*)", function, re.M)]
        back = [(int(to, 16), at) for at, name, to in code if name[0] == "j" and to and int(to, 16) <= at]
        for first, last in back:
            names = [re.sub(r"(?<=add)\d{3}", "", name) for at, name, _ in code if first <= at <= last]
            is_inner = not any((a, b) != (first, last) and first <= a and b <= last for a, b in back)
            if is_inner and any(map(PRODUCT.match, names)):
                found[tuple(sorted(Counter(filter(KEPT.match, names)).items()))] += 1
    return found


if __name__ == "__main__":
    old, new = map(loops, sys.argv[1:3])
    for sign, only in (("-", old - new), ("+", new - old)):
        for loop, times in only.items():
            print(sign, times, "x", " ".join(f"{number} {name}" for name, number in loop))
    sys.exit(f"{(old & new).total()} of {old.total()} loops are the same" if old != new else 0)
