"""Padding: which columns of a batch are tokens, and when pages without the other columns show each token the same.

A mask has a column for each token of a row so far, [B, columns]. The host stores K and V of padding and hides them with
the mask. Layers that attend to pages store tokens alone, so a row in pages is shorter than its columns:

    columns   . . a b . c d        the host: a window of 3 shows d the columns (. c d)
    pages     a b c d              pages:    a window of 3 shows d the tokens (b c d)

So windows agree only where no padding lies in them, or where they hold all tokens of the row. The host also computes
padding: a column of padding behind a token attends to the tokens before it, and `generate` may read its logits.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def has_padding_behind(mask: torch.Tensor) -> bool:
    """Return whether a row of a mask, [B, L], has padding after a token."""
    return bool((mask.bool().int().diff() < 0).any())


def computes_padding(mask: torch.Tensor, width: int) -> bool:
    """Return whether one of the last `width` columns is padding behind a token of its row."""
    return bool((~mask & (mask.cumsum(1) > 0))[:, -width:].any())


def windows_agree(mask: torch.Tensor, width: int, windows: Iterable[int | None]) -> bool:
    """Return whether each of the last `width` columns sees the same tokens through a window of tokens as through a
    window of columns.
    """
    sizes = {size for size in windows if size is not None}
    if not sizes or not has_padding_behind(mask):
        return True
    new, seen = mask[:, -width:], mask.cumsum(1)
    for size in sizes:
        inside = (seen - torch.nn.functional.pad(seen, (size, 0))[:, : seen.shape[1]])[:, -width:]
        if bool((new & (inside != seen[:, -width:].clamp(max=size))).any()):
            return False
    return True


def sees_nothing(mask: torch.Tensor, windows: Iterable[int | None]) -> bool:
    """Return whether the last column of a row attends to no token. Its logits are those of the next token.

    The result then depends on the host's function: sdpa gives zeros, and eager the mean of all V, those of hidden
    padding too, which pages do not have.
    """
    size = min((size for size in windows if size is not None), default=mask.shape[1])
    return not bool(mask[:, -size:].any(1).all())


def spread(packed: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Return the tokens of each row at their columns, and zeros at its padding.

    Shapes: packed [B, heads, most, D], row b with its tokens first; real bool [B, L]; returns [B, heads, L, D]
    """
    real = real.to(packed.device)
    holds = torch.arange(packed.shape[2], device=packed.device) < real.sum(1, keepdim=True)
    whole = packed.new_zeros(*packed.shape[:2], real.shape[1], packed.shape[3])
    whole.transpose(1, 2)[real] = packed.transpose(1, 2)[holds]
    return whole
