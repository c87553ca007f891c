"""Options of `generate` that shape the output: a grammar, and biases of tokens. Texts become fields of SamplingParams.

--json-schema TEXT or FILE     an object on the command line, or the file that holds it
--logit-bias TOKEN=BIAS        an id is known at once; a text becomes an id when the tokenizer is loaded
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pagedkv import regular_files
from pagedkv.errors import InvalidRequest

if TYPE_CHECKING:
    from pagedkv.checkpoint.tokenizer import Tokenizer

MOST_BYTES: Final = 2**24
"""Bytes of a file with a schema."""

OPTIONS: Final = {"json_schema": "--json-schema", "regex": "--regex", "choice": "--choice"}

Biases = dict[int | str, float]
"""Token → bias: a token is an id, or a text that is to be one token."""


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


def biases(given: Sequence[str]) -> Biases:
    """Return the biases of texts TOKEN=BIAS. Raises: InvalidRequest for a text of another form, or a token twice"""
    found: Biases = {}
    for text in given:
        name, _, number = text.rpartition("=")
        try:
            bias = float(number)
        except ValueError:
            bias = float("nan")
        if not name or not -100 <= bias <= 100:
            raise InvalidRequest(
                f"--logit-bias is {text!r}; give TOKEN=BIAS: the id of a token or its text, and a number from -100 to "
                "100, such as 42=-100"
            )
        token = int(name) if name.isascii() and name.isdigit() else name
        if token in found:
            raise InvalidRequest(f"--logit-bias names the token {name!r} twice; give it once")
        found[token] = bias
    return found


def with_ids(given: Biases, tokenizer: Tokenizer) -> dict[int, float]:
    """Return biases by id. Raises: InvalidRequest for a text that is not one token, or a token that is named twice"""
    found: dict[int, float] = {}
    for token, bias in given.items():
        number = token if isinstance(token, int) else _id_of(token, tokenizer)
        if number in found:
            raise InvalidRequest(f"--logit-bias names the token {number} twice, by its id and its text; give it once")
        found[number] = bias
    return found


def _id_of(text: str, tokenizer: Tokenizer) -> int:
    ids = tokenizer.encode(text, special_tokens=False)
    if len(ids) == 1 and tokenizer.decode(ids, skip_special_tokens=False) == text:
        return ids[0]
    if (known := tokenizer.raw.token_to_id(text)) is not None:  # such as </s>
        return known
    pieces = ", ".join(f"{tokenizer.raw.id_to_token(i)} ({i})" for i in ids[:8])
    raise InvalidRequest(
        f"--logit-bias names {text!r}, which is not one token: the tokenizer of this model makes {pieces or 'none'} "
        "of it; give a token, by its text or its id"
    )
