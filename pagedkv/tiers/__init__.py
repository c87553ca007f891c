"""Tiers: memory under the pool, where pages live on after eviction. A frame moves as one run of bytes, verified."""

from pagedkv.tiers.disk import DiskTier
from pagedkv.tiers.fetch import Fetch
from pagedkv.tiers.host import HostTier
from pagedkv.tiers.pool_view import PoolView
from pagedkv.tiers.tier import Job, Key, Op, Result, Tier, TierStats
from pagedkv.tiers.write_back import EveryPage, UsedAgain, WriteBack

__all__ = [
    "DiskTier",
    "EveryPage",
    "Fetch",
    "HostTier",
    "Job",
    "Key",
    "Op",
    "PoolView",
    "Result",
    "Tier",
    "TierStats",
    "UsedAgain",
    "WriteBack",
]
