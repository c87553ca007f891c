"""ChatTemplate: a checkpoint's chat template, rendered in Jinja's sandbox.

A chat template is a program that comes with a checkpoint. The sandbox keeps it from the attributes of Python objects
and from changing what it is given, and its text has a limit. It may still loop for years or fill the memory: a model
folder is trusted that far.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from pagedkv.errors import CheckpointError, InvalidRequest

if TYPE_CHECKING:
    from jinja2 import Environment, Template, nodes
    from jinja2.parser import Parser

MOST_CHARACTERS: Final = 2**24
"""The longest text of a template."""

MOST_SHOWN: Final = 1000
"""Characters of an error, which may hold text of the template."""


class ChatTemplate:
    """A chat template. Any thread may render it."""

    def __init__(self, source: str) -> None:
        self.source: str = source

    def render(self, variables: dict[str, Any]) -> str:
        """Return the text of the template for these variables, which are JSON values.

        Raises: InvalidRequest if the template refuses the messages or fails, or a variable is no JSON value;
            CheckpointError if the template is not valid, or its text is too long
        """
        try:
            variables = json.loads(json.dumps(variables))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(
                f"the messages are not JSON values ({error}); give texts, numbers, lists and dicts"
            ) from None
        template, pieces, length = self._compiled, list[str](), 0
        try:
            for piece in template.generate(variables):
                pieces.append(piece)
                length += len(piece)
                if length > MOST_CHARACTERS:
                    break
        except RecursionError:
            raise _not_valid("it calls itself without end") from None
        except Exception as error:  # a template can raise anything
            raise InvalidRequest(f"the checkpoint's chat template refuses these messages: {_shown(error)}") from None
        if length > MOST_CHARACTERS:
            raise CheckpointError(
                f"the checkpoint's chat template gives a text of more than {MOST_CHARACTERS:,} characters; "
                "give fewer messages, or plain text"
            )
        return "".join(pieces)

    @cached_property
    def _compiled(self) -> Template:
        try:
            return _environment().from_string(self.source)
        except RecursionError:
            raise _not_valid("it is nested too deeply") from None
        except Exception as error:  # constants are computed when a template is compiled, and may raise anything
            raise _not_valid(_shown(error)) from None


def _not_valid(reason: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint's chat template is not valid ({reason}); fetch it again, or give plain text"
    )


def _shown(error: Exception) -> str:
    """Return the text of an error in one line; after the name of its type, unless Jinja or the template wrote it."""
    from jinja2 import TemplateError

    name = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
    return " ".join(f"{name}{error}"[:MOST_SHOWN].split())


def _environment() -> Environment:
    """Return a sandbox with the settings, filters and names that Hugging Face templates expect."""
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
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Serialise `value`. Jinja's own filter would escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
