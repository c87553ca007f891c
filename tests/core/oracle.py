"""The oracle: the promises of the memory manager as plain dicts. Slow, obviously right, independent of its code.

The oracle keeps the beliefs of an engine (the tokens of each space, the outstanding plans) and the contents of memory:
`memory[slot]` is the prefix whose KV was stored in the slot, with its tenant and its layer group. So one wrong, lost or
stale frame shows as one wrong position. The contents of a free frame are dropped, as if the frame were poisoned.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from pagedkv.core import AddressSpace, MemoryManager, Pin, Plan
from pagedkv.core import state as st
from pagedkv.core.prefix.events import AllBlocksCleared, BlockStored, Event
from pagedkv.errors import EventsLost, OutOfFrames, QuotaExceeded
from tests.core.frame_pool import oracle as pools

Salts = tuple[tuple[int, bytes], ...]
Prefix = tuple[bytes, tuple[int, ...], int, Salts]
"""Tenant, the tokens up to and including the stored one, layer group, the salts up to the stored token."""


@dataclass(eq=False)
class Believed:
    """One open space: its tenant, its committed tokens, its salts."""

    space: AddressSpace
    tenant: bytes
    tokens: list[int]
    released: bool = False
    unnamed: set[int] = field(default_factory=set)
    """Positions of tokens that were committed without their ids."""
    behind: list[set[int]] = field(default_factory=list)
    """For each group, the pages that were given back behind the window."""
    salts: Salts = ()


@dataclass(eq=False)
class Outstanding:
    """One plan: its spaces, the tokens of each, and whether the device has run it."""

    plan: Plan
    owners: list[Believed]
    tokens: list[list[int]]
    starts: list[list[int]]  # the tokens of each space before this plan
    has_run: bool = False

    @property
    def writers(self) -> set[Believed]:
        """The spaces that get tokens."""
        return {owner for owner, new in zip(self.owners, self.tokens, strict=True) if new}


@dataclass(eq=False)
class Pinned:
    """One pin, and the contents of its frames when it was made."""

    pin: Pin
    frames: dict[int, int]  # frame: generation
    bytes: dict[int, Prefix | None]  # slot: its contents


class Oracle:
    """The model of one MemoryManager: tests tell it each call, and `verify` compares the manager with it."""

    def __init__(self, mm: MemoryManager) -> None:
        self.mm, self.size = mm, mm.block_size
        self.groups = range(len(mm.groups))
        self.spaces: list[Believed] = []
        self.plans: list[Outstanding] = []
        self.memory: dict[int, Prefix] = {}
        self.pins: list[Pinned] = []
        self.quotas: dict[int, tuple[int | None, int | None, int]] = {}  # account: hard, soft, protected
        # open epoch: {frame: generation} of the frames that were mapped when it was opened
        self.epochs: dict[int, dict[int, int]] = {}

    # -- frames that must stay ----------------------------------------------------------------------------------------

    def record_pin(self, pin: Pin, frames: list[int]) -> None:
        """Record that `pin` protects `frames`, with their present contents."""
        slots = [frame * self.size + offset for frame in frames for offset in range(self.size)]
        self.pins.append(Pinned(pin, self.generations(frames), {slot: self.memory.get(slot) for slot in slots}))

    def record_epoch(self, epoch: int) -> None:
        """Record that work is launched which may read every frame that is mapped now."""
        self.epochs[epoch] = self.generations(np.flatnonzero(self.mm.state.frames["status"] == st.MAPPED).tolist())

    def generations(self, frames: list[int]) -> dict[int, int]:
        """Return {frame: generation}."""
        return {frame: int(self.mm.state.frames["generation"][frame]) for frame in frames}

    # -- the device ---------------------------------------------------------------------------------------------------

    def run(self, upto: Outstanding | None = None) -> None:
        """Execute the planned steps in order, copies first, up to and including `upto`."""
        for step in self.plans:
            if not step.has_run:
                for source, target in step.plan.copies.tolist():
                    for offset in range(self.size):
                        self.memory.pop(target * self.size + offset, None)
                        if source * self.size + offset in self.memory:
                            self.memory[target * self.size + offset] = self.memory[source * self.size + offset]
                for group in self.groups:
                    slots = iter(step.plan.group(group).slots.tolist())
                    for owner, before, new in zip(step.owners, step.starts, step.tokens, strict=True):
                        for count in range(1, len(new) + 1):
                            self.memory[next(slots)] = stored(owner, (*before, *new[:count]), group)
                step.has_run = True
            if step is upto:
                return

    def move(self, moves: list[list[int]]) -> None:
        """Move the contents of whole frames from source to target."""
        for source, target in moves:
            for offset in range(self.size):
                self.memory.pop(target * self.size + offset, None)
                if (stored := self.memory.pop(source * self.size + offset, None)) is not None:
                    self.memory[target * self.size + offset] = stored

    # -- verification -------------------------------------------------------------------------------------------------

    def verify(self) -> None:
        """Check the invariants, the contents of every committed position, and the counts against a recount."""
        self.mm.check(3)
        for frame in np.flatnonzero(self.mm.state.frames["status"] == st.FREE).tolist():
            for offset in range(self.size):
                self.memory.pop(frame * self.size + offset, None)
        for believed in self.spaces:
            assert len(believed.space) == len(believed.tokens)
            for group in self.groups:
                self.verify_group(believed, group)
        for readable in [*self.epochs.values(), *(pinned.frames for pinned in self.pins)]:
            assert self.generations(list(readable)) == readable, "a frame that an epoch or a pin reads was reused"
            free = self.mm.state.frames["status"][list(readable)] == st.FREE
            assert not free.any(), "a frame that an epoch or a pin reads is free"
        for pinned in self.pins:
            assert {slot: self.memory.get(slot) for slot in pinned.bytes} == pinned.bytes, "a pinned frame was written"
        sources = {int(f) for p in self.plans for f in p.plan.splits[:, 0]}
        pins = self.mm.state.frames["pins"]
        assert all(pins[f] for f in sources)  # until their plan is settled
        if not self.plans and not self.epochs:
            assert not pins.any()
            assert self.mm.pending == 0
        now = self.mm.stats()
        assert now.spaces == len({id(b) for b in self.spaces} | {id(o) for p in self.plans for o in p.owners})
        assert self.mm.available == now.free + now.evictable

    def verify_group(self, believed: Believed, group: int) -> None:
        """Check that each position that `group` may still see holds what was stored, and that the rest are holes."""
        space, pages, holes = believed.space, believed.space.pages_in(group).tolist(), self.holes(believed, group)
        assert {page for page, frame in enumerate(pages) if frame < 0} == holes
        read = space.token_ids.tolist()
        for position, token in enumerate(believed.tokens):
            page, offset = divmod(position, self.size)
            if group == 0:
                assert read[position] == (-1 if page in holes or position in believed.unnamed else token)
            if page in holes:
                continue
            found = self.memory.get(pages[page] * self.size + offset)
            if self.has_contents(pages[page]):
                expected = stored(believed, tuple(believed.tokens[: position + 1]), group)
                assert found == expected, f"position {position} of {space}"

    def has_contents(self, frame: int) -> bool:
        """Return False for the target of a copy that has not been made yet."""
        return frame not in {int(t) for p in self.plans if not p.has_run for t in p.plan.splits[:, 1]}

    # -- windows ------------------------------------------------------------------------------------------------------

    def invisible_pages(self, group: int, length: int) -> set[int]:
        """Return the pages that no query at position `length` or later sees."""
        layers = self.mm.groups[group]
        if layers.window is None:
            return set()
        positions = {p for p in range(length) if p > length - layers.window or p < layers.sinks}
        visible = {p // self.size for p in positions} | ({length // self.size} if length % self.size else set())
        return set(range(-(-length // self.size))) - visible

    def given_back(self, group: int, length: int) -> set[int]:
        """Return the pages that a commit gives back when a sequence has `length` tokens."""
        return self.invisible_pages(group, max(0, length - self.mm.groups[group].keep))

    def holes(self, believed: Believed, group: int) -> set[int]:
        """Return the pages that were given back behind the window."""
        return believed.behind[group] if believed.behind else set()

    def believed(self, space: AddressSpace, tenant: bytes, tokens: list[int], salts: Salts = ()) -> Believed:
        """Return the beliefs about a space that has just been opened and maps `tokens`."""
        behind = [(self.invisible_pages if group else self.given_back)(group, len(tokens)) for group in self.groups]
        return Believed(space, tenant, tokens, behind=behind, salts=salts)

    def record_commit(self, believed: Believed, tokens: list[int], *, named: bool = True) -> None:
        """Record that `tokens` were committed, so windows move on."""
        before = len(believed.tokens)
        believed.unnamed |= set() if named else set(range(before, before + len(tokens)))
        believed.tokens.extend(tokens)
        for group in self.groups if tokens else ():
            gone = self.given_back(group, len(believed.tokens))
            if self.holes(believed, group):
                visible = set(range(-(-before // self.size))) - self.given_back(group, before)
                gone &= visible | set(range(-(-before // self.size), -(-len(believed.tokens) // self.size)))
            believed.behind[group] |= gone

    def lacks_visible_pages(self, believed: Believed, length: int) -> bool:
        """Return whether a query at position `length` would see a page that was given back."""
        return any(
            self.mm.groups[group].window is not None
            and self.holes(believed, group)
            & (set(range(-(-length // self.size))) - self.invisible_pages(group, length))
            for group in self.groups
        )

    def frames_needed(self, owners: list[Believed], counts: list[int]) -> Counter[int]:
        """Count the frames that a plan takes, by account: new pages, and copies of tails that another space sees."""
        refs = Counter(
            int(f) for b in self.live_spaces() for group in self.groups for f in self.table(b, group) if f >= 0
        )
        refs += Counter(frame for pinned in self.pins for frame in pinned.frames)
        sources = {int(f) for p in self.plans for f in p.plan.splits[:, 0]}  # tails that abort may give back
        total: Counter[int] = Counter()
        for owner, count in zip(owners, counts, strict=True):
            length = self.planned_length(owner)
            account = self.mm._accounts.get(owner.tenant, 0)
            for group in self.groups:
                pages = self.table(owner, group)
                total[account] += -(-(length + count) // self.size) - len(pages)
                if count and length % self.size:
                    tail = int(pages[-1])
                    if refs[tail] > 1 or self.mm.state.frames["published"][tail] or tail in sources:
                        refs[tail] -= 1
                        total[account] += 1
        return total

    def account_usage(self) -> list[tuple[int, int]]:
        """Return (used, evictable) of each account, recounted."""
        frames = self.mm.state.frames
        evictable = (frames["status"] == st.CACHED) & (frames["pins"] == 0)
        charged = [frames["account"] == account for account in range(len(self.mm._accounts) + 1)]
        return [(int((own & (frames["status"] != st.FREE)).sum()), int((own & evictable).sum())) for own in charged]

    def refusal(self, needed: Counter[int]) -> type[OutOfFrames] | None:
        """Return the error with which the pool or a quota must refuse a plan, or None."""
        if needed.total() > self.mm.available:
            return OutOfFrames
        given = 0
        for account, (used, evictable) in enumerate(self.account_usage()):
            hard, _, protected = self.quotas.get(account, (None, None, 0))
            if needed[account] and hard is not None and used + needed[account] - evictable > hard:
                return QuotaExceeded
            given += min(evictable, max(needed[account], used + needed[account] - protected))
        return OutOfFrames if needed.total() > self.mm.stats().free + given else None

    def verify_quotas(self, needed: Counter[int], before: list[tuple[int, int]]) -> None:
        """Check after a plan that no account is over its hard quota, and none gave protected frames to another."""
        for account, ((used, _), (now, _)) in enumerate(zip(before, self.account_usage(), strict=True)):
            hard, _, protected = self.quotas.get(account, (None, None, 0))
            assert hard is None or not needed[account] or now <= hard
            assert used + needed[account] - now <= max(needed[account], used + needed[account] - protected)

    def live_spaces(self) -> list[Believed]:
        """Return the open spaces, and the released ones that an outstanding plan names."""
        return list({id(b): b for b in [*self.spaces, *(o for p in self.plans for o in p.owners)]}.values())

    def table(self, believed: Believed, group: int = 0) -> list[int]:
        """Return the frames of a row of the page table, whether its space is released or not."""
        state, row = self.mm.state, believed.space.asid + group
        return state.table[row, : state.spaces["num_pages"][row]].tolist()

    def planned_length(self, believed: Believed) -> int:
        """Return the number of committed and outstanding tokens."""
        return len(believed.tokens) + sum(
            len(t) for p in self.plans for o, t in zip(p.owners, p.tokens, strict=True) if o is believed
        )

    def prefix_of(self, frame: int) -> list[int] | None:
        """Return `frame` and the frames of its prefix, last one first, or None if one of them is not published."""
        frames, found = self.mm.state.frames, [frame]
        while frames["published"][found[-1]]:
            parent = int(frames["parent"][found[-1]])
            if parent < 0:
                return found
            if frames["generation"][parent] != frames["parent_generation"][found[-1]]:
                return None
            found.append(parent)
        return None

    def common_lengths(self, tenant: bytes, rows: list[list[int]], pads: list[int], salts: Salts) -> list[int]:
        """Return how much open_batch() must match of each row so that all of them end at one column, the last one."""
        longest = [pad + self.longest_match(tenant, row, salts) for row, pad in zip(rows, pads, strict=True)]
        for column in range(min(longest, default=0), -1, -1):
            lengths = [max(0, column - pad) for pad in pads]
            each = zip(rows, lengths, strict=True)
            if all(self.longest_match(tenant, row, salts, length) == length for row, length in each):
                return lengths
        raise AssertionError("no row needs to be known up to column 0")

    def longest_match(self, tenant: bytes, tokens: list[int], salts: Salts = (), most: int = 2**31) -> int:
        """Return how many of `tokens`, up to `most`, must match, by a walk over a dict of all published frames."""
        frames, successors, own = self.mm.state.frames, {}, own_salts(self.mm)
        companions: set[tuple[int, int]] = set()
        for frame in np.flatnonzero(frames["published"]).tolist():
            parent, group = int(frames["parent"][frame]), int(frames["published"][frame]) - 1
            if parent < 0 or frames["generation"][parent] == frames["parent_generation"][frame]:
                if group:
                    companions.add((parent, group))
                else:
                    successors[parent, tuple(self.mm.state.tokens[frame].tolist()), own[frame]] = frame
        at = -2 - self.mm._roots.by_tenant[tenant].number if tenant in self.mm._roots.by_tenant else None
        found, leaders = 0, []
        while at is not None and found + self.size < len(tokens):
            at = successors.get((at, tuple(tokens[found : found + self.size]), salts_in(salts, found, self.size)))
            found += self.size if at is not None else 0
            leaders += [at] if at is not None else []
        found = min(found, most)
        while any(
            (leaders[p], g) not in companions
            for g in self.groups[1:]
            for p in set(range(-(-found // self.size))) - self.invisible_pages(g, found)
        ):
            found = (found - 1) // self.size * self.size
        return found


def stored(owner: Believed, prefix: tuple[int, ...], group: int) -> Prefix:
    """Return what is stored for the last token of `prefix`."""
    return owner.tenant, prefix, group, tuple(salt for salt in owner.salts if salt[0] < len(prefix))


def salts_in(salts: Salts, first: int, size: int) -> Salts:
    """Return the salts in the page that begins at position `first`, with their offsets in it."""
    return tuple((position - first, digest) for position, digest in salts if first <= position < first + size)


def own_salts(mm: MemoryManager) -> dict[int, Salts]:
    """Return the salts in the page of each published frame."""
    salts = {1 + root.number: root.own for root in mm._roots.salted.values()}
    frames = np.flatnonzero(mm.state.frames["published"] == 1).tolist()
    numbers = st.page_salts(mm.state)
    return {frame: salts[at] if (at := int(numbers[frame])) else () for frame in frames}


def everything(mm: MemoryManager) -> tuple[bytes, ...]:
    """Return every number of the manager but tick, stamps and scratch: equal results mean that nothing changed."""
    s = mm.state
    fields = [s.frames[name].tobytes() for name in st.FRAME.names or ()]  # by field: padding is not data
    fields += [s.chunks[name].tobytes() for name in st.CHUNK.names or ()]
    fields += [s.spaces[name].tobytes() for name in st.SPACE.names or () if name != "stamp"]
    rows = [s.table[asid, :pages].tobytes() for asid, pages in enumerate(s.spaces["num_pages"])]
    reg = np.delete(s.reg, st.TICK)
    for account in range(len(mm._accounts) + 1 if mm._accounts else 0):  # scratch of plans that count
        reg[st.NUM_REGISTERS - 1 + account * st.ACCOUNT + np.array([st.NEED, st.GIVES])] = 0
    return (
        *fields,
        *rows,
        s.tokens.tobytes(),
        s.ghosts.tobytes(),
        s.roots.tobytes(),
        st.page_salts(s).tobytes(),
        s.log.tobytes(),
        reg.tobytes(),
    )


@contextmanager
def refused(pool: Any, error: Any, match: str | None = None) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Expect that a call of a manager or a frame pool is refused, and that it changes nothing."""
    numbers = everything if isinstance(pool, MemoryManager) else pools.everything
    before = numbers(pool)
    with pytest.raises(error, match=match) as raised:
        yield raised
    assert numbers(pool) == before


