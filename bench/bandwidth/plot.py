"""The charts and the words of `pagedkv bench bandwidth`, made from kept rows: ceilings, efficiencies, a roofline.

    attainable GFLOP/s  =  GB/s of the read ceiling x operations per byte

The arithmetic bound is not drawn: no operation here comes near it on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from pagedkv.bench.chart import Axis, Bar, Chart, Series, bars, lines

Row = dict[str, Any]
KINDS: Final = {"pagedkv": "ours", "pagedkv, numba": "also", "pagedkv, reference": "c", "torch": "a"}
WORDS: Final = {
    "decode": "decode attention", "linear": "linear operations", "write_kv": "write_kv", "gather_kv": "gather_kv",
    "copy_frames": "copy_frames", "swap": "swap",
}  # fmt: skip
BASE: Final = "; blocks of 16, bfloat16, 32/8 heads of 128 where no other is named"
AGAINST: Final = {"read": "a read", "copy": "a copy"}


def charts(rows: list[Row]) -> list[Chart]:
    """Return the charts for which there are rows; of operations only those on the most threads."""
    found = [_ceilings(rows), _efficiencies(at_most(rows)), _roofline(at_most(rows))]
    return [chart for chart in found if chart]


def at_most(rows: Iterable[Row]) -> list[Row]:
    """Return the rows on the largest number of threads, and those of a GPU."""
    kept = list(rows)
    most = max((row.get("threads", 0) for row in kept), default=0)
    return [row for row in kept if row.get("threads", most) == most]


def threads(rows: Iterable[Row]) -> str:
    """Return the number of threads in words, or the name of the GPU."""
    row = next((row for row in rows if "threads" in row or "device" in row), {})
    count = row.get("threads", 0)
    return f"{count} thread{'s' if count > 1 else ''}" if count else str(row.get("device", ""))


def _ceilings(rows: list[Row]) -> Chart | None:
    given = [
        Bar(row["pattern"], row["median"], "peer", ", ".join(filter(None, (_pages(row), threads([row])))))
        for row in sorted(rows, key=lambda row: (row.get("pages") != "huge", -row.get("threads", 0)))
        if row["case"] == "ceiling"
    ]
    title = "The speed of memory by access pattern; a copy counts the bytes read and the bytes written"
    return bars(title, given, unit="GB/s") if given else None


def _pages(row: Row) -> str:
    return f"pages of the system: {row['pages']}" if "pages" in row else ""


def _efficiencies(rows: list[Row]) -> Chart | None:
    given = [
        Bar(
            shape_of(row) if row["variant"] == "pagedkv" else row["variant"],
            100 * row["efficiency"],
            "ours" if row["variant"] == "pagedkv" else "peer",
            f"{WORDS[row['case']]}, of {AGAINST.get(row['bound'], row['bound'])}" + BASE * (row["case"] == "decode"),
            f"{row['median']:.3g} GB/s" + ("" if row["clean"] else ", disturbed"),
        )
        for row in sorted(rows, key=lambda row: list(WORDS).index(row["case"]) if row["case"] in WORDS else 0)
        if row["case"] in WORDS and not row["variant"].startswith("pagedkv, ")
    ]
    title = f"Bytes that had to move over time, as a share of a ceiling in the same turns; {threads(rows)}"
    return bars(title, given, unit="%", bound=(100, "ceiling")) if given else None


def shape_of(row: Row) -> str:
    """Return the axes of a row in a few words."""
    if row["case"] == "ceiling":
        return f"{row['pattern']}, pages of the system: {row['pages']}" if "pages" in row else row["pattern"]
    if row["case"] == "decode":
        size = f"{row['batch']} × {row['context']:,}"
        special = [f"blocks of {row['block_size']}" if row["block_size"] != 16 else ""]
        special += [row["kv"] if row["kv"] != "bfloat16" else "", row["heads"] if row["heads"] != "32/8" else ""]
        special.append(f"heads of {row['head_dim']}" if row["head_dim"] != 128 else "")
        return ", ".join(filter(None, [size, *special]))
    if row["case"] == "linear":
        return f"{row['operation']}, {row['weights']}, {row['tokens']} token{'s' if row['tokens'] > 1 else ''}"
    if row["case"] == "copy_frames":
        size = f"{row['frame_KiB'] >> 10} MiB" if row["frame_KiB"] >= 1024 else f"{row['frame_KiB']} KiB"
        return f"frames of {size}, {row['order']}"
    if row["case"] in ("write_kv", "gather_kv"):
        return f"KV in {row['kv']}" + (f", frames {row['order']}" if "order" in row else "")
    return f"{row['MiB']} MiB" if "MiB" in row else row.get("direction", "")


def _roofline(rows: list[Row]) -> Chart | None:
    found = [row for row in rows if "flop_per_byte" in row and row["clean"]]
    speed = next((row["median"] for row in rows if row["case"] == "state" and row["bound"] == "read"), None)
    series = [
        Series(name, points, kind, "points")
        for name, kind in KINDS.items()
        if (
            points := sorted(
                (r["flop_per_byte"], r["flop_per_byte"] * r["median"]) for r in found if r["variant"] == name
            )
        )
    ]
    if not series or speed is None:
        return None
    ends = [end(row["flop_per_byte"] for row in found) for end in (min, max)]
    roof = Series("a bare read", [(x, x * speed) for x in (ends[0] / 1.1, ends[1] * 1.1)], "bound")
    title = f"Roofline of decode attention and linear operations: {threads(rows)}, a read of {speed:.0f} GB/s"
    x, y = Axis("operations per byte that had to move", log=True), Axis("GFLOP/s", log=True)
    return lines(title, [roof, *series], x=x, y=y)
