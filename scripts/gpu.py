"""`make gpu`: whether the GPU kernels are right, and how fast they are, in the first ten minutes on a GPU.

    python scripts/gpu.py [--out FOLDER] [--minutes N] [--rest [ARCHIVE]] [stage ...]

FOLDER then has two files: gpu-results.tar.gz, of at most 16 MB, with the log and the rows of each stage, and
summary.txt, one screen. They are complete after each stage, so a run that is killed leaves the stages before. Without
stages the first ten minutes run (on_gpu/stages.py); with --rest, all stages that did not pass in ARCHIVE, then the
later ones; the new archive holds the old results too. The status is 0 only if all these stages passed.

A stage that is out of time is interrupted, as by Ctrl-C, so that pytest prints the failures so far, and killed GRACE
seconds later.

The run installs and compiles no C++ and needs no network. Python must have torch with CUDA and numpy, and
triton, CuPy or pytest for the stages that say so. Each stage is a process of its own with a limit of time: a stage that
fails, hangs or is killed does not stop the others. Without a GPU only the stages that need none run. This file knows
only how stages are run and reported.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

from on_gpu import archive, clocks, tree
from on_gpu.stages import ENVIRONMENT, FIRST, LATER, SANITIZE, Stage

ROOT: Final = Path(__file__).resolve().parents[1]
ARCHIVE, SUMMARY, STATE = "gpu-results.tar.gz", "summary.txt", "stages.json"
GRACE: Final = 15.0
"""Seconds from the interrupt of a stage that is out of time to its end. pytest ends its workers within 10 seconds."""

LAST: Final = 15.0
"""Seconds at the end that no stage takes: for the archive."""

SCREEN: Final = (50, 120)
"""Lines and columns of the summary."""

REASON: Final = 80
"""The most characters of the reason of a failure in the summary."""

# An interpreted, forced or checked kernel would not be the one to test and measure.
_UNSET: Final = ("TRITON_INTERPRET", "PAGEDKV_KERNELS", "PAGEDKV_DEBUG")
_SET: Final = {"PYTHONUNBUFFERED": "1", "TRITON_DEFAULT_FP_FUSION": "1", "OMP_NUM_THREADS": "1"}


class Ended(NamedTuple):
    """The end of a stage.

    how:    "passed", "FAILED", "out of time" or "not run".      why: the reason, or the last line that was printed.
    clocks: the GPU's clocks while it ran, in words.             lines: for the summary, printed with "= " before them.
    """

    name: str
    how: str
    seconds: float
    why: str
    clocks: str = ""
    lines: tuple[str, ...] = ()


class Run:
    """One call: its folders, and how each stage ended, this time or in the archive of an earlier call."""

    def __init__(self, out: Path, work: Path) -> None:
        self.out, self.results, self.tree = out, work / "results", work / "tree"
        self.ended: dict[str, Ended] = {}
        out.mkdir(parents=True, exist_ok=True)
        self.results.mkdir(parents=True, exist_ok=True)

    def resume(self, before: Path) -> None:
        """Take the results of the archive of an earlier call. Raises: SystemExit in words if it is none"""
        try:
            archive.unpack(before, self.results)
            kept = json.loads((self.results / STATE).read_text())
        except (OSError, tarfile.TarError, ValueError) as why:
            raise SystemExit(
                f"--rest: {before} is not the archive of an earlier call: {why}; name one, or leave out --rest"
            ) from None
        self.ended = {each["name"]: Ended(**each | {"lines": tuple(each["lines"])}) for each in kept}

    def lacks(self, stage: Stage) -> str:
        """Return what a stage needs and this machine lacks; "" for nothing."""
        found = []
        for need in stage.needs:
            if need == "gpu" and (environment := self.ended.get(ENVIRONMENT)) and environment.how != "passed":
                found.append(f"a GPU, and {environment.why.rpartition(': ')[2]}")
            elif need.startswith("program:") and not shutil.which(need.removeprefix("program:")):
                found.append(f"{need.removeprefix('program:')}, which is not on the PATH")
            elif need != "gpu" and not need.startswith("program:") and not importlib.util.find_spec(need):
                found.append(f"the module {need}, which this Python lacks")
        return " and ".join(found)

    def run(self, stage: Stage, seconds: float) -> Ended:
        """Run a stage for at most `seconds`, and keep how it ended."""
        if lacks := self.lacks(stage):
            ended = Ended(stage.name, "not run", 0, f"needs {lacks}")
        elif seconds < min(10.0, stage.seconds):
            ended = Ended(stage.name, "not run", 0, "no time is left; --rest continues")
        else:
            ended = self._process(stage, min(max(seconds - GRACE, seconds / 2), stage.seconds))
        if ended.how != "not run" or stage.name not in self.ended:  # an earlier call may have said more
            self.ended[stage.name] = ended
        return ended

    def _process(self, stage: Stage, seconds: float) -> Ended:
        log = self.results / f"{stage.name}.log"
        env = {name: value for name, value in os.environ.items() if name not in _UNSET} | _SET | dict(stage.env)
        arguments = [argument.replace("{out}", str(self.results)) for argument in stage.arguments]
        began, at = time.monotonic(), time.time()
        printed: list[str] | None = None
        with log.open("w") as file:
            try:
                process = subprocess.Popen(
                    [*stage.tool, sys.executable, *arguments],
                    cwd=self.tree,
                    env=env,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as missing:
                return Ended(stage.name, "not run", 0, str(missing))
            try:
                how, why = _how(process.wait(timeout=seconds))
            except subprocess.TimeoutExpired:
                how, why = "out of time", f"after {seconds:.0f} s; "
                printed = _lines(log)
                _interrupt(process)
            finally:
                _end(process)
        lines = _lines(log)
        if printed is not None and lines and lines[-1] == "KeyboardInterrupt":  # where it was says nothing
            lines = printed
        last = lines[-1] if lines else "it printed nothing"
        if how == "passed" and " skipped" in last and " passed" not in last:
            how, why = "FAILED", "nothing ran: "
        told = (*(line[2:] for line in lines if line.startswith("= ")), *reasons(lines))
        watched = clocks.during(self.results / "clocks.csv", at, time.time())
        return Ended(stage.name, how, round(time.monotonic() - began, 1), why + last.removeprefix("= "), watched, told)

    def keep(self) -> None:
        """Write the archive and the summary."""
        (self.results / STATE).write_text(json.dumps([each._asdict() for each in self.ended.values()], indent=1))
        (self.results / SUMMARY).write_text(self.summary([]))
        left_out = archive.pack(self.results, self.out / ARCHIVE)
        archive.replace(self.out / SUMMARY, self.summary(left_out).encode())

    def summary(self, left_out: list[str]) -> str:
        """Return one screen: a line for each stage, and the lines that stages printed for it."""
        (rows, columns), every = SCREEN, list(self.ended.values())
        head = f"pagedkv make gpu, {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC, kernels {tree.digest(ROOT)}"
        lines = [head, *([f"left out of the archive, which was full: {', '.join(left_out)}"] if left_out else [])]
        least = sum(1 for _ in every) + len(lines)  # each stage has a line, whatever else fits
        for each in every:
            about = f"{each.name}: {each.how}, {each.seconds:.0f} s"
            lines.append(f"{about}; {each.clocks}" if each.clocks else about)
            if each.how != "passed":
                lines[-1] += f": {each.why}"
            spare = max(0, rows - least)
            shown = (
                each.lines if len(each.lines) <= spare else (*each.lines[: max(0, spare - 1)], "... more in its log")
            )
            shown = shown[:spare]
            least += len(shown)
            lines += [f"  {line}" for line in shown]
        return "".join(f"{line[:columns]}\n" for line in lines)


def _how(code: int) -> tuple[str, str]:
    if code < 0:
        return "FAILED", f"killed by {signal.Signals(-code).name}: "
    return ("passed", "") if code == 0 else ("FAILED", f"status {code}: ")


def reasons(lines: list[str]) -> list[str]:
    """Return a line for each reason in pytest's list of failures: how often, the reason, and the first test."""
    found: dict[str, list[str]] = {}
    for test, reason in re.findall(
        r"(?m)^(?:FAILED|ERROR) (?:\S*/)?(\w+\.py\S*(?:\[.*?\])?) - (.+)$", "\n".join(lines)
    ):
        found.setdefault(reason, []).append(test)
    return [f"{len(tests)} x {reason[:REASON]}: {tests[0]}" for reason, tests in found.items()]


