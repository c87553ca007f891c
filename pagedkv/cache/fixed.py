"""FixedBatch: the tensors of a decode step at addresses that never change, as a CUDA graph needs them.

    fixed = cache.fixed_batch(num_sequences=8, max_seqlen_k=4096)        once
    batch = cache.plan(spaces, [1] * len(spaces), into=fixed)            each step: one transfer
    graph.replay()                                                       reads the same tensors as when it was captured
    cache.commit(batch, token_ids)

The batch always has `num_sequences` sequences. The first ones are those of the plan, the others are padding: slot -1,
which no kernel writes, length 0 and no query. The page tables lie in the mirror of the cache (mirror.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from pagedkv.cache.states import StateBatch
from pagedkv.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pagedkv.core.handles import Plan

PADDING: Final = {"slots": -1, "positions": 0, "seq_lens": 0, "rows": 0, "state_in": -1, "state_out": -1}
"""The values of a sequence that the step does not have. Its entry of cu_seqlens_q is the number of real sequences."""


class FixedBatch:
    """Tensors for decode steps of up to `num_sequences` sequences, one token each, of up to `max_seqlen_k` tokens.

    Made by `PagedKVCache.fixed_batch`, and given to `plan` as `into`. A step overwrites the tensors of the last one.

    moved: whether the page tables of the last step lie elsewhere than those of the step before, or there was none: a
           CUDA graph that reads them must be captured anew. Page tables grow with the longest sequence.
    """

    moved: bool = True

    def __init__(
        self, num_sequences: int, max_seqlen_k: int, num_groups: int, device: torch.device, has_states: bool = False
    ) -> None:
        self.num_sequences: int = num_sequences
        self.max_seqlen_k: int = max_seqlen_k
        pins = device.type == "cuda"
        parts = [("slots", g) for g in range(num_groups)] + [("positions", 0), ("seq_lens", 0), ("cu_seqlens_q", 0)]
        parts += [(name, 0) for name in ("state_in", "state_out", "save_indptr") if has_states]
        parts += [("rows", g) for g in range(num_groups)]  # 8-byte elements first: each part is aligned
        dtypes = {name: np.dtype(np.int64 if name in ("slots", "positions") else np.int32) for name, _ in parts}
        sizes = [
            (num_sequences + (name in ("cu_seqlens_q", "save_indptr"))) * dtypes[name].itemsize for name, _ in parts
        ]
        self._host = torch.zeros(sum(sizes), dtype=torch.uint8, pin_memory=pins)
        self._sent = self._host if device.type == "cpu" else self._host.to(device)
        self._was_sent = torch.cuda.Event() if pins else None  # type: ignore[no-untyped-call]
        self._places: list[Any] | None = None
        self._arrays: dict[tuple[str, int], Any] = {}
        self._tensors: dict[tuple[str, int], torch.Tensor] = {}
        views = self._host.split_with_sizes(sizes), self._sent.split_with_sizes(sizes)
        for (name, group), host, sent in zip(parts, *views, strict=True):
            self._arrays[name, group] = host.numpy().view(dtypes[name])
            self._tensors[name, group] = sent.view(torch.int64 if dtypes[name].itemsize == 8 else torch.int32)

    @property
    def states(self) -> StateBatch:
        """The recurrent states of the step. A step of one token a sequence saves no state inside."""
        state_in, state_out, bounds = (self._tensors[name, 0] for name in ("state_in", "state_out", "save_indptr"))
        return StateBatch(state_in, state_out, bounds, bounds[:0], bounds[:0])

    def check(self, counts: Iterable[int], longest: int) -> None:
        """Raise InvalidRequest if a step of `counts` new tokens and up to `longest` tokens in all does not fit."""
        counts = list(counts)
        if len(counts) > self.num_sequences or any(count != 1 for count in counts) or longest > self.max_seqlen_k:
            raise InvalidRequest(
                f"a step of {len(counts)} sequences, {sum(counts)} new tokens and up to {longest} tokens in all is "
                f"planned into a FixedBatch for {self.num_sequences} sequences of one new token each and "
                f"{self.max_seqlen_k} in all; plan it without `into`, or make a larger one"
            )

    def fill(self, plan: Plan, tables: Sequence[torch.Tensor], rows: Sequence[Any]) -> list[dict[str, Any]]:
        """Write a step, and return the fields of the PagedBatch of each layer group.

        tables, rows: a pair of tensors for each group, as the mirror gave them.
        """
        places: list[Any] = [(table.data_ptr(), table.shape, table.stride()) for table in tables]
        self.moved, self._places = places != self._places, places
        if self._was_sent is not None:
            self._was_sent.synchronize()  # the last transfer may still read the host's memory
        num, arrays = len(plan.seq_lens), self._arrays
        for (name, group), array in arrays.items():
            if name == "cu_seqlens_q":
                array[: num + 1], array[num + 1 :] = plan.cu_seqlens_q, num
                continue
            if name.startswith(("state", "save")):
                if plan.states is not None and name != "save_indptr":  # a step of one token saves none inside
                    array[:num], array[num:] = getattr(plan.states, name), PADDING[name]
                continue
            of_group = {"slots": plan.group_slots[group], "rows": rows[group]}
            array[:num], array[num:] = of_group.get(name, getattr(plan, name, None)), PADDING[name]
        if self._sent is not self._host:
            self._sent.copy_(self._host, non_blocking=True)
        if self._was_sent is not None:
            self._was_sent.record()
        bounds = {"max_seqlen_q": 1, "max_seqlen_k": self.max_seqlen_k}
        shared = {name: self._tensors[name, 0] for name in ("positions", "seq_lens", "cu_seqlens_q")}
        return [
            {**shared, **bounds, "block_table": table, **{n: self._tensors[n, g] for n in ("slots", "rows")}}
            for g, table in enumerate(tables)
        ]
