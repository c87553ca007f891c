"""Seeded faults: each is the code of core with one law broken on purpose, as it was broken in an engine that served.

A fault replaces a text that must occur exactly once. If a line is rewritten, the fault in it is not found any more, and
must be seeded in the new line. The tests of core (test_laws, test_steps, test_machine and others) must catch each
fault.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

CORE = Path(__file__).parents[2] / "pagedkv" / "core"


class Fault(NamedTuple):
    """`old` replaced by `new` in a file of core.

    law: the law, and how the fault breaks it. proof: the test file that should catch it, which runs first.
    """

    law: str
    file: str
    old: str
    new: str
    proof: str = "test_laws.py"

    def seeded(self) -> str:
        """Return the text of the file with the fault in it."""
        text = (CORE / self.file).read_text(encoding="utf-8")
        found = text.count(self.old)
        assert found == 1, (
            f"{self.law}: {self.old!r} is {found} times in core/{self.file}; seed this fault in the present line of "
            f"the file, in {__name__}"
        )
        return text.replace(self.old, self.new)


IDENTITY, MACHINE, STEPS, GROUPS = (
    "prefix/test_identity.py",
    "test_machine.py",
    "tables/test_steps.py",
    "tables/test_layer_groups.py",
)
OPENING = "spaces/test_opening.py"
WINDOWED = "tables/test_windowed_leader.py"
ORDER, TENANTS, RESIZE, EVENTS = (
    "pool/test_eviction_order.py",
    "pool/test_tenants.py",
    "tables/test_resize.py",
    "prefix/test_events.py",
)

POOL_LAWS, POOL_KEYS, POOL_MACHINE = (f"frame_pool/test_pool_{name}.py" for name in ("laws", "keys", "machine"))

FAULTS = (
    Fault(
        "a prefix is findable only once it was computed: published at plan",
        "tables/steps.py",
        "        for position in range(start, end):\n",
        "        asid, s.spaces[asids[i]].length = asids[i], end\n"
        "        page_tables.publish_pages(s, asid)\n"
        "        s.spaces[asid].length = start\n"
        "        for position in range(start, end):\n",
    ),
    Fault(
        "tenants cannot see each other's pages: no salt",
        "prefix/roots.py",
        "        if tenant not in self.by_tenant:\n            if len",
        '        tenant = b""\n        if tenant not in self.by_tenant:\n            if len',
    ),
    Fault(
        "an evicted parent cannot be taken for its successor: generations are not compared",
        "prefix/index.py",
        "            and record.parent_generation == generation\n",
        "",
        IDENTITY,
    ),
    Fault(
        "a page has the salts of the prompt that it was computed for: they are not compared",
        "prefix/index.py",
        "            and salt_of(s.salts, frame) == salt\n",
        "",
        "prefix/test_salts.py",
    ),
    Fault(
        "identity is exact: the hash is believed",
        "prefix/index.py",
        "            if different == 0:\n",
        "            if True:\n",
        IDENTITY,
    ),
    Fault(
        "a frame that a match maps cannot be evicted: it is not taken off its list",
        "pool/frames.py",
        "        if records[frame].pins == 0:\n            delist(records, reg, frame)\n        elif",
        "        if records[frame].pins == 0:\n            pass\n        elif",
    ),
    Fault(
        "no suffix is orphaned: pages behind a hole are always kept",
        "tables/page_tables.py",
        "    return s.frames[frame].published > 0 and index.nearest_evictable(s, frame) != index.PREFIX_GONE\n",
        "    return True\n",
        WINDOWED,
    ),
    Fault(
        "windows move on committed tokens: they move on planned ones",
        "tables/page_tables.py",
        "layer_groups.first_kept_page(s, group, s.spaces[row].length), s.spaces[row].num_pages)",
        "layer_groups.first_kept_page(s, group, s.spaces[row].planned), s.spaces[row].num_pages)",
        GROUPS,
    ),
    Fault(
        "as many positions behind a window stay as the caller says: none",
        "tables/layer_groups.py",
        "    return first_visible_page(s, group, length - s.groups[group, _KEEP])\n",
        "    return first_visible_page(s, group, length)\n",
        GROUPS,
    ),
    Fault(
        "the first tokens stay where a window has sinks: they are given back",
        "tables/layer_groups.py",
        "    return (s.groups[group, 1] + size - 1) // size\n",
        "    return 0\n",
        GROUPS,
    ),
    Fault(
        "a page goes after its companions: leaders are dropped first",
        "tables/page_tables.py",
        "    for group in range(len(s.groups) - 1, -1, -1):\n        _drop_row",
        "    for group in range(len(s.groups)):\n        _drop_row",
        GROUPS,
    ),
    Fault(
        "all groups are served or none: one is counted",
        "tables/steps.py",
        "            needed += more * len(s.groups)\n",
        "            needed += more\n",
        GROUPS,
    ),
    Fault(
        "tails are evicted first: pages are dropped from the front",
        "tables/page_tables.py",
        "    for page in range(s.spaces[row].num_pages - 1, num_pages - 1, -1):\n",
        "    for page in range(num_pages, s.spaces[row].num_pages):\n",
    ),
    Fault(
        "a dropped frame waits for its epoch: it is free at once",
        "pool/frames.py",
        "    fenced = reg[EPOCH] > reg[PASSED]\n    if fenced:\n        _fence(records, reg, frame)\n",
        "    fenced = False\n",
    ),
    Fault(
        "an epoch ends what was launched up to it, and no more: every fence falls",
        "pool/frames.py",
        "while frame != NIL and ((epoch - int(s.frames[frame].entered)) & MASK) <= MASK // 2:",
        "while frame != NIL:",
    ),
    Fault(
        "the source of a copy survives until commit: not pinned",
        "tables/steps.py",
        "    frames.pin(s, source)\n    if chained:",
        "    if s.frames[source].refs > 1:\n        frames.pin(s, source)\n    if chained:",
    ),
    Fault(
        "refs count the entries that name a frame: a fork does not count its first page",
        "tables/page_tables.py",
        "            s.frames[frame].refs += 1  # mapped already\n",
        "            s.frames[frame].refs += page > 0\n",
    ),
    Fault(
        "a published page is never written: a published tail is written in place",
        "tables/steps.py",
        "if s.frames[tail].refs > 1 or s.frames[tail].published or",
        "if s.frames[tail].refs > 1 or",
        STEPS,
    ),
    Fault(
        "k writers of a tail with r owners cost min(k, r - 1) copies: they cost k",
        "tables/steps.py",
        "                s.frames[tail].refs -= 1\n",
        "                s.frames[tail].refs -= 0\n",
        STEPS,
    ),
    Fault(
        "a plan that fails has changed nothing: copies are not counted",
        "tables/steps.py",
        "    if needed + copies > s.reg[NUM_FREE]",
        "    if needed > s.reg[NUM_FREE]",
        STEPS,
    ),
    Fault(
        "frames of rejected drafts come back: they are kept",
        "tables/steps.py",
        "            page_tables.drop_tail(s, asid, (length + size - 1) // size)\n",
        "            pass\n",
        STEPS,
    ),
    Fault(
        "release under an outstanding plan waits for it: frames go at once",
        "tables/page_tables.py",
        "    if s.spaces[asid].outstanding > 0:\n        s.spaces[asid].status = CLOSING\n",
        "    if False:\n        s.spaces[asid].status = CLOSING\n",
        STEPS,
    ),
    Fault(
        "a page is not exchanged for an equal one under a plan: it is",
        "tables/page_tables.py",
        "            if existing >= 0 and s.spaces[asid].outstanding > 0:\n",
        "            if False:\n",
        STEPS,
    ),
    Fault(
        "a tail whose copy was made stays split: abort shares it again",
        "tables/steps.py",
        "        if not copied:\n",
        "        if True:\n",
        STEPS,
    ),
    Fault(
        "plans of a space are committed oldest first: any order",
        "tables/steps.py",
        "        if planned > 0 and s.spaces[asids[i]].length != starts[i]:\n",
        "        if False:\n",
        STEPS,
    ),
    Fault(
        "a cached page behind a mapped one never outlives its prefix: a floor stops at the page before",
        "pool/eviction.py",
        "        parent = records[parent].parent\n",
        "        parent = -1\n",
        ORDER,
    ),
    Fault(
        "the fence of a prefix falls last: it is not renewed when a tail is split behind it",
        "tables/steps.py",
        "        page_tables.touch_prefix(s, s.frames[source].parent)",
        "        pass",
        ORDER,
    ),
    Fault(
        "a tenant holds no more than its hard quota: the quota is not looked at",
        "pool/quotas.py",
        "        if need > 0 and hard >= 0 and used + need - evictable > hard:\n",
        "        if False:\n",
        TENANTS,
    ),
    Fault(
        "a protected share is not evicted by another's burst: it is",
        "pool/quotas.py",
        "max(need, used + need - reg[register(account, PROTECTED)])",
        "max(need, used + need)",
        TENANTS,
    ),
    Fault(
        "a frame that a tenant takes is charged to it: it is not",
        "pool/frames.py",
        "    count(records, reg, frame, USED, 1)\n",
        "",
        TENANTS,
    ),
    Fault(
        "a frame that moves is named by its new number: its children keep the old one",
        "tables/resize.py",
        "    _redirect_parents(s.frames, fresh.frames, into)\n",
        "",
        RESIZE,
    ),
    Fault(
        "the log reports each page that ceases to be cached: it does not",
        "prefix/index.py",
        "        log_removed(s.log, s.reg, frame)\n",
        "        pass\n",
        EVENTS,
    ),
    Fault(
        "a prompt longer than a row of the table is matched as far as the row goes: behind it",
        "tables/page_tables.py",
        "    whole = min(max(0, (len(token_ids) - 1) // size), len(found))",
        "    whole = max(0, (len(token_ids) - 1) // size)",
        MACHINE,
    ),
    Fault(
        "a retired page that is found again counts among the most ever mapped: it does not",
        "pool/frames.py",
        "        reg[NUM_RETIRED] -= 1\n        note_peak(records, reg)\n",
        "        reg[NUM_RETIRED] -= 1\n",
        POOL_LAWS,
    ),
    Fault(
        "a match has every page that a window sees: companions are taken for granted",
        "tables/layer_groups.py",
        "        lacking = _last_lacking_page(s, leaders, group, length)\n",
        "        lacking = -1\n",
        GROUPS,
    ),
    Fault(
        "the rows of a rectangle end at one column: a window may lack a page before it",
        "spaces/opening.py",
        "        if most == known:\n            return most\n",
        "        return most\n",
        OPENING,
    ),
    Fault(
        "no query sees a page that was given back: a sequence is truncated to where it would",
        "tables/layer_groups.py",
        "                if s.table[asid + group, page] == HOLE and is_visible(s, group, page, length):\n",
        "                if False:\n",
        GROUPS,
    ),
    Fault(
        "a quota counts the copies of a plan: new pages alone",
        "pool/quotas.py",
        "* len(s.groups) + copies\n",
        "* len(s.groups)\n",
        TENANTS,
    ),
    Fault(
        "a quota counts the pages of all groups: the pages of one",
        "pool/quotas.py",
        "* len(s.groups) + copies\n",
        " + copies\n",
        TENANTS,
    ),
    Fault(
        "a tenant over its soft quota yields first: the policy alone decides",
        "pool/quotas.py",
        "            if best < 0 or (over and not best_over) or (over == best_over and ahead > lead):\n",
        "            if best < 0 or ahead > lead:\n",
        TENANTS,
    ),
    Fault(
        "at its hard quota a tenant makes room itself: it takes what is free",
        "pool/quotas.py",
        "        while need > 0 and hard >= 0 and reg[register(account, USED)] + need > hard:\n"
        "            _evict_of(s, account)\n",
        "        pass\n",
        TENANTS,
    ),
    Fault(
        "a pinned frame does not move: it does",
        "tables/resize.py",
        "    stuck = pinned[pinned >= num_frames]\n",
        "    stuck = pinned[:0]\n",
        RESIZE,
    ),
    Fault(
        "a frame that an epoch may read does not move: it does",
        "tables/resize.py",
        "    if s.reg[EPOCH] > s.reg[PASSED]:\n",
        "    if False:\n",
        RESIZE,
    ),
    Fault(
        "a frame that moves has a generation that its place never had: it keeps the one it finds",
        "tables/resize.py",
        '    fresh.frames["generation"][targets] = s.frames["generation"][targets] + 1\n',
        '    fresh.frames["generation"][targets] = s.frames["generation"][targets]\n',
        RESIZE,
    ),
    Fault(
        "the lists of every account follow a move: the lists of one",
        "tables/resize.py",
        "        *(block[: 4 * NUM_LISTS].reshape(NUM_LISTS, 4) for block in account_registers(reg)),\n",
        "",
        RESIZE,
    ),
    Fault(
        "a smaller pool has room for what is mapped: the mapped frames are not counted",
        "tables/resize.py",
        "    if unevictable > num_frames:\n",
        "    if False:\n",
        RESIZE,
    ),
    Fault(
        "tokens of a plan are rejected only if it is the newest of its space: of any plan",
        "tables/steps.py",
        "        if accepted[i] < planned and s.spaces[asids[i]].planned != ends[i] and not keep:\n",
        "        if False:\n",
        MACHINE,
    ),
    Fault(
        "a pin holds the pages that prompts find: it holds the duplicates of a space that could not share them yet",
        "tables/page_tables.py",
        "    publish_pages(s, pin)\n",
        "",
        "test_pins.py",
    ),
    Fault(
        "a prompt that is looked up finds what open maps: whole pages alone",
        "observe/misses.py",
        "    return pages * s.tokens.shape[1] + common\n",
        "    return pages * s.tokens.shape[1]\n",
        OPENING,
    ),
    Fault(
        "a page behind a window is evicted before its prefix: it is put at the end of its list",
        "pool/frames.py",
        "        enlist_before(s.frames, s.reg, frame, before)\n",
        "        enlist(s.frames, s.reg, frame)\n",
        WINDOWED,
    ),
    Fault(
        "a page behind a window that waits for an epoch goes before its prefix afterwards: it forgets that",
        "pool/frames.py",
        "            s.frames[frame].rank += BEHIND_WINDOW\n",
        "            s.frames[frame].rank += 0\n",
        WINDOWED,
    ),
    Fault(
        "a page behind a window stays cached only if its prefix does: it may be evicted while the page waits",
        "pool/frames.py",
        "    if before != index.PREFIX_GONE:\n        _enlist",
        "    if True:\n        _enlist",
        WINDOWED,
    ),
    Fault(
        "a page is not published after its prefix was evicted: no lookup could reach it",
        "tables/page_tables.py",
        "    if before != HOLE and index.nearest_evictable(s, before) != index.PREFIX_GONE:\n",
        "    if before != HOLE:\n",
        WINDOWED,
    ),
    Fault(
        "a sequence that ends was used now: its past is as old as it was",
        "tables/page_tables.py",
        "                last = frame\n",
        "                last = NIL\n",
        WINDOWED,
    ),
    Fault(
        "a plan is settled once: its status says that it is outstanding for ever",
        "tables/steps.py",
        "    longs[STATUS] = COMMITTED\n",
        "",
        "interrupts/test_interrupts.py",
    ),
    Fault(
        "a beam that no other continues is released: it stays",
        "spaces/reordering.py",
        "if at not in used], np.int32)",
        "if at < 0], np.int32)",
        "spaces/test_reordering.py",
    ),
    Fault(
        "the rest of a plan stays planned if the caller says so: it is rolled back",
        "tables/steps.py",
        "        rejected = starts[i] + accepted[i] < ends[i] and not keep\n",
        "        rejected = starts[i] + accepted[i] < ends[i]\n",
        "tables/test_kept_plans.py",
    ),
    Fault(
        "a plan that is kept begins behind its committed tokens: it begins where it began",
        "tables/steps.py",
        "            starts[i] += accepted[i]\n",
        "            pass\n",
        "tables/test_kept_plans.py",
    ),
    Fault(
        "the source of a copy is unpinned once: again when the rest of its plan is settled",
        "tables/steps.py",
        "        longs[STATUS], longs[NUM_COPIES] = PARTLY, 0\n",
        "        longs[STATUS] = PARTLY\n",
        "tables/test_kept_plans.py",
    ),
    Fault(
        "a plan that is given up returns its frames: it keeps them",
        "tables/steps.py",
        "            page_tables.drop_tail(s, np.int64(asids[i]), (starts[i] + size - 1) // size)\n",
        "            pass\n",
        STEPS,
    ),
    Fault(
        "a batch that drops a reference too many changes nothing: the references before it are gone",
        "frame_pool/batches.py",
        "            _add_references(s, dropped[:i], 1)\n",
        "",
        POOL_LAWS,
    ),
    Fault(
        "a frame named twice in a batch needs two references: it is looked at once",
        "frame_pool/batches.py",
        "        s.frames[frame].refs -= 1\n    _add_references(s, dropped, 1)\n",
        "",
        POOL_LAWS,
    ),
    Fault(
        "a frame has one key: a second one in the same batch replaces it",
        "frame_pool/batches.py",
        "!= MAPPED or s.frames[frame].published >= _MARK:",
        "!= MAPPED:",
        POOL_KEYS,
    ),
    Fault(
        "a frame has one key: another one is taken for the same",
        "frame_pool/batches.py",
        "    return s.frames[frame].published == 0 or _has_key(s, frame, key)\n",
        "    return True\n",
        POOL_KEYS,
    ),
    Fault(
        "a key has one frame: a second one is published beside it",
        "frame_pool/batches.py",
        "    if not twins:\n",
        "    if False:\n",
        POOL_KEYS,
    ),
    Fault(
        "a frame without a key is free when it is dropped: it is kept like a cached one",
        "pool/frames.py",
        "    if keep > (records[frame].published == 0):\n",
        "    if keep:\n",
        POOL_LAWS,
    ),
    Fault(
        "a name that is taken away frees the frame that only the name kept: the frame stays cached",
        "frame_pool/batches.py",
        "        if s.frames[frame].status == CACHED:\n            frames.free_cached(s, frame)\n",
        "",
        POOL_KEYS,
    ),
    Fault(
        "victims changes nothing: a frame that it unlinks stays unlinked",
        "pool/frames.py",
        "            s.frames[s.frames[frame].newer].older = frame\n",
        "            pass\n",
        POOL_LAWS,
    ),
    Fault(
        "victims are those of quotas: protected shares are not looked at",
        "pool/quotas.py",
        "                aside[evicted] = frames.set_aside(s, account)\n",
        "                aside[evicted] = frames.set_aside(s, np.int64(0))\n",
        POOL_LAWS,
    ),
    Fault(
        "a quota bounds frames that are taken by number: it does not",
        "frame_pool/batches.py",
        "        if quotas.measure_one(s, account, len(wanted)) >= 0:\n            return OVER_QUOTA, ALL\n",
        "        quotas.measure_one(s, account, len(wanted))\n",
        POOL_LAWS,
    ),
    Fault(
        "an unnamed frame has no page before it: it is ranked after frame 0",
        "frame_pool/batches.py",
        "        s.frames[frame].parent = index.root_parent(_ROOT)  # as",
        "        pass  # as",
        POOL_MACHINE,
    ),
    Fault(
        "a use counts for the policy: a share does not count",
        "frame_pool/batches.py",
        "        frames.map_matched(s, np.int64(shared[i]))\n",
        "        frames.share(s.frames, s.reg, np.int64(shared[i]))\n",
        POOL_LAWS,
    ),
    Fault(
        "the clock of a policy ticks with each call that takes frames: it stands still",
        "frame_pool/batches.py",
        "    s.reg[TICK] += 1\n",
        "",
        POOL_LAWS,
    ),
)
