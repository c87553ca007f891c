"""The leader: the engine of rank 0. Each of its steps is sent to the followers before rank 0 computes it.

    plan      the frames of shared tails are copied on rank 0; the copies wait for the message of the step
    forward   message, then the decoder, whose sums wait for all ranks
    the rest  draws, commits, forks, preemption, prefixes, drafts: integers and logits, on rank 0 alone

A plan that is aborted keeps its copies (`PagedKVCache.abort`), so they are sent with whatever comes next. Bytes that
enter the pool outside a step would be missing on the others: RankedCache and RankedRunner refuse these calls.
"""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np

from pagedkv.cache import PagedKVCache
from pagedkv.checkpoint import BUNDLED
from pagedkv.checkpoint.files import weights_sample
from pagedkv.checkpoint.tokenizer import Tokenizer
from pagedkv.core.warm import warm_up_step
from pagedkv.distributed import wire
from pagedkv.distributed.launch import require_served
from pagedkv.errors import InvalidRequest
from pagedkv.kernels.linear.matrix import Matrix
from pagedkv.model.decoder import Decoder
from pagedkv.model.engine import Engine
from pagedkv.model.loop.pool import new_cache
from pagedkv.model.loop.runner import ModelRunner
from pagedkv.model.ways.drafters import drafter_of
from pagedkv.model.ways.streaming import endless

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from pagedkv.cache import PlannedBatch
    from pagedkv.core import AddressSpace
    from pagedkv.core.state import I32
    from pagedkv.distributed.ranks import Ranks
    from pagedkv.model.scheduler import Limits
    from pagedkv.model.ways.speculation import Drafter
    from pagedkv.model.ways.trees import Branches


NO_TREES: Final = "several ranks take no tree drafts; give a drafter of chains, such as prompt-lookup"
NO_COPIES: Final = np.empty((0, 2), np.int32)


class RankedCache(PagedKVCache):
    """The pool of rank 0. The followers have pools of as many frames, and no manager."""

    def resize(self, num_frames: int) -> NoReturn:
        """Raise InvalidRequest."""
        self._refuse("resized", "give num_frames or memory when the engine is loaded")

    def snapshot(self, folder: str | Path, *, model: str = "", key: bytes | None = None) -> NoReturn:
        """Raise InvalidRequest."""
        self._refuse("written to a snapshot, which would have the heads of rank 0 only", "run one process for it")

    def restore(self, folder: str | Path, *, model: str = "", key: bytes | None = None) -> NoReturn:
        """Raise InvalidRequest."""
        self._refuse("restored from a snapshot, whose bytes the other ranks lack", "run one process for it")

    def _refuse(self, done: str, remedy: str) -> NoReturn:
        raise InvalidRequest(f"a pool of several ranks cannot be {done}; {remedy}")


class RankedRunner(ModelRunner):
    """The forward passes of all ranks over their pools."""

    def __init__(self, ranks: Ranks, decoder: Decoder, cache: PagedKVCache) -> None:
        super().__init__(decoder, cache)
        self._ranks, self._session, self._tables = ranks, ranks.session, wire.Tables()
        self._copies: I32 = NO_COPIES
        """Copies that rank 0 has made and the others have not."""

    def plan(self, spaces: Sequence[AddressSpace], counts: Sequence[int]) -> PlannedBatch:
        """Plan a step of the cache. Raises: as PagedKVCache.plan; RankLost; InvalidRequest behind stop() of Ranks"""
        if self._ranks.session != self._session:
            raise InvalidRequest(
                "the other ranks no longer follow this engine: Ranks.stop() was called; load a new engine"
            )
        batch = super().plan(spaces, counts)
        if len(batch.plan.copies):
            if len(self._copies):  # of an aborted plan: one message has the copies of one plan, in no order
                self._send(wire.packed_copies(self._copies))
            self._copies = batch.plan.copies.copy()
        return batch

    def __call__(
        self,
        token_ids: Sequence[int],
        batch: PlannedBatch,
        logits_of: Sequence[int],
        branches: Branches | None = None,
    ) -> Tensor:
        """Compute a step on all ranks, and return the logits of some of its tokens. Shapes: as in ModelRunner

        Raises: InvalidRequest for branches; RankLost if a rank has ended, or an earlier step failed
        """
        if branches is not None:
            raise InvalidRequest(NO_TREES)
        with self._ranks.together():
            tables, block_size = self._tables, self._cache.spec.block_size
            self._ranks.send(wire.packed_step(token_ids, batch.plan, logits_of, self._copies, tables, block_size))
            self._copies = NO_COPIES
            return super().__call__(token_ids, batch, logits_of)

    def _send(self, words: I32) -> None:
        with self._ranks.together():
            self._ranks.send(words)


def load(
    ranks: Ranks,
    folder: Path | str | None = None,
    *,
    dtype: str | None = None,
    weights: str | None = None,
    window: int | None = None,
    sinks: int = 0,
    block_size: int = 16,
    kv_dtype: str | None = None,
    grouped: bool = True,
    speculate: Drafter | Path | str | None = None,
    limits: Limits | None = None,
    preemption: str = "recompute",
    **cache_options: Any,
) -> Engine:
    """Build the engine of rank 0, while the other ranks call `follow` with the same model.

    A draft model is whole, and on rank 0. Options: those of Engine.load, without `device` and `tiers`.
    Raises: as Engine.load, InvalidRequest for what several ranks do not serve, and RankLost
    """
    require_served(ranks.size, None if folder is None else Path(folder), {**cache_options, "speculate": speculate})
    decoder = decoder_of(ranks, folder, dtype=dtype, weights=weights, window=window, sinks=sinks)
    tokenizer = Tokenizer.load(BUNDLED if folder is None else Path(folder))
    drafter = drafter_of(speculate, device=str(ranks.device), block_size=block_size)
    if getattr(drafter, "width", 1) > 1:
        raise InvalidRequest(NO_TREES)
    options = {"watermark": 0.01, **cache_options, "kind": RankedCache}
    options.pop("tiers", None)
    pool: dict[str, Any] = {"block_size": block_size, "kv_dtype": kv_dtype, "grouped": grouped}
    cache = new_cache(decoder, **pool, **options)
    kernels = {"backend": cache.backend, "kernel": cache.kernel.name}
    ranks.begin({**pool, **kernels, "num_frames": cache.num_frames, "model": digest_of(decoder, folder)})
    warm_up_step()
    runner = partial(RankedRunner, ranks)
    return Engine(decoder, tokenizer, cache, limits=limits, drafter=drafter, preemption=preemption, runner=runner)


def decoder_of(
    ranks: Ranks, folder: Path | str | None, *, dtype: str | None, weights: str | None, window: int | None, sinks: int
) -> Decoder:
    """Load this rank's share of a model. Raises: as Engine.load"""
    path = BUNDLED if folder is None else Path(folder)
    decoder = Decoder.load(path, dtype=dtype, device=ranks.device, weights=weights, ranks=ranks)
    return Decoder(endless(decoder.config, window, sinks), decoder.weights, ranks)


def digest_of(decoder: Decoder, folder: Path | str | None) -> str:
    """Return a text that differs if two ranks have loaded different weights, or in different dtypes."""
    sample = weights_sample(BUNDLED if folder is None else Path(folder))
    head = decoder.weights.head
    dtypes = [head.stored.dtype if isinstance(head, Matrix) else head.dtype, decoder.dtype]
    return hashlib.sha256(repr((decoder.config, dtypes, sample)).encode()).hexdigest()
