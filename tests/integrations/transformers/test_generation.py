"""The ways of generate() that the tests of transformers go through, in its own mode and in ours.

transformers has these tests in GenerationTesterMixin (greedy, sample, beam, assisted, prompt_lookup, left_padding,
continue_from_past, inputs_embeds, static_cache, logits_to_keep). Its sources are no package, so this file says the same
of nine families: a model that is patched, or that gets a PagedCache, does what the model does without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import StaticCache

from pagedkv.integrations.transformers import PagedCache, patch, unpatch
from tests.integrations.transformers.families import model_of, prompts

FAMILIES = ("llama", "mistral", "gemma2", "qwen3", "gpt_neox", "gpt_oss", "phi3", "gemma3_text", "mixtral")
OPTIONS: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}
Way = Callable[[Any, dict[str, Any]], torch.Tensor]


def greedy(model: Any, options: dict[str, Any]) -> torch.Tensor:
    return model.generate(**prompts(20, (0, 4)), **OPTIONS, **options)  # type: ignore[no-any-return]


def scores(model: Any, options: dict[str, Any]) -> torch.Tensor:
    found = model.generate(
        **prompts(20, (0, 4)), **OPTIONS, **options, return_dict_in_generate=True, output_logits=True
    )
    return torch.stack(found.logits)


def sample(model: Any, options: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(3)
    changed = OPTIONS | {"do_sample": True, "num_return_sequences": 3}
    return model.generate(**prompts(20, (0, 4)), **changed, **options)  # type: ignore[no-any-return]


def beam_sample(model: Any, options: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(3)
    changed = OPTIONS | {"do_sample": True, "num_beams": 3, "num_return_sequences": 2}
    return model.generate(**prompts(20, (0, 4)), **changed, **options)  # type: ignore[no-any-return]


def left_padding(model: Any, options: dict[str, Any]) -> torch.Tensor:
    """Return the logits of the last token; those of a prompt do not depend on the padding before it."""
    inputs = prompts(20, (0, 6))
    alone = {name: value[1:, 6:] for name, value in inputs.items()}
    padded = model.generate(**inputs, **OPTIONS, **options, return_dict_in_generate=True, output_logits=True).logits[0][
        1
    ]
    torch.testing.assert_close(
        model.generate(**alone, **OPTIONS, return_dict_in_generate=True, output_logits=True).logits[0][0],
        padded,
        atol=1e-3,
        rtol=1e-3,
    )
    return padded  # type: ignore[no-any-return]


def continue_from_past(model: Any, options: dict[str, Any]) -> torch.Tensor:
    inputs = prompts(20, (0, 4))
    first = model.generate(**inputs, **OPTIONS | {"max_new_tokens": 3}, **options, return_dict_in_generate=True)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 3, dtype=torch.long)], 1)
    return model.generate(  # type: ignore[no-any-return]
        input_ids=first.sequences, attention_mask=mask, past_key_values=first.past_key_values,
        **OPTIONS | {"max_new_tokens": 7},
    )  # fmt: skip


def inputs_embeds(model: Any, options: dict[str, Any]) -> torch.Tensor:
    inputs = prompts(20, (0, 4))
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    return model.generate(  # type: ignore[no-any-return]
        inputs_embeds=embeds, attention_mask=inputs["attention_mask"], **OPTIONS, **options
    )


def static_cache(model: Any, _: dict[str, Any]) -> torch.Tensor:
    cache = StaticCache(config=model.config, max_cache_len=32)
    return model.generate(**prompts(20, (0, 4)), **OPTIONS, past_key_values=cache)  # type: ignore[no-any-return]


def chunks(model: Any, options: dict[str, Any]) -> torch.Tensor:
    return model.generate(  # type: ignore[no-any-return]
        **prompts(20, (0, 4)), **OPTIONS, **options, prefill_chunk_size=8
    )


@torch.no_grad()
def logits_to_keep(model: Any, options: dict[str, Any]) -> torch.Tensor:
    inputs = prompts(20, (0, 4))
    inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    last = model(**inputs, **options, logits_to_keep=1).logits
    whole = model(**inputs).logits[:, -1:]
    torch.testing.assert_close(last, whole, atol=1e-3, rtol=1e-3)
    return last  # type: ignore[no-any-return]


@torch.no_grad()
def crop(model: Any, options: dict[str, Any]) -> torch.Tensor:
    """Compute 14 tokens, take back 5, and then 4 of those before: the last of two steps, and a part of the first."""
    ids = prompts(20, (0, 0))["input_ids"]
    if model.config.model_type in ("mistral", "gemma2", "gpt_oss", "phi3", "gemma3_text"):
        ids = ids[:, :14]  # the host cannot take back what left a window
    cache = model(input_ids=ids[:, :8], **options).past_key_values
    model(input_ids=ids[:, 8:14], past_key_values=cache)
    cache.crop(-5)
    cache.crop(-4)
    assert cache.get_seq_length() == 5
    return model(input_ids=ids[:, 5:12], past_key_values=cache).logits  # type: ignore[no-any-return]


WAYS: tuple[Way, ...] = (
    greedy, scores, sample, beam_sample, left_padding, continue_from_past, inputs_embeds, static_cache, chunks,
    logits_to_keep, crop,
)  # fmt: skip


@pytest.mark.parametrize("mode", ["paged", pytest.param("gather", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [FAMILIES[0], *(pytest.param(one, marks=pytest.mark.slow) for one in FAMILIES[1:])])
def test_every_way_gives_what_it_gives_without_us(name: str, mode: str) -> None:
    model = model_of(name)
    expected = [way(model, {}) for way in WAYS]
    handle = patch(model, memory="64MiB") if mode == "paged" else None
    for way, right in zip(WAYS, expected, strict=True):
        pool = None if handle is None else handle.pool
        options = {} if pool is None else {"pool": pool}
        with PagedCache(model.config, **options) as cache:
            needs_cache = mode == "gather" or way in (logits_to_keep, crop)
            found = way(model, {"past_key_values": cache} if needs_cache else {})
        torch.testing.assert_close(found, right, atol=2e-4, rtol=2e-4, msg=lambda text, way=way: f"{way}: {text}")
    if handle is not None:
        handle.pool.sweep()
        handle.pool.kv.check()
        unpatch(model)
