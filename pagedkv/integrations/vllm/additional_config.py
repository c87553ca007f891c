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
KEYS: Final = (POLICY, LINEARS)


def policy_in(additional_config: object) -> Any:
    """Return the eviction policy that `additional_config` asks for, see FramePool: "lru" if it asks for none."""
    return _ours_in(additional_config).get(POLICY, "lru")


def linears_in(additional_config: object) -> bool:
    """Return whether linear layers are ours: True unless `additional_config` says false."""
    return bool(_ours_in(additional_config).get(LINEARS, True))


def _ours_in(additional_config: object) -> Mapping[str, Any]:
    """Raises: InvalidRequest for a policy that FramePool lacks, another switch than a bool, and an unknown name."""
    if not isinstance(additional_config, Mapping):  # None, or an object of another plug-in
        return {}
    for key, asked in additional_config.items():
        if str(key).startswith("pagedkv_") and key not in KEYS:
            raise InvalidRequest(
                f"additional_config has {key!r}; pagedkv reads {', '.join(map(repr, KEYS))}: correct the name"
            )
        if key == LINEARS and not isinstance(asked, bool):
            raise InvalidRequest(f"{LINEARS!r} of additional_config is {asked!r}; give true or false")
    if POLICY in additional_config:
        try:
            FramePool(1, policy=additional_config[POLICY])
        except InvalidRequest as error:
            raise InvalidRequest(f"{POLICY!r} of additional_config: {error}") from None
    return additional_config
