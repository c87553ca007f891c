"""`make gpu`: whether the GPU kernels are right, and how fast they are, in three calls of five minutes on a GPU.

    python scripts/gpu.py [--out FOLDER] [--minutes N] [call1 | call2 | call3 | later | stage ...]

FOLDER then has two files: gpu-results.tar.gz, with the log and the rows of each stage, and summary.txt. They are
complete after each stage, so a run that is killed leaves the stages before. Without names the first call runs; "later"
names all later stages (on_gpu/stages.py). The status is 0 only if all these stages passed.

The run installs and compiles no C++ and needs no network. Stages that measure other projects take them from the
archives of `make gpu-kit`, where these were carried along. Python must have torch with CUDA and numpy, and triton, CuPy
or pytest for the stages that say so. Each stage is a process of its own with a limit of time: a stage that fails, hangs
or is killed does not stop the others. Without a GPU only the stages that need none run. This file knows only how stages
are run and reported.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from on_gpu import tree
from on_gpu.stages import CALLS, ENVIRONMENT, LATER, SANITIZE, Stage

ROOT: Final = Path(__file__).resolve().parents[1]
KIT: Final = ROOT / "build/gpu-kit"
ARCHIVE, SUMMARY = "gpu-results.tar.gz", "summary.txt"
GRACE: Final = 15.0
"""Seconds from the interrupt of a stage that is out of time to its end. pytest ends its workers within 10 seconds."""

LAST: Final = 15.0
"""Seconds at the end that no stage takes: for the archive."""

MOST_LINES, COLUMNS = 30, 200
"""Of a stage, and of the summary."""

MOST_LOG: Final = 256 << 10
"""The most bytes of a log in the archive. Of a longer one it has the first and the last half."""

CLOCKS: Final = "timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active"

# An interpreted, forced or checked kernel would not be the one to test and measure.
_UNSET: Final = ("TRITON_INTERPRET", "PAGEDKV_KERNELS", "PAGEDKV_DEBUG")
_SET: Final = {"PYTHONUNBUFFERED": "1", "TRITON_DEFAULT_FP_FUSION": "1", "OMP_NUM_THREADS": "1"}


class Ended(NamedTuple):
    """The end of a stage.

    how:   "passed", "FAILED", "out of time" or "not run".      why: the reason, or the last line that was printed.
    lines: for the summary, printed with "= " before them.
    """

    name: str
    how: str
    seconds: float
    why: str
    lines: tuple[str, ...] = ()


class Run:
    """One call: its folders, and how each stage ended."""

    def __init__(self, out: Path, work: Path) -> None:
        self.out, self.work, self.results, self.tree = out, work, work / "results", work / "tree"
        self.ended: dict[str, Ended] = {}
        out.mkdir(parents=True, exist_ok=True)
        self.results.mkdir(parents=True)

    def run(self, stage: Stage, seconds: float) -> Ended:
        """Run a stage for at most `seconds`, and keep how it ended."""
        if lacks := self._lacks(stage):
            ended = Ended(stage.name, "not run", 0, f"needs {lacks}")
        elif seconds < min(10.0, stage.seconds):
            ended = Ended(stage.name, "not run", 0, "no time is left: name it in another call")
        else:
            ended = self._process(stage, min(max(seconds - GRACE, seconds / 2), stage.seconds))
        self.ended[stage.name] = ended
        return ended

    def _lacks(self, stage: Stage) -> str:
        """Return what a stage needs and this machine lacks; "" for nothing."""
        found, environment, packed = [], self.ended.get(ENVIRONMENT), self._unpacked(stage.kit)
        for need in stage.needs:
            program = need.removeprefix("program:")
            if need == "gpu" and environment and environment.how != "passed":
                found.append(f"a GPU, and {environment.why.rpartition(': ')[2]}")
            elif program != need and not shutil.which(program):
                found.append(f"{program}, which is not on the PATH")
            elif need != "gpu" and program == need and not (importlib.util.find_spec(need) or (packed / need).exists()):
                remedy = f"; make gpu-kit packs it into {stage.kit}.tar.xz" if stage.kit else ""
                found.append(f"the module {need}, which this Python lacks{remedy}")
        return " and ".join(found)

    def _unpacked(self, kit: str) -> Path:
        """Return the folder of an archive of `make gpu-kit`; it is empty without the archive, or with a damaged one."""
        folder = self.work / f"kit-{kit}"
        if kit and not folder.exists():
            folder.mkdir()
            try:
                shutil.unpack_archive(KIT / f"{kit}.tar.xz", folder, filter="data")
            except Exception as why:  # errors of several modules say that an archive is damaged
                print(f"build/gpu-kit/{kit}.tar.xz is not used: {why}", flush=True)
        return folder

    def _process(self, stage: Stage, seconds: float) -> Ended:
        log, began = self.results / f"{stage.name}.log", time.monotonic()
        env = {name: value for name, value in os.environ.items() if name not in _UNSET} | _SET | dict(stage.env)
        if stage.kit:
            folders = (self.tree, self._unpacked(stage.kit), os.environ.get("PYTHONPATH"))
            env["PYTHONPATH"] = os.pathsep.join(str(folder) for folder in folders if folder)
        arguments = [argument.replace("{out}", str(self.results)) for argument in stage.arguments]
        command = [*stage.tool, sys.executable, *arguments]
        with log.open("w") as file:
            process = subprocess.Popen(
                command, cwd=self.tree, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                how, why = _how(process.wait(timeout=seconds))
            except subprocess.TimeoutExpired:
                how, why = "out of time", f"after {seconds:.0f} s; "
                process.send_signal(signal.SIGINT)  # and not its workers: it ends them itself
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=GRACE)
            finally:
                _end(process)
        lines = _lines(log)
        last = lines[-1] if lines else "it printed nothing"
        if how == "passed" and " skipped" in last and " passed" not in last:
            how, why = "FAILED", "nothing ran: "
        told = tuple(line.removeprefix("= ") for line in lines if line.startswith(("= ", "FAILED ", "ERROR ")))
        return Ended(stage.name, how, round(time.monotonic() - began, 1), why + last.removeprefix("= "), told)

    def keep(self) -> None:
        """Write the archive and the summary, each whole or not at all."""
        summary = self.summary()
        (self.results / SUMMARY).write_text(summary)
        held = io.BytesIO()
        with tarfile.open(fileobj=held, mode="w:gz") as archive:
            for file in sorted(path for path in self.results.rglob("*") if path.is_file()):
                content, half = file.read_bytes(), MOST_LOG // 2
                if file.suffix == ".log" and len(content) > MOST_LOG:
                    content = content[:half] + b"\n... the middle is left out ...\n" + content[-half:]
                about = tarfile.TarInfo(str(file.relative_to(self.results)))
                about.size, about.mtime = len(content), int(file.stat().st_mtime)
                archive.addfile(about, io.BytesIO(content))
        for name, content in ((ARCHIVE, held.getvalue()), (SUMMARY, summary.encode())):
            new = self.out / f".{name}.{os.getpid()}"
            new.write_bytes(content)
            new.replace(self.out / name)

    def summary(self) -> str:
        """Return a line for each stage, and the lines that stages printed for it."""
        lines = [f"pagedkv make gpu, {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC, kernels {tree.digest(ROOT)}"]
        for each in self.ended.values():
            about = f"{each.name}: {each.how}, {each.seconds:.0f} s"
            lines.append(about if each.how == "passed" else f"{about}: {each.why}")
            more = ["... more in its log"] if len(each.lines) > MOST_LINES else []
            lines += [f"  {line}" for line in (*each.lines[:MOST_LINES], *more)]
        return "".join(f"{line[:COLUMNS]}\n" for line in lines)


def _how(code: int) -> tuple[str, str]:
    if code < 0:
        return "FAILED", f"killed by {signal.Signals(-code).name}: "
    return ("passed", "") if code == 0 else ("FAILED", f"status {code}: ")


def _end(process: subprocess.Popen[Any]) -> None:
    """End a process and the workers it has started. A process that waits inside a driver may outlive its signal."""
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=5)


def _lines(log: Path, most: int = 1 << 20) -> list[str]:
    """Return the lines at the end of a log that are not empty, however long the log is."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - most))
        return [line.rstrip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]


