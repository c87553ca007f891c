"""The scheduler of vLLM over our block pool: `scheduler_cls="pagedkv.integrations.vllm.scheduler.PagedScheduler"`.

vLLM constructs BlockPool in one place, with no option for the class. So we replace that name while a scheduler is made.
`additional_config={"pagedkv_policy": "2q"}` chooses how cached blocks are evicted, see FramePool.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import vllm.v1.core.kv_cache_coordinator as coordinator
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from pagedkv.errors import InvalidRequest
from pagedkv.integrations.vllm import require_known_vllm
from pagedkv.integrations.vllm.additional_config import policy_in
from pagedkv.integrations.vllm.block_pool import PagedBlockPool

_LOGGER: Final = init_logger("vllm.pagedkv")
_LOCK: Final = threading.RLock()  # a connector may make managers of its own meanwhile


@contextmanager
def _paged_blocks(policy: str = "lru") -> Iterator[None]:
    """Let the managers that are made inside of this context have a PagedBlockPool. policy: see FramePool."""
    with _LOCK:
        stock = coordinator.BlockPool
        coordinator.BlockPool = type("PagedBlockPool", (PagedBlockPool,), {"policy": policy})
        try:
            yield
        finally:
            coordinator.BlockPool = stock


class _Paged:
    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        require_known_vllm("PagedScheduler", "--scheduler-cls")
        with _paged_blocks(policy_in(getattr(vllm_config, "additional_config", None))):
            super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]
        pool = self.kv_cache_manager.block_pool  # type: ignore[attr-defined]
        if not isinstance(pool, PagedBlockPool):
            raise InvalidRequest(f"vLLM made a {type(pool).__name__}, not our block pool: its version is not served")
        _LOGGER.info("Blocks by pagedkv: %s, evicted by %s", pool.frames, pool.frames.policy.name)


class _PagedSyncScheduler(_Paged, Scheduler):
    """Scheduler over our block pool."""


class _PagedAsyncScheduler(_Paged, AsyncScheduler):
    """AsyncScheduler over our block pool."""


class PagedScheduler:
    """Makes the scheduler that the configuration asks for, over our block pool."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a _PagedAsyncScheduler with asynchronous scheduling, else a _PagedSyncScheduler."""
        if getattr(vllm_config, "diffusion_config", None) is not None:
            raise InvalidRequest("PagedScheduler does not serve diffusion models; leave scheduler_cls out")
        is_async = vllm_config.scheduler_config.async_scheduling
        return (_PagedAsyncScheduler if is_async else _PagedSyncScheduler)(vllm_config, *args, **kwargs)
