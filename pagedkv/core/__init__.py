"""core: the memory manager. Integers only: numpy and numba, never a tensor.

`MemoryManager` is the door; an engine that keeps its own tensors needs nothing else. Beneath the door lies one `State`
of arrays. Compiled functions work on these arrays, in wings by subject:

    pool/     which frames are free, cached, evicted       tables/   which space maps which frame; plan and commit
    prefix/   which pages a prompt finds                   observe/  statistics         check/   the invariants
"""

from pagedkv.core.handles import AddressSpace, Pin, Plan
from pagedkv.core.manager import MemoryManager
from pagedkv.core.observation import Observe
from pagedkv.core.observe.stats import Stats
from pagedkv.core.tables.layer_groups import Group

__all__ = ["AddressSpace", "Group", "MemoryManager", "Observe", "Pin", "Plan", "Stats"]
