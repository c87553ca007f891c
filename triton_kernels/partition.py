"""How decode work is cut, on the GPU, by every program for itself: no plan on the host that a graph replay would find stale.

The keys of all sequences, cut into units (a tile of N keys; or `split_tokens` of them), lie in one line, sequence after sequence.
Program p of `num_programs` owns the units p * share .. (p + 1) * share of that line, whatever sequences they belong to:

    sequence       0                1     2                                    3
    units          |a a a a a a a a |b b b|c c c c c c c c c c c c c c c c c c |d d d d|      23 + ... = total
    programs       |0 0 0 0 0|1 1 1 1 1|2 2 2 2 2|3 3 3 3 3|4 4 4 4 4|5 5 5 5 5|6 6 6|        share = ceil(total / num_programs)
    pieces         |a0       |a1 |b1|b2|c2       ...                                         slot of a piece: p + b

Going along the line, either p or b grows by one from piece to piece: so p + b is a slot of its own for each piece, and there are fewer than
num_programs + B of them. Every program does equal work whatever the lengths are; a sequence is cut no oftener than it must be.

With `split_tokens` a unit is a piece, at fixed tokens of its sequence: what a piece sums does not depend on the other sequences, nor on p.

Costs one read of seq_lens and a prefix sum over B in registers. Lengths may change between two replays of a graph; B may not.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ends_and_share(
    seq_lens, cu_seqlens_q, num_sequences, max_queries, window, unit, programs, BATCH: tl.constexpr, SPEC: tl.constexpr
):
    """ends int32 [BATCH]: where each sequence's units end in the line; and `share`.

    Sequences without queries, or with more than `max_queries`, have no units; others have one at least, for their output must be written.
    """
    b = tl.arange(0, BATCH)
    there = b < num_sequences
    n = tl.load(seq_lens + b, mask=there, other=0)
    m = tl.load(cu_seqlens_q + b + 1, mask=there, other=0) - tl.load(cu_seqlens_q + b, mask=there, other=0)
    units = tl.maximum((n - 1) // unit + 1 - first_seen_unit(n, m, window, unit, SPEC), 1)
    units = tl.where((m > 0) & (m <= max_queries), units, 0)
    ends = tl.cumsum(units, 0)
    total, longest = tl.sum(units, 0), tl.max(units, 0)
    share = tl.maximum((total + programs - 1) // programs, 1)
    # Equal lengths just above the share: rather a few programs idle than nearly every sequence cut in two.
    share = tl.where((longest > share) & (longest * 16 <= share * 17), longest, share)
    return ends, share


@triton.jit
def first_seen_unit(n, m, window, unit, SPEC: tl.constexpr):
    """The first unit of a sequence of n tokens, m of them new, that any query sees."""
    if SPEC.window:
        return tl.maximum(n - m - window + 1, 0) // unit
    return n * 0


@triton.jit
def sequence_of_unit(ends, unit_index):
    """The sequence that a unit of the line belongs to, and where that sequence's units begin and end."""
    before = ends <= unit_index
    b = tl.sum(before.to(tl.int32), 0)
    return b, tl.max(tl.where(before, ends, 0), 0), tl.min(tl.where(before, 2147483647, ends), 0)


@triton.jit
def slots_of_sequence(b, begin, end, share, units_per_sequence, SPEC: tl.constexpr):
    """The slot of the first piece of sequence b, whose units are begin..end of the line, and how many pieces there are, slot after slot."""
    if SPEC.split:
        slot, pieces = b.to(tl.int64) * units_per_sequence, end - begin
    else:
        slot, pieces = (begin // share + b).to(tl.int64), (end - 1) // share - begin // share + 1
    return slot, pieces
