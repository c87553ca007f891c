"""Identity is exact (I4): a page with an equal hash, or with the right frame number, may be another page.

Tokens that were committed without their ids are kept, and no prompt ever finds their KV. Salts are what lies next to
the tokens: they are part of a prompt's identity, from their position on.
"""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.core import Group, MemoryManager
from pagedkv.core import state as st
from pagedkv.core.prefix.events import BlockStored, as_map
from pagedkv.errors import InvalidRequest
from tests.core.oracle import Follower, content_digest, findable, grown


def test_pages_that_hash_alike_are_told_apart_by_their_tokens() -> None:
    """The test changes the tokens of a frame: the prefix hash leads to the frame, but the tokens differ."""
    mm = MemoryManager(16, 4)  # check() sees such a change
    first = grown(mm, [1, 2, 3, 4, 5])
    mm.state.tokens[first.pages[0]] = [1, 2, 3, 9]
    assert len(mm.open([1, 2, 3, 4, 5])) == 0


def test_the_same_tokens_after_another_prefix_are_another_page(mm: MemoryManager) -> None:
    grown(mm, [1, 1, 1, 1, 7, 7, 7, 7, 0])
    assert len(mm.open([2, 2, 2, 2, 7, 7, 7, 7, 0])) == 0
    assert len(mm.open([7, 7, 7, 7, 0])) == 0


@pytest.mark.parametrize("other", [b"acme2", b"acm", b"", b"ACME"])
def test_a_tenant_finds_nothing_of_a_name_alike(mm: MemoryManager, other: bytes) -> None:
    grown(mm, [1, 2, 3, 4, 5], tenant=b"acme")
    assert len(mm.open([1, 2, 3, 4, 5], tenant=other)) == 0


def test_tokens_at_the_ends_of_int32_are_tokens_like_others(mm: MemoryManager) -> None:
    ends = [np.iinfo(np.int32).min, np.iinfo(np.int32).max, -1, 0]
    grown(mm, [*ends, 1])
    assert len(mm.open([*ends, 1])) == 4
    assert len(mm.open([ends[1], ends[0], -1, 0, 1])) == 0


def test_a_page_is_not_found_after_the_successor_of_its_parent_even_if_that_holds_the_same() -> None:
    """The parent was evicted and computed again in the same frame: it has another generation, and no successor yet."""
    mm = MemoryManager(num_frames=3, block_size=1, groups=(Group(window=2),))
    kept = grown(mm, [1, 2, 3])
    parent = int(mm.state.frames["parent"][kept.pages[2]])
    assert mm.evict(3) == 2
    assert grown(mm, [1, 2]).pages[1] == parent
    assert mm.lookup([1, 2, 3, 4]) == 2
    mm.check()


def test_an_evicted_parent_cannot_be_taken_for_its_successor() -> None:
    """The frame is reused for other tokens; successors of the old page must not be found after the new one."""
    mm = MemoryManager(num_frames=3, block_size=1, groups=(Group(window=2),))
    kept = grown(mm, [1, 2, 3])
    parent = int(mm.state.frames["parent"][kept.pages[2]])
    assert mm.evict(3) == 2
    impostors = {int(grown(mm, [token]).pages[0]): token for token in (7, 8)}
    assert mm.lookup([impostors[parent], 3, 4]) == 1
    mm.check()


def test_a_page_without_its_prefix_is_not_left_cached() -> None:
    mm = MemoryManager(num_frames=4, block_size=1, groups=(Group(window=2),))
    kept = grown(mm, [1, 2, 3, 4])
    assert mm.evict(4) == 3
    kept.release()
    mm.check()
    assert mm.stats().cached == 0


def test_tokens_without_ids_are_kept_and_never_found() -> None:
    mm = MemoryManager(num_frames=16, block_size=2)
    space = mm.open()
    mm.commit(mm.plan([space], [5]), None)
    assert len(space) == 5
    assert space.token_ids.tolist() == [-1] * 5
    mm.commit(mm.plan([space], [4]), [1, 2, 3, 4])  # what follows them is not found either
    space.release()
    assert mm.stats().cached == 0
    for prompt in ([-1] * 6, [1, 2, 3, 4], [-1] * 5 + [1, 2, 3, 4, 5]):
        assert len(mm.open(prompt)) == 0


