"""The message of a step: a follower derives what rank 0 planned, from as many bytes as the formula says."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from pagedkv import KVSpec, PagedKVCache
from pagedkv.checkpoint.config import ModelConfig
from pagedkv.distributed import leader, wire
from pagedkv.distributed.follower import places_of
from pagedkv.distributed.ranks import FIRST
from pagedkv.errors import InvalidRequest, RankLost
from pagedkv.sampling.params import SamplingParams

from . import jobs
from .threads import ThreadRanks, on_threads

BLOCK = 4
FORMULA = "4 * (10 + T + 3 B + N + 2 C + 3 E)"


def bytes_by_formula(**letters: int) -> int:
    """Return the bytes of a step by FORMULA, which the manual has."""
    return int(eval(re.sub(r"(\d) ([A-Z])", r"\1 * \2", FORMULA), {}, letters))


def test_the_manual_has_the_formula() -> None:
    root = Path(__file__).parents[2]
    for page in ("docs/how-to/more-than-one-machine.md", "pagedkv/distributed/wire.py"):
        assert f"{FORMULA} bytes" in (root / page).read_text()
    assert bytes_by_formula(T=100, B=100, N=0, C=0, E=0) < 4 * FIRST == 2048  # as the page says
    assert round(bytes_by_formula(T=2000, B=1, N=1, C=0, E=125), -2) == 9600


def spec(window: int | None = None) -> KVSpec:
    return KVSpec(num_layers=1, num_kv_heads=1, head_dim=2, block_size=BLOCK, window=window, sinks=2 if window else 0)


@pytest.mark.parametrize("windows", [(None,), (None, 9), (7,)])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 9))])
def test_a_follower_derives_the_positions_and_slots_that_were_planned(
    seed: int, windows: tuple[int | None, ...]
) -> None:
    """Random steps over forks, truncations, aborts and new spaces; one table of rank 0, one of a follower."""
    dice = random.Random(seed)
    cache = PagedKVCache([spec(window) for window in windows], num_frames=200)
    sent, known, spaces = wire.Tables(), wire.Tables(), [cache.open() for _ in range(3)]
    for number in range(40):
        chosen = dice.sample(spaces, dice.randint(1, len(spaces)))
        counts = [dice.choice([1, 1, 2, 9]) for _ in chosen]
        batch = cache.plan(chosen, counts)
        tokens = [dice.randrange(50) for _ in range(sum(counts))]
        words = wire.packed_step(tokens, batch.plan, range(len(tokens)), batch.plan.copies, sent, BLOCK)
        step = wire.unpacked_step(words, known)
        assert step.token_ids.tolist() == tokens
        assert np.array_equal(step.copies, batch.plan.copies)
        sizes = {"T": batch.plan.num_tokens, "B": len(chosen), "C": len(batch.plan.copies), "E": int(words[7])}
        assert 4 * len(words) == 4 * words[0] == bytes_by_formula(N=0, **sizes)
        for group in range(len(windows)):
            positions, slots = places_of(step, known.known, step.rows + np.int32(group), BLOCK)
            assert np.array_equal(positions, batch.plan.positions)
            assert np.array_equal(slots, batch.plan.group_slots[group])
            for row, length in zip(step.rows + group, step.seq_lens, strict=True):
                pages = -(-int(length) // BLOCK)
                assert np.array_equal(known.known[row, :pages], batch.plan.live_table[row, :pages])
        if dice.random() < 0.2:
            cache.abort(batch)
        else:
            cache.commit(batch, tokens)
        if dice.random() < 0.3 and len(spaces) < 8:
            spaces.append(dice.choice(spaces).fork())
        elif dice.random() < 0.2 and len(spaces) > 2:
            spaces.pop(dice.randrange(len(spaces))).release()
            spaces.append(cache.open([number]))
    for space in spaces:
        space.release()


def test_a_message_is_what_was_packed() -> None:
    values = {"num_frames": 7, "model": "é", "kv_dtype": None}
    assert wire.unpacked_session(wire.packed_session(values)) == values
    copies = np.array([[3, 4], [1, 9]], np.int32)
    assert np.array_equal(wire.unpacked_copies(wire.packed_copies(copies)), copies)


@pytest.mark.parametrize("length", [1, 10, FIRST, FIRST + 1, 5000])
def test_a_message_of_any_length_arrives(length: int) -> None:
    words = np.arange(length, dtype=np.int32)
    words[0] = length
    arrived = list[Any]()
    sent = on_threads(
        2,
        lambda ranks: (ranks.send(words), ranks.message_bytes)[1],
        lambda ranks: arrived.append(ranks.receive()),
    )
    assert np.array_equal(arrived[0], words)
    assert sent == 4 * max(FIRST, length)


def test_the_bytes_of_a_step_are_those_of_the_formula(folder: Callable[..., Path]) -> None:
    """A prompt of 40 tokens and 10 decode steps: a step grows by no length, and by 12 bytes for a new page."""
    job = jobs.job_of(folder("llama"), [[1] * 40], params={"max_tokens": 11})
    sent = list[Any]()

    def lead(ranks: ThreadRanks) -> None:
        jobs.led(ranks, job)
        sent.extend(ranks.sent)

    on_threads(2, lead, lambda ranks: jobs.followed(ranks, job))
    begin, prompt, *decode, stop = sent
    assert [begin[1], prompt[1], stop[1]] == [wire.BEGIN, wire.STEP, wire.STOP]
    assert 4 * len(prompt) == bytes_by_formula(T=40, B=1, N=1, C=0, E=3)
    plain, with_page = (bytes_by_formula(T=1, B=1, N=0, C=0, E=pages) for pages in (0, 1))
    assert [4 * len(words) for words in decode] == [plain] * 8 + [with_page] + [plain]  # the 49th token begins a page


def test_a_layer_takes_two_sums_and_a_step_one_more(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, sums = folder("gemma2"), [0, 0]
    add = ThreadRanks.add

    def counted(ranks: ThreadRanks, x: Any) -> None:
        sums[ranks.rank] += 1
        add(ranks, x)

    monkeypatch.setattr(ThreadRanks, "add", counted)
    job = jobs.job_of(made, [[1] * 40], params={"max_tokens": 5})
    result = on_threads(2, lambda ranks: jobs.led(ranks, job), lambda ranks: jobs.followed(ranks, job))
    assert result["steps"] == 5
    assert sums == [5 * (2 * ModelConfig.load(made).num_layers + 1)] * 2


def test_copies_of_an_aborted_plan_are_sent_before_those_of_the_next(folder: Callable[..., Path]) -> None:
    """Both plans split one tail: the second copies from the target of the first."""
    made, kinds = folder("llama"), list[int]()

    def lead(ranks: ThreadRanks) -> None:
        engine = leader.load(ranks, made, dtype="float32", num_frames=50)
        cache, first = engine.cache, engine.cache.open()
        step, tokens = engine.forward, [5, 6, 7]
        batch = step.plan([first], [3])
        step(tokens, batch, [2])
        cache.commit(batch, tokens)
        second = first.fork()
        split = step.plan([second], [1])
        assert len(split.plan.copies) == 1
        cache.abort(split)
        third = second.fork()
        split = step.plan([third], [1])
        assert len(split.plan.copies) == 1
        step([8], split, [0])
        cache.commit(split, [8])
        kinds.extend(int(words[1]) for words in ranks.sent)
        ranks.stop()
        for space in (first, second, third):
            space.release()

    on_threads(2, lead, lambda ranks: jobs.followed(ranks, jobs.job_of(made, [])))
    assert kinds == [wire.BEGIN, wire.STEP, wire.COPY, wire.STEP]


def test_what_enters_the_pool_outside_a_step_is_refused(folder: Callable[..., Path], tmp_path: Path) -> None:
    made = folder("llama")

    def lead(ranks: ThreadRanks) -> None:
        engine = leader.load(ranks, made, dtype="float32", num_frames=50)
        for call in (
            lambda: engine.cache.resize(60),
            lambda: engine.cache.snapshot(tmp_path),
            lambda: engine.cache.restore(tmp_path),
        ):
            with pytest.raises(InvalidRequest, match="a pool of several ranks cannot be"):
                call()
        for options in ({"speculate": "prompt-tree"}, {"tiers": ["host:1MiB"]}):
            with pytest.raises(InvalidRequest, match="torchrun started 2 ranks"):
                leader.load(ranks, made, **options)
        ranks.stop()

    on_threads(2, lead, lambda ranks: jobs.followed(ranks, jobs.job_of(made, [])))


def test_an_engine_without_its_followers_computes_nothing(folder: Callable[..., Path]) -> None:
    """Its messages would wait for ever, or change the pool of the next session."""
    made, options = folder("llama"), {"dtype": "float32", "num_frames": 50}

    def lead(ranks: ThreadRanks) -> list[int]:
        first = leader.load(ranks, made, **options)
        first.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
        with pytest.raises(InvalidRequest, match=r"call Ranks.stop\(\) before you load another one"):
            leader.load(ranks, made, **options)
        ranks.stop()
        for again in (False, True):
            second = leader.load(ranks, made, **options) if again else None
            sent = len(ranks.sent)
            first.submit([1, 2, 3], SamplingParams(max_tokens=2))
            with pytest.raises(InvalidRequest, match="the other ranks no longer follow this engine"):
                first.step()
            assert len(ranks.sent) == sent
        assert second is not None
        (request,) = second.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
        ranks.stop()
        return request.completions[0].token_ids

    job = jobs.job_of(made, [])
    assert len(on_threads(2, lead, lambda ranks: [jobs.followed(ranks, job) for _ in range(2)])) == 2


def test_a_copy_of_the_model_with_other_weights_is_refused(folder: Callable[..., Path], tmp_path: Path) -> None:
    """The configs are equal, so only the bytes of the weights tell the two apart."""
    made = folder("llama")
    other = tmp_path / "other"
    shutil.copytree(made, other)
    tensors = {name: tensor + 0.01 for name, tensor in load_file(made / "model.safetensors").items()}
    save_file(tensors, other / "model.safetensors", {"format": "pt"})

    def lead(ranks: ThreadRanks) -> None:
        leader.load(ranks, made, dtype="float32", num_frames=50)
        ranks.stop()

    with pytest.raises(InvalidRequest, match="the model of this rank is not that of rank 0: other weights"):
        on_threads(2, lead, lambda ranks: jobs.followed(ranks, jobs.job_of(other, [])))


OTHER_OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"weights": "int8"}, {"weights": "int4"}),
    ({"weights": "int8"}, {}),
    ({"dtype": "bfloat16"}, {}),
    ({"window": 24, "sinks": 4}, {"window": 24}),
]
"""Options of rank 0, and of another rank."""


@pytest.mark.parametrize(("first", "second"), OTHER_OPTIONS)
def test_a_rank_with_other_options_is_refused(
    first: dict[str, Any], second: dict[str, Any], folder: Callable[..., Path]
) -> None:
    made = folder("llama", hidden_size=128, intermediate_size=256, head_dim=32)

    def lead(ranks: ThreadRanks) -> None:
        leader.load(ranks, made, **{"dtype": "float32", "num_frames": 50, **first})
        ranks.stop()

    with pytest.raises(InvalidRequest, match="the model of this rank is not that of rank 0"):
        on_threads(2, lead, lambda ranks: jobs.followed(ranks, jobs.job_of(made, [], **second)))


def test_a_step_that_fails_ends_the_group(folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error behind the message the ranks are at different collectives: no step may follow."""
    made = folder("llama")

    def lead(ranks: ThreadRanks) -> None:
        engine = leader.load(ranks, made, dtype="float32", num_frames=50)
        request = engine.submit([1, 2, 3], SamplingParams(max_tokens=3))
        with monkeypatch.context() as patch:
            patch.setattr(type(engine.decoder), "forward", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.step()
        with pytest.raises(RankLost, match="an earlier step of the 2 ranks did not end"):
            engine.step()
        assert not request.finished
        with pytest.raises(RankLost):
            ranks.stop()

    on_threads(2, lead, lambda ranks: [ranks.receive(), ranks.receive()])  # BEGIN, and a step whose sums never come
