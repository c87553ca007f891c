"""Options of `generate` that shape the output by a grammar, as fields of SamplingParams."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from pagedkv.engine.checkpoint import regular_files
from pagedkv.errors import InvalidRequest

MOST_BYTES: Final = 2**24
"""Bytes of a file with a schema."""

OPTIONS: Final = {"json_schema": "--json-schema", "regex": "--regex", "choice": "--choice"}


def grammar(json_schema: str | None, regex: str | None, choice: Sequence[str] | None) -> dict[str, Any]:
    """Return the field of SamplingParams for a grammar; no field without one.

    Raises: InvalidRequest for two grammars, an unusable schema, or if the library is missing
    """
    every = {"json_schema": json_schema, "regex": regex, "choice": choice or None}
    given: dict[str, Any] = {name: value for name, value in every.items() if value is not None}
    if not given:
        return {}
    name, *others = given
    if others:
        raise InvalidRequest(
            f"{OPTIONS[name]} and {OPTIONS[others[0]]} are given; the text can follow only one of them"
        )
    if json_schema is not None:
        given[name] = _schema(json_schema)
    if find_spec("llguidance") is None:  # before a model is loaded
        raise InvalidRequest(f"{OPTIONS[name]} needs the library llguidance; pip install 'pagedkv[grammar]'")
    return given


def _schema(given: str) -> dict[str, Any]:
    """Return the schema of a text that begins with a brace, or of the file that any other text names."""
    is_text = given.lstrip().startswith(("{", "["))
    where, wanted = "--json-schema" if is_text else f"the schema {given}", 'give an object such as {"type": "object"}'
    try:
        found = json.loads(given if is_text else regular_files.read(Path(given), MOST_BYTES).decode("utf-8-sig"))
    except OSError as error:
        raise InvalidRequest(f"cannot read {where}: {error.strerror}; {wanted}, or a file that holds one") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{where} is not JSON: {error}; {wanted}") from None
    if not isinstance(found, dict):
        raise InvalidRequest(f"{where} is not an object; {wanted}")
    return found
