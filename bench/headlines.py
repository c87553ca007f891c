"""The figures that answer the questions people ask first, each beside its peers, taken from kept rows.

The table at the end of `pagedkv bench all`, the report and the README's table show the same figures. A question whose
rows are not there has no line. `rows.py` chooses the rows that count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from pagedkv.bench.chart.sheet import figure

Row = dict[str, Any]
STEP: Final = "decode step, 1,024 sequences"


@dataclass(frozen=True)
class Headline:
    """A figure and its peers in words.

    short:  the head of its column in README's table.
    ratio:  how many times a peer's figure is ours; None without such a peer.
    source: a row that it was taken from: machine, commit, command.
    """

    benchmark: str
    short: str
    question: str
    ours: str
    beside: tuple[str, ...]
    source: Row


def headlines(rows: Iterable[Row]) -> list[Headline]:
    """Return the headlines for which `rows` hold a measurement."""
    by_benchmark: dict[str, list[Row]] = {}
    for row in rows:
        by_benchmark.setdefault(row["bench"], []).append(row)
    return [line for name, make in MAKERS.items() if (line := make(by_benchmark.get(name, [])))]


def _manager(rows: list[Row]) -> Headline | None:
    found = {row["who"]: row for row in rows if row.get("case") == STEP and row["median"] is not None}
    ours = found.pop("pagedkv", None)
    if ours is None:
        return None
    beside = [
        f"{who.split()[0]} {_time(row['median'])}" for who, row in sorted(found.items(), key=lambda i: i[1]["median"])
    ]
    question = "What does the memory manager cost in a decode step of 1,024 sequences?"
    return Headline("manager", "manager, a step of 1,024", question, _time(ours["median"]), tuple(beside), ours)


def _time(us: float) -> str:
    return f"{figure(us / 1e3)} ms" if us >= 1000 else f"{figure(us)} µs"


def _attention(rows: list[Row]) -> Headline | None:
    shape = {"kind": "decode", "dtype": "bfloat16", "kv": "", "block_size": 16, "lengths": "uniform"}
    shape |= {"batch": 4, "context": 4096, "pages": "permuted", "heads": 32, "head_dim": 128}
    found = [row for row in rows if all(row["cell"][name] == value for name, value in shape.items())]
    found = [row for row in found if "of_ceiling" in row["results"].get("cpu", {})]
    if not found:
        return None
    row = max(found, key=lambda row: (row["when"], row["cell"]["threads"]))
    share = {who: result["of_ceiling"] for who, result in row["results"].items() if "of_ceiling" in result}
    names = {"vllm": "vLLM", "sdpa": "torch SDPA on contiguous KV"}
    beside = tuple(f"{name} {share[who]:.2f}" for who, name in names.items() if who in share)
    question = "How near to the speed of memory does decode attention read the KV cache?"
    return Headline("attention", "decode ÷ ceiling", question, f"{share['cpu']:.2f} of a bare read", beside, row)


def _generate(rows: list[Row]) -> Headline | None:
    found = [row for row in rows if row.get("case") == "decode" and "over_bound" in row]
    ours = [row for row in found if row["variant"] == "pagedkv"]
    if not ours:
        return None
    beside = tuple(
        f"{name} {_span(row for row in found if row['variant'] == name)}"
        for name in ("StaticCache", "DynamicCache")
        if any(row["variant"] == name for row in found)
    )
    question = "How many times the time that memory needs does a step of the engine take?"
    return Headline("generate", "generate ÷ bound", question, f"{_span(ours)} × its bound", beside, ours[-1])


def _span(rows: Iterable[Row]) -> str:
    values = sorted(row["over_bound"] for row in rows)
    return f"{values[0]:.2f}" if len(values) == 1 else f"{values[0]:.2f} to {values[-1]:.2f}"


def _transformers(rows: list[Row]) -> Headline | None:
    found = _largest(row for row in rows if row.get("case") == "decode")
    ratios = {row["variant"]: row["pages_over_this"] for row in found}
    if "DynamicCache" not in ratios:
        return None
    shape = f"{found[0]['batch']} × {found[0]['context']:,} tokens"
    tokens = {row["variant"]: f"{figure(row['median'])} tokens/s" for row in found}
    beside = tuple(f"{name} {tokens[name]}" for name in ("StaticCache", "DynamicCache") if name in ratios)
    ours = f"{ratios['StaticCache']:.1f} × StaticCache, {ratios['DynamicCache']:.1f} × DynamicCache"
    question = f"How many times as fast does model.generate of transformers decode with pages ({shape})?"
    return Headline("transformers", "transformers", question, ours, beside, found[0])


def _vllm(rows: list[Row]) -> Headline | None:
    found = _largest(row for row in rows if row.get("case") == "decode")
    ours = next((row for row in found if row["variant"] == "pagedkv"), None)
    if ours is None:
        return None
    times = tuple(f"{row['variant']} {figure(row['median'])} ms" for row in found)
    question = (
        f"How many times as fast is a decode step of vLLM on a CPU ({ours['batch']} × {ours['context']:,} tokens)?"
    )
    return Headline("vllm", "vLLM on a CPU", question, f"{ours['times_as_fast']:.1f} ×", times, ours)


def _largest(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of the shape with the most tokens."""
    kept = list(rows)
    most = max((row["batch"] * row["context"] for row in kept), default=0)
    return [row for row in kept if row["batch"] * row["context"] == most]


MAKERS: Final = {
    "manager": _manager, "attention": _attention, "generate": _generate, "transformers": _transformers, "vllm": _vllm,
}  # fmt: skip
