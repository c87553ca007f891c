"""Events: what became findable in the index and what ceased to be, in order, for those who route prompts to caches.

    index.insert, index.remove  ──▶  s.log [E, 3 + S]: a ring of integers, written in passing     sequence numbers 1, 2, ...; row n % E
    events(since), snapshot()   ──▶  fold: follow the ring from where the last reader stopped, and name each page by its digest

The compiled functions write a row, O(block_size), and no object. Digests are computed when somebody reads: the fold knows the digest of
each published frame as of the last event it has seen, so a frame that is gone or in other hands by then is still named rightly. Whoever
reads too seldom for the ring is told so (EventsLost) and begins again from a snapshot; so does the fold.

A page that was published, lost its prefix (punched, then evicted) and is still mapped keeps its name for as long as the fold was not lost.
Where it has a twin, which was computed anew and published, the name is stored once and removed with the last of the two.

Each layer group has events of its own: the page of a group is stored after its leader, under the same name, and removed before it. So a
reader knows of every page in which groups it is; what a prompt would match follows from the windows, as in layer_groups.usable_pages.

It knows frames, roots and digests; who sends the events, and how, is the engine's business.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from pagedkv.core.compiled import inlined
from pagedkv.core.prefix.digests import page_digest, root_digest
from pagedkv.core.state import I32, I64, LOGGED, State
from pagedkv.errors import EventsLost, InvalidRequest

STORED: Final = 1
REMOVED: Final = 2
CLEARED: Final = 3
HEAD: Final = 3  # columns before the tokens: kind + 4 x group, frame, parent (of a companion: its leader)


@inlined
def log_stored(log: I32, reg: I64, page: tuple[int, int, int], tokens: I32) -> None:
    """`page`, (frame, parent, group), which holds `tokens` (int32 [S]), was published."""
    reg[LOGGED] += 1
    row = reg[LOGGED] % len(log)
    log[row, 0], log[row, 1], log[row, 2] = STORED + 4 * page[2], page[0], page[1]
    for i in range(len(tokens)):
        log[row, HEAD + i] = tokens[i]


@inlined
def log_removed(log: I32, reg: I64, frame: int) -> None:
    """`frame` is not published any more."""
    reg[LOGGED] += 1
    row = reg[LOGGED] % len(log)
    log[row, 0], log[row, 1], log[row, 2] = REMOVED, frame, 0


@inlined
def log_cleared(log: I32, reg: I64) -> None:
    """Nothing is published any more."""
    reg[LOGGED] += 1
    row = reg[LOGGED] % len(log)
    log[row, 0], log[row, 1], log[row, 2] = CLEARED, 0, 0


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A page became findable. The names are those that vLLM and SGLang publish; digests are 32 bytes.

    parent_block_hash is None for a first page. `tenant` is what `open` was told; adapters and images are part of it. `group`: of which
    layer group; the others of a page follow group 0.
    """

    sequence: int
    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    tenant: bytes
    group: int = 0


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A page is not findable any more in one layer group."""

    sequence: int
    block_hashes: tuple[bytes, ...]
    group: int = 0


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing that was said before holds: everything was forgotten, or, before a snapshot, the blocks that follow are all there are."""

    sequence: int


