"""A peer of the kernels on a GPU: torch SDPA over contiguous keys, without a page table.

A peer that does not support a cell raises ValueError with the reason; attention.py reports the reason. Each call reads
other memory, as our calls do: with its keys in the cache a peer could not be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from pagedkv.bench.gpu.pool import GpuPool
from pagedkv.bench.gpu.timing import Step
from pagedkv.kernels import quant


def sdpa(pool: GpuPool) -> list[Step]:
    """Return a step for each call of a graph. Raises: ValueError for quantised keys, drafts and ragged batches."""
    cell = pool.cell
    if cell.kv:
        raise ValueError("it has no keys with scales per token and head")
    if cell.new > 1 or cell.lengths != "uniform":
        raise ValueError("it has no ragged batches, and is asked to decode one token only")
    options = {"device": pool.device, "dtype": quant.DTYPES[cell.dtype]}
    q = torch.randn(cell.batch, cell.heads, 1, cell.head_dim, **options)
    kv = torch.randn(pool.calls, 2, cell.batch, cell.kv_heads, cell.context, cell.head_dim, **options)
    attend = torch.nn.functional.scaled_dot_product_attention
    return [lambda keys=keys: attend(q, keys[0], keys[1], enable_gqa=True) for keys in kv]


PEERS: Final[dict[str, Callable[[GpuPool], list[Step]]]] = {"sdpa": sdpa}
