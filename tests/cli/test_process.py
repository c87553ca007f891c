"""The command as a process: stdin, streams that fail, and Ctrl-C at any moment. `pagedkv/__main__.py` has the rules."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.records import DEMO_ANSWER

ROOT = Path(__file__).parents[2]
PAGEDKV = (sys.executable, "-m", "pagedkv")
NO_SPACE = "pagedkv: cannot write to stdout: No space left on device\n"
CLOSED = "pagedkv: cannot write to stdout: Bad file descriptor\n"
EMPTY = "pagedkv: error: the prompt on stdin is empty; give at least one character\n"
ASKED = "Otto lives in Ghent. Where does Otto live?"
LATE = [pytest.param(command, marks=pytest.mark.slow) for command in ("doctor", "warm")]
COMMANDS = ["--version", "fit", "generate --json", *LATE]
WORK = ["generate --json --prompt-file WORK", "bench manager --rounds 999 --record /dev/null"]


def shell(line: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a line of bash, in which $P is the command."""
    environment = {**os.environ, "P": " ".join(PAGEDKV), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=180, env=environment, **options
    )


def test_the_demo_is_answered_and_a_shell_that_ignores_ctrl_c_for_its_jobs_is_obeyed():
    run = shell("trap '' INT; $P generate </dev/null & job=$!; sleep 0.3; kill -INT $job; wait $job")
    assert (run.returncode, run.stdout) == (0, DEMO_ANSWER + "\n")
    assert "first token" in run.stderr


@pytest.mark.parametrize("options", ["--json", pytest.param("--json -", marks=pytest.mark.slow)])
def test_a_pipe_is_read_and_an_empty_one_refused(options):
    piped = shell(f"$P generate {options}", input=f"{ASKED}\n")
    assert json.loads(piped.stdout)["text"] == "Otto lives in Ghent."
    for dash in ("-", "--prompt -", "--prompt-file -"):
        empty = shell(f"$P generate {dash}", input="\n")
        assert (empty.returncode, empty.stdout, empty.stderr) == (2, "", EMPTY)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_and_a_closed_stdout_are_one_line_and_status_1(command):
    for to, words in (("/dev/full", NO_SPACE), ("&-", CLOSED)):
        run = shell(f"$P {command} </dev/null >{to}")
        assert run.returncode == 1
        assert run.stderr.endswith(words)
        assert "Traceback" not in run.stderr
        assert "Exception ignored" not in run.stderr


def test_a_stdout_that_cannot_be_written_to_is_closed_and_a_lost_message_changes_no_status():
    assert shell("$P --version 1</dev/null").stderr == CLOSED
    assert shell("$P --version >&- 2>&-").returncode == 1
    for closing in ("2>&-", "2>/dev/full"):
        assert shell(f"$P generate --prompt= {closing}").returncode == 2


@pytest.mark.parametrize("command", ["--help", "bench", pytest.param("generate", marks=pytest.mark.slow)])
def test_a_pipe_without_a_reader_ends_in_silence_with_the_status_of_sigpipe(command):
    """The reader has gone before the first byte."""
    run = shell(f"{{ sleep 0.1; $P {command} </dev/null 2>/dev/null; echo $? >&2; }} | true")
    assert run.stderr == "141\n"


def test_closed_streams_are_not_taken_by_files():
    """A checkpoint that was opened as descriptor 1 or 2 would be written to."""
    run = shell("$P generate --prompt 'Where is the lamp of Mira?' <&- 2>&-")
    assert (run.returncode, run.stderr) == (0, "")
    run = shell("$P generate - <&-")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.endswith(EMPTY)


def test_an_ascii_terminal_gets_replacements(tmp_path):
    locale = "LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0"
    (tmp_path / "prompt.txt").write_text("Zoë lives in Ghent. Where does Zoë live?")
    assert shell(f"{locale} $P generate --prompt-file {tmp_path}/prompt.txt").returncode == 0
    run = shell(f"{locale} $P generate --model {tmp_path}/Zoë")
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)


MARKED = """
import os
from pagedkv import __main__ as entry
guard = entry._guard_streams
entry._guard_streams = lambda: os.write(1, b"!") and guard()
entry.main()
"""
"""The program of the console script, with a mark as soon as it handles Ctrl-C. Python handles earlier signals."""


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


@pytest.mark.parametrize("count", [3, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize("command", WORK)
def test_ctrl_c_is_status_130_in_silence_while_importing_loading_and_working(count, command, tmp_path):
    """After the mark, at any time, the status is 130: never a traceback, and never a death by the signal."""
    line = '{"prompt": "Where is the lamp of Mira?", "max_tokens": 4000, "ignore_eos": true}\n'
    (tmp_path / "work.jsonl").write_text(line * 200)
    for delay in (0.0, *(0.001 * 3000 ** (number / count) for number in range(1, count + 1))):
        status, err = interrupted_after(delay, *command.replace("WORK", f"{tmp_path}/work.jsonl").split())
        assert (status, err) == (130, ""), f"after {delay:.4f} s"


def test_ctrl_c_at_the_end_is_status_130_or_the_status_of_the_command():
    """The process ends without the teardown of Python, in which a signal would kill it or print a traceback."""
    for seconds in (0.02, 0.05, 0.1, 0.15, 0.2, 0.3):
        status, err = interrupted_after(seconds, "--version")
        assert status in (0, 130)
        assert err == ""


DROPS_AN_INTERRUPT = """
import ctypes, os, signal, time
from pagedkv.cli.bench.run import _unwind_at_interrupt
signal.signal(signal.SIGINT, lambda *_: os._exit(130))
_unwind_at_interrupt()
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
