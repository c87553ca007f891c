"""Endless text: each query sees the last `window` tokens, and the first few of all, the sinks.

    position     0 1 2 3 │ 4 .. 83 │ 84 .. 99 │ 100         4 sinks, a window of 17, the query at position 100
    pages        kept    │ holes   │ kept     │
    near         84 .. 100: attention with a window, as it is
    far          0 .. 3:    attention of its own, then merge_states

(StreamingLLM: Xiao et al., 2023.) The first tokens take much of the softmax whatever they say, so a model that loses
them behind a plain window writes nonsense. With them its text stays fluent for any length. The memory of a sequence is
constant: core gives the pages between back (Group.sinks), and no kernel reads a hole. The text between is forgotten:
this makes no long context.

**Positions.** The paper numbers the tokens by their places in the cache, so that no distance is longer than the model
was trained on, and turns the keys anew in each step. Here a key stays as it was stored, turned by its position p, since
RoPE only knows distances: in the window these are those of the places. For the sinks the *query* is turned again, from
its position to its place, at most window + sinks - 1. So scores are those of the paper, and one rotation a step
replaces one of each key.

**The far part** asks for a different number of sinks for each query: while the window still covers some of them, they
are not counted twice. So each query is a sequence of its own there, with a length of 0 to `sinks`.

Two choices differ from the paper's program: `window` does not count the sinks, and the prompt has the same mask as the
output, so that its chunks, a preemption and the prefix cache change no token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final
from weakref import ref

import torch

from pagedkv.core.arguments import whole
from pagedkv.errors import InvalidRequest
from pagedkv.kernels.args import PagedBatch
from pagedkv.kernels.ops import merge_states

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.engine.checkpoint.config import ModelConfig
    from pagedkv.engine.model.rope_angles import Rotary
    from pagedkv.kernels.bound import BoundAttention

LONGEST: Final = 2**20
"""Tokens of a text. Angles are float32: beyond it those of neighbours would be rounded by more than 0.03 radians."""


def endless(config: ModelConfig, window: int | None, sinks: int) -> ModelConfig:
    """Return the config of a model whose layers see `window` tokens and `sinks` first ones; itself without a window.

    Raises: InvalidRequest
    """
    sinks = whole(sinks, "sinks", 0, 2**31)
    if window is None:
        if sinks:
            raise InvalidRequest(f"sinks is {sinks} without a window; give a window too, such as 1024")
        return config
    window, longest = whole(window, "window", 1, 2**31), config.max_position_embeddings
    if window + sinks > longest:
        raise InvalidRequest(
            f"a window of {window} and {sinks} sinks are more than the {longest} positions that the model knows; "
            "give less"
        )
    windows = tuple(window if own is None else min(own, window) for own in config.windows)
    return replace(config, windows=windows, sinks=sinks, max_position_embeddings=LONGEST)


class FarBatches:
    """The tables of the far part, made once for all layers of a step that have the same batch."""

    def __init__(self, sinks: int) -> None:
        self._sinks = sinks
        self._last: tuple[ref[PagedBatch], int, PagedBatch] | None = None

    def of(self, batch: PagedBatch, window: int) -> PagedBatch:
        """Return a batch in which each query is a sequence: the sinks that are no longer in its window."""
        if self._last is not None and self._last[0]() is batch and self._last[1] == window:
            return self._last[2]
        assert batch.positions is not None
        num_tokens, device = len(batch.positions), batch.positions.device
        queries = torch.arange(num_tokens + 1, dtype=torch.int32, device=device)
        sequence = torch.searchsorted(batch.cu_seqlens_q[1:], queries[:-1], right=True, out_int32=True)
        sequence = sequence.clamp_(max=len(batch.seq_lens) - 1)  # of a graph's padding
        far = PagedBatch(
            block_table=batch.block_table,
            seq_lens=(batch.positions - (window - 1)).clamp_(0, self._sinks).int(),
            cu_seqlens_q=queries,
            max_seqlen_q=1,
            max_seqlen_k=self._sinks,
            rows=sequence if batch.rows is None else batch.rows[sequence],
        )
        self._last = ref(batch), window, far
        return far


class SinkAttention:
    """The attention of a layer to its window and to the sinks: called as a bound attention.

    near, far: attention to the same layer, with the window, and without a window or causality
    """

    def __init__(
        self, near: BoundAttention, far: BoundAttention, batches: FarBatches, rotary: Rotary, *, window: int, sinks: int
    ) -> None:
        self._near, self._far, self._batches, self._rotary = near, far, batches, rotary
        self._window, self._sinks = window, sinks

    def __call__(self, q_THD: Tensor, batch: PagedBatch, *, out: Tensor | None = None) -> Tensor:
        """Attend from the new tokens of a batch. Shapes, what is modified and raised: as in `paged_attention`."""
        if batch.max_seqlen_k <= self._window:
            return self._near(q_THD, batch, out=out)
        assert batch.positions is not None
        place = batch.positions.clamp(max=self._window + self._sinks - 1)
        turned = self._rotary.turned(q_THD, place - batch.positions)
        near = self._near(q_THD, batch, return_lse=True)
        far = self._far(turned, self._batches.of(batch, self._window), return_lse=True)
        merged, _ = merge_states(*near, *far)
        return merged if out is None else out.copy_(merged)
