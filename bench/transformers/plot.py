"""The charts of `pagedkv bench transformers`: tokens per second, first tokens, memory. Drawn from kept rows."""

from __future__ import annotations

from typing import Any, Final

from pagedkv.bench.chart import Bar, Chart, bars
from pagedkv.bench.rows import of_layers

TITLES: Final = {
    "decode": "Tokens per second of model.generate",
    "prefill": "Seconds to the first token of an unknown prompt",
    "batch": "New tokens per second of generate_batch",
    "memory": "Peak memory above the model, MiB",
}
OURS: Final = {"pages": "ours", "pages int8": "also", "pages, F.linear": "also"}


def charts(rows: list[dict[str, Any]]) -> list[Chart]:
    """Return a chart of each case: decode, first token, memory."""
    made, measured = [], [row for row in rows if row["median"] is not None]
    for case, title in TITLES.items():
        found = [
            Bar(row["variant"], row["median"], OURS.get(row["variant"], "peer"),
                f"{row['batch']} × {row['context']:,} tokens{of_layers(row)}", _note(row))
            for row in sorted(measured, key=lambda row: (row.get("batch", 0), row.get("context", 0), row["median"]))
            if row["case"] == case
        ]  # fmt: skip
        made += [bars(title, found, unit=found_unit(rows, case))] if found else []
    return made


def found_unit(rows: list[dict[str, Any]], case: str) -> str:
    """Return the unit of a case."""
    return str(next(row["unit"] for row in rows if row["case"] == case))


def _note(row: dict[str, Any]) -> str:
    ratio = row.get("pages_over_this")
    return f"(pages {ratio:.1f}×)" if ratio and not row["variant"].startswith("pages") else ""
