"""`pagedkv replay`: hit rates of policies and pool sizes over a request trace. The figures are core's; here they are printed and drawn."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import track
from rich.table import Table

from pagedkv.core.policies import POLICIES
from pagedkv.core.replay import BELADY, BLOCK_TOKENS, ESTIMATE, read_trace, replay, unbounded
from pagedkv.errors import InvalidRequest
from pagedkv.spec import parse_bytes

Row = dict[str, Any]

_STYLES: Final = {BELADY: "--", ESTIMATE: ":"}
EVERY: Final = (*POLICIES, BELADY, ESTIMATE)


def run(trace: Path, sizes: Sequence[int], policies: Sequence[str], *, as_json: bool, plot: Path | None) -> None:
    """Print a table, or JSON: a list of {policy, num_frames, hit_rate, hit_rate_last_half, ...}. No sizes: unbounded."""
    if plot and find_spec("matplotlib") is None:
        raise InvalidRequest("--plot needs matplotlib; install pagedkv[plot]")
    try:
        requests = read_trace(trace)
    except (OSError, UnicodeDecodeError) as why:
        raise InvalidRequest(f"{trace} cannot be read: {why}") from None
    pools = sorted(set(sizes)) or [unbounded(requests)]
    chosen = list(dict.fromkeys(name for given in policies for name in (EVERY if given == "all" else [given])))
    replay(requests[:1], pools, chosen)  # complains before any work is done
    cases = [(size, policy) for size in pools for policy in chosen]
    shown = track(cases, "replaying", console=Console(stderr=True), transient=True, disable=as_json)
    rows = [row for size, policy in shown for row in replay(requests, [size], [policy])]
    if as_json:
        print(json.dumps(rows))
    else:
        _print(rows, len(requests))
    if plot:
        _draw(rows, plot)


def frames_in(memory: str, bytes_per_token: int) -> int:
    """Frames of one trace block each. Raises: InvalidRequest if not even one fits."""
    if bytes_per_token < 1:
        raise InvalidRequest(f"bytes-per-token is {bytes_per_token}; give at least 1")
    frames = parse_bytes(memory) // (bytes_per_token * BLOCK_TOKENS)
    if frames < 1:
        raise InvalidRequest(
            f"{memory} holds no block: {BLOCK_TOKENS} tokens of {bytes_per_token} bytes take {bytes_per_token * BLOCK_TOKENS}"
        )
    return frames


def _print(rows: list[Row], requests: int) -> None:
    table = Table(
        caption=f"{requests:,} requests, {rows[0]['blocks']:,} blocks of {BLOCK_TOKENS} tokens", caption_justify="left"
    )
    for name in ("frames", "policy", "hit rate", "last half", "evictions"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for row in rows:
        evictions = "" if row["evictions"] is None else f"{row['evictions']:,}"
        table.add_row(
            f"{row['num_frames']:,}",
            row["policy"],
            f"{row['hit_rate']:.3f}",
            f"{row['hit_rate_last_half']:.3f}",
            evictions,
        )
    Console(highlight=False).print(table)


def _draw(rows: list[Row], path: Path) -> None:
    """Hit rate against pool size, a line for each policy."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for number, policy in enumerate(
        dict.fromkeys(row["policy"] for row in rows)
    ):  # the first ones widest: equal lines stay visible
        size = max(2, 10 - number)
        points = [(row["num_frames"], row["hit_rate"]) for row in rows if row["policy"] == policy]
        axes.plot(
            *zip(*points, strict=True),
            marker="o",
            markersize=size,
            linewidth=size / 3,
            linestyle=_STYLES.get(policy, "-"),
            label=policy,
        )
    axes.set(xscale="log", xlabel=f"frames of {BLOCK_TOKENS} tokens", ylabel="hit rate", ylim=(0, None))
    axes.legend()
    axes.grid(alpha=0.3)
    try:
        figure.savefig(path, bbox_inches="tight")
    except (OSError, ValueError) as why:
        raise InvalidRequest(f"the plot cannot be written to {path}: {why}") from None
