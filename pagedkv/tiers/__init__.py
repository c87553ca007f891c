"""Tiers: memory under the pool, where pages live on after eviction. A frame moves as one run of bytes, verified."""

from pagedkv.tiers.disk import DiskTier
from pagedkv.tiers.fetch import Fetch
from pagedkv.tiers.from_text import tiers_of
from pagedkv.tiers.host import HostTier
from pagedkv.tiers.level import Level
from pagedkv.tiers.pool_view import PoolView
from pagedkv.tiers.shared import client_of
from pagedkv.tiers.shared.mooncake import MooncakeTier
from pagedkv.tiers.shared.objects import ObjectTier
from pagedkv.tiers.shared.records import Client, Records
from pagedkv.tiers.shared.redis import RedisTier
from pagedkv.tiers.shared.tier import SharedTier
from pagedkv.tiers.tier import Job, Key, Op, Result, Tier, TierStats
from pagedkv.tiers.write_back import UsedAgain, WriteBack

__all__ = [
    "Client",
    "DiskTier",
    "Fetch",
    "HostTier",
    "Job",
    "Key",
    "Level",
    "MooncakeTier",
    "ObjectTier",
    "Op",
    "PoolView",
    "Records",
    "RedisTier",
    "Result",
    "SharedTier",
    "Tier",
    "TierStats",
    "UsedAgain",
    "WriteBack",
    "client_of",
    "tiers_of",
]
