"""The partition of decode work among programs, computed on the GPU by each program for itself.

The host holds no partition, so the replay of a graph cannot find a stale one.
The keys of all sequences are split into units (a tile of N keys; or `split_tokens` keys). The units lie in one line,
sequence after sequence. Program p of `num_programs` owns the units p * share .. (p + 1) * share of the line; they may
belong to several sequences:

    sequence       0                1     2                                    3
    units          |a a a a a a a a |b b b|c c c c c c c c c c c c c c c c c c |d d d d| total = number of units
    programs       |0 0 0 0 0|1 1 1 1 1|2 2 2 2 2|3 3 3 3 3|4 4 4 4 4|5 5 5 5 5|6 6 6|   share = ceil(total / programs)
    pieces         |a0       |a1 |b1|b2|c2       ...                                    slot of a piece: p + b

A piece is the part of one sequence in one program's share. From one piece to the next along the line, either p or b
grows by one. So p + b is a different slot for each piece, and there are fewer than num_programs + B slots. All programs
do equal work for any lengths, and a sequence is cut only at the borders of shares.

With `split_tokens` each unit is a piece, at fixed tokens of its sequence: the sums of a piece depend neither on the
other sequences nor on p.

Cost: one read of seq_lens and a prefix sum over B in registers. Between two replays of a graph, lengths may change; B
may not.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ends_and_share(
    seq_lens, cu_seqlens_q, num_sequences, max_queries, window, unit, programs, BATCH: tl.constexpr, SPEC: tl.constexpr
):
    """Return `ends`, int32 [BATCH]: the end of each sequence's units in the line; and `share`, the units of a program.

    A sequence without queries, with more than `max_queries`, or with at most SPEC.above, has no units. Every other
    sequence has at least one unit, because its output must be written.
    """
    b = tl.arange(0, BATCH)
    there = b < num_sequences
    n = tl.load(seq_lens + b, mask=there, other=0)
    m = tl.load(cu_seqlens_q + b + 1, mask=there, other=0) - tl.load(cu_seqlens_q + b, mask=there, other=0)
    units = tl.maximum((n - 1) // unit + 1 - first_seen_unit(n, m, window, unit, SPEC), 1)
    units = tl.where((m > SPEC.above) & (m <= max_queries), units, 0)
    ends = tl.cumsum(units, 0)
    total, longest = tl.sum(units, 0), tl.max(units, 0)
    share = tl.maximum((total + programs - 1) // programs, 1)
    # If equal lengths lie just above the share, a few idle programs are better than nearly all sequences cut in two.
    share = tl.where((longest > share) & (longest * 16 <= share * 17), longest, share)
    return ends, share


@triton.jit
def first_seen_unit(n, m, window, unit, SPEC: tl.constexpr):
    """Return the first unit that any query sees, of a sequence of n tokens, m of them new."""
    if SPEC.window:
        return tl.maximum(n - m - window + 1, 0) // unit
    return n * 0


@triton.jit
def sequence_of_unit(ends, unit_index):
    """Return the sequence that a unit of the line belongs to, and the begin and end of its units in the line."""
    before = ends <= unit_index
    b = tl.sum(before.to(tl.int32), 0)
    return b, tl.max(tl.where(before, ends, 0), 0), tl.min(tl.where(before, 2147483647, ends), 0)


@triton.jit
def sequence_of_row(starts, row, num_sequences, steps):
    """Return the sequence that a packed row belongs to, by a binary search: the last one that begins there or before.

    starts: first rows of the sequences, and the end.   steps: the bit length of num_sequences.
    """
    sequence, beyond = row * 0, row * 0 + num_sequences
    for _ in range(steps):
        middle = (sequence + beyond) // 2
        is_before = tl.load(starts + middle) <= row
        sequence = tl.where(is_before, middle, sequence)
        beyond = tl.where(is_before, beyond, middle)
    return sequence


@triton.jit
def slots_of_sequence(b, begin, end, share, units_per_sequence, SPEC: tl.constexpr):
    """Return the slot of the first piece of sequence b, and the number of its pieces; their slots are consecutive.

    begin, end: the units of the sequence in the line.
    """
    if SPEC.split:
        slot, pieces = b.to(tl.int64) * units_per_sequence, end - begin
    else:
        slot, pieces = (begin // share + b).to(tl.int64), (end - 1) // share - begin // share + 1
    return slot, pieces
