"""The objects that a manager takes as its policy, from `pagedkv.core.policies`."""

from __future__ import annotations

import pytest

from pagedkv.core import MemoryManager
from pagedkv.core.policies import LFU, LRU, POLICIES, Cost, Policy, TwoQueues


@pytest.mark.parametrize("policy", [LRU(), TwoQueues(scale=2), LFU(), Cost(scale=512)])
def test_a_manager_keeps_the_policy_object_it_was_given(policy: Policy) -> None:
    assert MemoryManager(8, 4, policy=policy).policy is policy
    assert type(policy) is POLICIES[policy.name]
