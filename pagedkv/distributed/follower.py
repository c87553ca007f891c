"""The follower: a rank that computes the steps that rank 0 sends, over a pool without a manager.

    BEGIN   allocate a pool of as many frames as rank 0 has, and bind its layers
    COPY    copy frames
    STEP    copy frames; enter the changes of the page tables; derive positions and slots; compute
    STOP    the session is over

It knows tokens and frames, and no request.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pagedkv.cache.mirror import DeviceMirror
from pagedkv.cache.storage import Storage
from pagedkv.distributed import wire
from pagedkv.distributed.leader import decoder_of, digest_of
from pagedkv.errors import InvalidRequest
from pagedkv.kernels import registry
from pagedkv.kernels.args import PagedBatch
from pagedkv.kernels.case import Case
from pagedkv.model.loop.pool import geometry_of

if TYPE_CHECKING:
    from pagedkv.core.state import I32
    from pagedkv.distributed.ranks import Ranks
    from pagedkv.distributed.wire import StepMessage
    from pagedkv.model.decoder import Decoder


def follow(
    ranks: Ranks,
    folder: Path | str | None = None,
    *,
    dtype: str | None = None,
    weights: str | None = None,
    window: int | None = None,
    sinks: int = 0,
) -> None:
    """Compute what rank 0 sends, from its `load` of the same model to the end of its session.

    Raises: as Engine.load; InvalidRequest if rank 0 has another model; RankLost
    """
    decoder = decoder_of(ranks, folder, dtype=dtype, weights=weights, window=window, sinks=sinks)
    model = digest_of(decoder, folder)
    session: Session | None = None
    while (words := ranks.receive())[1] != wire.STOP:
        if words[1] == wire.BEGIN:
            session = Session(decoder, model, wire.unpacked_session(words))
            continue
        assert session is not None
        session.run(words)


class Session:
    """The pool of a follower and the page tables that it was told."""

    def __init__(self, decoder: Decoder, model: str, values: dict[str, Any]) -> None:
        """model: the digest of this rank. values: those of the message that began the session.

        Raises: InvalidRequest
        """
        if values["model"] != model:
            raise InvalidRequest(
                "the model of this rank is not that of rank 0: other weights, or another dtype, weights=, window or "
                "sinks; give all ranks the same options, and copies of one folder"
            )
        specs, groups = geometry_of(decoder, **{name: values[name] for name in ("block_size", "kv_dtype", "grouped")})
        self.decoder: Decoder = decoder
        self.storage: Storage = Storage(specs, values["num_frames"], decoder.device, layer_groups=groups)
        self._layers = decoder.bind(self.storage.layers, values["backend"])
        self._kernel: str = values["kernel"]
        self._tables, self._block_size = wire.Tables(), int(values["block_size"])
        self._mirror = None if decoder.device.type == "cpu" else DeviceMirror(decoder.device)
        copying = Case("copy_frames", decoder.device.type, device_index=decoder.device.index)
        self._copy_frames = registry.resolve(copying, values["backend"]).load().copy_frames

    def run(self, words: I32) -> None:
        """Do what a message says."""
        if words[1] == wire.COPY:
            self._copy(wire.unpacked_copies(words))
            return
        step = wire.unpacked_step(words, self._tables)
        self._copy(step.copies)
        batches = [self._batch(step, group) for group in range(len(self.storage.specs))]
        wanted = None if step.logits_of is None else self._on_device(step.logits_of.astype(np.int64))
        self.decoder.forward(
            self._on_device(step.token_ids.astype(np.int64)),
            [batches[group] for group in self.storage.layer_groups],
            self._layers,
            logits_of=wanted,
            backend=self._kernel,
        )

    def _copy(self, copies: I32) -> None:
        if len(copies):
            self._copy_frames(self.storage.frames, self._on_device(copies))

    def _batch(self, step: StepMessage, group: int) -> PagedBatch:
        """Return the batch of a layer group."""
        rows, table = step.rows + np.int32(group), self._tables.known
        places = places_of(step, table, rows, self._block_size)
        if self._mirror is None:
            tensor = torch.from_numpy(table)
        else:
            tensor, rows = self._mirror.update(table, rows, -(-step.seq_lens // self._block_size))
        return PagedBatch(
            block_table=tensor,
            seq_lens=self._on_device(step.seq_lens),
            cu_seqlens_q=self._on_device(np.concatenate([[0], np.cumsum(step.counts)]).astype(np.int32)),
            slots=self._on_device(places[1]),
            positions=self._on_device(places[0]),
            max_seqlen_q=int(step.counts.max(initial=0)),
            max_seqlen_k=int(step.seq_lens.max(initial=0)),
            rows=self._on_device(rows),
        )

    def _on_device(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.decoder.device)


def places_of(step: StepMessage, table: I32, rows: I32, block_size: int) -> tuple[Any, Any]:
    """Return the positions of the new tokens and their slots: -1 for a page that the table does not map.

    Shapes: table int32 [A, P]; rows int32 [B]; returns int64 [T] twice
    """
    counts, ends = step.counts.astype(np.int64), np.cumsum(step.counts, dtype=np.int64)
    positions = np.arange(len(step.token_ids)) + np.repeat(step.seq_lens - ends, counts)
    frames = table[np.repeat(rows, counts), positions // block_size].astype(np.int64)
    return positions, np.where(frames < 0, -1, frames * block_size + positions % block_size)
