"""core: the memory manager. Integers only: numpy and numba, never a tensor.

`MemoryManager` is the door; an engine that keeps its own tensors needs nothing else. An engine that keeps its own page
tables, too, takes `FramePool`. Beneath both doors lies one `State` of arrays. Compiled functions work on these arrays,
in wings by subject:

    pool/     which frames are free, cached, evicted       tables/   which space maps which frame; plan and commit
    prefix/   which pages a prompt finds                   observe/  statistics         check/   the invariants
"""

from pagedkv.core.frame_pool.pool import FramePool
from pagedkv.core.handles import AddressSpace, Pin, Plan
from pagedkv.core.manager import MemoryManager
from pagedkv.core.observe.receipts import Receipt
from pagedkv.core.observe.stats import PoolStats, Stats
from pagedkv.core.prefix.digests import page_digests
from pagedkv.core.prefix.events import as_array, as_map
from pagedkv.core.prefix.history import TokenHistory
from pagedkv.core.states.door import Places, StatePool
from pagedkv.core.tables.layer_groups import Group

__all__ = [
    "AddressSpace", "FramePool", "Group", "MemoryManager", "Pin", "Places", "Plan", "PoolStats", "Receipt", "StatePool",
    "Stats", "TokenHistory", "as_array", "as_map", "page_digests",
]  # fmt: skip
