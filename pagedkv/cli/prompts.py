"""The sources of prompts: an option, a file, stdin, or the bundled demo. Text and messages only; no torch.

A file's last newline ends its last line and is no part of the prompt. A mistake in one line of a .jsonl is the error of
its Prompt; any other mistake is raised before work starts.
"""

from __future__ import annotations

import json
import os
import select
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pagedkv.engine.checkpoint.demo import DEMO_PROMPT
from pagedkv.errors import InvalidRequest

if TYPE_CHECKING:
    from pagedkv.cli.options import Prompting

_PATIENCE_S: Final = 1.0
"""Seconds without input on stdin after which stderr says that stdin is being read."""

MOST_BYTES: Final = 2**28
"""Bytes of a source of prompts. A device may have no end."""

_TAKEN: Final = ("messages", "self")
"""Names that are no variables of a template: the prompts, and a name of Jinja's."""


@dataclass(frozen=True)
class Prompt:
    """One prompt: a text, or the messages of a chat.

    where: its name in errors. line: its number in a .jsonl, from 1; 0 elsewhere. id: the "id" of its line.
    options: its own fields of SamplingParams. error: the reason why it cannot be used, or "".
    """

    text: str
    where: str
    messages: tuple[dict[str, Any], ...] = ()
    line: int = 0
    id: str | int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class Source:
    """The prompts of a run.

    many: from a .jsonl file, so each result names its line. demo: the user gave no prompt. talk: the user gives the
    prompts at the terminal, one after the other.
    """

    prompts: tuple[Prompt, ...] = ()
    many: bool = False
    demo: bool = False
    talk: bool = False


