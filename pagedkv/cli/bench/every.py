"""`pagedkv bench all`: every benchmark that can run here, each in a process of its own, and one table at the end.

A process of its own gives each benchmark its threads and all of the memory, and a benchmark that fails does not end the
others. The rows are kept by the benchmarks themselves.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from pagedkv.bench import memory_state
from pagedkv.bench.headlines import headlines
from pagedkv.cli.bench.run import Shown, why_not
from pagedkv.errors import InvalidRequest

NAMES: Final = ("manager", "attention", "fragmentation", "bandwidth", "generate", "transformers", "vllm", "tiers")
FAILED: Final = 1


def run(only: Sequence[str], *, is_quick: bool, as_json: bool, keep: Path | None) -> int:
    """Run the benchmarks; print a table or all rows. Return 1 if one of them failed."""
    Shown(as_json, keep)
    if unknown := [name for name in only if name not in NAMES]:
        raise InvalidRequest(f"--only {unknown[0]}: there is no such benchmark; there are {', '.join(NAMES)}")
    rows: list[dict[str, Any]] = []
    missing, began = {}, time.monotonic()
    console = Console(highlight=False, stderr=as_json)
    for name in only or NAMES:
        missing[name] = why_not(name, is_quick=is_quick)
        console.print(f"{name}: left out: {missing[name]}" if missing[name] else f"{name} ...", soft_wrap=True)
        if not missing[name]:
            status, found = _measured(name, is_quick=is_quick, keep=keep)
            rows += found
            missing[name] = f"its process ended with status {status}" if status else ""
    if as_json:
        print(json.dumps(rows))
    else:
        _print(console, rows, {name: why for name, why in missing.items() if why}, time.monotonic() - began)
    return FAILED if any("status" in why for why in missing.values()) else 0


def _measured(name: str, *, is_quick: bool, keep: Path | None) -> tuple[int, list[dict[str, Any]]]:
    """Run one benchmark. Its messages and its progress go to our stderr. Return its status and its rows."""
    size = ["--quick"] if is_quick else ["--full"] if name == "attention" else []  # its grid is an option
    options = [*size, *(["--record", str(keep)] if keep else [])]
    command = [sys.executable, "-m", "pagedkv", "bench", name, "--json", *options]
    # a process group of its own: a terminal sends Ctrl-C to us alone, and the benchmark gets it once
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        try:
            out, _ = process.communicate()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            raise
    return process.returncode, json.loads(out) if process.returncode == 0 and out else []


def _print(console: Console, rows: list[dict[str, Any]], missing: dict[str, str], seconds: float) -> None:
    table = Table(caption_justify="left", title_justify="left", title="The figures of this machine")
    for head in ("question", "pagedkv", "beside it"):
        table.add_column(head)
    for line in headlines(rows):
        ours = f"{line.ours}, disturbed" if line.is_disturbed else line.ours
        table.add_row(line.question, ours, "; ".join(line.beside))
    about = rows[0] if rows else {"machine": "no row was measured", "commit": ""}
    words = about["machine"], about["commit"], memory_state.of_rows(rows), f"{seconds / 60:.1f} minutes"
    table.caption = "; ".join(filter(None, words))
    console.print(table)
    for name, why in missing.items():
        console.print(f"not measured: {name}: {why}", soft_wrap=True)
    console.print("`pagedkv bench report` draws all of bench/results; `pagedkv bench compare` compares two files.")
