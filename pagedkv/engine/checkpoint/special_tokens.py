"""Special tokens: names and tokens in the files next to tokenizer.json, read as transformers 5 does. No texts, no ids.

    tokenizer_config.json     names (bos_token, ..), extra tokens, added_tokens_decoder: tokens by id
    special_tokens_map.json   names and extra tokens, which replace those above  ┐ not read next to an
    added_tokens.json         tokens by text                                     ┘ added_tokens_decoder

A token that tokenizer.json lacks, or has with other flags, is added to the tokenizer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tokenizers import AddedToken

from pagedkv.engine.checkpoint.fields import shown
from pagedkv.engine.checkpoint.files import read_json_if_present
from pagedkv.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    import tokenizers

CONFIG: Final = "tokenizer_config.json"
MAP: Final = "special_tokens_map.json"
ADDED: Final = "added_tokens.json"

EXTRA: Final = "extra_special_tokens"
OLD_EXTRA: Final = "additional_special_tokens"
"""The field with further special tokens, as transformers 5 and as older ones write it."""

STANDARD: Final = tuple(f"{name}_token" for name in "bos eos unk sep pad cls mask".split())
"""Names that make a token of ADDED special."""

FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_config(folder: Path, raw: tokenizers.Tokenizer) -> dict[str, Any]:
    """Return tokenizer_config.json with the names of special tokens, each as a text, from all files of the folder.

    Modifies: raw, to which missing tokens are added. Raises: CheckpointError if a file does not hold what it should
    """
    where, config = folder / CONFIG, read_json_if_present(folder, CONFIG)
    listed = config.pop("added_tokens_decoder", None)
    names = _names(folder, config, with_map=listed is None)
    extra = _checked(config.pop(EXTRA, None) or [], list, where)
    if listed is None:
        texts = {_text(value, where) for value in (*(names[name] for name in STANDARD if name in names), *extra)}
        ids, where_listed = {i: text for text, i in read_json_if_present(folder, ADDED).items()}, folder / ADDED
        tokens = [_token(ids[i], where_listed, special=ids[i] in texts) for i in _in_order(ids, where_listed)]
    else:
        tokens = [_token(listed[i], where) for i in _in_order(_checked(listed, dict, where), where)]
    extra = extra or _checked(config.get(OLD_EXTRA) or [], list, where)
    _add(raw, tokens, *([_token(value, where, special=True) for value in some] for some in (names.values(), extra)))
    return {**config, **{name: _text(value, where) for name, value in names.items()}}


def _names(folder: Path, config: dict[str, Any], *, with_map: bool) -> dict[str, Any]:
    """Return the named tokens, standard ones first. Modifies: config, which gets the extra tokens of all files"""
    if not config.get(EXTRA) and OLD_EXTRA in config:
        config[EXTRA] = config.pop(OLD_EXTRA)
    own = {key: value for key, value in config.items() if key.endswith("_token") and isinstance(value, str)}
    own = {key: value for key, value in own.items() if key not in STANDARD}
    own |= _checked(config.pop("model_specific_special_tokens", {}), dict, folder / CONFIG)
    own |= config.pop(EXTRA) if isinstance(config.get(EXTRA), dict) else {}
    if with_map:
        further = read_json_if_present(folder, MAP)
        if isinstance(further.get(EXTRA), list):
            further[EXTRA] = [*(config.get(EXTRA) or []), *further[EXTRA]]
        config |= further
        own |= config.pop(EXTRA) if isinstance(config.get(EXTRA), dict) else {}
    others = {key: value for key, value in config.items() if key.endswith("_token")}
    names = {**dict.fromkeys(STANDARD), **others, **own}
    return {key: value for key, value in names.items() if isinstance(value, (str, dict))}


def _add(raw: tokenizers.Tokenizer, tokens: list[AddedToken], named: list[AddedToken], extra: list[AddedToken]) -> None:
    """Add each of `tokens` unless the tokenizer has it with the same flags, then named and extra tokens that it lacks.

    named: a token of such a text is special
    """
    present = raw.get_added_tokens_decoder().values()
    same, texts = {repr(token) for token in present}, {token.content for token in (*present, *tokens)}
    missing, special = [token for token in tokens if repr(token) not in same], {token.content for token in named}
    for token in missing:
        token.special |= token.content in special
    others = {repr(token): token for token in (*named, *extra) if token.content not in texts}
    raw.add_tokens([*missing, *others.values()])


def _token(value: object, where: Path, *, special: bool | None = None) -> AddedToken:
    flags = {flag: bool(value[flag]) for flag in FLAGS if flag in value} if isinstance(value, dict) else {}
    return AddedToken(_text(value, where), **flags | ({} if special is None else {"special": special}))


def _text(value: object, where: Path) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise CheckpointError(f"{where} has the token {shown(value)}; it must be a text, or an object with content")
    return text


def _in_order(ids: dict[Any, Any], where: Path) -> list[Any]:
    """Return the keys of `ids` in the order of their numbers."""
    try:
        return sorted(ids, key=int)
    except (TypeError, ValueError):
        raise CheckpointError(f"{where} has tokens with the ids {shown(list(ids))}; they must be integers") from None


def _checked(value: Any, kind: type, where: Path) -> Any:
    if not isinstance(value, kind):
        raise CheckpointError(f"{where} has the tokens {shown(value)}; they must be a {kind.__name__}")
    return value
