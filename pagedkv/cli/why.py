"""`pagedkv why`: the first token in which two prompts differ, and what of the first a server can use for the second."""

from __future__ import annotations

import json
from itertools import zip_longest
from typing import TYPE_CHECKING, Final

from pagedkv.engine.checkpoint import BUNDLED
from pagedkv.engine.checkpoint.tokenizer import Tokenizer
from pagedkv.errors import InvalidRequest

if TYPE_CHECKING:
    from pathlib import Path

    from pagedkv.cli.options import Comparing

_CONTEXT: Final = 12
"""Tokens that are shown before and behind the first difference."""


def run(given: Comparing) -> None:
    """Print the first difference of two prompts. Raises: InvalidRequest; CheckpointError"""
    tokenizer = Tokenizer.load(given.folder() or BUNDLED)
    first, second = (_token_ids(file, str(given.text_of(file)), tokenizer) for file in (given.first, given.second))
    for line in _compared(first, second, tokenizer, given.block_size):
        print(line)


def _token_ids(file: Path, text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a prompt: a text, or the body of a request to /v1/completions or /v1/chat/completions."""
    if not _is_request(text):
        return tokenizer.encode(text.removesuffix("\n"))
    from pagedkv.engine.serve.bodies import ChatBody, CompletionBody, read  # pydantic

    kind: type[ChatBody | CompletionBody] = ChatBody if '"messages"' in text else CompletionBody
    prompts = read(kind, text.encode()).prompts(tokenizer, 2**31)
    if len(prompts) != 1:
        raise InvalidRequest(f"{file}: the body has {len(prompts)} prompts; give one with a single prompt")
    return prompts[0]


def _is_request(text: str) -> bool:
    try:
        body = json.loads(text)
    except ValueError:
        return False
    return isinstance(body, dict) and bool({"prompt", "messages"} & set(body))


def _compared(first: list[int], second: list[int], tokenizer: Tokenizer, block_size: int) -> list[str]:
    """Return the lines that are printed."""
    at = next((i for i, (a, b) in enumerate(zip_longest(first, second)) if a != b), None)
    sizes = f"{len(first):,} and {len(second):,} tokens"
    if at is None:
        return [f"The prompts are equal, {len(first):,} tokens."]
    found = max(0, min(at, len(second) - 1) // block_size * block_size)
    lines = [f"The prompts have {sizes}. They differ at token {at:,}."]
    if at in (len(first), len(second)):
        lines = [f"The prompts have {sizes}. The shorter one is the beginning of the longer one."]
    lines.append(f"{found:,} tokens of the first are of use to the second: whole pages of {block_size} tokens.")
    for name, ids in (("first", first), ("second", second)):
        before, behind = ids[max(0, at - _CONTEXT) : at], ids[at : at + _CONTEXT]
        lines.append(f"{name:>6}: {tokenizer.decode(before)!r} then {tokenizer.decode(behind)!r} (tokens {behind[:4]})")
    return lines
