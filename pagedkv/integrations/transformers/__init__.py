"""transformers: Hugging Face models keep K and V in pages, and attend to them where they lie. Needs the extra `hf`.

from pagedkv.integrations.transformers import patch
patch(model)                        # or patch(model, memory="8GiB", kv_dtype="int8")
model.generate(**inputs)            # as before; equal prefixes are computed once

patching   hooks, generate() and unpatch()        ─▶ cache ─▶ pool ─▶ geometry
cache      PagedCache: one batch of sequences, its steps, beams and rollbacks
attention  the attention function "pagedkv", and its mask function
pool       Pool: the frames that the caches of one model share
states     state_layers.py: the recurrent states of hybrid models, which their layers read and write in a step
identity   what decides K and V besides tokens, and so which prompts find which pages
padding    which columns are tokens, and when pages show them what the host shows
linears    linear layers that read their weights faster than torch's in steps of few tokens
geometry   what a config asks of a cache, and what is refused
kv_quality measures the KV kinds for kv_dtype="auto"
trial      proves on a few tokens that a model computes the same as without pages
batching   generate_batch() of transformers, with our kernels over its own pool
"""

from __future__ import annotations

try:
    import transformers as _transformers
except ImportError as _error:
    raise ImportError("pagedkv.integrations.transformers needs transformers; install pagedkv[hf]") from _error

import warnings

OLDEST_HOST, NEWEST_HOST = (5, 14), (5, 24)
"""The oldest version of transformers that is supported, and the newest that is tested."""


def _check_version(version: str) -> None:
    """Refuse a version that is too old; warn once of one that is newer than the tests."""
    found = tuple(int(part) for part in version.split(".")[:2])
    if found < OLDEST_HOST:
        raise ImportError(
            f"pagedkv.integrations.transformers needs transformers {OLDEST_HOST[0]}.{OLDEST_HOST[1]} or newer, and "
            f"{version} is installed; pip install --upgrade transformers"
        )
    if found > NEWEST_HOST:
        warnings.warn(
            f"transformers {version} is newer than {NEWEST_HOST[0]}.{NEWEST_HOST[1]}, the newest version that pagedkv "
            "is tested with",
            stacklevel=3,
        )


_check_version(_transformers.__version__)

from pagedkv.integrations.transformers.attention import NAME, register  # noqa: E402
from pagedkv.integrations.transformers.batching import paged_batching  # noqa: E402
from pagedkv.integrations.transformers.cache import PagedCache  # noqa: E402
from pagedkv.integrations.transformers.patching import Patched, patch, unpatch  # noqa: E402
from pagedkv.integrations.transformers.pool import Pool  # noqa: E402

__all__ = ["NAME", "PagedCache", "Patched", "Pool", "paged_batching", "patch", "register", "unpatch"]
