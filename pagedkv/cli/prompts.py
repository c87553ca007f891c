"""Where prompts come from: an option, a file, stdin, or the bundled demo. Text only; no torch.

A file's last newline ends its last line and is no part of the prompt. What is not right is found before any work starts.
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
"""Seconds of silence on stdin, after which a person is told that it is being read."""


@dataclass(frozen=True)
class Prompt:
    """One prompt. where: what an error calls it. options: fields of SamplingParams that it wants otherwise."""

    text: str
    where: str
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.text:
            raise InvalidRequest(f"{self.where} is empty; give at least one character")
        try:
            self.text.encode()
        except UnicodeEncodeError as why:
            raise InvalidRequest(f"{self.where} is not Unicode text: {why.reason} at character {why.start}") from None


@dataclass(frozen=True)
class Source:
    """The prompts of a run. many: they came as .jsonl, and so will the results. demo: nobody gave one."""

    prompts: tuple[Prompt, ...]
    many: bool = False
    demo: bool = False


def read(text: str | None, path: Path | None, dash: str | None) -> Source:
    """The prompts that the command line means.

    Raises: InvalidRequest if it names two sources, or one that is empty, cannot be read or is malformed (naming the line).
    """
    if dash not in (None, "-"):
        raise InvalidRequest(
            f"unexpected argument {dash!r}; a prompt is given with --prompt, --prompt-file, or - for stdin"
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
    """Whether somebody sends something: a pipe or a file. (What has no input at all gives /dev/null or a socket.)"""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _stdin() -> str:
    if not select.select([0], [], [], PATIENCE_S)[0]:
        print("pagedkv: reading the prompt from stdin", file=sys.stderr)
    try:
        return _decoded(sys.stdin.buffer.read(), "stdin")
    except OSError as why:
        raise InvalidRequest(f"cannot read stdin: {why.strerror}") from None


def _file(path: Path) -> str:
    try:
        return _decoded(path.read_bytes(), str(path))
    except OSError as why:
        raise InvalidRequest(f"cannot read {path}: {why.strerror}; give a file of prompts") from None


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as why:
        raise InvalidRequest(f"{where} is not UTF-8 text: {why.reason} at byte {why.start}") from None


def _lines(text: str, path: Path) -> tuple[Prompt, ...]:
    """The prompts of a .jsonl; blank lines are skipped. Lines end with \\n only: others may stand inside a JSON string."""
    found = tuple(_line(line, f"{path}, line {n}") for n, line in enumerate(text.split("\n"), 1) if line.strip())
    if not found:
        raise InvalidRequest(f'{path} holds no prompt; write one {{"prompt": "..."}} on each line')
    return found


def _line(line: str, where: str) -> Prompt:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as why:
        raise InvalidRequest(f"{where} is not JSON: {why}") from None
    if not isinstance(values, dict) or not isinstance(values.get("prompt"), str):
        raise InvalidRequest(f'{where} is not an object with a text under "prompt"')
    return Prompt(values.pop("prompt"), where, values)
