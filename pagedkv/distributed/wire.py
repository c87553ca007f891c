"""The messages of rank 0, in 32-bit words, and the page tables that all ranks keep equal.

    words       0      1     2    3    4    5    6    7    8
                words  kind  T    B    G    N    C    E    A, P
    STEP        token_ids [T]  counts [B]  seq_lens [B]  rows [B]  logits_of [N]  copies [C, 2]  entries [E, 3]
    COPY                                                                          copies [C, 2]
    BEGIN       the bytes of a JSON object: the pool and the kernels of the session
    STOP

(T new tokens, B sequences, G layer groups, N tokens whose logits are wanted: ALL if each; C copies of frames, E entries
of the page tables int32 [A, P] that changed.) Positions and slots are not sent: they follow from lengths and tables. So
a step takes 4 * (10 + T + 3 B + N + 2 C + 3 E) bytes, whatever the lengths of the sequences.

A page table is sent once, and then its changes: an entry is (row, page, frame), and E counts those of pages that the
step's sequences have, in rows of all groups, which differ from what was last sent.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedkv.core.handles import Plan
    from pagedkv.core.state import I32

STEP, COPY, BEGIN, STOP = range(4)
"""Kinds of messages."""

HEAD: Final = 10
"""Words of the head."""

ALL: Final = -1
"""The N of a step in which the logits of each token are wanted: their indices are not sent."""


class StepMessage(NamedTuple):
    """A step as a follower receives it.

    Shapes: token_ids int32 [T]; counts, seq_lens, rows int32 [B]; logits_of int32 [N], None for all T tokens;
            copies int32 [C, 2], to be made before any KV is written
    """

    token_ids: I32
    counts: I32
    seq_lens: I32
    rows: I32
    logits_of: I32 | None
    copies: I32


class Tables:
    """The page tables as the followers have them: int32 [A, P], -1 for an entry that no step has read."""

    def __init__(self) -> None:
        self.known: I32 = np.empty((0, 0), np.int32)

    def begin(self, shape: tuple[int, ...]) -> None:
        """Begin anew if the tables of the manager have another shape."""
        if self.known.shape != shape:
            self.known = np.full(shape, -1, np.int32)

    def changes(self, plan: Plan, block_size: int) -> I32:
        """Return the entries that a step reads and the followers lack: int32 [E, 3]. Modifies: known"""
        live = plan.live_table
        self.begin(live.shape)
        groups = np.arange(plan.num_groups, dtype=np.int32)
        rows = (plan.rows[:, None] + groups).ravel()
        pages = np.repeat(-(-plan.seq_lens // block_size), plan.num_groups)
        width = int(pages.max(initial=0))
        wanted = live[rows, :width]
        differs = (wanted != self.known[rows, :width]) & (np.arange(width) < pages[:, None])
        row, page = np.nonzero(differs)
        entries = np.stack([rows[row], page.astype(np.int32), wanted[row, page]], axis=1)
        self.take(entries)
        return entries

    def take(self, entries: I32) -> None:
        """Enter changes. Shapes: entries int32 [E, 3]. Modifies: known"""
        self.known[entries[:, 0], entries[:, 1]] = entries[:, 2]


def packed_step(
    token_ids: Sequence[int], plan: Plan, logits_of: Sequence[int], copies: I32, tables: Tables, block_size: int
) -> I32:
    """Return the message of a step. Modifies: tables"""
    entries = tables.changes(plan, block_size)
    wanted, num_wanted = ((), ALL) if len(logits_of) == len(token_ids) else (logits_of, len(logits_of))
    sizes = [len(token_ids), len(plan.rows), plan.num_groups, num_wanted, len(copies), len(entries)]
    body = [np.asarray(part, np.int32).ravel() for part in (token_ids, plan.counts, plan.seq_lens, plan.rows, wanted)]
    return _message(STEP, [*sizes, *tables.known.shape], *body, copies.ravel(), entries.ravel())


def unpacked_step(words: I32, tables: Tables) -> StepMessage:
    """Return the step of a message. Modifies: tables, which are then those of rank 0"""
    num_tokens, num_sequences, _, num_wanted, num_copies, num_entries = map(int, words[2:8])
    tables.begin((int(words[8]), int(words[9])))
    sizes = [num_tokens, *[num_sequences] * 3, max(0, num_wanted), 2 * num_copies, 3 * num_entries]
    parts = np.split(words[HEAD:], np.cumsum(sizes)[:-1])
    tables.take(parts[6].reshape(-1, 3))
    logits_of = None if num_wanted == ALL else parts[4]
    return StepMessage(parts[0], parts[1], parts[2], parts[3], logits_of, parts[5].reshape(-1, 2))


def packed_copies(copies: I32) -> I32:
    """Return the message that orders copies of frames alone, int32 [C, 2]."""
    return _message(COPY, [], copies.ravel())


def unpacked_copies(words: I32) -> I32:
    """Return the copies of such a message."""
    return words[HEAD:].reshape(-1, 2)


def packed_session(values: dict[str, Any]) -> I32:
    """Return the message that begins a session."""
    text = json.dumps(values).encode()
    return _message(BEGIN, [len(text)], np.frombuffer(text.ljust(-(-len(text) // 4) * 4), np.int32))


def unpacked_session(words: I32) -> dict[str, Any]:
    """Return the values of such a message."""
    values: dict[str, Any] = json.loads(words[HEAD:].tobytes()[: words[2]])
    return values


def packed_stop() -> I32:
    """Return the message that ends a session."""
    return _message(STOP, [])


def _message(kind: int, head: list[int], *body: I32) -> I32:
    words = np.concatenate([np.zeros(HEAD, np.int32), *body])
    words[: 2 + len(head)] = [len(words), kind, *head]
    return words