def test_two_forks_with_different_tokens_without_ids_never_share_a_page() -> None:
    """Zeros in place of unknown ids let the pages of two beams pass for one."""
    mm = MemoryManager(num_frames=16, block_size=2)
    parent = mm.open()
    mm.commit(mm.plan([parent], [2]), [1, 2])
    child = parent.fork()
    mm.commit(mm.plan([parent, child], [4, 4]), None)
    assert not set(parent.pages[1:].tolist()) & set(child.pages[1:].tolist())
    assert mm.stats().deduplicated == 0


@pytest.mark.parametrize(("length", "found"), [(4, 8), (5, 4), (3, 8), (0, 8)])
def test_a_space_that_drops_its_tokens_without_ids_publishes_again(length: int, found: int) -> None:
    mm = MemoryManager(num_frames=16, block_size=2)
    prompt = [*range(1, 9)]
    space = mm.open()
    mm.commit(mm.plan([space], [4]), prompt[:4])
    mm.commit(mm.plan([space], [3]), None)
    space.truncate(length)
    mm.commit(mm.plan([space], [8 - length]), prompt[length:])
    space.release()
    assert len(mm.open([*prompt, 9])) == found


def test_pages_that_waited_for_an_outstanding_plan_are_published_after_tokens_without_ids() -> None:
    mm = MemoryManager(num_frames=32, block_size=2)
    other, space = mm.open(), mm.open()
    first, second = mm.plan([space], [6]), mm.plan([space], [2])
    mm.commit(mm.plan([other], [2]), [1, 2])
    mm.commit(first, [1, 2, 3, 4, 5, 6])  # its first page is published already, and `second` may read ours
    pin = mm.pin(space)
    mm.commit(second, None)
    mm.unpin(pin)
    for each in (space, other):
        each.release()
    assert len(mm.open([1, 2, 3, 4, 5, 6, 7])) == 6


PROMPT = list(range(30))
IMAGE = 99  # the placeholder of an image: every image has this token


@pytest.mark.parametrize(
    ("salt", "known"),
    [
        ({9: b"cat"}, 28),
        ({9: b"dog"}, 8),
        (b"", 8),
        ({8: b"cat"}, 8),
        ({9: b"cat", 17: b"dog"}, 16),
        ({3: b"cat", 9: b"cat"}, 0),
        ({29: b"cat"}, 8),
        (b"adapter", 0),
    ],
)
def test_pages_are_shared_up_to_the_first_salt_that_differs(salt: bytes | dict[int, bytes], known: int) -> None:
    mm = MemoryManager(64, 4)
    grown(mm, PROMPT, salt={9: b"cat"}).release()
    assert mm.lookup(PROMPT, salt=salt) == mm.why(PROMPT, salt=salt).tokens_matched == known
    assert len(mm.open(PROMPT, salt=salt)) == known
    mm.check()


def test_a_salt_is_no_tenant_and_splits_no_text(mm: MemoryManager) -> None:
    grown(mm, PROMPT[:9], tenant=b"a", salt=b"b")
    for tenant, salt in ((b"ab", b""), (b"", b"ab"), (b"b", b"a"), (b"a", {0: b"b", 1: b"c"})):
        assert mm.lookup(PROMPT[:9], tenant=tenant, salt=salt) == 0


def test_two_salts_in_one_page_are_told_apart_by_their_offsets(mm: MemoryManager) -> None:
    grown(mm, [IMAGE] * 5, salt={1: b"cat", 2: b"dog"})
    assert mm.lookup([IMAGE] * 5, salt={1: b"cat", 2: b"dog"}) == 4
    for salt in ({1: b"dog", 2: b"cat"}, {1: b"catdog"}, {1: b"cat", 3: b"dog"}, {2: b"dog"}):
        assert mm.lookup([IMAGE] * 5, salt=salt) == 0


def test_equal_hashes_of_salts_do_not_make_pages_equal(mm: MemoryManager) -> None:
    """The hash of every salt is made the same: pages are still told apart."""
    mm.open(salt={1: b"cat"}), mm.open(salt={1: b"dog"})
    mm.state.roots[:, st.SALT_SEED] = 0
    grown(mm, [IMAGE] * 5, salt={1: b"cat"})
    assert mm.lookup([IMAGE] * 5, salt={1: b"dog"}) == 0
    assert mm.lookup([IMAGE] * 5, salt={1: b"cat"}) == 4


