"""Decode steps over memory that exists before: equal tokens, the same addresses, padding unread.

Graphs are rehearsed on a CPU: `Replayed` records a call and repeats it, with the tensors it was captured with.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pagedkv.cache import PagedKVCache
from pagedkv.engine.model.decoder import Decoder
from pagedkv.engine.model.runner import ModelRunner
from pagedkv.engine.model.workspace import Workspace
from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.engine.step.engine import Engine
from pagedkv.errors import InvalidRequest
from pagedkv.kernels import linear
from tests.engine.conftest import VOCAB, Checkpoints, prompt_of
from tests.engine.model.test_hybrid import grouped
from tests.engine.step.test_engine import build, outputs

if TYPE_CHECKING:
    from collections.abc import Callable


SEQUENCES = (5, 70, 33)
"""Tokens of the prompts."""


class Replayed:
    """A graph that repeats a call. Tensors that move after the capture are not seen by it, as by a CUDA graph."""

    captured = 0
    replayed = 0

    def __init__(self, beside: Replayed | None) -> None:
        self.beside = None if beside is None else weakref.ref(beside)

    def capture(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        Replayed.captured += 1
        self._call, self._result = call, call()
        return self._result

    def replay(self) -> None:
        Replayed.replayed += 1
        with torch.inference_mode():
            self._result.copy_(self._call())  # torch's operations give a new tensor, a CUDA graph the captured one


def is_without_extension() -> bool:
    """Return whether torch serves the linear operations, which then allocate their results."""
    return not isinstance(linear.choose(torch.device("cpu"), torch.float32, 3), linear.cpu.Native)


def with_graphs(engine: Engine) -> Engine:
    """Let the engine replay its decode steps, as it does on a GPU."""
    engine.forward = ModelRunner(engine.decoder, engine.cache, graphs=Replayed)
    engine.scheduler._plan = engine.forward.plan
    return engine


@pytest.mark.parametrize("family", ["llama-yarn", "gemma3"])
def test_a_step_in_a_workspace_has_the_bits_of_a_step_in_new_memory(family: str, checkpoint: Checkpoints) -> None:
    decoder = checkpoint(family).decoder()
    memory = Workspace.of(decoder.config, 4, decoder.dtype, decoder.device)
    for tensor in (memory.x, memory.qkv, memory.attended, memory.gated, memory.logits):
        tensor.fill_(torch.nan)  # a step reads no result of another step
    logits = []
    for given in (None, memory.first(3)):
        cache = PagedKVCache(decoder.config.spec(), num_frames=40)
        spaces = [cache.open(prompt_of(length)) for length in SEQUENCES]
        tokens = [token for length in SEQUENCES for token in prompt_of(length)]
        batch = cache.plan(spaces, list(SEQUENCES))
        decoder.forward(torch.tensor(tokens), batch, cache)
        cache.commit(batch, tokens)
        batch = cache.plan(spaces, [1, 1, 1])
        logits.append(decoder.forward(torch.tensor([1, 2, 3]), batch, cache, memory=given).clone())
    assert torch.equal(*logits)
    assert logits[0].isfinite().all()


@pytest.mark.parametrize(("family", "is_grouped"), [("llama", False), ("gemma2", True)])
def test_replayed_steps_give_the_tokens_of_called_steps(family: str, is_grouped: bool, checkpoint: Checkpoints) -> None:
    """Sequences end at different steps, so padding changes; the pool is small, so some are preempted."""
    folder = checkpoint(family)
    given = [prompt_of(length) for length in (5, 8, 12, 7, 10)]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (40, 9, 25, 3, 30)]
    found = []
    for graphs in (False, True):
        engine = grouped(folder, 2 * 18) if is_grouped else build(folder, block_size=4, num_frames=18)
        if graphs:
            with_graphs(engine)
        Replayed.captured = Replayed.replayed = 0
        found.append(outputs(engine.generate(given, params)))
        assert engine.scheduler.preemptions
        engine.cache.check()
        assert engine.cache.stats().mapped == 0
    assert found[0] == found[1]
    assert 1 <= Replayed.captured < 12 < Replayed.replayed


def test_a_graph_is_captured_anew_after_a_resize(checkpoint: Checkpoints) -> None:
    called, engine = build(checkpoint("llama"), num_frames=30), with_graphs(build(checkpoint("llama"), num_frames=30))
    expected = outputs(called.generate([prompt_of(20)], SamplingParams(max_tokens=30, ignore_eos=True)))
    Replayed.captured = 0
    request = engine.submit(prompt_of(20), SamplingParams(max_tokens=30, ignore_eos=True))
    for step in range(30):
        if step in (10, 20):
            engine.cache.resize(30 + step)
        engine.step()
    assert outputs([request]) == expected
    assert Replayed.captured == 3


def test_all_steps_of_a_size_use_the_same_addresses(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps differ in the number of sequences, and in their rows."""
    engine = with_graphs(build(checkpoint("gemma2"), num_frames=64))
    seen: list[tuple[int, ...]] = []
    inner = Decoder.forward

    def watched(self: Decoder, token_ids: torch.Tensor, batch: Any, *args: Any, **options: Any) -> torch.Tensor:
        logits = inner(self, token_ids, batch, *args, **options)
        if options.get("memory") is not None:
            of_layer = batch[0]
            fields = (of_layer.slots, of_layer.positions, of_layer.seq_lens, of_layer.cu_seqlens_q, of_layer.rows)
            results = () if is_without_extension() else (logits,)
            seen.append(tuple(tensor.data_ptr() for tensor in (token_ids, *results, of_layer.block_table, *fields)))
            assert of_layer.max_seqlen_q == 1
            num_sequences = int(of_layer.cu_seqlens_q[-1])
            assert of_layer.slots[num_sequences:].tolist() == [-1] * (4 - num_sequences)
        return logits

    monkeypatch.setattr(Decoder, "forward", watched)
    for length, most in zip((5, 70, 33, 8), (30, 12, 14, 30), strict=True):
        engine.submit(prompt_of(length), SamplingParams(max_tokens=most, ignore_eos=True))
    while len(engine.scheduler.running) != 2:
        engine.step()
    assert len(seen) >= 10
    assert len(set(seen)) == 1


def test_a_step_that_does_not_fit_into_fixed_tensors_is_refused(checkpoint: Checkpoints) -> None:
    cache = PagedKVCache(checkpoint("llama").decoder().config.spec(), num_frames=40)
    space = cache.open([1] * 8)
    cache.commit(cache.plan([space], [8]), [1] * 8)
    with pytest.raises(InvalidRequest, match="plan it without `into`"):
        cache.plan([space], [2], into=cache.fixed_batch(4, 16))
    with pytest.raises(InvalidRequest, match="up to 9 tokens in all .* and 8 in all"):
        cache.plan([space], [1], into=cache.fixed_batch(4, 8))
    batch = cache.plan([space], [1], into=cache.fixed_batch(4, 9))
    assert batch.seq_lens.tolist() == [9, 0, 0, 0]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 1, 1, 1]
    cache.commit(batch, [VOCAB - 1])
