"""The child process that renders chat templates: started by chat_template.py, it knows Jinja and nothing of pagedkv.

A chat template is a program that comes with a checkpoint. Jinja's sandbox keeps it from reading attributes of Python
objects, but a template may loop for years, or multiply a string until the memory is full. So it runs in this process,
whose memory and processor time the system limits: `python -I -S chat_sandbox.py FOLDER...` takes the folders of jinja2
and markupsafe, and answers each line of stdin by a line on stdout.

    {"source": ..., "variables": {...}}  ->  {"text": ...}  or  {"kind": ..., "error": ...}

The kind of an error is "source", "messages" or "limit".

A template that takes more than CPU_SECONDS ends the process, by SIGPROF. Without the module `resource` or interval
timers (Windows) the only limit is that of the parent, in seconds of time.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from jinja2 import Template, nodes
    from jinja2.parser import Parser

CPU_SECONDS: Final = 2.0
MEMORY_BYTES: Final = 2**30
MOST_CHARACTERS: Final = 2**24
"""Limits of one rendering: processor time, address space of the process, and length of the text."""

MOST_WORDS: Final = 1000
"""Characters of an error, whose text may be the template's own."""


class InvalidTemplate(Exception):
    """Raised for a template that is not valid, whatever the messages."""


def main() -> None:
    """Answer the lines of stdin until it ends."""
    sys.path += sys.argv[1:]
    compiled = lru_cache(maxsize=1)(compile_template)
    _limit_memory()
    for line in sys.stdin.buffer:
        _limit_time(CPU_SECONDS)
        try:
            answer = _answer(compiled, **json.loads(line))
        except MemoryError:
            answer = {"kind": "limit", "error": f"it takes more than {MEMORY_BYTES >> 20} MiB of memory"}
        except RecursionError:
            answer = {"kind": "source", "error": "it is nested too deeply, or calls itself without end"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        _limit_time(0)


def _answer(compiled: Callable[[str], Template], source: str, variables: dict[str, Any]) -> dict[str, str]:
    """Render a template. Returns: the text, or what is wrong with the template or with the messages"""
    try:
        text = compiled(source).render(variables)
    except (MemoryError, RecursionError):
        raise
    except InvalidTemplate as error:
        return {"kind": "source", "error": _words(error)}
    except Exception as error:  # a template can raise anything
        return {"kind": "messages", "error": _words(error)}
    if len(text) > MOST_CHARACTERS:
        return {"kind": "limit", "error": f"its text has {len(text):,} characters, the limit is {MOST_CHARACTERS:,}"}
    return {"text": text}


def _words(error: Exception) -> str:
    """Return the text of an error in one line; after the name of its type, unless it has words for a reader."""
    from jinja2 import TemplateError

    name = "" if isinstance(error, TemplateError | InvalidTemplate) else f"{type(error).__name__}: "
    return " ".join(f"{name}{error}"[:MOST_WORDS].split())


def _limit_memory() -> None:
    with suppress(ImportError, ValueError, OSError):  # no module on Windows, no such limit on macOS
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def _limit_time(seconds: float) -> None:
    """Let the system end this process after so many seconds of processor time from now; 0 for no limit."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def compile_template(source: str) -> Template:
    """Compile a chat template with the settings, filters and names that Hugging Face templates expect.

    Raises: InvalidTemplate
    """
    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag `{% generation %}`, which marks a model's text for training. Here the tag renders only its body."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[nodes.Node]:
            """Parse up to `{% endgeneration %}` and return the body."""
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        """Refuse the messages; chat templates call this function."""
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        return environment.from_string(source)
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # constants are computed when a template is compiled, and may raise anything
        raise InvalidTemplate(_words(error)) from None


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Serialise `value`. Jinja's own filter would escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


if __name__ == "__main__":
    main()
