"""A worker of vLLM sleeps while it waits for the engine. vLLM is a stand-in here; host/test_tokens.py runs it."""

from __future__ import annotations

import importlib
import os
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from pagedkv.errors import InvalidRequest

NAME = "pagedkv.integrations.vllm.worker_wait"


def yields() -> None:
    """Stands in for vLLM's way to wait."""


class Host:
    """Stands in for the parts of vLLM that the file imports. The engine has four cores, and the worker's thread one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        names = (
            "vllm", "vllm.config", "vllm.distributed", "vllm.distributed.device_communicators", "vllm.logger",
            "vllm.distributed.device_communicators.shm_broadcast", "vllm.utils", "vllm.utils.cpu_resource_utils",
        )  # fmt: skip
        modules: dict[str, Any] = {name: ModuleType(name) for name in names}
        self.queue = modules["vllm.distributed.device_communicators.shm_broadcast"]
        modules["vllm.distributed.device_communicators"].shm_broadcast = self.queue
        self.queue.sched_yield = yields
        self.said: list[str] = []
        modules["vllm.logger"].init_logger = lambda _: SimpleNamespace(info=self.said.append)
        self.config: Any = None
        modules["vllm.config"].get_current_vllm_config_or_none = lambda: self.config
        modules["vllm.utils.cpu_resource_utils"].parse_id_list = lambda text: list(map(int, text.split(",")))
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delitem(sys.modules, NAME, raising=False)
        cores = {os.getppid(): {0, 1, 2, 3}, 0: {0}}
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: cores[process], raising=False)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0,1,2,3")
        self.worker_wait = importlib.import_module(NAME)

    def waits_by(self, workers: int = 1, additional_config: Any = None, executor: str = "mp") -> Any:
        """Return how a worker waits, of `workers`."""
        parallel = SimpleNamespace(local_world_size=workers, distributed_executor_backend=executor)
        self.config = SimpleNamespace(parallel_config=parallel, additional_config=additional_config)
        self.worker_wait.install()
        return self.queue.sched_yield


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


@pytest.mark.parametrize(
    ("bound", "sleeps"),
    [
        ("0,1,2,3", True), ("0,1|2,3", True), ("0,1,2|0,1,3", True), ("0,1,2,3,4,5", True),
        ("0,1,2", False), ("0,1|0,1", False), ("0,1,2|4", False), ("4,5,6,7", False),
    ],
)  # fmt: skip
def test_a_worker_sleeps_if_the_workers_are_bound_to_all_cores(
    host: Host, bound: str, sleeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of its cores would be left to the engine; cores that the engine may not run on are none of its."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", bound)
    assert host.waits_by(2) is (host.worker_wait.rest if sleeps else yields)
    assert len(host.said) == sleeps
    assert host.waits_by(2) is (host.worker_wait.rest if sleeps else yields)
    assert len(host.said) == sleeps


@pytest.mark.parametrize("bound", ["auto", "nobind", None])
@pytest.mark.parametrize(
    ("workers", "threads", "sleeps"), [(1, 4, True), (2, 2, True), (1, 6, True), (1, 3, False), (2, 1, False)]
)
def test_a_worker_sleeps_if_the_workers_have_a_thread_for_each_core(
    host: Host, bound: str | None, workers: int, threads: int, sleeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND")
    if bound is not None:
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", bound)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert host.waits_by(workers) is (host.worker_wait.rest if sleeps else yields)


@pytest.mark.parametrize("executor", ["uni", "ray", "external_launcher"])
def test_a_worker_whose_parent_is_no_engine_waits_as_before(host: Host, executor: str) -> None:
    assert host.waits_by(executor=executor) is yields


@pytest.mark.parametrize("error", [ProcessLookupError, PermissionError])
def test_a_worker_whose_engine_is_gone_or_hidden_waits_as_before(
    host: Host, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(process: int) -> set[int]:
        raise error

    monkeypatch.setattr(os, "sched_getaffinity", refuse)
    assert host.waits_by() is yields


def test_a_worker_whose_engine_is_in_another_namespace_waits_as_before(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getppid", lambda: 0)
    assert host.waits_by() is yields


def test_a_rest_leaves_the_core_to_others(host: Host) -> None:
    began, used = time.perf_counter(), time.thread_time()
    for _ in range(100):
        host.worker_wait.rest()
    assert time.perf_counter() - began >= 0.005
    assert time.thread_time() - used < 0.5 * (time.perf_counter() - began)


def test_the_config_leaves_a_worker_as_it_is(host: Host) -> None:
    assert host.waits_by(1, {"pagedkv_sleep": False}) is yields
    with pytest.raises(InvalidRequest, match="'pagedkv_sleep' of additional_config is 'no'; give true or false"):
        host.waits_by(1, {"pagedkv_sleep": "no"})
    assert host.waits_by(1, {"pagedkv_linears": False}) is host.worker_wait.rest


def test_a_vllm_without_what_is_replaced_stays(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.worker_wait.install()  # a layer that is made without a config
    assert host.queue.sched_yield is yields
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert host.waits_by() is yields
    monkeypatch.delattr(host.queue, "sched_yield")
    host.worker_wait.install()
    assert not hasattr(host.queue, "sched_yield")
