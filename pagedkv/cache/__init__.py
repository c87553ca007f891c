"""cache: the bytes. The pool (storage), a plan on the device (batch, mirror), the façade (paged)."""

from pagedkv.cache import graph_breaks
from pagedkv.cache.batch import PlannedBatch
from pagedkv.cache.fixed import FixedBatch
from pagedkv.cache.paged import PagedKVCache
from pagedkv.cache.states import StateBatch, StateSpec, StateStorage
from pagedkv.cache.storage import Storage

graph_breaks.mark_core()

__all__ = ["FixedBatch", "PagedKVCache", "PlannedBatch", "StateBatch", "StateSpec", "StateStorage", "Storage"]
