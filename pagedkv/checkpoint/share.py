"""Share: the part of the weights that one of several ranks holds, as runs of rows or of columns. No tensors.

    split     matrices                        a rank computes
    ROWS      qkv, gate and up, their biases  its heads, its columns of the MLP, from the whole input
              embedding, head                 its tokens of the vocabulary
    COLUMNS   out, down                       a summand of the whole output, from its heads or columns
    None      norms, biases of out and down   the same as all others

Each part of a stacked matrix (q, k and v) is split on its own, so that a rank has whole heads of each.
"""

from __future__ import annotations

from typing import Final, NamedTuple

ROWS, COLUMNS = 0, 1
"""The dimension of a matrix that is split."""


class Share(NamedTuple):
    """The share of rank `rank`, from 0, of `size` ranks."""

    rank: int = 0
    size: int = 1

    def run(self, count: int) -> slice:
        """Return this rank's run of `count` rows or columns, which `size` divides."""
        each = count // self.size
        return slice(self.rank * each, (self.rank + 1) * each)


WHOLE: Final = Share()
"""The share of a process that is alone."""
