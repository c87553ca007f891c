"""The keys of vLLM's additional_config that are for pagedkv, and a clear word for anything else."""

from __future__ import annotations

import re

import pytest

from pagedkv.core import policies
from pagedkv.errors import InvalidRequest
from pagedkv.integrations.vllm.additional_config import linears_in, policy_in


@pytest.mark.parametrize("name", policies.POLICIES)
def test_a_policy_is_chosen_by_its_name(name: str) -> None:
    assert policy_in({"pagedkv_policy": name, "of_another_plug_in": 1}) == name


@pytest.mark.parametrize("config", [None, {}, {"of_another_plug_in": 1}, object()])
def test_lru_serves_where_no_policy_is_asked_for(config: object) -> None:
    assert policy_in(config) == "lru"


@pytest.mark.parametrize("asked", ["fifo", "", None, 3, ["2q"]])
def test_another_policy_is_refused_with_the_names_that_there_are(asked: object) -> None:
    words = f"'pagedkv_policy' of additional_config: policy is {asked!r}; give one of lru, 2q, lfu, cost"
    for read in (policy_in, linears_in):
        with pytest.raises(InvalidRequest, match=re.escape(words)):
            read({"pagedkv_policy": asked})


def test_a_misspelt_key_is_refused_with_the_right_one() -> None:
    known = "'pagedkv_policy', 'pagedkv_linears'"
    with pytest.raises(InvalidRequest, match=f"has 'pagedkv_polices'; pagedkv reads {known}: correct the name"):
        policy_in({"pagedkv_polices": "2q"})


def test_linear_layers_are_ours_unless_the_config_says_no() -> None:
    for config in (None, {}, object(), {"of_another_plug_in": 1}, {"pagedkv_linears": True}):
        assert linears_in(config)
    assert not linears_in({"pagedkv_linears": False, "pagedkv_policy": "2q"})


@pytest.mark.parametrize("asked", [0, 1, "false", None])
def test_a_switch_is_true_or_false(asked: object) -> None:
    text = f"'pagedkv_linears' of additional_config is {asked!r}; give true or false"
    with pytest.raises(InvalidRequest, match=re.escape(text)):
        linears_in({"pagedkv_linears": asked})
