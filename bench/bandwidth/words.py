"""The answer and the table of the manual's page about bandwidth, made from kept rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pagedkv.bench.bandwidth.plot import AGAINST, WORDS, at_most, shape_of, threads

Row = dict[str, Any]


def text(rows: list[Row]) -> str:
    """Return a paragraph that answers, then a table of all operations on the most threads."""
    kept = at_most(rows)
    return "\n".join([_answer(kept), "", *_table(kept), "", _measured(kept)])


def _answer(rows: list[Row]) -> str:
    speeds = {row["bound"]: row["median"] for row in rows if row["case"] == "state"}
    ours = [row for row in rows if row["variant"] == "pagedkv" and row["clean"]]
    plain = [row for row in ours if row.get("kv", "bfloat16") == row.get("weights", "bfloat16") == "bfloat16"]
    parts = [
        f"{WORDS[case]} {_span(row['efficiency'] for row in plain if row['case'] == case)}"
        for case in ("decode", "linear", "gather_kv", "copy_frames", "write_kv")
        if any(row["case"] == case for row in plain)
    ]
    return (
        f"On {threads(rows)} this machine reads {speeds['read']:.0f} GB/s and copies {speeds['copy']:.0f} GB/s, the "
        f"bytes read and written together. Of the ceiling in the same turns, operations in bfloat16 reach: "
        f"{', '.join(parts)}."
    )


def _span(values: Iterable[float]) -> str:
    low, *_, high = sorted([*values] * 2)
    return f"{low:.2f}" if round(low, 2) == round(high, 2) else f"{low:.2f} to {high:.2f}"


def _table(rows: list[Row]) -> list[str]:
    lines = ["| operation | shape | by | GB/s | of | its ceiling, GB/s | efficiency |", "|---|---|---|---|---|---|---|"]
    for row in sorted((r for r in rows if r["case"] in WORDS), key=lambda row: list(WORDS).index(row["case"])):
        mark = "**" if row["variant"] == "pagedkv" else ""
        share = f"{mark}{row['efficiency']:.2f}{mark}" if row["clean"] else f"{row['efficiency']:.2f}, disturbed"
        lines.append(
            f"| {WORDS[row['case']]} | {shape_of(row)} | {row['variant']} | {row['median']:.3g} | "
            f"{AGAINST.get(row['bound'], row['bound'])} | {row['ceiling']:.3g} | {share} |"
        )
    return lines


def _measured(rows: list[Row]) -> str:
    about = max(rows, key=lambda row: row["when"])
    return (
        f"`{about['command']}`, commit `{about['commit']}`, {about['when'][:10]}, {about['machine']}. {_states(rows)}"
    )


def _states(rows: list[Row]) -> str:
    return " ".join(map(states_of, (row for row in rows if row["case"] == "state")))


def states_of(row: Row) -> str:
    """Return in a sentence the states of memory in a run, and the repetitions that were left out."""
    found = " and ".join(f"{speed:.0f} GB/s in {share:.0%}" for speed, share in row["states"])
    many = f"{len(row['states'])} state{'s' if len(row['states']) > 1 else ''}"
    return (
        f"The {row['bound']} ceiling had {many} on {threads([row])}: {found} of {row['readings']} readings; left out: "
        f"{row['switched']} repetitions for a context switch, {row['changed']} for a change of state."
    )