Event = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All pages that can be found, prefixes first, as of event number `sequence`: go on with `events(since=sequence)`."""

    sequence: int
    blocks: tuple[BlockStored, ...]

    def as_events(self) -> list[Event]:
        """For a reader that knows events only: forget everything, then these."""
        return [AllBlocksCleared(self.sequence), *self.blocks]


@dataclass(frozen=True, slots=True)
class _Named:
    """A published frame: its digest, that of the page before, its root, its layer group."""

    digest: bytes
    before: bytes | None
    tenant: bytes
    group: int = 0


class EventLog:
    """The reading side of the ring of one manager."""

    def __init__(self) -> None:
        self._seen = 0  # the last event folded
        self._held: dict[int, _Named] = {}  # published frame: its name, as of event `_seen`
        self._copies: Counter[tuple[bytes, int]] = Counter()  # how many of these frames have that name and group
        self._said: dict[
            int, _Named | None
        ] = {}  # event in the ring: what it is about, None if it tells a reader nothing
        self._tenants: dict[int, list[tuple[int, bytes]]] = {}  # root: (from which event on, whose)

    def root_taken(self, s: State, number: int, tenant: bytes) -> None:
        """From now on, `number` is the root of `tenant`. Again is harmless."""
        history = self._tenants.setdefault(number, [])
        if history and history[-1][1] == tenant:
            return
        oldest = int(s.reg[LOGGED]) - len(s.log)
        while len(history) > 1 and history[1][0] <= oldest:  # nothing in the ring is older than the next one
            history.pop(0)
        if history and history[-1][0] == s.reg[LOGGED] + 1:
            history.pop()  # nothing was published under it
        history.append((int(s.reg[LOGGED]) + 1, tenant))

    def renumber(self, s: State, moves: I32) -> None:
        """Published frames are about to move, source to target (int32 [M, 2]). Nothing becomes findable or ceases to be."""
        if len(s.log):
            self._fold(s, int(s.reg[LOGGED]))
            self._held |= {target: self._held.pop(source) for source, target in moves.tolist() if source in self._held}

    def events(self, s: State, since: int) -> list[Event]:
        """What happened after event `since`. O(events). Raises: EventsLost, InvalidRequest for a number that was not given out."""
        newest = int(s.reg[LOGGED])
        if since > newest:
            raise InvalidRequest(f"events since {since}: the newest one has number {newest}; give 0 up to that")
        lost = newest - self._seen > len(s.log)  # nothing in the ring can be named
        first = newest + 1 if lost else max(newest - len(s.log), 0) + 1
        if since + 1 < first:
            raise EventsLost(since, first)
        self._fold(s, newest)
        return [event for number in range(since + 1, newest + 1) if (event := self._render(s, number))]

    def snapshot(self, s: State) -> Snapshot:
        """All that can be found now. O(published frames)."""
        newest = int(s.reg[LOGGED])
        self._fold(s, newest)
        blocks: dict[tuple[bytes, int], BlockStored] = {}
        for frame in _prefixes_first(s, list(self._held)):
            named = self._held[frame]
            knows = int(s.frames["parent"][frame]) if named.group else frame  # its leader has the tokens
            blocks.setdefault((named.digest, named.group), _stored(newest, named, s.tokens[knows]))
        return Snapshot(newest, tuple(blocks.values()))

    def _fold(self, s: State, newest: int) -> None:
        """Follow the ring up to `newest`, or begin anew if it has gone round since."""
        if newest - self._seen > len(s.log):
            self._rebuild(s, newest)
        for number in range(self._seen + 1, newest + 1):
            kind, frame, parent = s.log[number % len(s.log), :HEAD].tolist()
            if kind % 4 == STORED:
                self._said[number] = self._store(
                    frame, self._name(number, (parent, kind // 4), s.log[number % len(s.log), HEAD:])
                )
            elif kind == REMOVED:
                self._said[number] = self._remove(frame)
            else:
                self._held, self._copies, self._said[number] = {}, Counter(), None
            self._said.pop(number - len(s.log), None)
        self._seen = newest

    def _name(self, number: int, place: tuple[int, int], tokens: I32) -> _Named | None:
        """The name of a page published at event `number` at `place`, (parent, group); None if the page before has none (only after the fold
        was lost)."""
        parent, group = place
        if group:
            leader = self._held.get(parent)
            return _Named(leader.digest, leader.before, leader.tenant, group) if leader else None
        if parent >= 0:
            before = self._held.get(parent)
            return _Named(page_digest(before.digest, tokens), before.digest, before.tenant) if before else None
        tenant = next(tenant for begin, tenant in reversed(self._tenants[-2 - parent]) if begin <= number)
        return _Named(page_digest(root_digest(tenant), tokens), None, tenant)

    def _store(self, frame: int, named: _Named | None) -> _Named | None:
        if named is None:
            return None
        self._held[frame] = named
        self._copies[named.digest, named.group] += 1
        return named if self._copies[named.digest, named.group] == 1 else None

    def _remove(self, frame: int) -> _Named | None:
        named = self._held.pop(frame, None)
        if named is None:
            return None
        self._copies[named.digest, named.group] -= 1
        if self._copies[named.digest, named.group] > 0:
            return None
        del self._copies[named.digest, named.group]
        return named

    def _render(self, s: State, number: int) -> Event | None:
        row, named = s.log[number % len(s.log)], self._said[number]
        if row[0] == CLEARED:
            return AllBlocksCleared(number)
        if named is None:
            return None
        return (
            _stored(number, named, row[HEAD:])
            if row[0] % 4 == STORED
            else BlockRemoved(number, (named.digest,), named.group)
        )

    def _rebuild(self, s: State, newest: int) -> None:
        """Name what is published from the arrays themselves: all but pages that lost their prefix, which nobody can find."""
        self._seen = newest
        self._held, self._copies, self._said = {}, Counter(), {}
        for frame in _prefixes_first(s, np.flatnonzero(s.frames["published"]).tolist()):
            parent, group = int(s.frames["parent"][frame]), int(s.frames["published"][frame]) - 1
            if parent < 0 or _is_page_before(s, parent, frame):
                self._store(frame, self._name(newest, (parent, group), s.tokens[frame]))


def _is_page_before(s: State, parent: int, frame: int) -> bool:
    """Whether the frame `parent` still is what it was when `frame` was published after it."""
    return bool(s.frames["generation"][parent] == s.frames["parent_generation"][frame])


def _prefixes_first(s: State, frames: list[int]) -> list[int]:
    """`frames`, none before the page before it."""
    wanted, ordered = set(frames), list[int]()
    for last in frames:
        chain = []
        frame = last
        while frame in wanted:
            wanted.discard(frame)
            chain.append(frame)
            parent = int(s.frames["parent"][frame])
            frame = parent if parent >= 0 and _is_page_before(s, parent, frame) else -1
        ordered += reversed(chain)
    return ordered


def _stored(number: int, named: _Named, tokens: I32) -> BlockStored:
    return BlockStored(
        number, (named.digest,), named.before, tuple(tokens.tolist()), len(tokens), named.tenant, named.group
    )


def as_map(event: Event, *, medium: str = "GPU") -> dict[str, Any]:
    """The form of vLLM's events: a map with the type in it, digests as bytes. Give it to msgpack."""
    if isinstance(event, BlockStored):
        return {
            "type": "BlockStored",
            "block_hashes": list(event.block_hashes),
            "parent_block_hash": event.parent_block_hash,
            "token_ids": list(event.token_ids),
            "block_size": event.block_size,
            "lora_id": None,
            "medium": medium,
            "lora_name": None,
            "extra_keys": [[event.tenant]] * len(event.block_hashes) if event.tenant else None,
            "group_idx": event.group,
        }
    if isinstance(event, BlockRemoved):
        return {
            "type": "BlockRemoved",
            "block_hashes": list(event.block_hashes),
            "medium": medium,
            "group_idx": event.group,
        }
    return {"type": "AllBlocksCleared"}


def as_array(event: Event, *, medium: str = "GPU") -> list[Any]:
    """The form of SGLang's events, and of vLLM's older ones: an array with the type first, digests cut to 64 signed bits.

    It has no word for layer groups: a reader that takes a block for gone when it is removed from one of them is never too hopeful.
    """
    if isinstance(event, BlockStored):
        parent = None if event.parent_block_hash is None else _short(event.parent_block_hash)
        hashes = [_short(digest) for digest in event.block_hashes]
        return ["BlockStored", hashes, parent, list(event.token_ids), event.block_size, None, medium]
    if isinstance(event, BlockRemoved):
        return ["BlockRemoved", [_short(digest) for digest in event.block_hashes], medium]
    return ["AllBlocksCleared"]


def _short(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big", signed=True)