def grown(
    mm: MemoryManager, tokens: list[int], tenant: bytes = b"", salt: bytes | dict[int, bytes] = b""
) -> AddressSpace:
    """Return a new space that holds `tokens`, committed."""
    space = mm.open(tokens, tenant=tenant, salt=salt)
    rest = tokens[space.ready :]
    mm.commit(mm.plan([space], [len(rest)]), rest)
    return space


def content_digest(tenant: bytes, prefix: list[int], block_size: int = 4, salts: Salts = ()) -> bytes:
    """Return the name of the last page of `prefix` in events and snapshots: sha256 chained over the whole prefix."""
    digest = hashlib.sha256(b"root" + tenant).digest()
    for at in range(0, len(prefix), block_size):
        digest = hashlib.sha256(
            b"page" + digest + struct.pack(f"<{block_size}i", *prefix[at : at + block_size])
        ).digest()
        if own := salts_in(salts, at, block_size):
            packed = b"".join(struct.pack("<ii", offset, len(salt)) + salt for offset, salt in own)
            digest = hashlib.sha256(b"salt" + digest + packed).digest()
    return digest


def findable(mm: MemoryManager) -> set[bytes]:
    """Return the names of all published pages whose whole prefix is published."""
    return set(names_by_frame(mm).values())


def names_by_frame(mm: MemoryManager) -> dict[tuple[int, int], bytes]:
    """Return {(frame, generation): name} of all pages that can be found, by a walk from each to its root."""
    frames, tenants = mm.state.frames, {root.number: name for name, root in mm._roots.by_tenant.items()}
    names: dict[tuple[int, int], bytes] = {}
    own = own_salts(mm)
    for found in np.flatnonzero(frames["published"] == 1).tolist():
        frame, prefix, pages = found, list[int](), list[Salts]()
        while frame >= 0:
            prefix = mm.state.tokens[frame].tolist() + prefix
            pages.insert(0, own[frame])
            parent, generation = int(frames["parent"][frame]), frames["parent_generation"][frame]
            if parent >= 0 and not (frames["published"][parent] and frames["generation"][parent] == generation):
                break
            frame = parent
        else:
            size = mm.block_size
            salts = tuple((at * size + offset, salt) for at, page in enumerate(pages) for offset, salt in page)
            name = content_digest(tenants[-2 - frame], prefix, size, salts)
            names[found, int(frames["generation"][found])] = name
    return names