def test_a_salt_beyond_the_prompt_takes_effect_when_the_tokens_get_there(mm: MemoryManager) -> None:
    space = mm.open(PROMPT[:3], salt={6: b"cat"})
    mm.commit(mm.plan([space], [9]), PROMPT[:9])
    child = space.fork()
    mm.commit(mm.plan([child], [4]), PROMPT[9:13])
    assert mm.lookup(PROMPT, salt={6: b"cat"}) == 12
    assert mm.lookup(PROMPT) == 4


@pytest.mark.many_steps
def test_roots_of_salts_that_nothing_needs_are_removed_and_the_rest_stays(mm: MemoryManager) -> None:
    kept = grown(mm, PROMPT[:9], salt={0: b"adapter", 5: b"kept"})
    for number in range(80):
        space = grown(mm, [IMAGE] * 5, salt={1: b"image %d" % number})
        space.release()
        mm.evict(8)
        mm.check()
    assert len(mm.state.roots) <= 64
    assert mm.lookup(PROMPT[:9], salt={0: b"adapter", 5: b"kept"}) == 8
    kept.release()


def test_companions_are_found_under_the_salts_of_their_leaders() -> None:
    mm = MemoryManager(64, 4, groups=(Group(), Group(window=8)))
    grown(mm, PROMPT, salt={5: b"cat"}).release()
    assert mm.lookup(PROMPT, salt={5: b"cat"}) == 28
    assert mm.lookup(PROMPT, salt={5: b"dog"}) == 4
    mm.evict(64)
    assert mm.stats().free == 64
    mm.check()


def test_events_name_pages_by_their_salts() -> None:
    mm = MemoryManager(16, 4, events=64)
    reader = Follower(mm, since=0)
    for salt in ({5: b"cat"}, {5: b"dog"}, {}):
        grown(mm, PROMPT[:9], b"acme", salt).release()
    first, cat, dog, plain = (event for event in mm.events(0) if isinstance(event, BlockStored))
    assert (first.salts, cat.salts, dog.salts, plain.salts) == ((), ((1, b"cat"),), ((1, b"dog"),), ())
    assert cat.block_hashes[0] == content_digest(b"acme", PROMPT[:8], salts=((5, b"cat"),))
    assert cat.parent_block_hash == dog.parent_block_hash == plain.parent_block_hash == first.block_hashes[0]
    assert as_map(cat)["extra_keys"] == [[b"acme", b"cat"]]
    reader.catch_up()
    assert reader.names == findable(mm)
    assert len(reader.names) == 4
    late = Follower(mm)
    assert late.names == reader.names
    mm.evict(4)
    late.catch_up()
    assert not late.names


def test_a_root_whose_number_was_reused_has_the_salts_of_its_time() -> None:
    mm = MemoryManager(40, 4, events=400)
    for number in range(40):
        grown(mm, [7] * 5, salt={2: b"image %d" % number}).release()
        mm.evict(1)
    assert len({root.number for root in mm._roots.salted.values()}) < 40
    stored = [event for event in mm.events(0) if isinstance(event, BlockStored)]
    assert [event.salts for event in stored] == [((2, b"image %d" % number),) for number in range(40)]


@pytest.mark.parametrize("is_held", [False, True])
def test_open_maps_at_most_so_many_tokens_and_the_rest_is_published_again(is_held: bool) -> None:
    mm = MemoryManager(16, 4)
    prompt = list(range(13))
    held = grown(mm, prompt)
    if not is_held:
        held.release()
    for most, known in ((None, 12), (99, 12), (12, 12), (4, 4), (3, 0), (0, 0)):
        space = mm.open(prompt, most=most)
        assert known <= len(space) <= (13 if most is None else most)
        plan = mm.plan([space], [13 - len(space)])
        mm.commit(plan, prompt[len(space) :])
        space.release()
        assert mm.lookup(prompt) == 12
    with pytest.raises(InvalidRequest, match="most is -1; give an int of 0 or more"):
        mm.open(prompt, most=-1)
    mm.check()
