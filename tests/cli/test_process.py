"""The command as a process: streams that fail, and Ctrl-C at any moment. `pagedkv/__main__.py` has the rules."""

from __future__ import annotations

import os
import pty
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pagedkv.checkpoint import BUNDLED

from . import hostile

ROOT = Path(__file__).parents[2]
PAGEDKV = (sys.executable, "-m", "pagedkv")
NO_SPACE = "pagedkv: cannot write to stdout: No space left on device\n"
CLOSED = "pagedkv: cannot write to stdout: Bad file descriptor\n"

LATE = [pytest.param(command, marks=pytest.mark.slow) for command in ("generate", "doctor", "warm")]
COMMANDS = ["--version", "generate --help", "generate --json", "fit", *LATE]

REPLAY = '{"hash_ids": [0, 1, 2]}\n{"hash_ids": [0, 1, 3]}\n'


def shell(line: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a line of bash, in which $P is the command."""
    environment = {**os.environ, "P": " ".join(PAGEDKV), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=180, env=environment, **options
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_is_one_line_and_status_1(command):
    run = shell(f"$P {command} </dev/null 2>&1 >/dev/full")
    assert run.returncode == 1
    assert run.stdout.endswith(NO_SPACE)
    assert "Traceback" not in run.stdout
    assert "Exception ignored" not in run.stdout


def test_a_full_disk_ends_a_replay_and_a_benchmark_too(tmp_path):
    (tmp_path / "trace.jsonl").write_text(REPLAY)
    for command in (f"replay {tmp_path}/trace.jsonl", "bench", "bench manager --help"):
        run = shell(f"$P {command} >/dev/full")
        assert (run.returncode, run.stderr.lstrip("\n")) == (1, NO_SPACE)  # rich ends the line of its bar


@pytest.mark.parametrize("command", COMMANDS)
def test_a_closed_stdout_is_one_line_and_status_1(command):
    run = shell(f"$P {command} </dev/null >&-")
    assert (run.returncode, run.stderr) == (1, CLOSED)
    assert shell(f"$P {command} </dev/null >&- 2>&-").returncode == 1


def test_a_stdout_that_cannot_be_written_to_is_closed():
    run = shell("$P --version 1</dev/null")
    assert (run.returncode, run.stderr) == (1, CLOSED)


@pytest.mark.parametrize("command", ["--help", *LATE])
def test_a_pipe_without_a_reader_ends_in_silence_with_the_status_of_sigpipe(command):
    """The reader has gone before the first byte."""
    run = shell(f"{{ sleep 0.1; $P {command} </dev/null 2>/dev/null; echo $? >&2; }} | true")
    assert run.stderr == "141\n"


@pytest.mark.parametrize("closing", ["2>&-", "2>/dev/full"])
def test_a_stderr_that_fails_costs_only_its_text(closing):
    run = shell(f"$P generate --json --prompt 'Otto lives in Ghent. Where does Otto live?' {closing}")
    assert run.returncode == 0
    assert '"text": "Otto lives in Ghent."' in run.stdout
    assert shell(f"$P generate --prompt= {closing}").returncode == 2


def test_closed_streams_are_not_taken_by_files():
    """A checkpoint that was opened as descriptor 1 or 2 would be written to."""
    run = shell("$P generate --prompt 'Where is the lamp of Mira?' <&- 2>&-")
    assert (run.returncode, run.stderr) == (0, "")
    run = shell("$P generate - <&-")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.endswith("pagedkv: error: the prompt on stdin is empty; give at least one character\n")


@pytest.mark.parametrize(
    "locale",
    [
        "LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0",
        pytest.param("PYTHONIOENCODING=ascii:strict", marks=pytest.mark.slow),
    ],
)
def test_an_ascii_terminal_gets_replacements(locale, tmp_path):
    (tmp_path / "prompt.txt").write_text("Zoë lives in Ghent. Where does Zoë live?")
    assert shell(f"{locale} $P generate --prompt-file {tmp_path}/prompt.txt").returncode == 0
    assert shell(f"{locale} $P doctor").returncode == 0
    run = shell(f"{locale} $P generate --model {tmp_path}/Zoë")
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)


def test_a_stopped_reader_of_a_non_blocking_pipe_is_one_line():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"x" * 65536)
    except BlockingIOError:
        pass
    run = subprocess.run([*PAGEDKV, "--help"], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(reader), os.close(writer)
    assert (run.returncode, run.stderr) == (
        1,
        "pagedkv: cannot write to stdout: Resource temporarily unavailable\n",
    )


# --- Ctrl-C ---

MARKED = """
import os
from pagedkv import __main__ as entry
guard = entry._guard_streams
entry._guard_streams = lambda: os.write(1, b"!") and guard()
entry.main()
"""
"""The program of the console script, with a mark as soon as it handles Ctrl-C. Python handles earlier signals."""


@pytest.fixture(scope="module")
def long_work(tmp_path_factory):
    """A file of prompts that takes minutes."""
    path = tmp_path_factory.mktemp("work") / "prompts.jsonl"
    line = '{"prompt": "Where is the lamp of Mira?", "max_tokens": 4000, "ignore_eos": true}\n'
    path.write_text(line * 200)
    return path


def interrupted_after(seconds: float, *command: object) -> tuple[int, str]:
    """Start the command, send SIGINT so many seconds after its mark, and return its status and its stderr."""
    with subprocess.Popen(
        [sys.executable, "-c", MARKED, *map(str, command)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as run:
        assert run.stdout
        assert run.stdout.read(1) == b"!"
        time.sleep(seconds)
        run.send_signal(signal.SIGINT)
        try:
            _, err = run.communicate(timeout=60)
        finally:
            run.kill()
    return run.returncode, err.decode()


def assert_ends_quietly(delays: list[float], *command: object) -> None:
    for delay in delays:
        status, err = interrupted_after(delay, *command)
        assert (status, err) == (130, ""), f"after {delay:.4f} s"


def delays(count: int, longest: float) -> list[float]:
    """Return delays from 1 ms to `longest` s, as many short as long ones."""
    dice = random.Random(count)
    return [0.0, *(0.001 * (1000 * longest) ** dice.random() for _ in range(count))]


@pytest.mark.parametrize("count", [5, pytest.param(150, marks=pytest.mark.slow)])
def test_ctrl_c_is_status_130_in_silence_while_importing_loading_and_stepping(count, long_work):
    """After the mark, at any time, the status is 130: never a traceback, and never a death by the signal."""
    assert_ends_quietly(delays(count, 6.0), "generate", "--json", "--prompt-file", long_work)


@pytest.mark.parametrize("count", [2, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "command",
    [
        "bench manager --rounds 999 --record /dev/null",
        pytest.param("bench attention --full --json", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_is_status_130_in_silence_in_the_other_commands(count, command):
    assert_ends_quietly(delays(count, 4.0), *command.split())


DROPS_AN_INTERRUPT = """
import ctypes, os, signal, time
from pagedkv.cli.bench.commands import unwind_at_interrupt
unwind_at_interrupt()
callback = ctypes.CFUNCTYPE(None)(lambda: os.kill(os.getpid(), signal.SIGINT))
try:
    callback()
    time.sleep(30)
except KeyboardInterrupt:
    print("unwound")
"""


def test_ctrl_c_that_a_callback_of_c_code_drops_is_raised_again():
    """numba compiles with such callbacks. ctypes prints what they raise, and goes on."""
    run = subprocess.run([sys.executable, "-c", DROPS_AN_INTERRUPT], capture_output=True, text=True, timeout=25)
    assert (run.stdout, run.stderr) == ("unwound\n", "")


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_ctrl_c_in_an_import_that_c_code_began_ends_at_once(name):
    """Code in C++ drops what an import of numpy raises, and then uses half of it."""
    drops = f"""
import os, signal, sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from pagedkv.cli.bench.commands import unwind_at_interrupt
unwind_at_interrupt()
sys.modules[{name!r}] = ModuleType({name!r})
sys.modules[{name!r}].__spec__ = ModuleSpec({name!r}, None)
for sys.modules[{name!r}].__spec__._initializing in (False, True):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        print("unwound", flush=True)
        unwind_at_interrupt()
print("went on")
"""
    run = subprocess.run([sys.executable, "-c", drops], capture_output=True, text=True, timeout=25)
    assert (run.returncode, run.stdout, run.stderr) == (130, "unwound\n", "")


def test_ctrl_c_at_the_end_is_status_130_or_the_status_of_the_command():
    """The process ends without the teardown of Python, in which a signal would kill it or print a traceback."""
    for seconds in (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5):
        status, err = interrupted_after(seconds, "--version")
        assert status in (0, 130)
        assert err == ""


def test_ctrl_c_at_a_terminal_clears_the_line_and_shows_the_cursor(tmp_path):
    """A chat template is being rendered."""
    folder = shutil.copytree(BUNDLED, tmp_path / "checkpoint")
    hostile.edit("tokenizer_config.json", chat_template=hostile.LOOPS)(folder)
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(ROOT)
        command = ("generate", "--model", str(folder), "--chat", "--prompt", "a")
        os.execv(sys.executable, [*PAGEDKV, *command])
    shown = b""
    deadline = time.monotonic() + 60
    while b"loading" not in shown and time.monotonic() < deadline:
        shown += os.read(terminal, 4096)
    time.sleep(0.5)
    os.write(terminal, b"\x03")
    while time.monotonic() < deadline and select.select([terminal], [], [], 30)[0]:
        try:
            shown += os.read(terminal, 4096)
        except OSError:
            break
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 130
    assert b"Traceback" not in shown
    assert shown.endswith(b"\r\x1b[K\x1b[?25h")


def test_a_shell_that_ignores_ctrl_c_for_its_jobs_is_obeyed():
    run = shell("trap '' INT; $P generate </dev/null 2>/dev/null & job=$!; sleep 0.3; kill -INT $job; wait $job")
    assert run.returncode == 0
    assert run.stdout
