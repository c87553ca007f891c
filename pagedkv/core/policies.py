"""The eviction policies, under the name that users import: `pagedkv.core.policies`. They are defined in pool/policies.py."""

from pagedkv.core.pool.policies import LFU, LRU, POLICIES, Cost, Policy, Priority, TwoQueues

__all__ = ["LFU", "LRU", "POLICIES", "Cost", "Policy", "Priority", "TwoQueues"]
