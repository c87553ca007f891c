"""The oracle: what the memory manager promises, as plain dicts. Slow, obviously right, and sharing no code with what it judges.

It keeps what an engine believes (the tokens of each space, the plans under way) and what memory holds: `memory[slot]` is the whole prefix
whose KV was stored there, and by the layers of which group, so one wrong, lost or stale frame shows as one wrong position. Frames nobody
owns are forgotten, like poison.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from pagedkv.core import AddressSpace, MemoryManager, Pin, Plan
from pagedkv.core import state as st
from pagedkv.core.prefix.events import AllBlocksCleared, BlockStored, Event
from pagedkv.errors import EventsLost, OutOfFrames, QuotaExceeded

Prefix = tuple[bytes, tuple[int, ...], int]
"""Tenant, tokens up to this one, layer group."""


@dataclass(eq=False)
class Believed:
    """One open space: its tenant, its committed tokens, its punched pages."""

    space: AddressSpace
    tenant: bytes
    tokens: list[int]
    holes: set[int] = field(default_factory=set)
    released: bool = False
    behind: list[set[int]] = field(default_factory=list)
    """Pages that were given back behind the window, for each group."""


@dataclass(eq=False)
class Outstanding:
    """One plan: whose, which tokens, and whether the device has run it."""

    plan: Plan
    owners: list[Believed]
    tokens: list[list[int]]
    starts: list[list[int]]  # the tokens of each space before this plan
    has_run: bool = False


@dataclass(eq=False)
class Pinned:
    """One pin, and what its frames held when it was made."""

    pin: Pin
    frames: dict[int, int]  # frame: generation
    bytes: dict[int, Prefix | None]  # slot: what is there


class Oracle:
    """Drives a MemoryManager and remembers, in dicts, what must be true."""

    def __init__(self, mm: MemoryManager) -> None:
        self.mm, self.size = mm, mm.block_size
        self.groups = range(len(mm.groups))
        self.spaces: list[Believed] = []
        self.plans: list[Outstanding] = []
        self.memory: dict[int, Prefix] = {}
        self.pins: list[Pinned] = []
        self.quotas: dict[int, tuple[int | None, int | None, int]] = {}  # account: hard, soft, protected
        self.epochs: dict[
            int, dict[int, int]
        ] = {}  # open epoch: frame: generation, of what was mapped when it was opened

    # -- who relies on what -------------------------------------------------------------------------------------------------------

    def hold(self, pin: Pin, frames: list[int]) -> None:
        """`frames` are pinned: nothing may happen to them."""
        slots = [frame * self.size + offset for frame in frames for offset in range(self.size)]
        self.pins.append(Pinned(pin, self.generations(frames), {slot: self.memory.get(slot) for slot in slots}))

    def launch(self, epoch: int) -> None:
        """Work begins that may read all that is mapped now."""
        self.epochs[epoch] = self.generations(np.flatnonzero(self.mm.state.frames["status"] == st.MAPPED).tolist())

    def generations(self, frames: list[int]) -> dict[int, int]:
        """frame: generation."""
        return {frame: int(self.mm.state.frames["generation"][frame]) for frame in frames}

    # -- what the device does -----------------------------------------------------------------------------------------------------

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
                            self.memory[next(slots)] = (owner.tenant, (*before, *new[:count]), group)
                step.has_run = True
            if step is upto:
                return

    def move(self, moves: list[list[int]]) -> None:
        """Copy whole frames, source to target; nothing is left at the source."""
        for source, target in moves:
            for offset in range(self.size):
                self.memory.pop(target * self.size + offset, None)
                if (held := self.memory.pop(source * self.size + offset, None)) is not None:
                    self.memory[target * self.size + offset] = held

    # -- what must be true ----------------------------------------------------------------------------------------------------------

    def verify(self) -> None:
        """Invariants hold, every committed position reads back what was written, and the counts are those of a recount."""
        self.mm.check(3)
        for frame in np.flatnonzero(self.mm.state.frames["status"] == st.FREE).tolist():
            for offset in range(self.size):
                self.memory.pop(frame * self.size + offset, None)
        for believed in self.spaces:
            assert len(believed.space) == len(believed.tokens)
            for group in self.groups:
                self.verify_group(believed, group)
        for relied in [*self.epochs.values(), *(pinned.frames for pinned in self.pins)]:
            assert self.generations(list(relied)) == relied, "a frame that somebody reads was taken"
            assert not (self.mm.state.frames["status"][list(relied)] == st.FREE).any(), (
                "a frame that somebody reads is free"
            )
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
        """Every position that the layers of `group` may still look at reads back what they stored; the rest was given back."""
        space, pages, holes = believed.space, believed.space.pages_in(group).tolist(), self.holes(believed, group)
        assert {page for page, frame in enumerate(pages) if frame < 0} == holes
        read = space.token_ids.tolist()
        for position, token in enumerate(believed.tokens):
            page, offset = divmod(position, self.size)
            if group == 0:
                assert read[position] == (-1 if page in holes else token)
            if page in holes:
                continue
            held = self.memory.get(pages[page] * self.size + offset)
            if self.was_run(pages[page]):
                assert held == (believed.tenant, tuple(believed.tokens[: position + 1]), group), (
                    f"position {position} of {space}"
                )

    def was_run(self, frame: int) -> bool:
        """A shared tail that an outstanding plan copies holds its bytes only once the copy was made."""
        return frame not in {int(t) for p in self.plans if not p.has_run for t in p.plan.splits[:, 1]}

    # -- windows ------------------------------------------------------------------------------------------------------------------------

    def unseen(self, group: int, length: int) -> set[int]:
        """The pages in which no query at position `length` or later sees anything."""
        seen = self.mm.groups[group]
        if seen.window is None:
            return set()
        positions = {p for p in range(length) if p > length - seen.window or p < seen.sinks}
        seen_pages = {p // self.size for p in positions} | ({length // self.size} if length % self.size else set())
        return set(range(-(-length // self.size))) - seen_pages

    def holes(self, believed: Believed, group: int) -> set[int]:
        """Pages that were punched, or given back behind the window."""
        return believed.holes | (believed.behind[group] if believed.behind else set())

    def opened(self, space: AddressSpace, tenant: bytes, tokens: list[int]) -> Believed:
        """A space that has just been opened and maps `tokens`. The group that leads maps all of them."""
        behind = [self.unseen(group, len(tokens)) if group else set[int]() for group in self.groups]
        return Believed(space, tenant, tokens, behind=behind)

    def keep(self, believed: Believed, tokens: list[int]) -> None:
        """`tokens` were committed: windows move on. A page that a punched one hides is left until release."""
        before = len(believed.tokens)
        believed.tokens.extend(tokens)
        for group in self.groups if tokens else ():
            now = self.unseen(group, len(believed.tokens))
            if self.holes(believed, group):
                kept = set(range(-(-before // self.size))) - self.unseen(group, before)
                now &= kept | set(range(-(-before // self.size), -(-len(believed.tokens) // self.size)))
            believed.behind[group] |= now

    def blind(self, believed: Believed, length: int) -> bool:
        """Whether a query at position `length` would see a page that is no longer there."""
        return any(
            self.mm.groups[group].window is not None
            and self.holes(believed, group) & (set(range(-(-length // self.size))) - self.unseen(group, length))
            for group in self.groups
        )

    def needed(self, owners: list[Believed], counts: list[int]) -> Counter[int]:
        """Frames a plan takes, for each account, counted over dicts: new pages, and copies of tails that somebody else sees then."""
        refs = Counter(int(f) for b in self.everyone() for group in self.groups for f in self.table(b, group) if f >= 0)
        refs += Counter(frame for pinned in self.pins for frame in pinned.frames)
        sources = {int(f) for p in self.plans for f in p.plan.splits[:, 0]}  # what abort may give back
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

    def held(self) -> list[tuple[int, int]]:
        """(used, evictable) of each account, recounted."""
        frames = self.mm.state.frames
        evictable = (frames["status"] == st.CACHED) & (frames["pins"] == 0)
        mine = [frames["account"] == account for account in range(len(self.mm._accounts) + 1)]
        return [(int((own & (frames["status"] != st.FREE)).sum()), int((own & evictable).sum())) for own in mine]

    def refusal(self, needed: Counter[int]) -> type[OutOfFrames] | None:
        """What quotas and the pool have against a plan."""
        if needed.total() > self.mm.available:
            return OutOfFrames
        given = 0
        for account, (used, evictable) in enumerate(self.held()):
            hard, _, protected = self.quotas.get(account, (None, None, 0))
            if needed[account] and hard is not None and used + needed[account] - evictable > hard:
                return QuotaExceeded
            given += min(evictable, max(needed[account], used + needed[account] - protected))
        return OutOfFrames if needed.total() > self.mm.stats().free + given else None

    def verify_quotas(self, needed: Counter[int], before: list[tuple[int, int]]) -> None:
        """A plan was had: nobody is over a hard quota for it, and nobody gave up for others what is protected."""
        for account, ((used, _), (now, _)) in enumerate(zip(before, self.held(), strict=True)):
            hard, _, protected = self.quotas.get(account, (None, None, 0))
            assert hard is None or not needed[account] or now <= hard
            assert used + needed[account] - now <= max(needed[account], used + needed[account] - protected)

    def everyone(self) -> list[Believed]:
        """Open spaces and released ones that a plan still holds."""
        return list({id(b): b for b in [*self.spaces, *(o for p in self.plans for o in p.owners)]}.values())

    def table(self, believed: Believed, group: int = 0) -> list[int]:
        """The page table row, released or not."""
        state, row = self.mm.state, believed.space.asid + group
        return state.table[row, : state.spaces["num_pages"][row]].tolist()

    def planned_length(self, believed: Believed) -> int:
        """Committed and outstanding tokens."""
        return len(believed.tokens) + sum(
            len(t) for p in self.plans for o, t in zip(p.owners, p.tokens, strict=True) if o is believed
        )

    def prefix_of(self, frame: int) -> list[int] | None:
        """`frame` and the frames before it, if all are published."""
        frames, found = self.mm.state.frames, [frame]
        while frames["published"][found[-1]]:
            parent = int(frames["parent"][found[-1]])
            if parent < 0:
                return found
            if frames["generation"][parent] != frames["parent_generation"][found[-1]]:
                return None
            found.append(parent)
        return None

    def longest_known(self, tenant: bytes, tokens: list[int]) -> int:
        """How many tokens of `tokens` open() must find: a walk over a dict of all published frames."""
        frames, known = self.mm.state.frames, {}
        companions: set[tuple[int, int]] = set()
        for frame in np.flatnonzero(frames["published"]).tolist():
            parent, group = int(frames["parent"][frame]), int(frames["published"][frame]) - 1
            if parent < 0 or frames["generation"][parent] == frames["parent_generation"][frame]:
                if group:
                    companions.add((parent, group))
                else:
                    known[parent, tuple(self.mm.state.tokens[frame].tolist())] = frame
        at = -2 - self.mm._roots.by_tenant[tenant].number if tenant in self.mm._roots.by_tenant else None
        found, last, leaders = 0, at, []
        while at is not None and found + self.size < len(tokens):
            at = known.get((at, tuple(tokens[found : found + self.size])))
            found += self.size if at is not None else 0
            last = at if at is not None else last
            leaders += [at] if at is not None else []
        while any(
            (leaders[p], g) not in companions
            for g in self.groups[1:]
            for p in set(range(len(leaders))) - self.unseen(g, found)
        ):
            leaders.pop()
            found -= self.size
        if not len(self.mm.state.successors) or last is None:
            return found
        rest = tokens[found:-1]
        pages = [page for parent, page in known if parent == last]
        return found + max(
            (
                next((i for i, (a, b) in enumerate(zip(page, rest, strict=False)) if a != b), min(len(page), len(rest)))
                for page in pages
            ),
            default=0,
        )


def everything(mm: MemoryManager) -> tuple[bytes, ...]:
    """Every number of the manager but tick and stamps, which are scratch: equal before and after means nothing was changed."""
    s = mm.state
    fields = [s.frames[name].tobytes() for name in st.FRAME.names or ()]  # by field: padding is not data
    fields += [s.chunks[name].tobytes() for name in st.CHUNK.names or ()]
    fields += [s.spaces[name].tobytes() for name in st.SPACE.names or () if name != "stamp"]
    rows = [s.table[asid, :pages].tobytes() for asid, pages in enumerate(s.spaces["num_pages"])]
    reg = np.delete(s.reg, st.TICK)
    for account in range(len(mm._accounts) + 1 if mm._accounts else 0):  # what plans write down while they count
        reg[st.NUM_REGISTERS - 1 + account * st.ACCOUNT + np.array([st.NEED, st.GIVES])] = 0
    return (
        *fields,
        *rows,
        s.tokens.tobytes(),
        s.ghosts.tobytes(),
        s.roots.tobytes(),
        s.successors.tobytes(),
        s.log.tobytes(),
        reg.tobytes(),
    )


def grown(mm: MemoryManager, tokens: list[int], tenant: bytes = b"") -> AddressSpace:
    """A space that holds `tokens`, committed."""
    space = mm.open(tokens, tenant=tenant)
    rest = tokens[len(space) :]
    mm.commit(mm.plan([space], [len(rest)]), rest)
    return space


def content_digest(tenant: bytes, prefix: list[int], block_size: int = 4) -> bytes:
    """What a page is called outside: sha256 chained over its whole prefix, whose last page it is."""
    digest = hashlib.sha256(b"root" + tenant).digest()
    for at in range(0, len(prefix), block_size):
        digest = hashlib.sha256(
            b"page" + digest + struct.pack(f"<{block_size}i", *prefix[at : at + block_size])
        ).digest()
    return digest


def findable(mm: MemoryManager) -> set[bytes]:
    """The names of all published pages whose whole prefix is published."""
    return set(names_by_frame(mm).values())


def names_by_frame(mm: MemoryManager) -> dict[tuple[int, int], bytes]:
    """(frame, generation): its name, of those that can be found; walks from each to its root, over the arrays."""
    frames, tenants = mm.state.frames, {root.number: name for name, root in mm._roots.by_tenant.items()}
    names: dict[tuple[int, int], bytes] = {}
    for found in np.flatnonzero(frames["published"] == 1).tolist():
        frame, prefix = found, list[int]()
        while frame >= 0:
            prefix = mm.state.tokens[frame].tolist() + prefix
            parent, generation = int(frames["parent"][frame]), frames["parent_generation"][frame]
            if parent >= 0 and not (frames["published"][parent] and frames["generation"][parent] == generation):
                break
            frame = parent
        else:
            names[found, int(frames["generation"][found])] = content_digest(tenants[-2 - frame], prefix, mm.block_size)
    return names


class Follower:
    """A router's view: from a snapshot, or from the beginning, it follows events and holds names."""

    def __init__(self, mm: MemoryManager, since: int | None = None) -> None:
        self.mm, self.names, self.companions = mm, set[bytes](), set[tuple[bytes, int]]()
        self.since = since if since is not None else self.begin_again()

    def begin_again(self) -> int:
        """Take a snapshot."""
        now = self.mm.snapshot()
        pages = [(name, block.group) for block in now.blocks for name in block.block_hashes]
        self.names, self.companions = {name for name, group in pages if not group}, {page for page in pages if page[1]}
        self.since = now.sequence
        return now.sequence

    def catch_up(self) -> None:
        """Read what happened, or take a snapshot if that is gone."""
        try:
            for event in self.mm.events(self.since):
                self.follow(event)
                assert event.sequence > self.since
                self.since = event.sequence
        except EventsLost:
            self.begin_again()

    def follow(self, event: Event) -> None:
        """One event: strict, so that one that was sent twice or not at all is seen."""
        if isinstance(event, AllBlocksCleared):
            self.names, self.companions = set(), set()
        elif event.group:
            pages = {(name, event.group) for name in event.block_hashes}
            stored = isinstance(event, BlockStored)
            assert set(event.block_hashes) <= self.names, "a companion without its leader"
            assert not self.companions & pages if stored else pages <= self.companions, (
                "a companion stored twice, or removed and not there"
            )
            self.companions = self.companions | pages if stored else self.companions - pages
        elif isinstance(event, BlockStored):
            assert not self.names & set(event.block_hashes), "stored twice"
            assert event.parent_block_hash is None or event.parent_block_hash in self.names, "stored before its prefix"
            self.names |= set(event.block_hashes)
        else:
            assert self.names >= set(event.block_hashes), "removed and not there"
            self.names -= set(event.block_hashes)
