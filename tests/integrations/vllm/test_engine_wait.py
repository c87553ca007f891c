"""vLLM's engine sleeps while its workers compute on all cores. vLLM is a stand-in here; host/test_tokens.py runs it."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pagedkv.errors import InvalidRequest

NAME = "pagedkv.integrations.vllm.engine_wait"


def yields() -> None:
    """Stands in for vLLM's way to wait."""


class Host:
    """Stands in for the parts of vLLM that the file imports."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        names = (
            "vllm", "vllm.distributed", "vllm.distributed.device_communicators", "vllm.utils", "vllm.logger",
            "vllm.distributed.device_communicators.shm_broadcast", "vllm.utils.ompmultiprocessing",
        )  # fmt: skip
        modules: dict[str, Any] = {name: ModuleType(name) for name in names}
        self.queue = modules["vllm.distributed.device_communicators.shm_broadcast"]
        modules["vllm.distributed.device_communicators"].shm_broadcast = self.queue
        self.queue.sched_yield = yields
        self.said: list[str] = []
        modules["vllm.logger"].init_logger = lambda _: SimpleNamespace(info=self.said.append)
        self.bound: list[list[int]] = []

        class OMPProcessManager:
            def __init__(manager, config: Any) -> None:
                manager.config = config
                manager.cpu_lists = self.bound

        self.manager = modules["vllm.utils.ompmultiprocessing"].OMPProcessManager = OMPProcessManager
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delitem(sys.modules, NAME, raising=False)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def waits_by(self, bound: list[list[int]], additional_config: Any = None) -> Any:
        """Return how an engine waits whose workers are bound to `bound`."""
        self.bound = bound
        config = SimpleNamespace(additional_config=additional_config)
        assert self.manager(config).config is config  # type: ignore[attr-defined]
        return self.queue.sched_yield


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


@pytest.fixture
def engine_wait(host: Host) -> Any:
    module = importlib.import_module(NAME)
    module.install()
    return module


@pytest.mark.parametrize("bound", [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0, 1, 2, 3, 4, 5]], []])
def test_the_engine_sleeps_if_its_workers_have_all_cores(host: Host, engine_wait: Any, bound: list[list[int]]) -> None:
    assert host.waits_by(bound) is engine_wait.rest
    assert host.said == ["The engine sleeps while its workers compute: they have all cores, by pagedkv"]
    began, used = time.perf_counter(), time.process_time()
    for _ in range(100):
        engine_wait.rest()
    assert time.perf_counter() - began >= 0.01
    assert time.process_time() - used < 0.5 * (time.perf_counter() - began)


@pytest.mark.parametrize("bound", [[[0, 1, 2]], [[0], [1]], [[4, 5, 6, 7]]])
def test_an_engine_with_a_core_of_its_own_waits_as_before(host: Host, engine_wait: Any, bound: list[list[int]]) -> None:
    assert host.waits_by(bound) is yields
    assert not host.said


@pytest.mark.parametrize(("threads", "sleeps"), [("1", False), ("3", False), ("4", True), ("8", True), ("4,2", True)])
def test_workers_that_are_not_bound_have_as_many_threads_as_openmp_is_told(
    host: Host, engine_wait: Any, threads: str, sleeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert (host.waits_by([]) is engine_wait.rest) == sleeps


def test_the_config_leaves_the_engine_as_it_is(host: Host, engine_wait: Any) -> None:
    assert host.waits_by([[0, 1, 2, 3]], {"pagedkv_sleep": False}) is yields
    with pytest.raises(InvalidRequest, match="'pagedkv_sleep' of additional_config is 'no'; give true or false"):
        host.waits_by([[0, 1, 2, 3]], {"pagedkv_sleep": "no"})
    assert host.waits_by([[0, 1, 2, 3]], {"pagedkv_linears": False}) is engine_wait.rest


def test_a_second_call_changes_nothing(host: Host, engine_wait: Any) -> None:
    ours = host.manager.__init__
    engine_wait.install()
    assert host.manager.__init__ is ours


def test_a_vllm_without_what_is_replaced_stays(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(NAME)
    theirs = host.manager.__init__
    monkeypatch.delattr(host.queue, "sched_yield")
    module.install()
    assert host.manager.__init__ is theirs
    assert not module.has_all_cores(None)
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert not module.has_all_cores([[0, 1, 2, 3]])


def test_numba_is_not_imported_with_the_keys() -> None:
    """Workers of vLLM 0.32 in which numba is imported before their kernels do not start."""
    code = "import sys, pagedkv.integrations.vllm.additional_config; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
