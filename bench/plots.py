"""The charts of a benchmark's rows: `--plot FILE.svg` draws those of one run.

A bar is the median of the runs of its cell. Its whisker goes from the least run to the greatest; if there is one run,
from its least turn to its greatest.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any, Final

from pagedkv.bench.chart import LONG, Bar, Chart, bars, short
from pagedkv.bench.compare import LARGER_IS_BETTER
from pagedkv.bench.record import Row, axes_of

SPREAD: Final = "Bar: the median run. Whisker: the least and the greatest run; of one run, its turns."
NAMES: Final = {
    "cpu": "pagedkv", "sdpa": "torch SDPA", "vllm": "vLLM", "vLLM KVCacheManager": "vLLM",
    "nano-vllm BlockManager": "nano-vllm", "SGLang RadixCache": "SGLang",
}  # fmt: skip
"""variant of a row: its name in a chart."""
BOUNDS: Final = ("ceiling", "torch.mm")
"""Variants that are the bound of the others."""
MOVED: Final = "Bytes moved, as a share of what memory moves", "efficiency", "memory"
TITLES: Final[dict[tuple[str, str], tuple[str, str, str]]] = {
    ("attention", "decode"): ("Decode: KV read, as a share of a bare read", "efficiency", "a bare read"),
    ("bandwidth", "ceiling"): ("Speed of memory by access pattern", "median", ""),
    **{("bandwidth", case): MOVED for case in ("decode", "linear", "write_kv", "gather_kv", "copy_frames", "delta")},
    ("fragmentation", "useful"): ("KV memory that holds tokens while requests wait", "median", ""),
    ("fragmentation", "waste"): ("Slots of mapped frames without a token", "median", ""),
    ("fragmentation", "saved"): ("Frames that sharing saves", "median", ""),
    ("generate", "decode"): ("A decode step over the time of reading its bytes", "over_bound", "the read"),
    ("states", "agent"): ("An agent: prompt tokens a request beyond the least", "median", ""),
    ("states", "chat"): ("Chats: prompt tokens a request beyond the least", "median", ""),
    ("hints", "agents"): ("Agents with tools: prompt tokens computed again, a request", "median", ""),
    ("tiers", "store"): ("Pages stored", "median", ""),
    ("tiers", "load"): ("Pages loaded", "median", ""),
}  # fmt: skip
"""(benchmark, case): the title of its chart, the field with its figure, and the name of its bound."""
UNITS: Final = {"over_bound": ("×", 1.0), "efficiency": ("%", 100.0)}
"""Field of a row with a ratio to a bound: its unit in a chart, and the bound in this unit."""


def charts(name: str, rows: Iterable[Row]) -> list[Chart]:
    """Return the charts of a benchmark: one for each title, or case that has peers, or first words of a case."""
    measured = [row for row in rows if row["median"] is not None and row["variant"] not in BOUNDS]
    variants: dict[str, set[str]] = {}
    for row in measured:
        variants.setdefault(row["case"], set()).add(row["variant"])
    found: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in measured:
        case = row["case"] if len(variants[row["case"]]) > 1 else row["case"].partition(", ")[0]
        title, field, bound = TITLES.get((name, row["case"]), (case, "median", ""))
        unit = UNITS[field][0] if field in UNITS else row["unit"].replace("us", "µs").partition(" of ")[0]
        found.setdefault((title[:1].upper() + title[1:], field, bound, unit), []).append(row)
    return [_chart(*about, some) for about, some in found.items()]


def _chart(title: str, field: str, bound: str, unit: str, rows: Sequence[Row]) -> Chart:
    """Return a chart of rows with one unit. The axes that differ are headings, or a part of the name of a lone bar.

    If rows have an axis `limit`, each variant is a heading with a bar for each limit.
    """
    words, cells = _namer(rows), dict[tuple[str, str], list[Row]]()
    for row in rows:
        cell = words(row), NAMES.get(row["variant"], row["variant"])
        cells.setdefault(cell[::-1] if "limit" in row else cell, []).append(row)
    heads = [group for group, _ in cells]
    is_one = len({name for _, name in cells}) == 1
    given = []
    for (group, name), runs in sorted(cells.items(), key=lambda cell: heads.index(cell[0][0])):
        label = group if is_one and group else f"{group}, {name}".removeprefix(", ")
        is_lone = heads.count(group) == 1 and len(label) <= LONG + 8
        kind = _kind(group if "limit" in runs[0] else name)
        given.append(_bar(label if is_lone else name, "" if is_lone else group, kind, runs, field, unit))
    is_more = rows[0]["unit"].endswith(LARGER_IS_BETTER) if field == "median" else field == "efficiency"
    mark = (bound, UNITS[field][1]) if bound else None
    return bars(f"{title}: {'more' if is_more else 'less'} is better", given, unit=unit, bound=mark)


def _bar(name: str, group: str, kind: str, runs: Sequence[Row], field: str, unit: str) -> Bar:
    scale, last, figures = UNITS.get(field, ("", 1.0))[1], runs[-1], [run[field] for run in runs]
    value = statistics.median(figures)
    if len(runs) == 1:
        figures += [turn for turn in last.get("turns" if field == "median" else "ratios") or () if turn is not None]
    low, high = scale * min(figures), scale * max(figures)
    note = ", disturbed" if last.get("clean") == 0 else ""
    note = f" ({short(low)}–{short(high)})" if len(runs) > 1 and low < high else note
    label = f"{short(scale * value)} {unit}{note}"
    return Bar(name, scale * value, low, high, label, kind, group, last.get("published"))


def _kind(name: str) -> str:
    if name.partition(",")[0] not in ("pagedkv", "pages", "pages int8"):
        return "also" if name in ("numba", "reference") else "peer"
    return "also" if name.endswith(("int8", "numba", "reference", "F.linear", "window", "LRU")) else "ours"


def _namer(rows: Sequence[Row]) -> Callable[[Row], str]:
    """Return a function that names a row by its case and axes, as far as these differ among the rows of a chart."""
    values: dict[tuple[str, str], set[Any]] = {}
    for row in rows:
        for name, value in axes_of(row).items():
            values.setdefault((row["case"], name), set()).add(value)
    cases = {row["case"] for row in rows}
    firsts = cases if len(cases) == 1 else {case.partition(", ")[0] for case in cases}
    start = firsts.pop() if len(firsts) == 1 else ""
    shapes = [row["shape"].replace(" thr", "\u00a0thr").split(" ") for row in rows if "shape" in row]
    first = sum(1 for _ in takewhile(lambda some: len({*some}) == 1, zip(*shapes, strict=False)))
    last = sum(1 for _ in takewhile(lambda some: len({*some}) == 1, zip(*(s[::-1] for s in shapes), strict=False)))

    def words(row: Row) -> str:
        axes, parts = axes_of(row), [row["case"].removeprefix(start).strip(", ").partition(":")[0]]
        differ = {name: value for name, value in axes.items() if len(values[row["case"], name]) > 1}
        if {"batch", "context"} <= set(axes) and {"batch", "context"} & set(differ):
            parts.append(f"{axes['batch']} × {axes['context']:,} tokens")
        for name, value in differ.items():
            if name == "shape":
                parts.append(" ".join(value.replace(" thr", "\u00a0thr").split(" ")[first : -last or None]))
            elif name in ("batch", "context") and "batch" in axes:
                continue
            elif isinstance(value, str):
                parts.append(f"KV in {value}" if name == "kv" else value)
            else:
                parts.append(f"{name.replace('_', ' ')} {value:,}")
        return ", ".join(part for part in parts if part)

    return words
