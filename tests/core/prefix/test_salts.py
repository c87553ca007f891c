"""The laws of salts: what lies beside the tokens is part of a prompt's identity, from its position on."""

from __future__ import annotations

import pytest

from pagedkv.core import Group, MemoryManager
from pagedkv.core import state as st
from pagedkv.core.prefix.events import BlockStored, as_map
from tests.core.oracle import Follower, content_digest, findable, grown

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
