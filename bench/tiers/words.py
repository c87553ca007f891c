"""The figures of the manual's page about tiers, made from kept rows: an answer, then a table of each part."""

from __future__ import annotations

import textwrap
from typing import Any, Final

from pagedkv.bench import memory_state
from pagedkv.bench.chart.sheet import figure
from pagedkv.bench.tiers.plot import OURS, PLACES

Row = dict[str, Any]
COLUMNS: Final = {
    "stored in host memory": ("store", "host", "pagedkv"),
    "loaded from it, verified": ("load", "host", "pagedkv"),
    "loaded, not verified": ("load", "host", "pagedkv, not verified"),
    "stored on a disk": ("store", "disk", "pagedkv"),
    "loaded from it, verified ": ("load", "disk", "pagedkv"),
}
"""Head of a column: case, tier and variant of its rows."""
PICTURE: Final = "![Speed of tiers, first tokens and steps beside transfers](../img/bench/tiers.svg)"


def text(rows: list[Row]) -> str:
    """Return the answer, the picture, the tables, and the commands."""
    tokens = [row for row in rows if row["case"] == "first token"]
    steps = [row for row in rows if row["case"] == "decode beside transfers"]
    speeds = [row for row in rows if row["case"] in ("store", "load")]
    transfers = [row for row in rows if row["case"] == "transfer"]
    tables = [_speeds(speeds) if speeds else [], _tokens(tokens), _steps(steps), _transfers(transfers)]
    memory = f"; {found}" if (found := memory_state.of_rows(rows)) else ""
    runs = {row["when"]: f"`{row['command']}` ({row['when'][:10]}, commit `{row['commit']}`)" for row in rows}
    measured = f"Measured by {', '.join(runs.values())} on {rows[0]['machine']}{memory}."
    parts = [_wrapped(_answer(tokens)), PICTURE, *("\n".join(lines) for lines in tables), _wrapped(measured)]
    return "\n\n".join(filter(None, parts))


def _wrapped(words: str) -> str:
    return textwrap.fill(words, 120, break_on_hyphens=False, break_long_words=False)


def _answer(tokens: list[Row]) -> str:
    most = max((row["context"] for row in tokens), default=0)
    seconds = {_place(row): figure(row["median"]) for row in tokens if row["context"] == most}
    if not {"in host memory", "on disk", "computed"} <= set(seconds):
        return ""
    return (
        f"A prompt of {most:,} tokens has its first token after {seconds['computed']} s if it is computed, after "
        f"{seconds['in host memory']} s if its pages lie in host memory, and after {seconds['on disk']} s if they lie "
        "on a disk."
    )


def _place(row: Row) -> str:
    return PLACES[row["variant"].removeprefix(OURS)]


def _speeds(rows: list[Row]) -> list[str]:
    lines = [f"| GB/s, by KiB of a frame | {' | '.join(map(str.strip, COLUMNS))} |", "|---" * (1 + len(COLUMNS)) + "|"]
    for frame in sorted({row["frame"] for row in rows}):
        found = {(row["case"], row["tier"], row["variant"]): row for row in rows if row["frame"] == frame}
        cells = (found.get(key) for key in COLUMNS.values())
        lines.append(f"| {frame >> 10:,} | {' | '.join(_speed(row) if row else '' for row in cells)} |")
    return [
        *lines,
        "",
        "In brackets: the share of the bare transfer, of which the promise is at least the last number.",
    ]


def _transfers(rows: list[Row]) -> list[str]:
    lines = ["| to another process, by | KiB of a frame | GB/s, verified | the bare transport |", "|---|---|---|---|"]
    bare = {(row["tier"], row["frame"]): row for row in rows if "of_bare" not in row}
    ours = [row for row in rows if "of_bare" in row]
    for row in sorted(ours, key=lambda row: (row["tier"], row["frame"])):
        beside = bare.get((row["tier"], row["frame"]))
        other = f"{figure(beside['median'])}{_mark(beside)}" if beside else ""
        lines.append(f"| {row['tier']} | {row['frame'] >> 10:,} | {_speed(row)} | {other} |")
    return lines if rows else []


def _speed(row: Row) -> str:
    missed = " **missed**" if row["must"] and row["of_bare"] < row["must"] else ""
    must = f"; {row['must']:g}{missed}" if row["must"] else ""
    return f"{figure(row['median'])} ({row['of_bare']:.2f}{must}){_mark(row)}"


def _most(row: Row, share: str, most: str) -> str:
    """Return the promise `most`, and whether `row[share]` keeps it. "" for a row without a promise."""
    return f"{most}{' **missed**' if row[share] > row['must'] else ''}" if row.get("must") else ""


def _mark(row: Row) -> str:
    return "" if row["clean"] else ", disturbed"


def _tokens(rows: list[Row]) -> list[str]:
    lines = [
        "| prefix of a prompt | tokens | s to the first token | of computing it | at most |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = f"{row['of_computing']:.3f}" if row.get("of_computing") else ""
        must = _most(row, "of_computing", f"{row.get('must') or 0:.3f}")
        lines.append(f"| {_place(row)} | {row['context']:,} | {figure(row['median'])}{_mark(row)} | {ratio} | {must} |")
    return lines if rows else []


def _steps(rows: list[Row]) -> list[str]:
    lines = ["| beside a step of 8 sequences | ms a step | GB/s moved | slower by | of it the traffic | at most |"]
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        slower, taken = (f"{row[name]:.1f} %" if name in row else "" for name in ("slower_percent", "taken_percent"))
        must = _most(row, "of_alone", f"{100 * ((row.get('must') or 1) - 1):.1f} %")
        name, moved = row["variant"].removeprefix(OURS), f"{row['moved_gb_s']:.2f}" if "of_alone" in row else ""
        lines.append(f"| {name} | {figure(row['median'])}{_mark(row)} | {moved} | {slower} | {taken} | {must} |")
    return lines if rows else []
