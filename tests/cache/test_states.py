"""Recurrent states as bytes: a small recurrent model over PagedKVCache gives what it gives without a cache."""

from __future__ import annotations

import math

import pytest
import torch

from pagedkv import KVSpec, PagedKVCache, StateSpec
from pagedkv.cache.batch import PlannedBatch
from pagedkv.core import AddressSpace, Places
from pagedkv.errors import InvalidRequest, OutOfFrames, PlanConflict
from pagedkv.tiers import HostTier, UsedAgain

KV = KVSpec(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
STATES = StateSpec([{"sum": ((3, 5), "float32"), "last": ((2,), "bfloat16")}, {"sum": ((7,), "float32")}])
PROMPT = list(range(1, 41))


def cache_of(num_states: int = 16, num_frames: int = 64, **options: object) -> PagedKVCache:
    return PagedKVCache(KV, num_frames=num_frames, states=STATES, state_memory=num_states, **options)


def after(tokens: list[int]) -> float:
    """Return the state of the model after `tokens`: a sum that depends on their order."""
    total = 0.0
    for token in tokens:
        total = 0.5 * total + token
    return total


def compute(cache: PagedKVCache, batch: PlannedBatch, ids: list[list[int]]) -> None:
    """Compute a step of the model in the frames of the cache, as a kernel would."""
    states = batch.states
    for layer, parts in enumerate(cache.state_storage.layers):
        for name, tensor in parts.items():
            first = cache.state_storage.read(layer, name, states.state_in)
            for i, row in enumerate(ids):
                saves = slice(*states.save_indptr[i : i + 2].tolist())
                writes = dict(zip(states.save_offsets[saves].tolist(), states.save_frames[saves].tolist(), strict=True))
                writes[len(row)] = int(states.state_out[i])
                value = first[i].float()
                for offset, token in enumerate(row, 1):
                    value = 0.5 * value + token if name == "sum" else torch.full_like(value, token)
                    if offset in writes:
                        tensor[writes[offset]] = value


def holds(cache: PagedKVCache, space: AddressSpace, text: list[int]) -> bool:
    """Return whether the state of a space is that after the tokens that it is ready for."""
    frame = int(cache.states.held.rows["state"][space.asid])
    wanted = after(text[: space.ready])
    return all(
        torch.allclose(parts["sum"][frame], torch.full_like(parts["sum"][frame], wanted))
        for parts in cache.state_storage.layers
    )


def run(cache: PagedKVCache, space: AddressSpace, text: list[int], kept: int | None = None) -> None:
    """Compute `text` from the state of the space on, and keep `kept` of these tokens."""
    rest = text[space.ready :]
    batch = cache.plan([space], [len(rest)], certain=[len(rest) if kept is None else kept])
    compute(cache, batch, [rest])
    count = len(rest) if kept is None else kept
    cache.commit(batch, rest[:count], [count])
    assert holds(cache, space, text)


def test_hits_branches_drafts_and_forks_go_on_from_the_right_state() -> None:
    cache = cache_of(32, places=Places(distances=(8, 16, 24)))
    first = cache.open(PROMPT)
    run(cache, first, PROMPT)
    again = cache.open(PROMPT)
    assert again.ready == 36
    run(cache, again, PROMPT)
    branch = [*PROMPT[:22], 99, 98]
    space = cache.open(branch)
    assert 0 < space.ready < len(space) == 20
    run(cache, space, branch)
    run(cache, space, [*branch, 5, 6, 7], kept=1)
    child = space.fork()
    run(cache, child, [*branch, 5, 8])
    run(cache, space, [*branch, 5, 9, 10])
    assert cache.stats().states.copied == 0
    cache.check()


def test_a_pool_of_states_is_resized_with_its_bytes() -> None:
    cache = cache_of(32)
    texts = [[first, *PROMPT] for first in (50, 60, 70, 80)]
    spaces = [cache.open(text) for text in texts]
    for space, text in zip(spaces, texts, strict=True):
        run(cache, space, text)
    for space in spaces[:3]:
        space.release()
    for size in (5, 20):
        cache.resize_states(size)
        assert len(cache.state_storage.frames) == cache.stats().states.num_frames == size
        assert holds(cache, spaces[3], texts[3])
        again = cache.open(texts[3])
        assert again.ready > 0
        assert holds(cache, again, texts[3])
        again.release()
    others = [cache.open([token]) for token in range(3)]
    cache.commit(cache.plan(others, [1] * 3), [0, 1, 2])
    with pytest.raises(OutOfFrames, match="4 frames cannot be evicted"):
        cache.resize_states(3)
    with pytest.raises(InvalidRequest, match="give at least 3"):
        cache.resize_states(2)


def over_tiers(num_states: int = 32, **options: object) -> tuple[PagedKVCache, HostTier]:
    """Return a cache over tiers that has computed and released PROMPT, and the tier of its states."""
    of_states = HostTier("1MiB")
    tiers = {"tiers": [HostTier("1MiB")], "state_tiers": [of_states], "places": Places(distances=(16, 24))}
    cache = cache_of(num_states, **(tiers | options))
    space = cache.open(PROMPT)
    run(cache, space, PROMPT)
    space.release()
    assert cache.tiers.flush(60)
    return cache, of_states


def test_a_fetch_brings_pages_and_the_deepest_state() -> None:
    cache, tier = over_tiers()
    assert tier.stats().stored == cache.stats().states.checkpoints == 4
    cache.evict(64)
    assert cache.lookup(PROMPT) == 0
    fetch = cache.fetch(PROMPT, hold=True)
    assert fetch.wait(60)
    assert (fetch.asked, fetch.tokens) == (36, 36)
    assert cache.stats().states.checkpoints == 1
    again = cache.open(PROMPT)
    assert (len(again), again.ready) == (36, 36)
    run(cache, again, PROMPT)
    fetch.cancel()
    assert cache.stats().states.tokens_computed == 40 + 4
    cache.check()


def test_a_state_comes_back_to_pages_that_the_pool_still_has() -> None:
    cache, _ = over_tiers(tiers=[])
    others = [cache.open([token]) for token in range(32)]
    cache.abort(cache.plan(others, [1] * 32))
    for other in others:
        other.release()
    assert (cache.lookup(PROMPT), cache.why(PROMPT).ready) == (36, 0)
    assert cache.fetch(PROMPT).wait(60)
    again = cache.open(PROMPT)
    assert (len(again), again.ready) == (36, 36)
    assert holds(cache, again, PROMPT)
    cache.check()


@pytest.mark.parametrize(("damaged", "ready"), [(1, 24), (2, 16), (3, 0)])
def test_a_damaged_state_is_a_miss_at_the_checkpoint_before_it(damaged: int, ready: int) -> None:
    cache, tier = over_tiers()
    cache.evict(64)
    hashed: list[bytes] = []
    list(cache.tiers._namer.keys_of(torch.tensor(PROMPT).numpy(), b"", b"", block_size=4, digests=hashed))
    for end in (36, 24, 16)[:damaged]:
        key = cache.tiers._namer.state_key(hashed[end // 4 - 1], b"")
        slot = next(slot for slot, seal in enumerate(tier._seals) if seal.startswith(key.name))
        tier._memory[slot, 0] ^= 1
    fetch = cache.fetch(PROMPT)
    assert fetch.wait(60)
    assert tier.stats().corrupt == damaged
    again = cache.open(PROMPT)
    assert again.ready == fetch.tokens == ready
    run(cache, again, PROMPT)
    cache.check()


def test_a_state_comes_back_beside_windows() -> None:
    windowed = [KV, KVSpec(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32", window=6)]
    tiers = {"tiers": [HostTier("1MiB")], "state_tiers": [HostTier("1MiB")]}
    cache = PagedKVCache(windowed, num_frames=64, states=STATES, state_memory=32, **tiers)
    space = cache.open(PROMPT)
    run(cache, space, PROMPT)
    space.release()
    assert cache.tiers.flush(60)
    cache.evict(64)
    assert cache.fetch(PROMPT).wait(60)
    again = cache.open(PROMPT)
    assert again.ready == len(again) == 36
    run(cache, again, PROMPT)
    cache.check()


def test_pages_without_a_state_in_any_tier_are_not_fetched() -> None:
    cache, tier = over_tiers(state_tiers=[])
    assert tier.stats().stored == 0
    cache.evict(64)
    fetch = cache.fetch(PROMPT)
    assert fetch.wait(60)
    assert (fetch.asked, cache.lookup(PROMPT)) == (0, 0)


def test_the_state_of_an_output_is_stored_when_the_output_has_ended() -> None:
    cache, tier = over_tiers(places=None)
    before = tier.stats().stored
    space = cache.open(PROMPT)
    text = list(PROMPT)
    run(cache, space, text)
    for token in range(90, 130):
        text.append(token)
        run(cache, space, text)
    assert cache.tiers.flush(60)
    assert tier.stats().stored == before  # each would be replaced 4 tokens later
    space.release()
    assert cache.tiers.flush(60)
    assert tier.stats().stored == before + 1
    cache.evict(64)
    assert cache.fetch([*text, 1]).wait(60)
    again = cache.open([*text, 1])
    assert again.ready == 80
    assert holds(cache, again, text)


def test_a_rule_of_write_back_counts_the_uses_of_a_states_page() -> None:
    # A pool remembers its evicted pages in a table of hashes: in a small one, newer pages may overwrite all of them.
    cache, tier = over_tiers(write_back=UsedAgain(), num_frames=4096)
    assert tier.stats().stored == 0
    for _ in range(2):
        cache.evict(4096)
        space = cache.open(PROMPT)
        run(cache, space, PROMPT)
        space.release()
        assert cache.tiers.flush(60)
    assert tier.stats().stored > 0
    assert [one.name for one in cache.tiers.tiers] == ["host", "host-states"]


def test_an_interrupt_loses_no_state_for_the_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, tier = over_tiers()
    cache.evict(64)
    with monkeypatch.context() as once:
        once.setattr(cache.tiers._namer, "state_key", lambda *_: [][0])
        space = cache.open(PROMPT[1:])
        with pytest.raises(IndexError):
            run(cache, space, PROMPT[1:])
    before = tier.stats().stored
    space.release()
    assert cache.tiers.flush(60)
    assert tier.stats().stored > before


def test_state_tiers_need_states() -> None:
    with pytest.raises(InvalidRequest, match="state_tiers of a cache without states"):
        PagedKVCache(KV, num_frames=8, state_tiers=[HostTier("1MiB")])
    with pytest.raises(InvalidRequest, match="state_tiers is a HostTier"):
        cache_of(state_tiers=HostTier("1MiB"))


def test_a_new_frame_is_nan_until_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDKV_DEBUG", "2")
    cache = cache_of()
    batch = cache.plan([cache.open(PROMPT)], [40])
    written = [*batch.states.state_out.tolist(), *batch.states.save_frames.tolist()]
    assert len(written) > 2
    assert all(part[written].isnan().all() for parts in cache.state_storage.layers for part in parts.values())


def test_copies_serve_kernels_that_change_a_state_in_place() -> None:
    cache = cache_of()
    space, fresh = cache.open(PROMPT), cache.open([7, 8])
    run(cache, space, PROMPT)
    batch = cache.plan([space, fresh], [1, 1])
    cache.copy_states(batch)
    frames, source = cache.state_storage.frames, int(batch.states.state_in[0])
    assert batch.states.state_in[1] == -1
    assert torch.equal(frames[batch.states.state_out[0]], frames[source])
    assert not frames[batch.states.state_out[1]].any()
    assert cache.stats().states.copied == 2
    cache.abort(batch)
    with pytest.raises(PlanConflict, match="of a batch that is settled already"):
        cache.copy_states(batch)
    plain = PagedKVCache(KV, num_frames=8)
    batch = plain.plan([plain.open([1])], [1])
    with pytest.raises(InvalidRequest, match="copy_states of a cache without states"):
        plain.copy_states(batch)


def test_the_arrays_of_a_fixed_batch_stay_where_they_are() -> None:
    cache = cache_of()
    fixed, space = cache.fixed_batch(4, 64), cache.open(PROMPT)
    run(cache, space, PROMPT)
    text, seen = list(PROMPT), set()
    for token in range(3):
        batch = cache.plan([space], [1], into=fixed)
        seen.add(tuple(getattr(batch.states, name).data_ptr() for name in ("state_in", "state_out", "save_indptr")))
        assert batch.states.state_in.tolist()[1:] == batch.states.state_out.tolist()[1:] == [-1, -1, -1]
        assert batch.states.state_in[0] != batch.states.state_out[0]
        compute(cache, batch, [[token]])
        cache.commit(batch, [token])
        text.append(token)
        assert holds(cache, space, text)
    assert len(seen) == 1


def test_a_frame_is_one_run_and_each_tensor_begins_at_a_cache_line() -> None:
    assert STATES.frame_bytes == 64 + 64 + 64
    cache = cache_of()
    for parts in cache.state_storage.layers:
        for name, part in parts.items():
            assert part.stride(0) * part.element_size() == 192, name
            assert part[0].is_contiguous()
            assert (part.data_ptr() - cache.state_storage.frames.data_ptr()) % 64 == 0


@pytest.mark.parametrize(("memory", "count"), [(5, 5), ("2KiB", 10), ("10%", 8), ("12.5 %", 10)])
def test_memory_for_states_is_a_number_bytes_or_a_share(memory: str | int, count: int) -> None:
    pool_bytes = 64 * KV.frame_bytes
    assert STATES.frames_in(memory, pool_bytes) == count, pool_bytes
    assert PagedKVCache(KV, num_frames=64, states=STATES, state_memory=memory).stats().states.num_frames == count


@pytest.mark.parametrize("memory", [2, "1%", "5 states", -1, math.pi])
def test_memory_for_too_few_states_is_refused(memory: object) -> None:
    with pytest.raises(InvalidRequest):
        PagedKVCache(KV, num_frames=64, states=STATES, state_memory=memory)


@pytest.mark.parametrize("layers", [[], [{}], [{"s": ((0,), "float32")}], [{"s": ((4,), "int8")}], [{"s": "float32"}]])
def test_states_that_make_no_sense_are_refused(layers: object) -> None:
    with pytest.raises(InvalidRequest):
        StateSpec(layers)


def test_a_cache_that_lacks_a_state_does_not_grow_for_it() -> None:
    cache = cache_of(3, places=Places(rolling=False))
    spaces = [cache.open([token]) for token in range(4)]
    with pytest.raises(OutOfFrames) as lack:
        cache.plan(spaces, [1] * 4)
    assert (lack.value.pool, lack.value.shortfall, cache.num_frames) == ("states", 1, 64)
