"""vLLM's engine sleeps while its workers compute on all cores of a machine. This is for CPUs.

The engine is a process of its own. While its workers compute, it looks for their answer again and again without a rest,
and so takes a core. vLLM leaves one to it, unless VLLM_CPU_OMP_THREADS_BIND says otherwise. Where the workers have all
cores, the engine shares one with a thread of theirs, and the other threads wait for that one at the end of every
operation. `install` lets the engine sleep between two looks there:

    cores of the workers                                     the engine
    all that the engine may run on                           sleeps 0.1 ms after each look
    fewer                                                    never rests, as in vLLM alone

additional_config={"pagedkv_sleep": false} leaves the engine as it is.
"""

from __future__ import annotations

import os
import time
from functools import wraps
from typing import Any, Final

from vllm.distributed.device_communicators import shm_broadcast
from vllm.logger import init_logger
from vllm.utils.ompmultiprocessing import OMPProcessManager

from pagedkv.integrations.vllm.additional_config import sleeps_in

_LOGGER: Final = init_logger("vllm.pagedkv")
REST: Final = 1e-4  # seconds; a step takes milliseconds, and waits for two or three answers


def install() -> None:
    """Choose how a process waits when it makes the object that binds its workers to cores. A second call does nothing.

    Only engines make that object. A vLLM that lacks what is replaced stays as it is.
    """
    host = OMPProcessManager.__init__
    if hasattr(host, "is_pagedkv") or not hasattr(shm_broadcast, "sched_yield"):
        return

    @wraps(host)
    def bind(self: Any, config: Any) -> None:
        host(self, config)
        if sleeps_in(config.additional_config) and has_all_cores(getattr(self, "cpu_lists", None)):
            _LOGGER.info("The engine sleeps while its workers compute: they have all cores, by pagedkv")
            shm_broadcast.sched_yield = rest

    vars(bind)["is_pagedkv"] = True
    OMPProcessManager.__init__ = bind


def rest() -> None:
    """Sleep between two looks."""
    time.sleep(REST)


def has_all_cores(cores_of_workers: list[list[int]] | None) -> bool:
    """Return whether the workers compute on every core that this process may run on.

    cores_of_workers: the cores of each worker; [] if none is bound; None if it is not known
    """
    if cores_of_workers is None or not hasattr(os, "sched_getaffinity"):  # macOS binds nothing
        return False
    own = os.sched_getaffinity(0)
    if not cores_of_workers:  # OpenMP takes all cores, unless it is told how many threads to have
        threads = os.environ.get("OMP_NUM_THREADS", "")
        return not threads.isdecimal() or int(threads) >= len(own)
    return own <= {core for cores in cores_of_workers for core in cores}