@dataclass(frozen=True)
class Templating:
    """The use of the chat template. every: for texts too, as messages of a user. variables: names for the template."""

    every: bool = False
    system: str | None = None
    variables: dict[str, Any] = field(default_factory=dict)

    def messages(self, prompt: Prompt) -> list[dict[str, Any]]:
        """Return the messages of a prompt; [] for plain text."""
        given = list(prompt.messages)
        return given if given or not self.every else [{"role": "user", "content": prompt.text}]

    def with_system(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages after the system message, unless they begin with one."""
        if self.system is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self.system}, *messages]


def _variables(given: Sequence[str]) -> dict[str, Any]:
    """Return the variables of the template from texts NAME=VALUE: a value is JSON, or else a text.

    Raises: InvalidRequest for a text of another form, or a name that is taken
    """
    found: dict[str, Any] = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not sign or not name.isidentifier() or name in _TAKEN:
            wanted = f"NAME=VALUE, such as enable_thinking=false, and another name than {' or '.join(_TAKEN)}"
            raise InvalidRequest(f"--template-var is {text!r}; give {wanted}")
        try:
            found[name] = json.loads(value)
        except (ValueError, RecursionError):
            found[name] = value
    return found


def _require_chat(source: Source, templating: Templating) -> None:
    """Raise InvalidRequest if there are options for a chat template, and no prompt goes through one."""
    given = "--system" if templating.system is not None else "--template-var" if templating.variables else ""
    if given and not templating.every and not any(prompt.messages or prompt.error for prompt in source.prompts):
        raise InvalidRequest(f"{given} is for the chat template; give --chat, or messages in a .jsonl")


def read(given: Prompting) -> tuple[Source, Templating]:
    """Read the prompts that the command line asks for; without any, the demo, or for a chat at a terminal a talk.

    Raises: InvalidRequest for two sources, or for a source that is empty, unreadable or malformed, or options of a chat
        where no prompt is one
    """
    templating = Templating(given.chat, given.system, _variables(given.template_var or ()))
    source = _read(given.prompt, given.prompt_file, given.dash, is_chat=given.chat)
    _require_chat(source, templating)
    return source, templating


def _read(text: str | None, path: Path | None, dash: str | None, *, is_chat: bool) -> Source:
    if dash not in (None, "-"):
        raise InvalidRequest(
            f"unexpected argument {dash!r}; give the prompt with --prompt, --prompt-file, or - for stdin"
        )
    given = [name for name, value in (("--prompt", text), ("--prompt-file", path), ("-", dash)) if value is not None]
    if len(given) > 1:
        raise InvalidRequest(f"{' and '.join(given)} both give a prompt; give one of them")
    if text not in (None, "-"):
        return Source((_prompt(text, "the prompt"),))
    if path is not None and str(path) != "-":
        if path.suffix == ".jsonl":
            return Source(_lines(_file(path), path), many=True)
        return Source((_prompt(_file(path).removesuffix("\n"), str(path)),))
    if given or _is_piped():
        return Source((_prompt(_stdin().removesuffix("\n"), "the prompt on stdin"),))
    if is_chat and sys.stdin.isatty():
        return Source(talk=True)
    return Source((Prompt(DEMO_PROMPT, "the demo"),), demo=True)


def _is_piped() -> bool:
    """Return whether stdin is a pipe or a file. (A process without input gets /dev/null or a socket.)"""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _stdin() -> str:
    """Read all of stdin. If no input comes for _PATIENCE_S, say on stderr that stdin is being read."""
    if not select.select([0], [], [], _PATIENCE_S)[0]:
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


def _prompt(text: str, where: str, **fields: Any) -> Prompt:
    """Return a prompt. Raises: InvalidRequest for an empty text, or one that is not Unicode"""
    if not text:
        raise InvalidRequest(f"{where} is empty; give at least one character")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{where} is not Unicode text: {error.reason} at character {error.start}") from None
    return Prompt(text, where, **fields)


def _lines(text: str, path: Path) -> tuple[Prompt, ...]:
    """Parse a .jsonl file, skipping blank lines. Only \\n ends a line: JSON strings may hold the other line ends."""
    found = tuple(_line(line, path, n) for n, line in enumerate(text.split("\n"), 1) if line.strip())
    if not found:
        raise InvalidRequest(f'{path} holds no prompt; write one {{"prompt": "..."}} on each line')
    return found


def _line(line: str, path: Path, number: int) -> Prompt:
    """Return the prompt of one line, or one with an error."""
    where, known = f"{path}, line {number}", None
    try:
        values = json.loads(line)
        if isinstance(values, dict):
            known = values.pop("id", None)
            known = known if isinstance(known, str | int) else None
        return _prompt_of(values, where, line=number, id=known)
    except InvalidRequest as error:
        return Prompt("", where, line=number, id=known, error=str(error))
    except (ValueError, RecursionError) as error:
        return Prompt("", where, line=number, error=f'{where} is not JSON: {error}; write {{"prompt": "..."}}')


def _prompt_of(values: Any, where: str, **fields: Any) -> Prompt:
    """Return the prompt of an object. Raises: InvalidRequest if it has neither a text nor messages, or both"""
    kinds = {"prompt": str, "messages": list}
    found = [name for name in kinds if isinstance(values, dict) and name in values]
    if len(found) != 1 or not isinstance(values[found[0]], kinds[found[0]]):
        has = f"; it has {', '.join(sorted(values)) or 'no key'}" if isinstance(values, dict) else ""
        wanted = 'an object with either a text under "prompt" or a list under "messages"'
        raise InvalidRequest(f"{where} is not {wanted}{has}")
    given = values.pop(found[0])
    if found == ["prompt"]:
        if not given:
            raise InvalidRequest(f"{where} has an empty prompt; give at least one character")
        return _prompt(given, where, options=values, **fields)
    if not given or not all(map(_is_message, given)):
        raise InvalidRequest(
            f'{where}: messages are objects with a "role" and a "content" (a text, or a list of parts, which are '
            "objects); give at least one"
        )
    return Prompt("", where, messages=tuple(given), options=values, **fields)


def _is_message(value: Any) -> bool:
    """Return whether a value is a message: a template would read a content that is not there as an empty text."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    content = value.get("content")
    parts = content if isinstance(content, list) else []
    return (isinstance(content, str | list) and all(isinstance(part, dict) for part in parts)) or "tool_calls" in value
