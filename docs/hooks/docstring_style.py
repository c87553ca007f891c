"""The project's docstrings as Markdown, for mkdocstrings: a griffe extension that mkdocs.yml names.

A docstring is prose, followed by fields. A field is a name, a colon and a text; it ends before the next field:

    Map the frames for a step.

    counts:  new tokens of each sequence
    Shapes:  q [T, H, D]; sinks float32 [H]
             returns out [T, H, Dv]
    Raises:  OutOfFrames; nothing was changed then

Markdown would join these lines to one paragraph. This file turns each run of fields into a definition list, and each
drawing into a block of code. It knows nothing of HTML.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe

FIELD = re.compile(r"^(?P<name>[A-Za-z_][\w.]*(?:, [A-Za-z_][\w.]*)*|\"[^\"]*\"(?=:| {2})):? +(?P<text>\S.*)$")
NEXT_FIELD = re.compile(r"(?<=\.) +(?=(?:\"[^\"]+\"|[a-z_]\w*(?:=\([^)]*\))?(?:, [a-z_]\w*)*): )")
SECTIONS = ("Shapes", "Modifies", "Raises", "Returns", "Source", "Cost", "Units")
DRAWING = re.compile(r"[─│├└┌▶]")
ARRAY = re.compile(r"^(?:returns )?\w+(?:, \w+)*:? (?:u?int\d*|float\d*|bool|\[|None)")


class DocstringStyle(griffe.Extension):
    """Rewrite the docstring of every object when griffe has loaded the object."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Replace the text of one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Return a docstring with its fields as definition lists."""
    blocks: list[str] = []
    lines = [*text.expandtabs().splitlines(), ""]
    at = 0
    while at < len(lines):
        line = lines[at]
        if drawing := drawn(lines[at:]):
            blocks += ["", "```text", *drawing, "```", ""]
            at += len(drawing)
            continue
        if at and field_of(line):
            first = at
            while (at := at + 1) < len(lines) and lines[at].strip() and not field_of(lines[at]):
                pass
            for name, rest in fields_in([line.strip() for line in lines[first:at]]):
                blocks.append(f"{name if name in SECTIONS else f'`{name}`'}\n:   {definition(name, rest)}\n")
            continue
        if line.startswith(("    ", "|")) or not line.strip():
            blocks.append(line)
        else:
            blocks.append(escaped(line))
            if at + 1 < len(lines) and field_of(lines[at + 1]):
                blocks.append("")
        at += 1
    return "\n".join(blocks)


def drawn(lines: list[str]) -> list[str]:
    """Return the lines up to the next empty one if they are a drawing: at least one has a line or an arrow in it."""
    paragraph = lines[: lines.index("")]
    if not any(DRAWING.search(line) for line in paragraph):
        return []
    return [re.sub(r"(?<=\S) {4,}(?=\()", "  ", line) for line in paragraph]  # remarks in brackets need no column


def field_of(line: str) -> re.Match[str] | None:
    """Return the match if a line begins a field: `Raises:` and the like, a parameter, or a quoted value."""
    found = FIELD.match(line)
    if not found or (line[len(found["name"])] != ":" and not found["name"].startswith('"')):
        return None
    capital = found["name"][0].isupper()
    return None if capital and found["name"] not in SECTIONS else found


def fields_in(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield (name, lines) of the field that `lines` begin with, and of fields that follow it after a full stop."""
    field = field_of(lines[0])
    assert field is not None
    if field["name"] in SECTIONS:
        yield field["name"], [field["text"], *lines[1:]]
        return
    first, *others = NEXT_FIELD.split(" ".join([field["text"], *lines[1:]]))
    yield field["name"], [first]
    for other in others:
        name, _, text = other.partition(":")
        yield name, [text.strip()]


def definition(name: str, lines: list[str]) -> str:
    """Return the text of one field. Each array of `Shapes` begins a line of its own."""
    if name not in ("Shapes", "Returns"):
        return escaped(" ".join(lines))
    parts = [part for line in lines for part in re.split(r" {3,}", line)]
    text = parts[0]
    for part in parts[1:]:
        text += ("<br>" if ARRAY.match(part) else " ") + part
    return escaped(text)


def escaped(text: str) -> str:
    """Return text in which Markdown reads no emphasis and no tag, outside code and our own line breaks."""
    parts = re.split(r"(`[^`]*`|<br>)", text)
    return "".join(
        part if part.startswith("`") or part == "<br>" else part.replace("*", r"\*").replace("<", "&lt;")
        for part in parts
    )
