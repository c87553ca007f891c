"""ChatTemplate: a checkpoint's chat template, rendered in a child process with limits of time, memory and size.

    Tokenizer.render_chat -> ChatTemplate.render -> pipe -> chat_sandbox.py (jinja2 only, in a sandbox) -> pipe -> text

The child starts at the first rendering (about 0.1 s) and serves all later ones. It ends with its ChatTemplate, or with
this process: its stdin is closed then. A rendering that exceeds a limit ends the child; the next one starts another.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from pagedkv.checkpoint import chat_sandbox
from pagedkv.checkpoint.chat_sandbox import CPU_SECONDS, MOST_CHARACTERS
from pagedkv.errors import CheckpointError, InvalidRequest

SECONDS: Final = 30.0
"""The limit of one rendering in seconds of time, for a machine so busy that processor time is scarce."""

MOST_ANSWER_BYTES: Final = 12 * MOST_CHARACTERS + 1024
"""Bytes of an answer: JSON takes at most twelve for a character."""


class ChatTemplate:
    """A chat template, and the child process that renders it. Any thread may render; threads take turns."""

    def __init__(self, source: str) -> None:
        self.source: str = source
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None

    def render(self, variables: dict[str, Any]) -> str:
        """Return the text of the template for these variables, which are JSON values.

        Raises: InvalidRequest if the template refuses the messages or fails, or a variable is no JSON value;
            CheckpointError if the template is not valid, or takes too much time or memory
        """
        try:
            request = json.dumps({"source": self.source, "variables": variables}).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(
                f"the messages are not JSON values ({error}); give texts, numbers, lists and dicts"
            ) from None
        with self._lock:
            answer = self._answer(request)
        if "text" in answer:
            return answer["text"]
        if answer["kind"] == "messages":
            raise InvalidRequest(f"the checkpoint's chat template refuses these messages: {answer['error']}")
        if answer["kind"] == "limit":
            raise CheckpointError(
                f"the checkpoint's chat template exceeds a limit ({answer['error']}); "
                "give fewer messages, or plain text"
            )
        raise CheckpointError(
            f"the checkpoint's chat template is not valid ({answer['error']}); fetch it again, or give plain text"
        )

    def _answer(self, request: bytes) -> dict[str, str]:
        """Hand a request to the child and return its answer."""
        child = self._child or self._start()
        assert child.stdin is not None
        assert child.stdout is not None
        watch = threading.Timer(SECONDS, child.kill)
        try:
            watch.start()
            child.stdin.write(request)
            child.stdin.flush()
            line = child.stdout.readline(MOST_ANSWER_BYTES)
            return dict(json.loads(line))
        except (OSError, ValueError):  # the child has ended, perhaps within a line
            self._stop()
            return {"kind": "limit", "error": _reason(child.returncode)}
        except BaseException:  # an interrupt: the answer would be taken for that of the next request
            self._stop()
            raise
        finally:
            watch.cancel()

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the child. Its folders are named, so that Python searches no others and runs no .pth files."""
        origins = [getattr(find_spec(name), "origin", None) for name in ("jinja2", "markupsafe")]
        folders = dict.fromkeys(str(Path(origin).parents[1]) for origin in origins if origin)
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        command = [sys.executable, "-I", "-S", chat_sandbox.__file__, *folders]
        try:
            # Ctrl-C at a terminal goes to its whole group of processes: the child is in another one.
            self._child = subprocess.Popen(command, start_new_session=True, **pipes)
        except OSError as error:
            raise InvalidRequest(
                f"{sys.executable!r} cannot be started to render the chat template: {error.strerror}; give plain text"
            ) from None
        self._end = weakref.finalize(self, _close, self._child)
        return self._child

    def _stop(self) -> None:
        self._child = None
        self._end()


def _reason(status: int) -> str:
    """Return the reason for which a child ended, by its exit status."""
    if status == -signal.SIGPROF:
        return f"it takes more than {CPU_SECONDS:g} s of processor time"
    if status == -signal.SIGKILL:
        return f"it takes more than {SECONDS:g} s"
    return f"its process, {sys.executable}, ended with status {status}"


def _close(child: subprocess.Popen[bytes]) -> None:
    """End the child and close its pipes."""
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:  # the rest of a request has no reader any more
                continue
