"""WorkerProcess: a process that answers each request, a line of JSON on its stdin, with a line of JSON on its stdout.

Peers run in one: manager/peers.py, attention/vllm_peer.py, generate/peers/process.py.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


class WorkerProcess:
    """A process whose PYTHONPATH is that of `environ` alone, and whose stderr is dropped.

    name:    the words by which errors call it.
    command: a relative path of the program counts from the folder of this process.
    environ: variables of its environment, beside those of this process.
    Raises:  OSError if it cannot be started
    """

    def __init__(self, name: str, command: Sequence[str], environ: dict[str, str], folder: Path) -> None:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environ
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        program = os.path.abspath(command[0]) if os.sep in command[0] else command[0]
        words = [program, *command[1:]]
        self.name, self.process = name, subprocess.Popen(words, env=env, text=True, cwd=folder, **pipes)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request. Raises: OSError if the process has ended."""
        assert self.process.stdin is not None
        with suppress(OSError):  # the process has ended, as `read` will say
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        return self.read()

    def read(self) -> dict[str, Any]:
        """Return the next answer; the first may come without a request. Raises: OSError if the process has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise OSError(f"{self.name} ended with status {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self, seconds: float) -> None:
        """End the process; kill one that does not end within `seconds`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.close()
            self.process.wait(timeout=seconds)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        finally:
            self.process.stdout.close()
