"""The keys of vLLM's additional_config that are for pagedkv, and a clear word for anything else."""

from __future__ import annotations

import re

import pytest

from pagedkv.errors import InvalidRequest
from pagedkv.integrations.vllm.additional_config import linears_in, policy_in


@pytest.mark.parametrize("config", [None, {}, {"of_another_plug_in": 1}, object()])
def test_lru_and_our_linear_layers_serve_where_nothing_is_asked_for(config: object) -> None:
    assert (policy_in(config), linears_in(config)) == ("lru", True)
    config = {"pagedkv_linears": False, "pagedkv_policy": "2q"}
    assert (policy_in(config), linears_in(config)) == ("2q", False)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        *(
            ({"pagedkv_policy": asked}, f"additional_config: policy is {asked!r}; give one of lru, 2q, lfu, cost")
            for asked in ("fifo", None, 3, ["2q"])
        ),
        *(
            ({"pagedkv_linears": asked}, f"'pagedkv_linears' of additional_config is {asked!r}; give true or false")
            for asked in (1, "false", None)
        ),
        ({"pagedkv_polices": "2q"}, "pagedkv reads 'pagedkv_policy', 'pagedkv_linears': correct the name"),
    ],
)
def test_a_wrong_value_or_key_is_refused_with_the_right_ones(config: dict[str, object], words: str) -> None:
    for read in (policy_in, linears_in):
        with pytest.raises(InvalidRequest, match=re.escape(words)):
            read(config)
