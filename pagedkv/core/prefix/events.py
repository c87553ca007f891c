"""Events: a log of the pages that became findable or ceased to be, for routers that send prompts to caches.

    index.insert, index.remove  ──▶  s.log [E, 4 + S]: a ring of integers; event n (1, 2, ...) is in row n % E
    events(since), its snapshot ──▶  fold: read the ring from where the last fold stopped, and name pages by digests

The compiled functions write one row an event, O(block_size), and make no object. Digests are computed when a reader
asks. The fold keeps the digest of each published frame as of the last event it has read. So it names a page correctly
even if the frame is free or holds another page by then. A reader that falls behind the ring gets EventsLost and begins
again from a snapshot. A fold that falls behind begins again, too.

A page that was published, lost its prefix (behind a window, then evicted) and is still mapped keeps its name until the
fold begins again. If an equal page was computed and published meanwhile, both have one name: it is stored once, and
removed with the last of the two.

Each layer group has events of its own: the page of a group is stored after its leader, under the same name, and removed
before it. So a reader knows which groups have a page. The windows decide what a prompt matches, as in
layer_groups.usable_length.

This file knows frames, roots and digests; it must not know how an engine sends the events.
"""

from __future__ import annotations

import operator
from collections import deque
from dataclasses import dataclass
from itertools import starmap
from typing import Any, Final

import numpy as np

from pagedkv.core.compiled import inlined
from pagedkv.core.prefix.digests import page_digest, root_digest
from pagedkv.core.prefix.roots import Salts
from pagedkv.core.state import I32, I64, LOGGED, State, page_salts
from pagedkv.errors import EventsLost, InvalidRequest

STORED: Final = 1
REMOVED: Final = 2
CLEARED: Final = 3
HEAD: Final = 4  # columns before the tokens: kind + 4 x group, frame, parent (for a companion: its leader), salt


@inlined
def log_stored(log: I32, reg: I64, page: tuple[int, int, int, int], tokens: I32) -> None:
    """Log that `page`, (frame, parent, group, salt), which holds `tokens` (int32 [S]), was published."""
    reg[LOGGED] += 1
    row = reg[LOGGED] % len(log)
    log[row, 0], log[row, 1], log[row, 2], log[row, 3] = STORED + 4 * page[2], page[0], page[1], page[3]
    for i in range(len(tokens)):
        log[row, HEAD + i] = tokens[i]


@inlined
def log_removed(log: I32, reg: I64, frame: int) -> None:
    """Log that `frame` was unpublished."""
    reg[LOGGED] += 1
    row = reg[LOGGED] % len(log)
    log[row, 0], log[row, 1], log[row, 2], log[row, 3] = REMOVED, frame, 0, 0


@inlined
def log_cleared(log: I32, reg: I64) -> None:
    """Log that all pages were unpublished."""
    reg[LOGGED] += 1
    row = reg[LOGGED] % len(log)
    log[row, 0], log[row, 1], log[row, 2], log[row, 3] = CLEARED, 0, 0, 0


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A page became findable. The field names are those of vLLM and SGLang; digests are 32 bytes.

    parent_block_hash: None for a first page.
    tenant:            the `tenant` given to `open`.
    group:             the layer group. The events of the other groups follow that of group 0.
    salts:             the salts given to `open` that lie in the page, with their offsets in it.
    """

    sequence: int
    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    tenant: bytes
    group: int = 0
    salts: Salts = ()


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A page ceased to be findable in one layer group."""

    sequence: int
    block_hashes: tuple[bytes, ...]
    group: int = 0


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Every page ceased to be findable: forget() was called, or a snapshot follows that lists all findable blocks."""

    sequence: int


Event = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All findable pages, prefixes first, as of event number `sequence`. Continue with `events(since=sequence)`."""

    sequence: int
    blocks: tuple[BlockStored, ...]

    def as_events(self) -> list[Event]:
        """Return the snapshot as events: AllBlocksCleared, then a BlockStored for each page."""
        return [AllBlocksCleared(self.sequence), *self.blocks]