def _interrupt(process: subprocess.Popen[Any]) -> None:
    """Interrupt a process, and not its workers: it ends them itself. Return when it has ended, or after GRACE."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=GRACE)


def _end(process: subprocess.Popen[Any]) -> None:
    """End a process and the workers it has started. A process that waits inside a driver may outlive its signal."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        print(f"process {process.pid} did not end: it waits inside the driver", flush=True)


def _lines(log: Path) -> list[str]:
    """Return the lines at the end of a log that are not empty."""
    return [line.rstrip() for line in _tail(log).splitlines() if line.strip()]


def _tail(log: Path, most: int = 1 << 20) -> str:
    """Return the end of a log, however long the log is."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - most))
        return file.read().decode(errors="replace")


def chosen(run: Run, names: list[str], rest: bool) -> list[Stage]:
    """Return the stages of this call. The environment is always looked at: the machine may be another one."""
    stages = {stage.name: stage for stage in (*FIRST, *LATER, *SANITIZE)}
    if names:
        picked = [stages[name] for name in names]
    elif rest:
        passed = {name for name, each in run.ended.items() if each.how == "passed"}
        picked = [stage for stage in (*FIRST, *LATER) if stage.name not in passed]
    else:
        picked = list(FIRST)
    return [stages[ENVIRONMENT], *(stage for stage in picked if stage.name != ENVIRONMENT)]


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """Return the options. Raises: SystemExit for a stage that does not exist"""
    names = [stage.name for stage in (*FIRST, *LATER, *SANITIZE)]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stages", nargs="*", help="of: " + ", ".join(names))
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-results")
    parser.add_argument("--minutes", type=float, default=9.0, help="for this call, the archive included")
    parser.add_argument("--rest", nargs="?", const="", metavar="ARCHIVE", help="continue; by default FOLDER's archive")
    options = parser.parse_args(argv)
    if unknown := [name for name in options.stages if name not in names]:
        parser.error(f"there is no stage {', '.join(unknown)}; there are: {', '.join(names)}")
    return options


def main(argv: list[str] | None = None) -> int:
    """Run the stages. Return 0 if all of them passed, else 1."""
    options, began = parsed(argv), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pagedkv-gpu-", ignore_cleanup_errors=True) as work:
        run = Run(options.out.resolve(), Path(work))
        if options.rest is not None:
            run.resume(Path(options.rest) if options.rest else run.out / ARCHIVE)
        tree.copy(ROOT, run.tree)
        stages = chosen(run, options.stages, options.rest is not None)
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the archive is written
        # a shell lets its jobs ignore it, and a stage would do so, too
        ctrl_c = signal.signal(signal.SIGINT, signal.default_int_handler)
        status = 0
        try:
            with clocks.logged(run.results / "clocks.csv"):
                for stage in stages:
                    left = 60 * options.minutes - LAST - (time.monotonic() - began)
                    ended = run.run(stage, left)
                    status |= int(ended.how != "passed")
                    print(f"{ended.name}: {ended.how}, {ended.seconds:.0f} s: {ended.why}"[:300], flush=True)
                    run.keep()
        finally:
            signal.signal(signal.SIGTERM, before)
            signal.signal(signal.SIGINT, ctrl_c)
            run.keep()
        print((run.out / SUMMARY).read_text(), end="", flush=True)
        return status


if __name__ == "__main__":
    sys.exit(main())
