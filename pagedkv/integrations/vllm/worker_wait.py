"""A worker of vLLM sleeps while it waits for the engine, if the workers compute on all cores. This is for CPUs.

The engine is a process of its own: between two steps it schedules, and its workers wait. A worker looks for the
engine's message again and again without a rest (`sched_yield`), for a second at most. OpenMP's threads do not rest at
once, either. By default vLLM leaves a core to the engine. Where it leaves none, the engine competes with threads that
only wait. `install` lets a worker sleep between two looks there:

    cores of the workers                a worker that waits
    all that the engine may run on      asks to sleep 0.05 ms after each look; Linux makes it 0.1 ms or more
    fewer                               does as vLLM alone

Cores are those that Linux counts: two for a core with two threads.
additional_config={"pagedkv_sleep": false} leaves workers as they are.
"""

from __future__ import annotations

import os
import time
from typing import Final

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.device_communicators import shm_broadcast
from vllm.logger import init_logger
from vllm.utils.cpu_resource_utils import parse_id_list

from pagedkv.integrations.vllm.additional_config import SLEEP, switch_in

_LOGGER: Final = init_logger("vllm.pagedkv")
REST: Final = 5e-5  # seconds; a step takes milliseconds, and a worker waits two or three times in it


def install() -> None:
    """Choose how this worker waits. A second call does nothing, and a vLLM without what is replaced stays as it is.

    Only workers of vLLM's executor "mp" wait for their parent, the engine.
    """
    config = get_current_vllm_config_or_none()
    if config is None or getattr(shm_broadcast, "sched_yield", rest) is rest:
        return
    parallel = config.parallel_config
    if not switch_in(config.additional_config, SLEEP) or parallel.distributed_executor_backend != "mp":
        return
    if have_all_cores(parallel.local_world_size):
        _LOGGER.info("This worker sleeps while it waits for the engine: workers have all cores, by pagedkv")
        shm_broadcast.sched_yield = rest


def rest() -> None:
    """Sleep between two looks."""
    time.sleep(REST)


def have_all_cores(num_workers: int) -> bool:
    """Return whether the workers of an engine, `num_workers` of them, compute on all cores that the engine may run on.

    This worker's threads are bound when vLLM asks, so its own cores tell nothing. False if nothing is known.
    """
    engine = os.getppid()
    if engine == 0:  # it is in another namespace, and 0 would be this worker
        return False
    try:
        cores = os.sched_getaffinity(engine)
    except (AttributeError, OSError):  # not on Linux; the engine has ended
        return False
    bound = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
    if bound in ("auto", "nobind"):
        return torch.get_num_threads() * num_workers >= len(cores)
    return cores <= {core for of_worker in bound.split("|") for core in parse_id_list(of_worker)}
