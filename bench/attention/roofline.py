"""The roofline of a run as a picture: the bounds set by memory and by arithmetic, and each kernel below them.

    attainable GFLOP/s  =  min(GFLOP/s of torch.mm,  GB/s of the ceiling x FLOP per byte)

Decode in a dtype has a fixed number of operations per byte of KV (4 G D over 2 D elements for each key and kv head).
Prefill has far more.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from pagedkv.bench.attention.runner import CEILING, PRODUCT, Row

MARKS: Final = {
    "cpu": ("o", "tab:blue"),
    "numba": ("^", "tab:green"),
    "reference": ("v", "tab:gray"),
    "sdpa": ("s", "tab:orange"),
}
MARKS["vllm"] = ("D", "tab:red")
NAMES: Final = {
    "cpu": "ours (cpu)",
    "numba": "ours (numba)",
    "sdpa": "torch SDPA, contiguous",
    "vllm": "vLLM",
    "reference": "reference",
}


def intensity(row: Row) -> float:
    """Return FLOP per byte of KV read. A prefill reads its keys once for each tile of queries; this counts one read."""
    if row.cell.kind == "prefill":
        return row.flops / (row.bytes or 1)
    lens = sum(row.cell.lens())
    return 4 * row.cell.heads * row.cell.head_dim * lens / row.bytes


def draw(rows: Iterable[Row], path: Path, caption: str) -> None:
    """Write the picture to `path`, with a panel for each number of threads.

    Raises: OSError; ValueError for an unknown file ending.
    """
    pyplot = importlib.import_module("matplotlib.pyplot")
    kept = [
        row
        for row in rows
        if row.cell.kind in ("decode", "prefill") and row.cell.lengths == "uniform" and row.cell.pages == "permuted"
    ]
    threads = sorted({row.cell.threads for row in kept})
    figure, panels = pyplot.subplots(1, len(threads), figsize=(6.2 * len(threads), 4.8), sharey=True, squeeze=False)
    for axes, count in zip(panels[0], threads, strict=True):
        _panel(axes, [row for row in kept if row.cell.threads == count])
        axes.set_title(f"{count} thread{'s' if count > 1 else ''}")
    panels[0][0].set_ylabel("GFLOP/s")
    handles = {
        label: handle for axes in panels[0] for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="lower center",
        ncols=len(handles),
        frameon=False,
        fontsize=9 if len(threads) > 1 else 7.5,
    )
    figure.suptitle(caption, fontsize=9)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panel(axes: Any, rows: list[Row]) -> None:
    bandwidth = [
        row.bytes / seconds / 1e9 for row in rows if row.cell.kind == "decode" and (seconds := row.seconds(CEILING))
    ]
    peaks = {
        row.cell.dtype: row.flops / seconds / 1e9
        for row in rows
        if row.cell.kind == "prefill" and (seconds := row.seconds(PRODUCT))
    }
    xs = [2.0 ** (step / 8) for step in range(13 * 8)]
    if bandwidth:
        gbps = statistics.median(bandwidth)
        top = max(peaks.values(), default=float("inf"))
        axes.plot(xs, [min(gbps * x, top) for x in xs], color="black", linewidth=1.2, label="load-and-xor; torch.mm")
        axes.annotate(f"{gbps:.0f} GB/s", (1.02, gbps * 2.3), fontsize=8)
        for x, name in ((2, "fp32"), (4, "16 bit"), (7.75, "8"), (15, "4")):  # G = 4: 4 G operations over 2 elements
            axes.annotate(name, (x, 0.02), xycoords=("data", "axes fraction"), fontsize=8, ha="center")
    for dtype, peak in peaks.items():
        axes.axhline(peak, color="black", linewidth=0.6, linestyle=":")
        axes.annotate(f"torch.mm {dtype}, {peak:.0f} GFLOP/s", (xs[-1], peak * 1.06), fontsize=8, ha="right")
    for who, (mark, colour) in MARKS.items():
        points = []
        for row in rows:
            if seconds := row.seconds(who):
                work = intensity(row)
                flops = row.flops if row.cell.kind == "prefill" else work * row.bytes
                points.append((work, flops / seconds / 1e9))
        if points:
            axes.scatter(
                *zip(*points, strict=True), marker=mark, color=colour, s=26, alpha=0.8, label=NAMES[who], zorder=3
            )
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte of KV")
    axes.grid(alpha=0.25, which="both")
