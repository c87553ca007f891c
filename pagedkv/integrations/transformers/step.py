"""Step: the step of one forward pass. Holdings: what a cache holds in its pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from pagedkv import AddressSpace, PagedBatch, PagedKVCache
from pagedkv.integrations.transformers.state_layers import StepStates


@dataclass
class Step:
    """The step of one forward pass.

    batch:   the plan, padded if layers attend to pages and a row has padding. width: columns of the host, padding
             included.
    ids:     int32 of the tokens, or None if pages of them must not be shared.
    paged:   whether layers attend to pages. stored: layers that have stored their K and V.
    tokens:  the plan, not padded. real: bool [B, width], which columns are tokens; None: all.
    done:    whether the forward pass has ended. is_hooked: whether the hooks of `patch` say so.
    states:  the recurrent states that the layers of a hybrid model read and write.
    """

    batch: Any
    width: int
    ids: Any
    paged: bool
    tokens: Any
    real: torch.Tensor | None
    is_hooked: bool
    states: StepStates | None = None
    stored: set[int] = field(default_factory=set)
    done: bool = False
    _last: dict[tuple[int, int], PagedBatch] = field(default_factory=dict)

    def last_columns(self, place: int, columns: int) -> PagedBatch:
        """Return the batch whose queries are the last `columns` columns of the step, for a layer that stores nothing.

        place: the number of a layer in the pool
        """
        if (place, columns) not in self._last:
            self._last[place, columns] = self._cut(self.tokens[place], columns)
        return self._last[place, columns]

    def _cut(self, batch: PagedBatch, columns: int) -> PagedBatch:
        rows, device = batch.seq_lens.shape[0], batch.seq_lens.device
        real = None if self.real is None else self.real[:, -columns:].to(device)
        counts = torch.full((rows,), columns, device=device) if real is None else real.sum(1)
        starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        cut = PagedBatch(batch.block_table, batch.seq_lens, starts, columns, batch.max_seqlen_k, rows=batch.rows)
        return cut if real is None else cut.padded(real)


@dataclass
class Holdings:
    """The holdings of a cache in its pool: sequences, and the step under way. They outlive a dropped cache."""

    spaces: list[AddressSpace] = field(default_factory=list)
    step: Step | None = None

    def release(self, kv: PagedKVCache | None) -> None:
        """Give everything back to `kv`. Tokens of a finished step are published first."""
        step, self.step = self.step, None
        spaces, self.spaces = self.spaces, []
        if kv is None:
            return
        if step is not None:
            if step.done:
                kv.commit(step.batch, step.ids)
            else:
                kv.abort(step.batch)
        kv.reorder(spaces, [])
