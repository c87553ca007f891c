"""The laws of looking a prompt up and of opening spaces for it."""

from __future__ import annotations

import pytest

from pagedkv.core import Group, MemoryManager, Observe
from tests.core.oracle import everything, grown

PROMPT = list(range(100, 130))


@pytest.mark.parametrize("match", ["page", "token"])
@pytest.mark.parametrize("length", [0, 1, 4, 5, 9, 30])
def test_lookup_answers_what_open_maps_and_changes_nothing(match: str, length: int) -> None:
    mm = MemoryManager(64, 4, match=match, observe=Observe(events=9, reuse=9, other_roots=True))
    grown(mm, PROMPT[:18], tenant=b"acme").release()
    before, stats = everything(mm), mm.stats()
    known = mm.lookup(PROMPT[:length], tenant=b"acme")
    assert everything(mm) == before
    assert mm.stats() == stats
    assert known == len(mm.open(PROMPT[:length], tenant=b"acme"))
    assert mm.lookup(PROMPT, tenant=b"umbra") == 0


def test_lookup_makes_no_root_for_a_tenant_that_is_new(mm: MemoryManager) -> None:
    roots = len(mm._roots.by_tenant)
    assert mm.lookup(PROMPT, tenant=b"new") == 0
    assert len(mm._roots.by_tenant) == roots


def test_a_prompt_that_was_looked_up_is_evicted_no_later() -> None:
    mm = MemoryManager(8, 4)
    grown(mm, [1] * 5).release()
    grown(mm, [2] * 5).release()
    assert mm.lookup([1] * 5) == 4
    mm.evict(1)
    assert (mm.lookup([1] * 5), mm.lookup([2] * 5)) == (0, 4)


def test_lookup_counts_only_pages_that_every_group_has() -> None:
    mm = MemoryManager(64, 4, groups=(Group(), Group(window=8, sinks=2)))
    grown(mm, PROMPT)
    assert mm.lookup(PROMPT[:17]) == 16
    mm.evict(4)
    assert mm.lookup(PROMPT[:17]) == 4
