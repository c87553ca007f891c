"""The cost of a KV kind (pagedkv/engine/model/kv_quality.py), next to the same figures of whole texts at once."""

from __future__ import annotations

import pytest
import torch

from pagedkv.engine.model.kv_quality import PIECE, kv_quality
from pagedkv.engine.model.pool import new_cache
from pagedkv.errors import InvalidRequest
from tests.engine.conftest import Checkpoints, prompt_of


@pytest.mark.parametrize("length", [PIECE, 2 * PIECE + 45])
def test_the_cost_of_a_kind_is_that_of_the_whole_text_at_once(checkpoint: Checkpoints, length: int) -> None:
    tiny, text = checkpoint("gemma3"), prompt_of(length)
    decoder = tiny.decoder()
    cache = new_cache(decoder, block_size=16, kv_dtype="int8", num_frames=64)
    batch = cache.plan([cache.open()], [length])
    p, q = (z[:-1].log_softmax(-1) for z in (tiny.logits(text), decoder.forward(torch.tensor(text), batch, cache)))
    kl, next_ids = (p.exp() * (p - q)).sum(-1), torch.tensor(text[1:])
    found = kv_quality(decoder, text, ["int8", "int4"])
    assert found[None][:4] == (0, 0, 0, 1)
    assert found[None].perplexity == pytest.approx(torch.nn.functional.nll_loss(p, next_ids).exp().item(), rel=1e-4)
    expected = kl.mean(), kl.quantile(0.99), kl.std() / len(kl) ** 0.5, (p.argmax(-1) == q.argmax(-1)).float().mean()
    assert found["int8"][:4] == pytest.approx([number.item() for number in expected], rel=1e-2)
    assert found["int8"].kl < found["int4"].kl / 10
    with pytest.raises(InvalidRequest, match="the text has 2 tokens; a mean and its standard error need three"):
        kv_quality(decoder, text[:2], ["int8"])
