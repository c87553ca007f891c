"""The keys of vLLM's additional_config that are for pagedkv, and a clear word for anything else."""

from __future__ import annotations

import re

import pytest

from pagedkv.core import policies
from pagedkv.errors import InvalidRequest
from pagedkv.integrations.vllm.additional_config import LINEARS, SLEEP, policy_in, switch_in


@pytest.mark.parametrize("name", policies.POLICIES)
def test_a_policy_is_chosen_by_its_name(name: str) -> None:
    assert policy_in({"pagedkv_policy": name, "of_another_plug_in": 1}) == name


@pytest.mark.parametrize("config", [None, {}, {"of_another_plug_in": 1}, object()])
def test_lru_serves_where_no_policy_is_asked_for(config: object) -> None:
    assert policy_in(config) == "lru"


@pytest.mark.parametrize("asked", ["fifo", "", None, 3, ["2q"]])
def test_another_policy_is_refused_with_the_names_that_there_are(asked: object) -> None:
    words = f"'pagedkv_policy' of additional_config: policy is {asked!r}; give one of lru, 2q, lfu, cost, priority"
    for read in (policy_in, lambda config: switch_in(config, LINEARS)):
        with pytest.raises(InvalidRequest, match=re.escape(words)):
            read({"pagedkv_policy": asked})


def test_a_misspelt_key_is_refused_with_the_right_one() -> None:
    known = "'pagedkv_policy', 'pagedkv_linears', 'pagedkv_sleep'"
    with pytest.raises(InvalidRequest, match=f"has 'pagedkv_polices'; pagedkv reads {known}: correct the name"):
        policy_in({"pagedkv_polices": "2q"})


SWITCHES = pytest.mark.parametrize(("key", "other"), [(LINEARS, SLEEP), (SLEEP, LINEARS)])


@SWITCHES
def test_a_part_is_on_unless_the_config_says_no(key: str, other: str) -> None:
    for config in (None, {}, object(), {"of_another_plug_in": 1}, {key: True}, {other: False}):
        assert switch_in(config, key)
    assert not switch_in({key: False, other: True, "pagedkv_policy": "2q"}, key)


@SWITCHES
@pytest.mark.parametrize("asked", [0, 1, "false", None])
def test_a_part_is_asked_for_by_true_or_false(key: str, other: str, asked: object) -> None:
    words = f"'{key}' of additional_config is {asked!r}; give true or false"
    with pytest.raises(InvalidRequest, match=re.escape(words)):
        switch_in({key: asked}, key)
