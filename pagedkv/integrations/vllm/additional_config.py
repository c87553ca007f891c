"""The keys of vLLM's `additional_config` that are for pagedkv. No vLLM is imported here.

    vllm serve ... --additional-config '{"pagedkv_policy": "2q"}'

vLLM hands the whole of `additional_config` to every plug-in and checks none of it. So a key that begins with `pagedkv_`
and has no meaning is refused here: it would change nothing, without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pagedkv.core import FramePool
from pagedkv.errors import InvalidRequest

POLICY: Final = "pagedkv_policy"
LINEARS: Final = "pagedkv_linears"
HINTS: Final = "pagedkv_hints"
LOGGED_MISS: Final = "pagedkv_logged_miss"
KEYS: Final[Mapping[str, Any]] = {POLICY: "lru", LINEARS: True, HINTS: 0.1, LOGGED_MISS: 2048}
"""key: its default. The eviction policy, see FramePool; whether linear layers are ours; the share of the pool for
retained blocks, and again for pinned ones; the tokens of a prompt computed again from which the log has a line."""


def option_in(additional_config: object, key: str) -> Any:
    """Return what `additional_config` says for one of KEYS, or its default.

    Raises: InvalidRequest for a value that cannot be meant, and for an unknown key
    """
    return _ours_in(additional_config).get(key, KEYS[key])


def _ours_in(additional_config: object) -> Mapping[str, Any]:
    """Raises: InvalidRequest for a value that cannot be meant, and for an unknown name."""
    if not isinstance(additional_config, Mapping):  # None, or an object of another plug-in
        return {}
    for key, asked in additional_config.items():
        if str(key).startswith("pagedkv_") and key not in KEYS:
            raise InvalidRequest(
                f"additional_config has {key!r}; pagedkv reads {', '.join(map(repr, KEYS))}: correct the name"
            )
        if key == LINEARS and not isinstance(asked, bool):
            raise InvalidRequest(f"{LINEARS!r} of additional_config is {asked!r}; give true or false")
        if key == LOGGED_MISS and not (type(asked) is int and asked >= 0):
            raise InvalidRequest(f"{LOGGED_MISS!r} of additional_config is {asked!r}; give a number of tokens")
        if key == HINTS and not (type(asked) in (int, float) and 0 <= asked < 1):
            raise InvalidRequest(f"{HINTS!r} of additional_config is {asked!r}; give a share below 1, for example 0.1")
    if POLICY in additional_config:
        try:
            FramePool(1, policy=additional_config[POLICY])
        except InvalidRequest as error:
            raise InvalidRequest(f"{POLICY!r} of additional_config: {error}") from None
    return additional_config
