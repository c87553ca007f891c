"""`pagedkv bench report`: the page "Speed", from the newest rows of each machine. It measures nothing.

A row counts if its commit was clean and no later one has changed the files that its benchmark measures, comments
included. So each figure of the page is one of today's code. The other rows stay in the files.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Final

from pagedkv.bench.compare import OURS, RATIOS
from pagedkv.bench.record import HERE, Row, axes_of, read, results
from pagedkv.errors import InvalidRequest

KERNELS: Final = ("setup.py", "csrc/cpu", "pagedkv/kernels")
CACHE: Final = ("pagedkv/core", "pagedkv/cache")
MEASURED: Final = {
    "manager": ("pagedkv/core",), "fragmentation": ("pagedkv/core",), "states": ("pagedkv/core",),
    "hints": ("pagedkv/core",), "attention": KERNELS, "bandwidth": KERNELS, "tiers": (*CACHE, "pagedkv/tiers"),
    "varlen": (*KERNELS, *(f"pagedkv/integrations/{name}.py" for name in ("torch_varlen", "flash_attn", "stand_in"))),
    "generate": (*KERNELS, *CACHE, "pagedkv/engine"),
    "transformers": (*KERNELS, *CACHE, "pagedkv/integrations/transformers"),
    "vllm": (*KERNELS, "pagedkv/core", "pagedkv/integrations/vllm"),
}  # fmt: skip
"""benchmark: the files that it measures, besides its own."""
TITLES: Final = {
    "manager": "The memory manager", "attention": "Attention on a CPU", "fragmentation": "Memory that holds tokens",
    "states": "Recurrent states", "hints": "Hints", "bandwidth": "Speed of memory", "tiers": "Tiers",
    "generate": "The engine", "transformers": "transformers", "vllm": "vLLM", "varlen": "torch's varlen_attn",
}  # fmt: skip
HEAD: Final = """# Speed

`pagedkv bench report` wrote this page from `bench/results`. It shows the newest row of each cell, if no later commit
has changed the files that the benchmark measures.

[How we measure](how-we-measure.md) has the rules, and the names of the machines. `of bound` is the share of a limit
that was measured in the same turns, or the ratio to a peer; the pages on each part say which. `disturbed`: other
processes took more than 5 % of too many turns, or memory changed its speed.
"""


def write(path: Path) -> int:
    """Write the page to `path`. Return how many rows it shows. Raises: InvalidRequest without bench/results"""
    folder = results()
    if folder is None:
        raise InvalidRequest("bench report reads bench/results of a checkout, and this is an installed package")
    files = [file for file in sorted(folder.glob("*.jsonl")) if not file.name.startswith("baseline-")]
    rows = newest(row for file in files for row in read(file))
    path.write_text(page(rows), encoding="utf-8")
    return len(rows)


def newest(rows: Iterable[Row]) -> list[Row]:
    """Return the newest current row of each cell and variant of each machine, in the order of their files."""
    found: dict[tuple[str, ...], Row] = {}
    for row in rows:
        if row["bench"] in MEASURED and row["median"] is not None and is_current(row["bench"], row["commit"]):
            key = (row["machine"], row.get("forced_isa", ""), row["bench"], _cell(row), row["variant"])
            if key not in found or found[key]["when"] <= row["when"]:
                found[key] = row
    return list(found.values())


@cache
def is_current(bench: str, commit: str) -> bool:
    """Return whether the files that a benchmark measures are those of a commit. Git knows no "...-dirty"."""
    files = (*MEASURED[bench], f"bench/{bench}", f"bench/{bench}.py")
    words = ["git", "-C", str(HERE.parent), "diff", "--quiet", commit, "--", *files]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def page(rows: Iterable[Row]) -> str:
    """Return the page: a part for each machine, a table for each benchmark, a line for each cell."""
    parts: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        machine = row["machine"] + (f", {row['forced_isa']} alone" if row.get("forced_isa") else "")
        parts.setdefault(machine, {}).setdefault(row["bench"], []).append(row)
    text = [HEAD]
    if not parts:
        text.append("No row is of today's code. `pagedkv bench all` measures it on a clean checkout.\n")
    for machine, benches in parts.items():
        text.append(f"## {machine}\n")
        for bench, some in sorted(benches.items(), key=lambda pair: list(TITLES).index(pair[0])):
            commands = dict.fromkeys(f"| `{row['command']}` | {row['commit']} | {row['when'][:10]} |" for row in some)
            text += [f"### {TITLES[bench]}\n", "| command | commit | date |", "|---|---|---|", *commands, ""]
            text += [*_table(some), ""]
    return "\n".join(text)


def _table(rows: list[Row]) -> list[str]:
    cells: dict[str, list[Row]] = {}
    for row in rows:
        cells.setdefault(_cell(row), []).append(row)
    lines = ["| case | pagedkv | of bound | others |", "|---|---|---|---|"]
    for cell, some in cells.items():
        first = sorted(some, key=lambda row: row["variant"] not in OURS)
        mine = next((row for row in first if row["variant"].startswith(OURS)), None)
        ratio = "" if mine is None else next((f"{mine[name]:.2f}" for name in RATIOS if mine.get(name)), "")
        others = "; ".join(f"{row['variant']} {_figure(row)}" for row in some if row is not mine)
        lines.append(f"| {cell} | {'' if mine is None else _figure(mine)} | {ratio} | {others} |")
    return lines


def _figure(row: Row) -> str:
    return f"{row['median']:,.4g} {row['unit']}{'' if row.get('clean', 1) else ' (disturbed)'}"


def _cell(row: Row) -> str:
    axes = [
        value if isinstance(value, str) else f"{name.replace('_', ' ')} {value}" for name, value in axes_of(row).items()
    ]
    return ", ".join([row["case"], *axes]).replace("|", "/")
