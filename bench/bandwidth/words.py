"""The answer and the table of the manual's page about bandwidth, made from kept rows."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from typing import Any, Final

from pagedkv.bench.bandwidth.plot import AGAINST, WORDS, at_most, shape_of, threads

Row = dict[str, Any]
PLAIN: Final[dict[str, Any]] = {"heads": "32/8", "head_dim": 128, "kv": "bfloat16", "dtype": "bfloat16"}
TYPICAL: Final[dict[str, tuple[str, Callable[[Row], bool]]]] = {
    "decode": (
        " of 4,096 tokens and more",
        lambda row: (
            row["context"] >= 4096
            and row["block_size"] >= 16
            and all(row[name] == value for name, value in PLAIN.items())
        ),
    ),
    "linear": (" for one token", lambda row: row["tokens"] == 1 and row["weights"] == "bfloat16"),
    "gather_kv": ("", lambda row: bool(row["kv"] == "bfloat16")),
    "copy_frames": (" of 2 MiB", lambda row: row["frame_KiB"] >= 2048),
    "write_kv": ("", lambda row: bool(row["kv"] == "bfloat16")),
}
"""case: more words, and whether a row is one that most readers ask for."""


def text(rows: list[Row]) -> str:
    """Return a paragraph that answers, then a table of all operations on the most threads."""
    kept = at_most(rows)
    answer, measured = (textwrap.fill(words, 120, break_on_hyphens=False) for words in (_answer(kept), _measured(kept)))
    return "\n".join([answer, "", *_table(kept), "", measured])


def _answer(rows: list[Row]) -> str:
    speeds = {row["bound"]: row["median"] for row in rows if row["case"] == "state"}
    ours = [row for row in rows if row["variant"] == "pagedkv" and row["clean"]]
    parts = [
        f"{WORDS[case]}{more} {_span(row['efficiency'] for row in ours if row['case'] == case and is_typical(row))}"
        for case, (more, is_typical) in TYPICAL.items()
        if any(row["case"] == case and is_typical(row) for row in ours)
    ]
    return (
        f"On {threads(rows)} this machine reads {speeds['read']:.0f} GB/s and copies {speeds['copy']:.0f} GB/s, bytes "
        f"read and written together. Of such a ceiling in the same turns, operations in bfloat16 reach: "
        f"{', '.join(parts)}."
    )


def _span(values: Iterable[float]) -> str:
    low, *_, high = sorted([*values] * 2)
    return f"{low:.2f}" if round(low, 2) == round(high, 2) else f"{low:.2f} to {high:.2f}"


def _table(rows: list[Row]) -> list[str]:
    lines = ["| operation | shape | by | GB/s | of | its ceiling, GB/s | efficiency |", "|---|---|---|---|---|---|---|"]
    shown = (row for row in rows if row["case"] in WORDS and not row["variant"].startswith("pagedkv, "))
    for row in sorted(shown, key=lambda row: list(WORDS).index(row["case"])):
        mark = "**" if row["variant"] == "pagedkv" else ""
        share = f"{mark}{row['efficiency']:.2f}{mark}" if row["clean"] else f"{row['efficiency']:.2f}, disturbed"
        lines.append(
            f"| {WORDS[row['case']]} | {shape_of(row)} | {row['variant']} | {row['median']:.3g} | "
            f"{AGAINST.get(row['bound'], row['bound'])} | {row['ceiling']:.3g} | {share} |"
        )
    return lines


def _measured(rows: list[Row]) -> str:
    runs = {row["when"]: f"`{row['command']}` ({row['when'][:10]}, commit `{row['commit']}`)" for row in rows}
    return f"Measured by {', '.join(runs.values())} on {rows[0]['machine']}. {_states(rows)}"


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
