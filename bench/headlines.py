"""The figures that answer the questions people ask first, each beside its peers, taken from kept rows.

The table at the end of `pagedkv bench all`, the report and the README's table show the same figures. A question whose
rows are not there has no line. `rows.py` chooses the rows that count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from pagedkv.bench.chart import Bar
from pagedkv.bench.chart.sheet import figure
from pagedkv.bench.rows import of_layers

Row = dict[str, Any]
STEP: Final = "decode step, 1,024 sequences"


@dataclass(frozen=True)
class Headline:
    """A figure and its peers in words.

    source: a row that it was taken from: machine, commit, command.
    drawn:  the figures as bars of one group.
    rows:   all rows whose figures it shows.
    """

    benchmark: str
    question: str
    ours: str
    beside: tuple[str, ...]
    source: Row
    drawn: tuple[Bar, ...]
    rows: tuple[Row, ...] = ()

    @property
    def days(self) -> str:
        """The day of its rows, or the first and the last."""
        found = sorted({row["when"][:10] for row in self.rows or (self.source,)})
        return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"

    @property
    def is_disturbed(self) -> bool:
        """Whether too few turns of a figure count."""
        return any(row.get("clean") == 0 for row in self.rows)


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
        f"{name_of(who)} {_time(row['median'])}" for who, row in sorted(found.items(), key=lambda i: i[1]["median"])
    ]
    question = "How long does the memory manager take for a decode step of 1,024 sequences?"
    times = {"pagedkv": ours["median"]} | {name_of(who): row["median"] for who, row in found.items()}
    drawn = _bars("Memory manager, a decode step of 1,024 sequences: less is better", times, _time)
    return Headline("manager", question, _time(ours["median"]), tuple(beside), ours, drawn, (ours, *found.values()))


def name_of(manager: str) -> str:
    """Return the name of the engine whose manager it is."""
    return manager if manager.startswith("lists") else manager.split()[0]


def _bars(group: str, values: dict[str, float], label: Callable[[float], str]) -> tuple[Bar, ...]:
    """Return the bars of a group. The first is ours."""
    kinds = {name: "ours" if i == 0 else "peer" for i, name in enumerate(values)}
    return tuple(Bar(name, value, kinds[name], group, label=label(value)) for name, value in values.items())


def _time(us: float) -> str:
    return f"{figure(us / 1e3)} ms" if us >= 1000 else f"{figure(us)} µs"


def _attention(rows: list[Row]) -> Headline | None:
    shape = {"kind": "decode", "dtype": "bfloat16", "kv": "", "block_size": 16, "lengths": "uniform"}
    shape |= {"batch": 4, "context": 4096, "pages": "permuted", "heads": 32, "head_dim": 128}
    found = [row for row in rows if all(row["cell"][name] == value for name, value in shape.items())]
    found = [
        row for row in found if row["results"].get("cpu", {}).get("clean") and "of_ceiling" in row["results"]["cpu"]
    ]
    if not found:
        return None
    row = max(found, key=lambda row: (row["when"], row["cell"]["threads"]))
    share = {who: result["of_ceiling"] for who, result in row["results"].items() if "of_ceiling" in result}
    names = {"vllm": "vLLM", "sdpa": "torch SDPA on contiguous KV"}
    beside = tuple(f"{name} {share[who]:.2f}" for who, name in names.items() if who in share)
    question = "How close does decode attention come to the speed of reading memory (1.00 is equal)?"
    shares = {"pagedkv": share["cpu"]} | {name: share[who] for who, name in names.items() if who in share}
    drawn = _bars("Decode attention, share of a bare read: more is better", shares, lambda value: f"{value:.0%}")
    return Headline("attention", question, f"{share['cpu']:.2f}", beside, row, drawn)


def _fragmentation(rows: list[Row]) -> Headline | None:
    found = [row for row in rows if row.get("case") == "useful" and row["workload"] == "sharegpt"]
    shares = {row["variant"]: row for row in found if "blocks of" not in row["variant"]}
    ours = shares.pop("pagedkv", None)
    if ours is None:
        return None
    others = sorted(shares.values(), key=lambda row: -row["median"])
    names = (
        "virtual memory, 64 KiB",
        "virtual memory, 2 MiB",
        "DynamicCache",
        "reserve the true length",
        "reserve the maximum",
    )
    beside = {row["variant"]: row["median"] for row in others if row["variant"] in names}
    words = tuple(f"{name} {share:.0f} %" for name, share in beside.items())
    question = "How much of the KV memory holds tokens while requests wait (lengths of ShareGPT)?"
    drawn = _bars(
        "KV memory that holds tokens: more is better", {"pagedkv": ours["median"]} | beside, "{:.0f} %".format
    )
    return Headline("fragmentation", question, f"{ours['median']:.0f} %", words, ours, drawn)


def _bandwidth(rows: list[Row]) -> Headline | None:
    found = [row for row in rows if row.get("case") == "gather_kv" and row["kv"] == "bfloat16" and row["clean"]]
    found = [row for row in found if "order" not in row]  # frames in random order
    most = max((row["threads"] for row in found), default=0)
    share = {row["variant"]: row["efficiency"] for row in found if row["threads"] == most}
    if "pagedkv" not in share:
        return None
    beside = tuple(f"torch's indexing {share[name]:.2f}" for name in share if name == "torch")
    question = "How close does gathering pages into one tensor come to the speed of copying (1.00 is equal)?"
    shares = {"pagedkv": share["pagedkv"]} | {f"{name}, index_select": share[name] for name in share if name == "torch"}
    drawn = _bars("gather_kv, share of a copy: more is better", shares, lambda value: f"{value:.0%}")
    ours = next(row for row in found if row["variant"] == "pagedkv" and row["threads"] == most)
    return Headline("bandwidth", question, f"{share['pagedkv']:.2f}", beside, ours, drawn)


def _generate(rows: list[Row]) -> Headline | None:
    found = [row for row in rows if row.get("case") == "decode" and "over_bound" in row]
    ours = [row for row in found if row["variant"] == "pagedkv"]
    if not ours:
        return None
    names = ("StaticCache", "DynamicCache", "OpenVINO", "llama.cpp")
    beside = tuple(
        f"{name} {_span(row for row in found if row['variant'] == name)} ×"
        for name in names
        if any(row["variant"] == name for row in found)
    )
    step = f"a step of the engine{of_layers(ours[-1])}"
    question = f"How long does {step} take, as a multiple of reading its memory once?"
    some = _largest(row for row in found if row["variant"] in names) or ours[-1:]
    shape = (some[0]["batch"], some[0]["context"])
    over = {row["variant"]: row["over_bound"] for row in found if (row["batch"], row["context"]) == shape}
    over = {name: over[name] for name in ("pagedkv", *names) if name in over}
    group = f"A decode step over its bound, {shape[0]} × {shape[1]:,} tokens: less is better"
    drawn = _bars(group, over, lambda value: f"{value:.2f}×")
    return Headline("generate", question, f"{_span(ours)} ×", beside, ours[-1], drawn, tuple(found))


def _span(rows: Iterable[Row]) -> str:
    values = sorted(row["over_bound"] for row in rows)
    return f"{values[0]:.2f}" if len(values) == 1 else f"{values[0]:.2f} to {values[-1]:.2f}"


def _transformers(rows: list[Row]) -> Headline | None:
    found = _largest(row for row in rows if row.get("case") == "decode")
    ratios = {row["variant"]: row["pages_over_this"] for row in found}
    if "DynamicCache" not in ratios:
        return None
    shape = f"{found[0]['batch']} × {found[0]['context']:,} tokens{of_layers(found[0])}"
    tokens = {row["variant"]: f"{figure(row['median'])} tokens/s" for row in found}
    beside = tuple(
        f"{ratios[name]:.1f} × {name}, {tokens[name]}" for name in ("StaticCache", "DynamicCache") if name in ratios
    )
    ours = f"{ratios.get('StaticCache', ratios['DynamicCache']):.1f} ×"
    question = f"How many times as fast does transformers decode with pages as with its own best cache ({shape})?"
    speeds = {row["variant"]: row["median"] for row in found}
    order = {name: speeds[name] for name in ("pages", "StaticCache", "DynamicCache") if name in speeds}
    drawn = _bars(f"transformers, {shape}: more is better", order, lambda value: f"{figure(value)} tokens/s")
    return Headline("transformers", question, ours, beside, found[0], drawn, tuple(found))


def _vllm(rows: list[Row]) -> Headline | None:
    found = _largest(row for row in rows if row.get("case") == "decode")
    ours = next((row for row in found if row["variant"] == "pagedkv"), None)
    if ours is None:
        return None
    times = tuple(f"{row['variant']} {figure(row['median'])} ms a step" for row in found)
    shape = f"{ours['batch']} × {ours['context']:,} tokens"
    question = f"How many times as fast does vLLM decode on a CPU with our parts ({shape})?"
    steps = {"pagedkv": ours["median"]} | {row["variant"]: row["median"] for row in found}
    drawn = _bars(f"A step of vLLM on a CPU, {shape}: less is better", steps, lambda value: f"{figure(value)} ms")
    return Headline("vllm", question, f"{ours['times_as_fast']:.1f} ×", times, ours, drawn, tuple(found))


def _tiers(rows: list[Row]) -> Headline | None:
    found = [row for row in rows if row.get("case") == "first token"]
    most = max((row["context"] for row in found), default=0)
    by_place = {row["variant"]: row for row in found if row["context"] == most}
    ours, computed = by_place.get("pagedkv, host"), by_place.get("computed")
    if ours is None or computed is None:
        return None
    names = {"pagedkv, host": "from host memory", "pagedkv, disk": "from a disk", "computed": "computed"}
    seconds = {place: by_place[place]["median"] for place in names if place in by_place}
    beside = [f"{100 * row['of_computing']:.1f} % from a disk" for row in [by_place.get("pagedkv, disk")] if row]
    beside.append(f"100 % is {figure(computed['median'])} s")
    prompt = f"a prompt of {most:,} tokens{of_layers(ours)}"
    question = f"What share of the time to compute {prompt} does fetching it from host memory take?"
    drawn = tuple(
        Bar(names[place], value, "peer" if place == "computed" else "ours",
            f"A first token after {most:,} tokens, by their place: less is better", label=f"{figure(value)} s")
        for place, value in seconds.items()
    )  # fmt: skip
    shown = tuple(by_place[place] for place in seconds)
    return Headline("tiers", question, f"{100 * ours['of_computing']:.1f} %", tuple(beside), ours, drawn, shown)


def _largest(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of the shape with the most tokens."""
    kept = list(rows)
    most = max((row["batch"] * row["context"] for row in kept), default=0)
    return [row for row in kept if row["batch"] * row["context"] == most]


MAKERS: Final = {
    "manager": _manager, "attention": _attention, "fragmentation": _fragmentation, "bandwidth": _bandwidth,
    "generate": _generate, "transformers": _transformers, "vllm": _vllm, "tiers": _tiers,
}  # fmt: skip
