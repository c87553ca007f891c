"""A worker of vLLM sleeps while it waits for the engine, if the workers compute on all cores. This is for CPUs.

The engine is a process of its own: between two steps it schedules, and its workers wait. They look for its message
again and again without a rest (`sched_yield`), and OpenMP's threads do not rest at once, either. vLLM leaves a core to
the engine, unless VLLM_CPU_OMP_THREADS_BIND says otherwise. Where it leaves none, the engine competes with threads that
only wait. `install` lets a worker sleep between two looks there:

    cores of the workers                a worker that waits
    all that the engine may run on      sleeps 0.05 ms after each look
    fewer                               never rests, as in vLLM alone

additional_config={"pagedkv_sleep": false} leaves workers as they are.
"""

from __future__ import annotations

import os
import time
from typing import Final

from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.device_communicators import shm_broadcast
from vllm.logger import init_logger

from pagedkv.integrations.vllm.additional_config import sleeps_in

_LOGGER: Final = init_logger("vllm.pagedkv")
REST: Final = 5e-5  # seconds; a step takes milliseconds, and a worker waits twice in it


def install() -> None:
    """Choose how this worker waits. A second call does nothing, and a vLLM without what is replaced stays as it is."""
    config = get_current_vllm_config_or_none()
    if config is None or getattr(shm_broadcast, "sched_yield", rest) is rest:
        return
    if sleeps_in(config.additional_config) and has_all_cores(config.parallel_config.local_world_size):
        _LOGGER.info("This worker sleeps while it waits for the engine: workers have all cores, by pagedkv")
        shm_broadcast.sched_yield = rest


def rest() -> None:
    """Sleep between two looks."""
    time.sleep(REST)


def has_all_cores(num_workers: int) -> bool:
    """Return whether `num_workers` workers with the threads of this one compute on all cores of the engine.

    vLLM binds the threads of a worker, so its own cores tell nothing of others. The engine is its parent.
    """
    if not hasattr(os, "sched_getaffinity"):  # macOS binds nothing
        return False
    cores, threads = len(os.sched_getaffinity(os.getppid())), os.environ.get("OMP_NUM_THREADS", "")
    return not threads.isdecimal() or int(threads) * num_workers >= cores  # OpenMP takes all cores, unless it is told
