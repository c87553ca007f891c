"""Why a prompt was computed again: reasons and positions against a past that is known whole."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from pagedkv.core import MemoryManager, TokenHistory
from pagedkv.core.prefix import roots
from pagedkv.errors import InvalidRequest

SIZE = 4
PROMPT = list(range(1, 42))


def manager(history: int = 4096, frames: int = 64) -> MemoryManager:
    return MemoryManager(frames, SIZE, history=history)


def run(mm: MemoryManager, ids: list[int], tenant: bytes = b"", salt: object = b"") -> None:
    space = mm.open(ids, tenant=tenant, salt=salt)
    mm.commit(mm.plan([space], [len(ids) - len(space)]), ids[len(space) :])
    space.release()


def changed(ids: list[int], *places: int) -> list[int]:
    return [token + 1000 if place in places else token for place, token in enumerate(ids)]


def test_the_first_token_that_differs_is_named() -> None:
    mm = manager()
    run(mm, PROMPT)
    miss = mm.why(changed(PROMPT, 17))
    assert (miss.reason, miss.position, miss.was, miss.now) == ("differs", 17, 18, 1018)
    assert str(miss) == "pages to 16: token 17 was 18 and is 1018"
    assert mm.why(PROMPT).reason == "nothing missed"


def test_the_nearest_of_all_known_pages_is_named() -> None:
    mm = manager()
    for place in (16, 17, 18, 19):
        run(mm, changed(PROMPT, place))
    near = mm.why(changed(PROMPT, 19, 18))
    assert (near.position, near.was, near.now) == (19, 20, 1020)
    assert mm.why(changed(PROMPT, 17, 16)).position == 17


def test_a_page_that_was_evicted_is_no_edit() -> None:
    mm = manager()
    run(mm, PROMPT)
    mm.evict(64)
    assert mm.why(PROMPT).reason == "evicted"
    assert (mm.why(changed(PROMPT, 2)).reason, mm.why(changed(PROMPT, 2)).position) == ("differs", 2)
    assert mm.why(changed(PROMPT, 0)).reason == "never published"  # another prompt


def test_a_salt_is_named_and_another_tenant_is_not() -> None:
    mm = manager()
    run(mm, PROMPT, b"a")
    run(mm, PROMPT, b"a", {9: b"image"})
    assert mm.why(PROMPT, tenant=b"a", salt={9: b"other"}).reason == "other salt"
    assert mm.why(PROMPT, tenant=b"a", salt=b"adapter").reason == "other salt"
    assert mm.why(changed(PROMPT, 9), tenant=b"a", salt={9: b"image"}).position == 9
    assert mm.why(PROMPT, tenant=b"b").reason == "other root"
    assert mm.why(PROMPT, tenant=b"b", private=True).reason == "never published"


def test_a_tenant_sees_no_past_of_another_with_the_same_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roots, "_keyed", lambda content, state: 7)
    mm = manager()
    run(mm, PROMPT, b"a")
    run(mm, [9], b"b")
    assert mm.why(changed(PROMPT, 5), tenant=b"a", private=True).was == PROMPT[5]
    assert mm.why(changed(PROMPT, 1), tenant=b"b", private=True).reason == "never published"


def test_forget_forgets_the_past_and_resize_keeps_it() -> None:
    mm = manager()
    run(mm, PROMPT)
    mm.resize(32)
    assert mm.why(changed(PROMPT, 5)).position == 5
    mm.forget()
    assert mm.why(changed(PROMPT, 1)).reason == "never published"


def test_a_full_history_names_no_token_that_is_equal() -> None:
    """Newer prefixes take the places of older ones, and of some in the middle of a page."""
    past, dice = TokenHistory(8), random.Random(0)
    pages = [np.array([dice.randrange(1000) for _ in range(SIZE)], np.int32) for _ in range(40)]
    found = set[int]()
    for number, page in enumerate(pages):
        past.note(number, page)
        for older in range(number + 1):
            common, was = past.nearest(older, pages[older])
            found.add(common)
            assert common in (-1, SIZE) or was != pages[older][common]
    assert {-1, 2, SIZE} <= found


def test_a_history_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="history"):
        manager(history=-1)


class Past:
    """All pages that were ever published since the last restart, by tenant, and what a miss must say."""

    def __init__(self) -> None:
        self.pages: dict[tuple[bytes, object], set[tuple[int, ...]]] = {}

    def add(self, ids: list[int], tenant: bytes, salt: object) -> None:
        known = self.pages.setdefault((tenant, salt), set())
        known.update(tuple(ids[:end]) for end in range(SIZE, len(ids) + 1, SIZE))

    def reason(self, ids: list[int], tenant: bytes, salt: object, found: int) -> tuple[str, int]:
        """Return the reason and the position of the miss of a prompt of which `found` tokens are in the pool."""
        if len(ids) <= SIZE:
            return "below one page", 0
        if found == (len(ids) - 1) // SIZE * SIZE:
            return "nothing missed", found
        mine, page = self.pages.get((tenant, salt), set()), tuple(ids[: found + SIZE])
        if page in mine:
            return "evicted", found
        common = -1
        for other in mine:
            if len(other) == len(page) and other[:found] == page[:found]:
                same = next(i for i in range(SIZE) if other[found + i] != page[found + i])
                common = max(common, same)
        return ("differs", found + common) if found + common > 0 <= common else ("never published", found)


def requests(draw: random.Random, count: int) -> Iterator[tuple[str, list[int], bytes, bytes]]:
    """Yield what happens: a prompt that edits an earlier one at some place, an eviction, or a restart."""
    past: list[list[int]] = [[draw.randrange(500) for _ in range(60)]]
    for _ in range(count):
        what = draw.choices(["prompt", "evict", "restart"], [96, 3.8, 0.2])[0]
        ids = list(draw.choice(past[-40:]))
        edit = draw.random()
        if edit < 0.3:
            ids[draw.randrange(len(ids))] = draw.randrange(500, 1000)
        elif edit < 0.5:
            ids = ids[: draw.randrange(1, len(ids) + 1)]
        elif edit < 0.6:
            ids = [draw.randrange(500) for _ in range(draw.randrange(1, 60))]
        ids += [draw.randrange(500) for _ in range(draw.randrange(8))]
        past.append(ids[:80])
        yield what, ids[:80], draw.choice([b"a", b"b"]), draw.choice([b"", b"", b"", b"adapter"])


@pytest.mark.many_steps
@pytest.mark.parametrize("count", [600, pytest.param(10_000, marks=pytest.mark.slow)])
def test_reasons_and_positions_of_a_replay_are_those_of_the_whole_past(count: int) -> None:
    mm, past, seen, wrong = manager(128 * count, 256), Past(), Counter[str](), list[str]()
    for what, ids, tenant, salt in requests(random.Random(5), count):
        if what == "restart":
            mm, past = manager(128 * count, 256), Past()
        if what == "evict":
            mm.evict(200)
        miss = mm.why(ids, tenant=tenant, salt=salt, private=True)
        reason, position = past.reason(ids, tenant, salt, miss.tokens_matched)
        seen[reason] += 1
        if miss.reason == "other salt":  # published with the other salt, and never or long ago with this one
            known = past.pages.get((tenant, b"" if salt else b"adapter"), set())
            assert tuple(ids[: miss.tokens_matched + SIZE]) in known
            assert reason != "evicted"
        elif miss.reason != reason:
            wrong.append(f"{miss} is {reason} at {position}")
        else:
            assert miss.position == position
            assert miss.was is None or (miss.was != miss.now == ids[position])
        run(mm, ids, tenant, salt)
        past.add(ids, tenant, salt)
    assert min(seen.values()) > count // 500
    assert len(wrong) <= count // 100, wrong[:5]
