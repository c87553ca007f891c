"""The methods of the manager that snapshots use: the findable pages, and a context for refilling the cache."""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.core import Group, MemoryManager
from tests.core.oracle import grown

PROMPT_FIGURES = ("tokens_asked", "tokens_matched", "missed_evicted", "missed_new", "below_one_page")


def observed(**options: object) -> MemoryManager:
    """Return a manager that counts everything about prompts, for two tenants, and has counted some."""
    mm = MemoryManager(64, 4, events=64, **options)  # type: ignore[arg-type]
    mm.set_quota(b"acme", hard=48)
    grown(mm, [1] * 10, tenant=b"acme").release()
    grown(mm, [1] * 10).release()
    grown(mm, [1] * 9, tenant=b"acme").release()
    return mm


def prompt_figures(mm: MemoryManager) -> dict[str, object]:
    """Return every statistic of prompts."""
    stats = mm.stats()
    figures: dict[str, object] = {name: getattr(stats, name) for name in PROMPT_FIGURES}
    figures |= {name.decode(): (use.tokens_asked, use.tokens_matched) for name, use in stats.tenants.items()}
    return figures


def test_restoring_counts_in_no_statistic_of_prompts() -> None:
    mm = observed()
    before = prompt_figures(mm)
    with mm.restoring():
        grown(mm, [2] * 20, tenant=b"acme").release()
        grown(mm, [2] * 20).release()
        grown(mm, [1] * 10, tenant=b"acme").release()
    assert prompt_figures(mm) == before
    space = mm.open([2] * 20)
    assert len(space) == 16  # the pages stay
    assert prompt_figures(mm) != before  # statistics count again
    mm.check()


def windowed() -> MemoryManager:
    """Return a manager whose only group sees the first 2 tokens and 4 positions back."""
    return MemoryManager(64, 4, groups=(Group(window=4, sinks=2),))


def gives_back(mm: MemoryManager, first: int) -> bool:
    """Append 20 tokens, one step each, to a new space. Return True if the manager gave back pages behind the window."""
    tokens = np.arange(first, first + 20, dtype=np.int32)
    space = mm.open(tokens)
    for token in tokens[len(space) :]:
        mm.commit(mm.plan([space], [1]), [token])
    holes = bool((space.pages == -1).any())
    space.release()
    return holes


@pytest.mark.parametrize("fails", [False, True])
def test_restoring_suspends_the_window_of_a_single_group_until_it_ends(fails: bool) -> None:
    mm = windowed()
    assert gives_back(mm, 100)
    try:
        with mm.restoring():
            assert not gives_back(mm, 200)
            mm.check()
            if fails:
                raise OSError("broken file")
    except OSError:
        assert fails
    assert mm.groups == (Group(window=4, sinks=2),)
    assert gives_back(mm, 300)
    mm.check()
