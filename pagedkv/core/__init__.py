"""core: the memory manager. Integers only: numpy and numba, never a tensor.

`MemoryManager` is the door; engines that keep their own tensors need nothing else. Underneath, one `State` of arrays and a few
compiled functions over it, by noun: frames, index (of prefixes), spaces (page tables), steps (plan and commit).
"""

from pagedkv.core.handles import AddressSpace, Pin, Plan
from pagedkv.core.manager import MemoryManager
from pagedkv.core.observation import Observe
from pagedkv.core.observe.stats import Stats
from pagedkv.core.tables.layer_groups import Group

__all__ = ["AddressSpace", "Group", "MemoryManager", "Observe", "Pin", "Plan", "Stats"]
