"""Padded tensors: tokens as [B, heads, L, D], one row for each sequence, as models of transformers hold them.

    token b * L + i of a call  =  x[b, :, i]          T = B * L tokens, those of padding among them

The kernels know tokens, [T, heads, D], and sequences as runs of tokens. So padded tensors are viewed as tokens, and the
tokens of padding become sequences of their own, of length 0 (`PagedBatch.padded`): their queries see nothing, so their
results are 0. No kernel knows padding.

    row b of the mask    0 0 0 1 1 1 1 1 0          |  before  |  sequence b    |  after  |       three runs
    cu_seqlens_q                                     b L        first            end       (b + 1) L

A tensor [B, L, heads, D] that was transposed is viewed without a copy, and so is one of L = 1 or B = 1. Any other is
copied once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from pagedkv import debug
from pagedkv.errors import InvalidRequest


def as_tokens(x: Tensor) -> Tensor:
    """Return [B, heads, L, D] as [B * L, heads, D]; a tensor of other dims as it is, for the checks to refuse."""
    return x.transpose(1, 2).flatten(0, 1) if x.dim() == 4 else x


def attend_padded(
    attend: Callable[[Tensor, Tensor | None], Any],
    q: Tensor,
    out: Tensor | None,
    cu_seqlens_q: Tensor,
    slots: Tensor | None,
) -> Any:
    """Return the results of `attend(q, out)`, called with tokens, in the dims of q [B, H, L, D]: [B, H, L, ...].

    cu_seqlens_q, slots: the tensors of the batch
    Raises: InvalidRequest if the batch has not the tokens of q, or `out` cannot be viewed as tokens
    """
    B, _, L, _ = q.shape
    _rows_begin_sequences(B, L, cu_seqlens_q, slots)
    if out is not None and (
        out.dim() != 4 or out.shape[:3] != q.shape[:3] or (B > 1 and L > 1 and out.stride(0) != L * out.stride(2))
    ):
        raise InvalidRequest(
            f"out is {list(out.shape)} with strides {out.stride()}; for q [B={B}, H={q.shape[1]}, L={L}, D] it must be "
            "[B, H, L, Dv], a transposed [B, L, H, Dv]: torch.empty(B, L, H, Dv).transpose(1, 2)"
        )
    results = attend(as_tokens(q), None if out is None else as_tokens(out))
    if isinstance(results, tuple):
        found, lse = results
        return _as_rows(found, B, L) if out is None else out, _as_rows(lse, B, L)
    return _as_rows(results, B, L) if out is None else out


def _as_rows(x: Tensor, B: int, L: int) -> Tensor:
    return x.view(B, L, *x.shape[1:]).transpose(1, 2)


def _rows_begin_sequences(B: int, L: int, cu_seqlens_q: Tensor, slots: Tensor | None) -> None:
    """Raise InvalidRequest unless each row of q begins a sequence of the batch.

    The values are read on a CPU, and with PAGEDKV_DEBUG >= 1.
    """
    is_right = slots is None or slots.shape[0] == B * L
    if is_right and not is_dynamo_compiling() and (cu_seqlens_q.device.type == "cpu" or debug.level() >= 1):
        every = max(1, (cu_seqlens_q.shape[0] - 1) // max(B, 1))  # sequences for each row
        is_right = cu_seqlens_q[::every].tolist() == [b * L for b in range(B + 1)]
    if not is_right:
        raise InvalidRequest(
            f"q has {B} rows of {L} tokens, and the batch counts other tokens: a batch for rows with padding is "
            "batch.padded(mask), mask bool [B, L]"
        )


def padded(
    mask: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    rows: Tensor | None,
    slots: Tensor | None,
    positions: Tensor | None,
) -> dict[str, Tensor | None]:
    """Return these fields of a batch as those of its padded batch (`PagedBatch.padded`). Raises InvalidRequest."""
    B, device = seq_lens.shape[0], seq_lens.device
    if not isinstance(mask, Tensor):
        raise InvalidRequest(f"mask is of type {type(mask).__name__}; give a tensor, bool [B={B}, L] on {device}")
    if mask.dtype != torch.bool or mask.dim() != 2 or mask.shape[0] != B or mask.device != device:
        raise InvalidRequest(
            f"mask is {str(mask.dtype)[6:]} {list(mask.shape)} on {mask.device}; it must be bool [B={B}, L] on {device}"
            ", True in the columns of each row that are new tokens"
        )
    L, counts = mask.shape[1], cu_seqlens_q.diff()
    first = mask.int().argmax(1) if L else torch.zeros_like(counts)  # of the first True, or 0
    if not is_dynamo_compiling() and (device.type == "cpu" or debug.level() >= 1):
        _runs(mask, first, counts)
    begin = torch.arange(B, device=device) * L
    runs = torch.stack([begin, begin + first, begin + first + counts], 1).flatten()
    none = torch.zeros_like(seq_lens)
    rows = torch.arange(B, device=device) if rows is None else rows
    return {
        "seq_lens": torch.stack([none, seq_lens, none], 1).flatten(),
        "cu_seqlens_q": torch.nn.functional.pad(runs, (0, 1), value=B * L).int(),
        "rows": rows.int().repeat_interleave(3),
        "slots": _spread(slots, mask, -1),
        "positions": _spread(positions, mask, 0),
    }


def _spread(x: Tensor | None, mask: Tensor, other: int) -> Tensor | None:
    """Return [B * L]: the elements of x where the mask is True, `other` elsewhere."""
    if x is None:
        return None
    return torch.full((mask.numel(),), other, dtype=x.dtype, device=x.device).masked_scatter(mask.flatten(), x)


def _runs(mask: Tensor, first: Tensor, counts: Tensor) -> None:
    """Raise InvalidRequest unless each row of the mask has the new tokens of its sequence, one after the other."""
    held = mask.sum(1)
    for b in (held != counts).nonzero().flatten().tolist():
        raise InvalidRequest(
            f"row {b} of mask has {int(held[b])} tokens and sequence {b} of the batch has {int(counts[b])} new ones; "
            "plan the step with mask.sum(1) tokens"
        )
    column = torch.arange(mask.shape[1], device=mask.device)
    is_run = mask == ((column >= first[:, None]) & (column < (first + held)[:, None]))
    for b in (~is_run.all(1)).nonzero().flatten().tolist():
        raise InvalidRequest(
            f"row {b} of mask has padding between its tokens; padding may lie before and after them. "
            "Pack such rows: q.transpose(1, 2)[mask]"
        )
