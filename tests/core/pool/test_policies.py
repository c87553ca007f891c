"""The documented import path of the policies, `pagedkv.core.policies`, and the objects that a manager takes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pagedkv.core import MemoryManager, policies
from pagedkv.core.policies import LFU, LRU, POLICIES, Cost, Policy, Priority, TwoQueues
from pagedkv.core.pool import policies as pool_policies


def test_the_documented_path_gives_the_same_objects_as_pool_policies() -> None:
    for name in policies.__all__:
        assert getattr(policies, name) is getattr(pool_policies, name)
    assert {LRU, TwoQueues, LFU, Cost, Priority} == set(POLICIES.values())
    assert Policy is pool_policies.Policy


def test_every_class_of_pool_policies_is_re_exported() -> None:
    names, module = vars(pool_policies).items(), pool_policies.__name__
    defined = {name for name, value in names if getattr(value, "__module__", "") == module}
    assert {name for name in defined if isinstance(getattr(pool_policies, name), type)} <= set(policies.__all__)


@pytest.mark.parametrize("policy", [LRU(), TwoQueues(scale=2), LFU(), Cost(scale=512), Priority()])
def test_a_manager_keeps_the_policy_object_it_was_given(policy: Policy) -> None:
    assert MemoryManager(8, 4, policy=policy).policy is policy


def test_the_module_can_be_run_by_its_documented_name() -> None:
    ran = subprocess.run([sys.executable, "-m", "pagedkv.core.policies"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
