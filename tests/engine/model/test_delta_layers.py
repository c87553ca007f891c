"""Models with recurrent states: logits are those of transformers, whatever the chunks, the dtype and the KV kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from pagedkv.cache import PagedKVCache
from pagedkv.engine.model.decoder import Decoder
from pagedkv.engine.model.kv_quality import calibration_of, kv_quality
from pagedkv.engine.model.pool import DEFAULT_MEMORY, new_cache
from pagedkv.errors import InvalidRequest
from pagedkv.spec import parse_bytes
from tests.engine.conftest import HYBRIDS, Checkpoint, Checkpoints, Paging, build, prompt_of

PROMPT = prompt_of(150)


@pytest.fixture
def hybrid(checkpoint: Checkpoints) -> Checkpoint:
    return checkpoint("qwen3_5")


def logits(decoder: Decoder, chunks: list[int], **options: Any) -> torch.Tensor:
    """Return the logits of PROMPT [T, V], computed in chunks."""
    cache = new_cache(decoder, block_size=16, num_frames=12, state_memory=8, **options)
    space, found, first = cache.open(), [], 0
    for count in chunks:
        ids = PROMPT[first : first + count]
        batch = cache.plan([space], [count])
        found.append(decoder.forward(torch.tensor(ids), batch, cache))
        cache.commit(batch, ids)
        first += count
    cache.check(3)
    return torch.cat(found)


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("chunks", [[150], [1, 2, 61, 64, 1, 21]], ids=["whole", "chunks"])
def test_logits_are_those_of_transformers(name: str, chunks: list[int], checkpoint: Checkpoints) -> None:
    found = logits(checkpoint(name).decoder(), chunks)
    torch.testing.assert_close(found, checkpoint(name).logits(PROMPT), rtol=0, atol=1e-4)
    assert len(set(found.argmax(-1).tolist())) > 30


def test_the_state_of_a_hybrid_reaches_far_back(hybrid: Checkpoint) -> None:
    """The first token changes the last logits, so a test in which states were lost would fail."""
    other = [(PROMPT[0] + 1) % 97, *PROMPT[1:]]
    assert (hybrid.logits(other)[-1] - hybrid.logits(PROMPT)[-1]).abs().max() > 0.02


def test_bfloat16_is_as_near_to_float32_as_transformers_is(hybrid: Checkpoint) -> None:
    rounded = transformers.AutoModelForCausalLM.from_pretrained(
        hybrid.folder, dtype=torch.bfloat16, attn_implementation="eager"
    )
    exact, theirs = hybrid.logits(PROMPT), rounded(torch.tensor([PROMPT])).logits[0].float()
    ours = logits(Decoder.load(hybrid.folder, dtype="bfloat16"), [100, 50])
    assert (ours - exact).square().mean().sqrt() <= 1.1 * (theirs - exact).square().mean().sqrt()


def test_weights_and_kv_of_integers_are_near_to_float32(hybrid: Checkpoint, tmp_path: Any) -> None:
    wide = build("qwen3_5", intermediate_size=128, linear_value_head_dim=32, num_attention_heads=4, head_dim=32)
    wide.save_pretrained(tmp_path)
    exact = wide(torch.tensor([PROMPT])).logits[0]
    for options in ({"weights": "int8"}, {"kv_dtype": "int8"}):
        decoder = Decoder.load(tmp_path, weights=options.pop("weights", None))
        found = logits(decoder, [100, 50], **options)
        assert 0 < (found - exact).square().mean().sqrt() < 0.05 * exact.square().mean().sqrt()
    costs = kv_quality(hybrid.decoder(), PROMPT, ["int8"])
    assert 0 <= costs[None].kl < 1e-6
    assert 0 < costs["int8"].kl < 0.05
    found = calibration_of(hybrid.decoder(), PROMPT)
    assert found is not None
    assert len(found) == 1


def test_states_that_the_user_gives_no_size_follow_the_sequences_and_the_memory(hybrid: Checkpoint) -> None:
    decoder, count = hybrid.decoder(), 3 * 5 + 64
    cache = new_cache(decoder, block_size=16, num_frames=8, at_once=5)
    assert cache.stats().states.num_frames == count
    most = new_cache(decoder, block_size=16, num_frames=8, at_once=2**20)
    assert most.stats().states.num_frames == parse_bytes(DEFAULT_MEMORY) // most.state_storage.spec.frame_bytes


def test_a_cache_without_the_states_of_the_model_is_refused(hybrid: Checkpoint, checkpoint: Checkpoints) -> None:
    decoder, other = hybrid.decoder(), checkpoint("llama").decoder()
    with pytest.raises(InvalidRequest, match="needs a PagedKVCache"):
        Paging(decoder, block_size=16, num_frames=4, num_sequences=1).step({0: PROMPT[:3]})
    cache = PagedKVCache(decoder.config.spec(), num_frames=4)
    batch = cache.plan([cache.open()], [3])
    with pytest.raises(InvalidRequest, match=r"came without them; make the cache with states="):
        decoder.forward(torch.tensor(PROMPT[:3]), batch, cache)
    cache.abort(batch)
    with pytest.raises(InvalidRequest, match="state_memory is 5, and this model has no recurrent states"):
        new_cache(other, block_size=16, state_memory=5)
