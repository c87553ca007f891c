"""A checker of prose: `python tests/plain_words.py PATH...` lists sentences without a subject, and vague words.

Prose is the docstrings, comments, and texts in functions of Python, the comments and texts of C++ and CUDA, and the
text of Markdown outside code. The checker knows no grammar: it looks at the first word of each sentence and of each
field of a list, and at a short list of words. A question may begin with any word.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

HEADLESS = re.compile(r"(What|Whatever|Who|Whoever|Whom|Whose|Those|Nobody|None of)\b")
"""No sentence begins with one of these."""

HEADLESS_FIRST = re.compile(r"(Where|How|Nothing|All that|That|Which|As if|Likewise)\b")
"""No docstring begins with one of these either; inside a text they may follow a sentence that gives them a subject."""

VAGUE = re.compile(
    r"\b(nobody|anybody|everybody|no one|whoever|such as it is|as it were|let go of|lets go of)\b", re.IGNORECASE
)

FIELD = re.compile(r"\s*[`*\w.,/\[\] ]{1,40}:\s|\s*\S.* {3,}\S")
"""A line that begins a field of a list: `name: text`, or `name   text` in columns."""

HEADLESS_FIELD = re.compile(r"[\w`\])]: ((?:that|of|those|theirs|what|whose|whatever)\b.{0,60})")
"""The text of a field has a noun before these words."""

DRAWN = re.compile(r"[│├└┬┴▲▼▶─]")
"""The letters of a picture."""

SOURCES = (".py", ".cpp", ".hpp", ".cuh", ".h", ".inc", ".md")


def complaints(path: Path) -> list[str]:
    """Return one line for each sentence of a file that breaks a rule: `path:line: rule: text`."""
    found = []
    for line, text, is_docstring in prose(path):
        plain = re.sub(r"`[^`]*`", "`code`", text)
        for sentence in sentences(plain):
            if not sentence.endswith("?") and HEADLESS.match(sentence):
                found.append(f"{path}:{line}: begins without a subject: {sentence[:90]}")
        if is_docstring and HEADLESS_FIRST.match(plain):
            found.append(f"{path}:{line}: docstring begins without a subject: {plain[:90]}")
        if path.suffix == ".py" and not is_docstring and FIELD.match(plain):
            fields = HEADLESS_FIELD.finditer(plain)
            found += [f"{path}:{line}: field begins without a noun: {field[0]}" for field in fields]
        found += [f"{path}:{line}: say who or what: {match[0]!r} in {plain[:90]}" for match in VAGUE.finditer(plain)]
    return found


def sentences(text: str) -> list[str]:
    """Return the sentences of a text. A colon begins one, too, if a capital letter follows."""
    return [part.strip() for part in re.split(r"(?<=[.?!:])\s+(?=[A-Z`])", " ".join(text.split())) if part.strip()]


def prose(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield (line, text, whether it is a docstring) for each piece of prose in a file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from _docstrings(text)
        yield from _messages(text)
        yield from _comments(text)
    elif path.suffix == ".md":
        text = re.sub(
            r"^(```.*?^```|    .*?$|<.*?$|\|.*?$)", lambda code: "\n" * code[0].count("\n"), text, flags=re.M | re.S
        )
        for match in re.finditer(r"\S(?:[^\n]|\n(?!\s*\n|[-*#\d]))*", text):
            yield text.count("\n", 0, match.start()) + 1, match[0].lstrip("-*# >0123456789."), False
    else:
        for number, comment in _joined((number, match[1]) for number, match in _cpp_comments(text)):
            yield number, comment, False
        for number, line in enumerate(text.splitlines(), 1):
            for match in re.finditer(r'(?<!asm\()"([^"\\]* [^"\\]* [^"\\]*)"', line):
                yield number, match[1][:1].upper() + match[1][1:], False


def _docstrings(text: str) -> Iterator[tuple[int, str, bool]]:
    for node in ast.walk(ast.parse(text)):
        for child in getattr(node, "body", []) if isinstance(getattr(node, "body", []), list) else []:
            value = child.value if isinstance(child, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                for offset, paragraph in _paragraphs(value.value):
                    yield child.lineno + offset, paragraph, offset == 0


def _messages(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yield the texts in functions, and those that a class is called with. A value in a text counts as a word.

    A text has three words or more. Docstrings are no texts.
    """
    tree = ast.parse(text)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    called = [node for node in ast.walk(tree) if isinstance(node, ast.Raise) or _makes_an_object(node)]
    statements = [line for node in functions for line in node.body if not _is_text(line)]
    found = {part for root in (*statements, *called) for part in ast.walk(root)}
    parts = {value for part in found if isinstance(part, ast.JoinedStr) for value in part.values}
    for part in found - parts:
        if isinstance(part, ast.JoinedStr | ast.Constant):
            words = part.values if isinstance(part, ast.JoinedStr) else [part]
            said = "".join(str(word.value) if isinstance(word, ast.Constant) else "X" for word in words)
            if said.count(" ") >= 2:
                yield part.lineno, said[:1].upper() + said[1:], False


def _makes_an_object(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2][:1].isupper()


def _is_text(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each paragraph, and of each field of a list: `name: text`, or `name   text` in columns."""
    lines = []
    for number, line in enumerate(text.splitlines()):
        drawn = DRAWN.search(line) or not re.search(r"\w", line)
        field = FIELD.match(line)
        if drawn or field:
            lines.append((number, ""))  # ends the paragraph before
        if not drawn:
            lines.append((number, " ".join(line.split())))
    yield from _joined(iter(lines))


def _comments(text: str) -> Iterator[tuple[int, str, bool]]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = ((token.start[0], token.string.lstrip("#: ")) for token in tokens if token.type == tokenize.COMMENT)
    for number, comment in _joined(lines):
        yield number, comment, False


def _cpp_comments(text: str) -> Iterator[tuple[int, re.Match[str]]]:
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.search(r"//+\s?(.*)", line):
            yield number, match


def _joined(lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Join the texts of consecutive lines; an empty text ends a paragraph."""
    first, last, words = 0, -2, list[str]()
    for number, line in lines:
        if number > last + 1 or not line.strip():
            if words:
                yield first, " ".join(words)
            first, words = number, []
        if line.strip():
            if not words:
                first = number
            words.append(line.strip())
        last = number
    if words:
        yield first, " ".join(words)


def files(paths: list[Path]) -> list[Path]:
    """Return the sources below `paths`, without the builds."""
    found = [below for path in paths for below in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    built = re.compile(r"__pycache__|\.venv.*")
    return [path for path in found if path.suffix in SOURCES and not any(map(built.fullmatch, path.parts))]


if __name__ == "__main__":
    lines = [line for path in files([Path(name) for name in sys.argv[1:]]) for line in complaints(path)]
    print("\n".join(lines) or "plain")
    sys.exit(bool(lines))
