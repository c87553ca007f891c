"""The eviction policies under their documented import path, `pagedkv.core.policies`. pool/policies.py defines them.

This module only re-exports, so a policy imported from either place is the same object.
"""

from pagedkv.core.pool.policies import LFU, LRU, POLICIES, Cost, Policy, Priority, TwoQueues

__all__ = ["LFU", "LRU", "POLICIES", "Cost", "Policy", "Priority", "TwoQueues"]
