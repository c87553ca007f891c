"""Classes and functions of flashinfer with its names, arguments and results, by our kernels: also on CPUs.

    from pagedkv.integrations import flashinfer
    flashinfer.install()                       # from now on `import flashinfer` finds this module
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

They follow the release `__version__` and differ in this:

- the LSE is in base 2, as there; a query that sees nothing has out 0 and LSE -inf
- workspaces, backends, use_tensor_cores, disable_split_kv and enable_pdl change nothing
- a custom mask must show all tokens before the queries' own: it is a mask among the new tokens
- refused: RoPE inside of attention, scoring of several items, NVFP4, and modules compiled by the caller

Letters: B requests, T queries, H query heads, K kv heads, D head_dim, F pages of the pool, S page_size.
"""

from __future__ import annotations

from pagedkv.integrations import stand_in
from pagedkv.integrations.flashinfer.pages import append_paged_kv_cache, get_batch_indices_positions, get_seq_lens
from pagedkv.integrations.flashinfer.states import merge_state
from pagedkv.integrations.flashinfer.wrappers import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
)

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "append_paged_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
    "install",
    "merge_state",
]
__version__ = "0.6.18"


def install(replace: bool = False) -> None:
    """Let `import flashinfer` find this module.

    replace: also if flashinfer itself is installed
    Raises:  InvalidRequest if it is installed and `replace` is False
    """
    stand_in.install("flashinfer", __name__, ["cascade", "decode", "page", "prefill"], replace)
