"""Matrices of integers: the weights of a linear layer in int8 or int4, with a scale for each group of 64 columns.

    value = integer * scale        scale = amax of the group / 127 (int8) or / 7 (int4), or 1 where that is 0

kind    stored                                                        bytes a weight, its share of a scale included
int8    int8 [N, K]                                                   1.0625
int4    uint8 [N, K / 2]: element 2i in the low nibble, plus 8        0.5625

Only weights are integers: x keeps its dtype. Elements are those of pagedkv/kernels/quant.py. A group that holds NaN or
infinity becomes NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

GROUP: Final = 64
"""Columns that share a scale; as in csrc/cpu/call.hpp."""

KINDS: Final = ("int8", "int4")
"""The integers; int4 has two of them in a byte."""

PIECE: Final = 1 << 18
"""Elements converted at a time: their floats stay in the second cache."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """Weights of N rows and K columns.

    Shapes: stored int8 [N, K] or uint8 [N, K / 2]; scales float32 [N, K / 64]
    """

    stored: Tensor
    scales: Tensor

    @classmethod
    def quantised(cls, values: Tensor, kind: str) -> Matrix:
        """Quantise a float matrix [N, K]; K must be a multiple of 64. kind: "int8" or "int4"."""
        (stored, dtype), (scales, of_scales) = layout(values.shape[0], values.shape[1], kind)
        made = cls(values.new_empty(stored, dtype=dtype), values.new_empty(scales, dtype=of_scales))
        made.store(0, values)
        return made

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.stored)

    @property
    def num_columns(self) -> int:
        """K."""
        return self.scales.shape[1] * GROUP

    @property
    def nbytes(self) -> int:
        """Bytes of the integers and of the scales."""
        return self.stored.nbytes + self.scales.nbytes

    def store(self, first: int, values: Tensor) -> None:
        """Quantise `values` [n, K] into the rows from `first` on. Modifies: stored, scales."""
        rows = max(1, PIECE // self.num_columns)
        for i in range(0, len(values), rows):
            groups = values[i : i + rows].reshape(-1, self.scales.shape[1], GROUP).float()
            limit = 7.0 if self.stored.dtype == torch.uint8 else 127.0
            scales = groups.abs().amax(-1) / limit
            scales = torch.where(scales == 0, 1.0, scales)
            whole = (groups / scales[..., None]).clamp(-limit, limit).round().nan_to_num(0.0).flatten(1)
            at = slice(first + i, first + i + len(groups))
            self.scales[at] = scales
            if limit == 7.0:
                whole += 8
                whole = whole[:, 0::2] + 16 * whole[:, 1::2]
            self.stored[at] = whole.to(self.stored.dtype)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the values [N, K], rounded to `dtype`."""
        result = self.scales.new_empty((len(self), self.num_columns), dtype=dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        rows = max(1, PIECE // self.num_columns)
        for i in range(0, len(self), rows):
            whole = self.stored[i : i + rows]
            if whole.dtype == torch.uint8:
                whole = torch.stack((whole & 15, whole >> 4), -1).to(torch.int8) - 8
            groups = whole.reshape(-1, self.scales.shape[1], GROUP).to(wide)
            result[i : i + rows] = (groups * self.scales[i : i + rows, :, None].to(wide)).flatten(1)
        return result


def layout(rows: int, columns: int, kind: str) -> tuple[tuple[tuple[int, int], torch.dtype], ...]:
    """Return shape and dtype of the integers and of the scales of a matrix."""
    in_byte = 2 if kind == "int4" else 1
    return ((rows, columns // in_byte), torch.uint8 if kind == "int4" else torch.int8), (
        (rows, columns // GROUP),
        torch.float32,
    )