@contextlib.contextmanager
def logged(file: Path) -> Iterator[None]:
    """Log the GPU's clocks and power once a second while the body runs; nothing without nvidia-smi."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield
        return
    command = [tool, f"--query-gpu={CLOCKS}", "--format=csv,noheader,nounits", "-lms", "1000"]
    with file.open("w") as log, subprocess.Popen(command, stdout=log, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()


def named() -> dict[str, tuple[Stage, ...]]:
    """Return the stages that each name of a command line stands for: a call, "later", or one stage."""
    groups = CALLS | {"later": LATER}
    return groups | {stage.name: (stage,) for group in (*groups.values(), SANITIZE) for stage in group}


def chosen(names: list[str]) -> list[Stage]:
    """Return the stages of this call. The environment is always looked at: the machine may be another one."""
    known = named()
    return list(dict.fromkeys(stage for name in (ENVIRONMENT, *names) for stage in known[name]))


def main(argv: list[str] | None = None) -> int:
    """Run the stages. Return 0 if all of them passed, else 1."""
    names = named()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stages", nargs="*", default=["call1"], help="of: " + ", ".join(names))
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-results")
    parser.add_argument("--minutes", type=float, default=9.0, help="for this call, the archive included")
    options, began, status = parser.parse_args(argv), time.monotonic(), 0
    if unknown := [name for name in options.stages if name not in names]:
        parser.error(f"there is no stage {', '.join(unknown)}; there are: {', '.join(names)}")
    with tempfile.TemporaryDirectory(prefix="pagedkv-gpu-", ignore_cleanup_errors=True) as work:
        run = Run(options.out.resolve(), Path(work))
        tree.copy(ROOT, run.tree)
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the archive is written
        # a shell lets its jobs ignore it, and a stage would do so, too
        ctrl_c = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with logged(run.results / "clocks.csv"):
                for stage in chosen(options.stages):
                    ended = run.run(stage, 60 * options.minutes - LAST - (time.monotonic() - began))
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