class Follower:
    """A router: a reader of events that holds the names of the published pages. since: the event to begin after.

    Without `since` the follower begins with a snapshot.
    """

    def __init__(self, mm: MemoryManager, since: int | None = None) -> None:
        self.mm, self.names, self.companions = mm, set[bytes](), set[tuple[bytes, int]]()
        self.since = since if since is not None else self.begin_again()

    def begin_again(self) -> int:
        """Take a snapshot."""
        now = self.mm.events_snapshot()
        pages = [(name, block.group) for block in now.blocks for name in block.block_hashes]
        self.names, self.companions = {name for name, group in pages if not group}, {page for page in pages if page[1]}
        self.since = now.sequence
        return now.sequence

    def catch_up(self) -> None:
        """Read the new events, or take a snapshot if some of them are lost."""
        try:
            for event in self.mm.events(self.since):
                self.follow(event)
                assert event.sequence > self.since
                self.since = event.sequence
        except EventsLost:
            self.begin_again()

    def follow(self, event: Event) -> None:
        """Apply one event. Assertions are strict, so an event sent twice or not at all is seen."""
        if isinstance(event, AllBlocksCleared):
            self.names, self.companions = set(), set()
        elif event.group:
            pages = {(name, event.group) for name in event.block_hashes}
            stored = isinstance(event, BlockStored)
            assert set(event.block_hashes) <= self.names, "a companion was sent without its leader"
            assert not self.companions & pages if stored else pages <= self.companions, (
                "a companion was stored twice, or removed without being stored"
            )
            self.companions = self.companions | pages if stored else self.companions - pages
        elif isinstance(event, BlockStored):
            assert not self.names & set(event.block_hashes), "a page was stored twice"
            assert event.parent_block_hash is None or event.parent_block_hash in self.names, (
                "a page was stored before its prefix"
            )
            self.names |= set(event.block_hashes)
        else:
            assert self.names >= set(event.block_hashes), "a page was removed without being stored"
            self.names -= set(event.block_hashes)
