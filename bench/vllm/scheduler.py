"""The scheduler of the benchmark's engine: vLLM's, with a switch of how the engine waits. toggle.py is of workers."""

from __future__ import annotations

from typing import Any

from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.utils import sched_yield
from vllm.v1.core.sched.scheduler import Scheduler

from pagedkv.bench.vllm.toggle import sleeps
from pagedkv.integrations.vllm import engine_wait


class ToggleScheduler(Scheduler):
    """An engine makes it after its workers, so the choice of `engine_wait` is made by then."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if shm_broadcast.sched_yield is engine_wait.rest:
            shm_broadcast.sched_yield = lambda: (engine_wait.rest if sleeps() else sched_yield)()
