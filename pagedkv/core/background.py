"""The background compiler: a process that compiles what a step calls, at the first use on a machine.

Numba compiles these functions for a quarter of a minute. Meanwhile this process runs them uncompiled (compiled.py), so
no call waits. The other one has a low priority, reads no request and writes only machine code. It goes on if this one
ends, and Ctrl-C at the terminal ends both. PAGEDKV_BACKGROUND=0 starts none: the first call of a function compiles it
then. None starts either if no folder can be written, or if this program is not Python, as a frozen application.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from pagedkv import debug
from pagedkv.machine_code import MachineCode

STEP: Final = (
    *("find_prefix", "open_space", "fork_space", "num_tokens"),
    *("plan_step", "release_space", "abort_step", "commit_step"),
)
"""The functions that a step calls, in the order in which they are compiled."""

_compiler: Final[list[subprocess.Popen[bytes]]] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_compiler.clear)  # a fork cannot see whether it runs


def begin(code: MachineCode) -> bool:
    """Start the process, unless all functions are on disk or it was started before. Return whether it runs."""
    is_python = "python" in Path(sys.executable or "").name.lower() and not getattr(sys, "frozen", False)
    may_start = is_python and code.folder is not None and debug.may_compile_in_background()
    if not _compiler and may_start and not code.has(STEP[-1]):
        command = [sys.executable, "-c", _PROGRAM, f"{code.folder}/lock", *sys.path]
        none = subprocess.DEVNULL
        with suppress(OSError):  # this machine allows no further process
            _compiler.append(subprocess.Popen(command, stdin=none, stdout=none, stderr=none))
            code.say(" in another process; steps run uncompiled meanwhile")
    return any(process.poll() is None for process in _compiler) and not code.has(STEP[-1])


def wait() -> None:
    """Wait until the process has ended, if it was started."""
    for process in _compiler:
        process.wait()


_PROGRAM: Final = """
import gc, os, sys, time
lock, *sys.path = sys.argv[1:]
if hasattr(os, "nice"):
    os.nice(5)
try:  # of many processes that start at once, one compiles; the next ones load
    import fcntl, signal
    signal.alarm(600)  # ends this process, if the compiler hangs
    held, end = open(lock, "a"), time.monotonic() + 60  # who has the lock may be stopped
    while time.monotonic() < end:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(0.05)
except (ImportError, OSError):
    pass
gc.disable()  # the compiler makes many objects that live: to look for garbage takes a tenth of its time
from pagedkv.core.warm import compile_step
compile_step()
"""