@dataclass(frozen=True, slots=True)
class PageName:
    """The name of a published frame: its digest, that of the page before, its tenant, its layer group, its salts."""

    digest: bytes
    before: bytes | None
    tenant: bytes
    group: int = 0
    salts: Salts = ()


@dataclass(frozen=True, slots=True)
class Changes:
    """The published pages that came and went after an event, for a reader that keeps their bytes.

    sequence: the number of the last event. stored: the frames that hold a page published since, and its name.
    removed:  the names of pages that cannot be found any more. cleared: whether all pages were unpublished meanwhile.
    """

    sequence: int
    stored: tuple[tuple[int, PageName], ...]
    removed: tuple[PageName, ...] = ()
    cleared: bool = False


Change = tuple[Any, ...]
"""A function in C and its arguments."""


def _at_once(changes: list[Change]) -> None:
    """Make all calls in one call of C functions, which no signal handler can interrupt."""
    deque(starmap(operator.call, changes), maxlen=0)


class EventLog:
    """The reading side of the ring of one manager."""

    def __init__(self) -> None:
        self._folded = 0  # the last event folded
        self._names: dict[int, PageName] = {}  # published frame: its name, as of event `_folded`
        self._copies: dict[tuple[bytes, int], int] = {}  # (digest, group): how many frames have it
        self._subjects: dict[int, PageName | None] = {}  # event in the ring: its page; None if a reader skips the event
        # root: [(first event, tenant and salts of the root from that event on)]
        self._roots: dict[int, list[tuple[int, tuple[bytes, Salts]]]] = {}

    def root_taken(self, s: State, number: int, name: tuple[bytes, Salts]) -> None:
        """Record that root `number` has this tenant and these salts from the next event on. A second call does nothing.

        The salts are those of its page, with their offsets in the page.
        """
        history = self._roots.get(number, [])
        if history and history[-1][1] == name:
            return
        newest = int(s.reg[LOGGED])
        # entries are dropped if no event in the ring is older than the next entry, or no page was published under them
        behind = [following[0] <= newest - len(s.log) for following in history[1:]]
        kept = [entry for entry in history[sum(behind) :] if entry[0] <= newest]
        self._roots[number] = [*kept, (newest + 1, name)]

    def renumbered(self, s: State, moves: I32) -> tuple[EventLog, str, object]:
        """Return the attribute to set when frames have moved, source to target (int32 [M, 2]). No event results."""
        if len(s.log):
            self._fold(s, int(s.reg[LOGGED]))
        into = dict(moves.tolist())
        return self, "_names", {into.get(frame, frame): name for frame, name in self._names.items()}

    def events(self, s: State, since: int) -> list[Event]:
        """Return the events after number `since`. O(events).

        Raises: EventsLost if the ring has lost some of them; InvalidRequest for a number beyond the newest event
        """
        newest = int(s.reg[LOGGED])
        if since > newest:
            raise InvalidRequest(f"events since {since}: the newest event has number {newest}; give 0 to {newest}")
        lost = newest - self._folded > len(s.log)  # the fold missed events: it can name no page of the ring
        first = newest + 1 if lost else max(newest - len(s.log), 0) + 1
        if since + 1 < first:
            raise EventsLost(since, first)
        self._fold(s, newest)
        return [event for number in range(since + 1, newest + 1) if (event := self._render(s, number))]

    def snapshot(self, s: State) -> Snapshot:
        """Return all pages that are findable now. O(published frames)."""
        newest = int(s.reg[LOGGED])
        self._fold(s, newest)
        blocks: dict[tuple[bytes, int], BlockStored] = {}
        for frame in _prefixes_first(s, list(self._names)):
            named = self._names[frame]
            leader = int(s.frames["parent"][frame]) if named.group else frame  # only leaders have their tokens recorded
            blocks.setdefault((named.digest, named.group), self._stored(newest, named, s.tokens[leader]))
        return Snapshot(newest, tuple(blocks.values()))

    def changes(self, s: State, since: int | None) -> Changes:
        """Return the pages published or removed after event `since`; None: all that are published.

        O(events), or O(published frames) if events were lost. A frame that holds another page by now is left out.
        """
        newest = int(s.reg[LOGGED])
        lost = since is None or newest - min(since, self._folded) > len(s.log)
        self._fold(s, newest)
        if since is None or lost:
            return Changes(newest, tuple(self._names.items()))
        stored: dict[int, PageName] = {}
        removed: list[PageName] = []
        cleared = False
        for number in range(since + 1, newest + 1):
            kind, frame = s.log[number % len(s.log), :2].tolist()
            subject = self._subjects.get(number)
            if kind == CLEARED:
                stored, removed, cleared = {}, [], True
            elif subject is not None and kind == REMOVED:
                removed.append(subject)
            elif subject is not None and self._names.get(frame) is subject:
                stored[frame] = subject
        return Changes(newest, tuple(stored.items()), tuple(removed), cleared)

    def names(self, s: State) -> dict[int, PageName]:
        """Return the name of each published frame. Not a copy."""
        self._fold(s, int(s.reg[LOGGED]))
        return self._names

    def _fold(self, s: State, newest: int) -> None:
        """Read the ring up to event `newest`, or begin again if it has lost events that were not read.

        An interrupt leaves the fold as of an earlier event: each event is applied at once, with its number.
        """
        if newest - self._folded > len(s.log):
            self._rebuild(s, newest)
        for number in range(self._folded + 1, newest + 1):
            kind, frame, parent, salt = s.log[number % len(s.log), :HEAD].tolist()
            if kind % 4 == STORED:
                tokens = s.log[number % len(s.log), HEAD:]
                subject, changes = self._stored_in(
                    frame, self._name(self._names, number, (parent, kind // 4, salt), tokens)
                )
            elif kind == REMOVED:
                subject, changes = self._removed_from(frame)
            else:
                subject, changes = None, [(setattr, self, "_names", {}), (setattr, self, "_copies", {})]
            changes += [(operator.setitem, self._subjects, number, subject), (setattr, self, "_folded", number)]
            changes.append((dict.pop, self._subjects, number - len(s.log), None))
            _at_once(changes)

    def _name(
        self, names: dict[int, PageName], number: int, place: tuple[int, int, int], tokens: I32
    ) -> PageName | None:
        """Return the name of a page published by event `number` at `place`, (parent, group, salt).

        names: the names of the pages published before.
        Returns: None if the page before has no name, which happens only after the fold began again.
        """
        parent, group, salt = place
        if group:
            leader = names.get(parent)
            return PageName(leader.digest, leader.before, leader.tenant, group, leader.salts) if leader else None
        salts = self._root_at(salt - 1, number)[1] if salt else ()
        if parent >= 0:
            before = names.get(parent)
            if before is None:
                return None
            return PageName(page_digest(before.digest, tokens, salts), before.digest, before.tenant, 0, salts)
        tenant, _ = self._root_at(-2 - parent, number)
        return PageName(page_digest(root_digest(tenant), tokens, salts), None, tenant, 0, salts)

    def _root_at(self, root: int, number: int) -> tuple[bytes, Salts]:
        """Return the tenant and the salts that a root had at event `number`."""
        return next(name for begin, name in reversed(self._roots[root]) if begin <= number)

    def _stored_in(self, frame: int, named: PageName | None) -> tuple[PageName | None, list[Change]]:
        """Return the page that a reader sees stored, None if another frame has it, and the calls that note it."""
        if named is None:
            return None, []
        copies = self._copies.get((named.digest, named.group), 0) + 1
        changes: list[Change] = [
            (operator.setitem, self._names, frame, named),
            (operator.setitem, self._copies, (named.digest, named.group), copies),
        ]
        return named if copies == 1 else None, changes

    def _removed_from(self, frame: int) -> tuple[PageName | None, list[Change]]:
        """Return the page that a reader sees removed, None if another frame has it, and the calls that note it."""
        named = self._names.get(frame)
        if named is None:
            return None, []
        page, changes = (named.digest, named.group), list[Change]([(operator.delitem, self._names, frame)])
        if (copies := self._copies[page] - 1) > 0:
            return None, [*changes, (operator.setitem, self._copies, page, copies)]
        return named, [*changes, (operator.delitem, self._copies, page)]

    def _render(self, s: State, number: int) -> Event | None:
        row, named = s.log[number % len(s.log)], self._subjects[number]
        if row[0] == CLEARED:
            return AllBlocksCleared(number)
        if named is None:
            return None
        return (
            self._stored(number, named, row[HEAD:])
            if row[0] % 4 == STORED
            else BlockRemoved(number, (named.digest,), named.group)
        )

    def _stored(self, number: int, named: PageName, tokens: I32) -> BlockStored:
        ids = tuple(tokens.tolist())
        return BlockStored(number, (named.digest,), named.before, ids, len(ids), named.tenant, named.group, named.salts)

    def _rebuild(self, s: State, newest: int) -> None:
        """Name the published pages from the arrays, except pages that lost their prefix: no prompt can find them."""
        names: dict[int, PageName] = {}
        copies: dict[tuple[bytes, int], int] = {}
        salts = page_salts(s)
        for frame in _prefixes_first(s, np.flatnonzero(s.frames["published"]).tolist()):
            parent, group = int(s.frames["parent"][frame]), int(s.frames["published"][frame]) - 1
            if parent < 0 or _is_page_before(s, parent, frame):
                named = self._name(names, newest, (parent, group, int(salts[frame])), s.tokens[frame])
                if named is not None:
                    names[frame] = named
                    copies[named.digest, named.group] = copies.get((named.digest, named.group), 0) + 1
        anew = {"_names": names, "_copies": copies, "_subjects": {}, "_folded": newest}
        _at_once([(setattr, self, name, value) for name, value in anew.items()])


def _is_page_before(s: State, parent: int, frame: int) -> bool:
    """Return True if frame `parent` still holds the page after which `frame` was published."""
    return bool(s.frames["generation"][parent] == s.frames["parent_generation"][frame])


def _prefixes_first(s: State, frames: list[int]) -> list[int]:
    """Return `frames` in an order in which each page comes after the page before it."""
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


def as_map(event: Event, *, medium: str = "GPU", short: bool = False) -> dict[str, Any]:
    """Return the event in vLLM's form, to be encoded by msgpack: a map that contains its type, digests as bytes.

    short: name blocks by the last 64 bits of their digests, an int of 0 or more, as vLLM does by default.
    """
    name = _last_bits if short else bytes
    if isinstance(event, BlockStored):
        keys = [*([event.tenant] if event.tenant else []), *(salt for _, salt in event.salts)]
        return {
            "type": "BlockStored",
            "block_hashes": [name(digest) for digest in event.block_hashes],
            "parent_block_hash": None if event.parent_block_hash is None else name(event.parent_block_hash),
            "token_ids": list(event.token_ids),
            "block_size": event.block_size,
            "lora_id": None,
            "medium": medium,
            "lora_name": None,
            "extra_keys": [keys] * len(event.block_hashes) if keys else None,
            "group_idx": event.group,
        }
    if isinstance(event, BlockRemoved):
        return {
            "type": "BlockRemoved",
            "block_hashes": [name(digest) for digest in event.block_hashes],
            "medium": medium,
            "group_idx": event.group,
        }
    return {"type": "AllBlocksCleared"}


def as_array(event: Event, *, medium: str = "GPU") -> list[Any]:
    """Return the event in SGLang's form (and older vLLM's): an array that begins with the type; digests cut to 64 bits.

    The digests are signed integers. The form has no field for layer groups. A reader should take a block for gone as
    soon as one group removes it: so it never expects a match that fails.
    """
    if isinstance(event, BlockStored):
        parent = None if event.parent_block_hash is None else _short(event.parent_block_hash)
        hashes = [_short(digest) for digest in event.block_hashes]
        return ["BlockStored", hashes, parent, list(event.token_ids), event.block_size, None, medium]
    if isinstance(event, BlockRemoved):
        return ["BlockRemoved", [_short(digest) for digest in event.block_hashes], medium]
    return ["AllBlocksCleared"]


def _last_bits(digest: bytes) -> int:
    return int.from_bytes(digest[-8:], "big")


def _short(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big", signed=True)
