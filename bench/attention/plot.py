"""The charts of `pagedkv bench attention`: decode beside the ceiling, and the roofline. They are drawn from kept rows.

    attainable GFLOP/s  =  min(GFLOP/s of torch.mm,  GB/s of the ceiling x FLOP per byte)

Decode in a dtype has a fixed number of operations per byte of KV (4 G D over 2 D elements for each key and kv head).
Prefill has far more: it reads its keys once for each tile of queries, and the roofline counts one read.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any, Final

from pagedkv.bench.chart import Axis, Bar, Chart, Series, bars, lines

Row = dict[str, Any]
NAMES: Final = {
    "cpu": "pagedkv", "numba": "pagedkv, numba", "sdpa": "torch SDPA, contiguous", "vllm": "vLLM",
    "reference": "pagedkv, reference",
}  # fmt: skip
KINDS: Final = {"cpu": "ours", "numba": "also", "reference": "c", "sdpa": "a", "vllm": "b"}
CEILING: Final = "bare read"


def charts(rows: list[Row]) -> list[Chart]:
    """Return decode beside the ceiling, and a roofline, both for the largest number of threads."""
    plain = [row for row in rows if (row["cell"]["lengths"], row["cell"]["pages"]) == ("uniform", "permuted")]
    most = max((row["cell"]["threads"] for row in plain), default=0)
    at_most = [row for row in plain if row["cell"]["threads"] == most]
    return [*_shares(at_most, most), *_roofline(at_most, most)]


def _shares(rows: list[Row], threads: int) -> list[Chart]:
    found = [
        Bar(
            NAMES[who],
            100 * result["of_ceiling"],
            _grey(who),
            _cell(row["cell"]),
            "" if result["clean"] else "disturbed",
        )
        for row in rows
        if row["cell"]["kind"] == "decode"
        for who, result in sorted(row["results"].items(), key=lambda item: -item[1].get("of_ceiling", 0))
        if who in ("cpu", "sdpa", "vllm") and "of_ceiling" in result
    ]
    title = f"Decode attention: speed of reading KV, as a share of a bare read in the same turns; {_threads(threads)}"
    return [bars(title, found, unit="%", bound=(100, CEILING))] if found else []


def _grey(who: str) -> str:
    return KINDS[who] if who in ("cpu", "numba") else "peer"


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def _cell(cell: Row) -> str:
    sequences = f"{cell['batch']} × {cell['context']:,} tokens"
    kv = f", KV in {cell['kv']}" if cell["kv"] else ""
    heads = f"{cell['heads']}/{cell['kv_heads']} heads of {cell['head_dim']}"
    return f"{sequences}, {cell['dtype']}{kv}, blocks of {cell['block_size']}, {heads}"


def _roofline(rows: list[Row], threads: int) -> list[Chart]:
    rates = [
        bound["GB_per_s"]
        for row in rows
        if row["cell"]["kind"] == "decode" and (bound := row["results"].get("ceiling"))
    ]
    if not rates:
        return []
    speed = statistics.median(rates)
    peaks = _peaks(rows)
    top, best = max(((peak, dtype) for dtype, peak in peaks.items()), default=(None, ""))
    high = 10_000.0 if top else 32.0
    knee = min(top / speed, high) if top else high
    roof = [(1.0, speed), (knee, knee * speed), *([(high, top)] if top else [])]
    named = f"{speed:.0f} GB/s" + (f"; torch.mm {best}, {top:.0f} GFLOP/s" if top else "")
    marks = [
        Series(name, points, KINDS[who], "points")
        for who, name in NAMES.items()
        if (points := sorted(_points(rows, who)))
    ]
    title = f"Roofline: {_threads(threads)}, bound of {named}"
    x, y = Axis("operations per byte of KV", log=True, low=1, high=high), Axis("GFLOP/s", log=True)
    return [lines(title, [Series("bound", roof, "bound"), *marks], x=x, y=y)] if marks else []


def _peaks(rows: Iterable[Row]) -> dict[str, float]:
    """Return the GFLOP/s of torch's product by dtype."""
    prefills = (row for row in rows if row["cell"]["kind"] == "prefill" and "torch.mm" in row["results"])
    return {row["cell"]["dtype"]: row["results"]["torch.mm"]["GFLOP_per_s"] for row in prefills}


def _points(rows: Iterable[Row], who: str) -> Iterable[tuple[float, float]]:
    """Yield (operations per byte, GFLOP/s) of each decode and prefill of a variant."""
    for row in rows:
        cell, result = row["cell"], row["results"].get(who)
        if result and cell["kind"] == "decode":
            flops = 4 * cell["heads"] * cell["head_dim"] * cell["batch"] * cell["context"]
            yield flops / (result["GB_per_s"] * result["us"] * 1e3), flops / result["us"] / 1e3
        elif result and cell["kind"] == "prefill" and "GFLOP_per_s" in result:
            flops = result["GFLOP_per_s"] * result["us"] * 1e3
            num_bytes = cell["batch"] * cell["context"] * cell["kv_heads"] * 2 * cell["head_dim"] * _size(cell)
            yield flops / num_bytes, result["GFLOP_per_s"]


def _size(cell: Row) -> int:
    return 4 if cell["dtype"] == "float32" else 2
