"""The clocks, power and temperature of the GPU, once a second beside the stages, by nvidia-smi.

The log is a CSV file. A machine without nvidia-smi has no log, and a stage's line then says nothing about clocks.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import shutil
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

FIELDS: Final = (
    "timestamp",
    "clocks.sm",
    "clocks.mem",
    "power.draw",
    "temperature.gpu",
    "clocks_event_reasons.active",
)


@contextlib.contextmanager
def logged(file: Path) -> Iterator[None]:
    """Log while the body runs. The log is appended to."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield
        return
    command = [tool, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits", "-lms", "1000"]
    with file.open("a") as log, subprocess.Popen(command, stdout=log, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()


def during(file: Path, began: float, ended: float) -> str:
    """Return the clocks between two times (seconds since 1970) in words; "" if there are none."""
    clocks, watts = [], []
    for row in csv.reader(file.read_text(errors="replace").splitlines()) if file.exists() else ():
        with contextlib.suppress(ValueError, IndexError):
            at = datetime.datetime.strptime(row[0].strip(), "%Y/%m/%d %H:%M:%S.%f").timestamp()
            if began <= at <= ended:
                clock, power = float(row[1]), float(row[3])
                clocks.append(clock)
                watts.append(power)
    if not clocks:
        return ""
    return f"SM {min(clocks):.0f}-{max(clocks):.0f} MHz, median {statistics.median(clocks):.0f}; {max(watts):.0f} W"
