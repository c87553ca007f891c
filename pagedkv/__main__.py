"""The process of the command, for `pagedkv` and `python -m pagedkv`: signals, streams, and the end of the process.

    Ctrl-C                  the process ends at once with status 130, also during imports; nothing is unwound but a
                            benchmark, whose peers end and whose temporary files go
    stdout fails            it ends with one line on stderr and status 1
    stdout has no reader    it ends in silence with status 141, as a command that SIGPIPE ended
    stderr fails            the text is lost, and the command goes on

This module imports the rest of pagedkv after it has set this up. The process ends without the teardown of Python, in
which a signal or a stream could still cause a traceback.
"""

from __future__ import annotations

import errno
import io
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from _typeshed import ReadableBuffer

STDOUT, STDERR = 1, 2
"""Descriptors."""

ENGINE = ("typer", "rich", "safetensors", "tokenizers", "jinja2")
"""The packages of the extra `engine`."""

FAILED, INTERRUPTED, NO_READER = 1, 130, 141
"""Exit statuses."""


def main() -> NoReturn:
    """Run `pagedkv` with the arguments of this process, and end the process with a status of the command."""
    try:
        import signal

        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell may have Ctrl-C ignored
            signal.signal(signal.SIGINT, _interrupted)
    except KeyboardInterrupt:
        _interrupted()
    _guard_streams()
    _need_engine()
    from pagedkv.cli.app import invoke

    status = invoke()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _need_engine() -> None:
    """End the process with one line unless the packages of the extra `engine` are installed."""
    import importlib.util

    if missing := [name for name in ENGINE if importlib.util.find_spec(name) is None]:
        needed = f"the command line needs {', '.join(missing)}; install them with: pip install 'pagedkv[engine]'"
        print(f"pagedkv: {needed}", file=sys.stderr, flush=True)
        os._exit(FAILED)


def _interrupted(*_: object) -> NoReturn:
    _show_cursor()
    os._exit(INTERRUPTED)


def _show_cursor() -> None:
    """Clear the line of a spinner or a progress bar on a terminal, and show the cursor, which they hide."""
    if os.isatty(STDERR):
        os.write(STDERR, b"\r\x1b[K\x1b[?25h")


def _guard_streams() -> None:
    """Replace the standard streams. A descriptor that is closed leads to the null device, so that no file takes it."""
    closed = sys.stdout is None
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (it stays open)
    sys.stderr = _wrapped(_Messages(STDERR, "w", closefd=False), sys.stderr)
    if closed:
        _failed(errno.EBADF)
    sys.stdout = _wrapped(_Output(STDOUT, "w", closefd=False), sys.stdout)


def _wrapped(file: io.FileIO, like: object) -> io.TextIOWrapper:
    """Return a text stream over `file` with the encoding and the buffering of the stream `like`."""
    assert isinstance(like, io.TextIOWrapper)
    kept = {name: getattr(like, name) for name in ("encoding", "errors", "line_buffering", "write_through")}
    return io.TextIOWrapper(io.BufferedWriter(file), **kept)


class _Output(io.FileIO):
    """The file under stdout. A write that fails ends the process."""

    def write(self, data: ReadableBuffer, /) -> int:
        """Write bytes and return their number."""
        try:
            written = super().write(data)
        except BrokenPipeError:
            _show_cursor()
            os._exit(NO_READER)
        except OSError as error:
            _failed(error.errno)
        return _failed(errno.EAGAIN) if written is None else written


class _Messages(io.FileIO):
    """The file under stderr. Bytes that cannot be written are lost."""

    def write(self, data: ReadableBuffer, /) -> int:
        """Write bytes and return their number."""
        lost = len(memoryview(data).cast("B"))
        try:
            written = super().write(data)
        except OSError:
            return lost
        return lost if written is None else written  # None: a pipe that is full and does not block


def _failed(reason: int | None) -> NoReturn:
    """End the process, because stdout cannot be written to."""
    _show_cursor()
    print(f"pagedkv: cannot write to stdout: {os.strerror(reason or errno.EIO)}", file=sys.stderr, flush=True)
    os._exit(FAILED)


if __name__ == "__main__":
    main()
