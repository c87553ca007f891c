"""The scheduler of vLLM over our block pool: `scheduler_cls="pagedkv.integrations.vllm.scheduler.PagedScheduler"`.

vLLM constructs BlockPool in one place, with no option for the class. So we replace that name while a scheduler is made.
`additional_config={"pagedkv_policy": "2q"}` chooses how cached blocks are evicted, see FramePool. `pagedkv_hints` is
the share of the pool for retained blocks, `pagedkv_logged_miss` the tokens from which a miss is logged.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import vllm.v1.core.kv_cache_coordinator as coordinator
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from pagedkv.errors import InvalidRequest
from pagedkv.integrations.vllm import SERVED, require_known_vllm
from pagedkv.integrations.vllm.additional_config import HINTS, LOGGED_MISS, POLICY, option_in
from pagedkv.integrations.vllm.block_pool import PagedBlockPool
from pagedkv.integrations.vllm.hints import KvHints
from pagedkv.integrations.vllm.receipts import Receipts

_LOGGER: Final = init_logger("vllm.pagedkv")
_MOST_REMEMBERED: Final = 2**22  # tokens, 32 bytes each
_LOCK: Final = threading.RLock()  # a connector may make managers of its own meanwhile


@contextmanager
def _paged_blocks(policy: str = "lru", share: float = 0.1) -> Iterator[None]:
    """Let the managers that are made inside of this context have a PagedBlockPool. policy, share: its attributes."""
    with _LOCK:
        stock = coordinator.BlockPool
        coordinator.BlockPool = type("PagedBlockPool", (PagedBlockPool,), {"policy": policy, "share": share})
        try:
            yield
        finally:
            coordinator.BlockPool = stock


class _Paged:
    kv_cache_manager: Any
    requests: dict[str, Any]

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        require_known_vllm("PagedScheduler", "--scheduler-cls")
        asked = getattr(vllm_config, "additional_config", None)
        with _paged_blocks(option_in(asked, POLICY), option_in(asked, HINTS)):
            super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]
        pool = self.kv_cache_manager.block_pool
        if not isinstance(pool, PagedBlockPool):
            raise InvalidRequest(
                f"vLLM made a {type(pool).__name__}, not our block pool; install vLLM {' or '.join(SERVED)}"
            )
        groups = self.kv_cache_manager.kv_cache_config.kv_cache_groups
        sizes = [group.kv_cache_spec.block_size for group in groups]
        longest = sum(-(-vllm_config.model_config.max_model_len // size) for size in sizes)
        pool.most_pinned = max(0, min(pool.most_pinned, pool.num_gpu_blocks - 1 - longest))  # the longest request fits
        self._pool, self._hints = pool, KvHints(pool, has_connector=getattr(self, "connector", None) is not None)
        drafts = getattr(vllm_config, "speculative_config", None)
        if pool.enable_caching and not (drafts and drafts.use_eagle()):  # then a hash covers tokens of the next block
            tokens = min(_MOST_REMEMBERED, 4 * pool.num_gpu_blocks * pool.hash_block_size)
            unit = math.lcm(pool.hash_block_size, *sizes)
            pool.receipts = Receipts((pool.hash_block_size, unit), tokens, option_in(asked, LOGGED_MISS))
        _LOGGER.info("Blocks by pagedkv: %s, evicted by %s", pool.frames, pool.frames.policy.name)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Plan a step, see vLLM. Hints end before it, and receipts of the prompts that begin are told after it."""
        self._pool.expire(time.monotonic())
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        if self._pool.receipts is not None:
            new = [(self.requests[one.req_id], one.num_computed_tokens) for one in output.scheduled_new_reqs]
            self._pool.receipts.tell(new)
        return output

    def _free_blocks(self, request: Any) -> None:
        self._hints.obey(request, self.kv_cache_manager.get_blocks(request.request_id).blocks, time.monotonic())
        super()._free_blocks(request)  # type: ignore[misc]


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
