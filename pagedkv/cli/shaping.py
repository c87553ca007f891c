"""Options of `generate` that shape the output: a grammar, and biases of tokens, as fields of SamplingParams."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from pagedkv import regular_files
from pagedkv.errors import InvalidRequest

MOST_BYTES: Final = 2**24
"""Bytes of a file with a schema."""

OPTIONS: Final = {"json_schema": "--json-schema", "regex": "--regex", "choice": "--choice"}


def grammar(json_schema: str | None, regex: str | None, choice: Sequence[str] | None) -> dict[str, Any]:
    """Return the field of SamplingParams for a grammar; no field without one.

    Raises: InvalidRequest for two grammars, an unusable schema, or if the library is missing
    """
    given: dict[str, Any] = {"json_schema": json_schema, "regex": regex, "choice": choice or None}
    names = [name for name, value in given.items() if value is not None]
    if not names:
        return {}
    if len(names) > 1:
        options = " and ".join(OPTIONS[name] for name in names)
        raise InvalidRequest(f"{options} are given; the text can follow only one of them")
    if find_spec("llguidance") is None:  # before a model is loaded
        raise InvalidRequest(f"{OPTIONS[names[0]]} needs the library llguidance; pip install 'pagedkv[grammar]'")
    if json_schema is not None:
        given["json_schema"] = _schema(json_schema)
    return {names[0]: given[names[0]]}


def _schema(given: str) -> dict[str, Any]:
    """Return the schema of a text that begins with a brace, or of the file that any other text names."""
    where, text = "--json-schema", given
    if not given.lstrip().startswith(("{", "[")):
        where = f"the schema {given}"
        try:
            text = regular_files.read(Path(given), MOST_BYTES).decode("utf-8-sig")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InvalidRequest(
                f"cannot read {where}: {reason}; give a file with a JSON schema, or the schema itself, such as "
                '{"type": "object"}'
            ) from None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f'{where} is not JSON: {error}; give an object such as {{"type": "object"}}') from None
    if not isinstance(found, dict):
        raise InvalidRequest(f'{where} is not an object; give one such as {{"type": "object"}}')
    return found


def biases(given: Sequence[str]) -> dict[int, float]:
    """Return the biases of texts ID=BIAS. Raises: InvalidRequest for a text of another form, or a token twice"""
    found: dict[int, float] = {}
    for text in given:
        token, _, number = text.partition("=")
        try:
            bias = float(number)
        except ValueError:
            bias = float("nan")
        if not (token.isascii() and token.isdigit()) or not -100 <= bias <= 100:
            raise InvalidRequest(
                f"--logit-bias is {text!r}; give ID=BIAS: the id of a token, and a number from -100 to 100, such as "
                "42=-100"
            )
        if int(token) in found:
            raise InvalidRequest(f"--logit-bias names the token {token} twice; give it once")
        found[int(token)] = bias
    return found
