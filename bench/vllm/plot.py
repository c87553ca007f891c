"""The charts of `pagedkv bench vllm`: a decode step and a prefill, of vLLM and with our parts. Drawn from kept rows."""

from __future__ import annotations

from typing import Any, Final

from pagedkv.bench.chart import Bar, Chart, bars

TITLES: Final = {"decode": "A decode step of vLLM on a CPU", "prefill": "Seconds to the first token in vLLM on a CPU"}
NAMES: Final = {"pagedkv": "vLLM, our parts"}


def charts(rows: list[dict[str, Any]]) -> list[Chart]:
    """Return the steps and the first tokens of each variant."""
    made = []
    for case, title in TITLES.items():
        found = [
            Bar(NAMES.get(row["variant"], row["variant"]), row["median"],
                "ours" if row["variant"] == "pagedkv" else "peer", f"{row['batch']} × {row['context']:,} tokens",
                f"({row['times_as_fast']:.1f}×)" if row["variant"] == "pagedkv" else "")
            for row in sorted(rows, key=lambda row: (row["batch"], row["context"], row["median"]))
            if row["case"] == case
        ]  # fmt: skip
        made += [bars(title, found, unit="ms" if case == "decode" else "s")] if found else []
    return made
