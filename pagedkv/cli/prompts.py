"""The sources of prompts: an option, a file, stdin, or the bundled demo. Text only; no torch.

A file's last newline ends its last line and is no part of the prompt. All mistakes are found before any work starts.
"""

from __future__ import annotations

import json
import os
import select
import stat
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pagedkv.errors import InvalidRequest
from pagedkv.model.records import DEMO_PROMPT

PATIENCE_S: Final = 1.0
"""Seconds without input on stdin after which stderr says that stdin is being read."""

MOST_BYTES: Final = 2**28
"""Bytes of a source of prompts. A device may have no end."""


@dataclass(frozen=True)
class Prompt:
    """One prompt. where: its name in errors. options: its own fields of SamplingParams, from a .jsonl line."""

    text: str
    where: str
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.text:
            raise InvalidRequest(f"{self.where} is empty; give at least one character")
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"{self.where} is not Unicode text: {error.reason} at character {error.start}"
            ) from None


@dataclass(frozen=True)
class Source:
    """The prompts of a run. many: from a .jsonl file, so each result names its line. demo: the user gave no prompt."""

    prompts: tuple[Prompt, ...]
    many: bool = False
    demo: bool = False


def read(text: str | None, path: Path | None, dash: str | None) -> Source:
    """Read the prompts that the command line asks for; without any, the demo.

    Raises: InvalidRequest for two sources, or for a source that is empty, unreadable or malformed (naming the line)
    """
    if dash not in (None, "-"):
        raise InvalidRequest(
            f"unexpected argument {dash!r}; give the prompt with --prompt, --prompt-file, or - for stdin"
        )
    given = [name for name, value in (("--prompt", text), ("--prompt-file", path), ("-", dash)) if value is not None]
    if len(given) > 1:
        raise InvalidRequest(f"{' and '.join(given)} both give a prompt; give one of them")
    if text is not None:
        return Source((Prompt(text, "the prompt"),))
    if path is not None and str(path) != "-":
        if path.suffix == ".jsonl":
            return Source(_lines(_file(path), path), many=True)
        return Source((Prompt(_file(path).removesuffix("\n"), str(path)),))
    if given or _is_piped():
        return Source((Prompt(_stdin().removesuffix("\n"), "the prompt on stdin"),))
    return Source((Prompt(DEMO_PROMPT, "the demo"),), demo=True)


def _is_piped() -> bool:
    """Return whether stdin is a pipe or a file. (A process without input gets /dev/null or a socket.)"""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _stdin() -> str:
    """Read all of stdin. If no input comes for PATIENCE_S, say on stderr that stdin is being read."""
    if not select.select([0], [], [], PATIENCE_S)[0]:
        print("pagedkv: reading the prompt from stdin", file=sys.stderr)
    try:
        return _decoded(sys.stdin.buffer.read(MOST_BYTES + 1), "stdin")
    except OSError as error:
        raise InvalidRequest(f"cannot read stdin: {error.strerror}") from None


def _file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return _decoded(file.read(MOST_BYTES + 1), str(path))
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}; give a file of prompts") from None


def _decoded(data: bytes, where: str) -> str:
    if len(data) > MOST_BYTES:
        raise InvalidRequest(f"{where} has more than {MOST_BYTES:,} bytes; give the prompts in several files")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{where} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def _lines(text: str, path: Path) -> tuple[Prompt, ...]:
    """Parse a .jsonl file, skipping blank lines. Only \\n ends a line: JSON strings may hold the other line ends."""
    found = tuple(_line(line, f"{path}, line {n}") for n, line in enumerate(text.split("\n"), 1) if line.strip())
    if not found:
        raise InvalidRequest(f'{path} holds no prompt; write one {{"prompt": "..."}} on each line')
    return found


def _line(line: str, where: str) -> Prompt:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{where} is not JSON: {error}") from None
    if not isinstance(values, dict) or not isinstance(values.get("prompt"), str):
        raise InvalidRequest(f'{where} is not an object with a text under "prompt"')
    return Prompt(values.pop("prompt"), where, values)
