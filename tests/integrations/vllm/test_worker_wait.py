"""A worker of vLLM sleeps while it waits for the engine. vLLM is a stand-in here; host/test_tokens.py runs it."""

from __future__ import annotations

import importlib
import os
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pagedkv.errors import InvalidRequest

NAME = "pagedkv.integrations.vllm.worker_wait"


def yields() -> None:
    """Stands in for vLLM's way to wait."""


class Host:
    """Stands in for the parts of vLLM that the file imports. The engine has four cores, and the worker's thread one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        names = (
            "vllm", "vllm.config", "vllm.distributed", "vllm.distributed.device_communicators", "vllm.logger",
            "vllm.distributed.device_communicators.shm_broadcast",
        )  # fmt: skip
        modules: dict[str, Any] = {name: ModuleType(name) for name in names}
        self.queue = modules["vllm.distributed.device_communicators.shm_broadcast"]
        modules["vllm.distributed.device_communicators"].shm_broadcast = self.queue
        self.queue.sched_yield = yields
        self.said: list[str] = []
        modules["vllm.logger"].init_logger = lambda _: SimpleNamespace(info=self.said.append)
        self.config: Any = None
        modules["vllm.config"].get_current_vllm_config_or_none = lambda: self.config
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delitem(sys.modules, NAME, raising=False)
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3} if process == os.getppid() else {0})
        self.worker_wait = importlib.import_module(NAME)

    def waits_by(self, workers: int, additional_config: Any = None) -> Any:
        """Return how a worker waits, of `workers`."""
        parallel = SimpleNamespace(local_world_size=workers)
        self.config = SimpleNamespace(parallel_config=parallel, additional_config=additional_config)
        self.worker_wait.install()
        return self.queue.sched_yield


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


@pytest.mark.parametrize(
    ("workers", "threads", "sleeps"),
    [
        (1, "4", True), (2, "2", True), (4, "1", True), (1, "6", True), (1, "", True), (1, "4,2", True),
        (1, "3", False), (2, "1", False), (1, "1", False),
    ],
)  # fmt: skip
def test_a_worker_sleeps_if_the_workers_have_all_cores(
    host: Host, workers: int, threads: str, sleeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """threads: of each worker; OpenMP has one for each core unless it is told."""
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert (host.waits_by(workers) is host.worker_wait.rest) == sleeps
    assert (host.queue.sched_yield is yields) != sleeps
    assert len(host.said) == sleeps
    assert host.waits_by(workers) is host.queue.sched_yield  # again
    assert len(host.said) == sleeps


def test_a_rest_leaves_the_core_to_others(host: Host) -> None:
    began, used = time.perf_counter(), time.process_time()
    for _ in range(100):
        host.worker_wait.rest()
    assert time.perf_counter() - began >= 0.005
    assert time.process_time() - used < 0.5 * (time.perf_counter() - began)


def test_the_config_leaves_a_worker_as_it_is(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert host.waits_by(1, {"pagedkv_sleep": False}) is yields
    with pytest.raises(InvalidRequest, match="'pagedkv_sleep' of additional_config is 'no'; give true or false"):
        host.waits_by(1, {"pagedkv_sleep": "no"})
    assert host.waits_by(1, {"pagedkv_linears": False}) is host.worker_wait.rest


def test_a_vllm_without_what_is_replaced_stays(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.worker_wait.install()  # a layer that is made without a config
    assert host.queue.sched_yield is yields
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert host.waits_by(4) is yields
    monkeypatch.delattr(host.queue, "sched_yield")
    host.worker_wait.install()
    assert not hasattr(host.queue, "sched_yield")
