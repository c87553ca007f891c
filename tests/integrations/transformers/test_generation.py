"""The ways of generate() that the tests of transformers go through, in its own mode and in ours.

transformers has these tests in GenerationTesterMixin (greedy, sample, beam, assisted, prompt_lookup, left_padding,
continue_from_past, inputs_embeds, static_cache, logits_to_keep). Its sources are no package, so this file says the same
of five families: a model that is patched, or that gets a PagedCache, does what the model does without.

The last part tests that arguments of generate() are handed on, and that arguments which reach attention are checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    MaxLengthCriteria,
    StoppingCriteriaList,
    TextGenerationPipeline,
    TextIteratorStreamer,
)

from pagedkv.errors import InvalidRequest
from pagedkv.integrations.transformers import PagedCache, Patched, patch, unpatch
from pagedkv.integrations.transformers.geometry import CACHE
from tests.integrations.transformers.families import model_of, prompts

FAMILIES = ("llama", "mistral", "gemma2", "gpt_oss", "gemma3_text")
OPTIONS: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}
Way = Callable[[Any, dict[str, Any]], torch.Tensor]


def greedy(model: Any, options: dict[str, Any]) -> torch.Tensor:
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
    if model.config.model_type in ("mistral", "gemma2", "gpt_oss", "gemma3_text"):
        ids = ids[:, :14]  # the host cannot take back what left a window
    cache = model(input_ids=ids[:, :8], **options).past_key_values
    model(input_ids=ids[:, 8:14], past_key_values=cache)
    cache.crop(-5)
    cache.crop(-4)
    assert cache.get_seq_length() == 5
    return model(input_ids=ids[:, 5:12], past_key_values=cache).logits  # type: ignore[no-any-return]


WAYS: tuple[Way, ...] = (
    greedy, sample, beam_sample, left_padding, continue_from_past, inputs_embeds, chunks, logits_to_keep, crop,
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


# -- arguments ---------------------------------------------------------------------------------------------------------

ASKED: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module")
def llama() -> Any:
    return model_of("llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Return a tokenizer that has a token for each character."""
    from tokenizers import Tokenizer, decoders, models

    characters = ["<pad>", "<s>", *map(chr, range(33, 127)), *"äöü"]
    made = Tokenizer(models.BPE(vocab={one: number for number, one in enumerate(characters)}, merges=[]))
    made.decoder = decoders.Fuse()
    made.add_special_tokens(["<pad>", "<s>"])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", padding_side="left"
    )


def batch(rows: int) -> dict[str, torch.Tensor]:
    inputs = prompts(40, (0, 3)[:rows])
    inputs["input_ids"][inputs["attention_mask"] == 1] = inputs["input_ids"][inputs["attention_mask"] == 1].clamp(min=2)
    return inputs


def streamed(model: Any, tokenizer: Any) -> list[str]:
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    model.generate(**batch(1), **ASKED, streamer=streamer, tokenizer=tokenizer)
    return list(streamer)


def healed(model: Any, tokenizer: Any) -> torch.Tensor:
    """Let generate() encode a prompt again, without its begin token."""
    ids = batch(1)["input_ids"]
    ids[0, 0] = tokenizer.bos_token_id
    found: torch.Tensor = model.generate(ids, **ASKED, token_healing=True, tokenizer=tokenizer)
    model.generate(ids, **ASKED)  # its pages are not those of the healed prompt
    return found


def own_way(model: Any, input_ids: torch.Tensor, tokenizer: Any = None, extra: int = 0, **given: Any) -> torch.Tensor:
    """A way of generate() that a user writes."""
    assert extra == 3
    for _ in range(extra):
        inputs = model.prepare_inputs_for_generation(input_ids, attention_mask=None, use_cache=False)
        input_ids = torch.cat([input_ids, model(**inputs).logits[:, -1:].argmax(-1)], 1)
    return input_ids


def stop_strings(model: Any, tokenizer: Any, rows: int, **options: Any) -> Any:
    inputs = batch(rows)
    answer = tokenizer.decode(model.generate(**inputs, **ASKED)[-1, -12:])
    found = model.generate(**inputs, **ASKED, **options, stop_strings=[answer[3:5]], tokenizer=tokenizer)
    assert options or rows > 1 or found.shape[1] < 40 + 12
    return found.tolist()


ARGUMENTS: dict[str, Callable[[Any, Any], Any]] = {
    "stop strings": lambda model, tokenizer: stop_strings(model, tokenizer, 1),
    "stop strings, a batch": lambda model, tokenizer: stop_strings(model, tokenizer, 2),
    "stop strings, beams": lambda model, tokenizer: stop_strings(model, tokenizer, 2, num_beams=2),
    "stop strings, chunks": lambda model, tokenizer: stop_strings(model, tokenizer, 2, prefill_chunk_size=7),
    "an assistant": lambda model, tokenizer: model.generate(
        **batch(1), **ASKED, assistant_model=model_of("llama", num_hidden_layers=1), tokenizer=tokenizer
    ).tolist(),
    "prompt lookup": lambda model, tokenizer: model.generate(
        **batch(1), **ASKED, prompt_lookup_num_tokens=3, tokenizer=tokenizer
    ).tolist(),
    "token healing": lambda model, tokenizer: healed(model, tokenizer).tolist(),
    "a streamer": streamed,
    "criteria and processors": lambda model, _: model.generate(
        **batch(2), **ASKED, stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(45)]), repetition_penalty=1.3
    ).tolist(),
    "a way of the user": lambda model, tokenizer: model.generate(
        **batch(1), **ASKED, custom_generate=own_way, tokenizer=tokenizer, extra=3
    ).tolist(),
    "a pipeline": lambda model, tokenizer: TextGenerationPipeline(model, tokenizer)(
        [tokenizer.decode(row[row > 1]) for row in batch(2)["input_ids"]], **ASKED, batch_size=2,
        stop_sequence=tokenizer.decode([50]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", ARGUMENTS)
def test_arguments_of_generate_are_handed_on(way: str, llama: Any, tokenizer: Any) -> None:
    expected = ARGUMENTS[way](llama, tokenizer)
    handle = patch(llama, memory="16MiB")
    assert ARGUMENTS[way](llama, tokenizer) == ARGUMENTS[way](llama, tokenizer) == expected
    handle.unpatch()


def test_a_call_with_a_tokenizer_finds_and_leaves_pages(llama: Any, tokenizer: Any, patched: Patched) -> None:
    llama.generate(**batch(1), **ASKED, tokenizer=tokenizer)
    with PagedCache(llama.config, pool=patched.pool) as cache:
        assert cache.find(**batch(1)) == 32


@pytest.mark.parametrize("name", ["cu_seq_lens_q", "attention_bias", "position_bias", "seq_idx", "tokeniser"])
def test_an_argument_that_attention_may_read_is_refused(name: str, llama: Any, patched: Patched) -> None:
    with torch.no_grad(), PagedCache(llama.config, pool=patched.pool) as cache:
        with pytest.raises(InvalidRequest, match=rf"attention takes \['{name}'\], which pages do not serve"):
            llama(**batch(1), **{CACHE: cache, name: torch.zeros(2)})
        assert llama(**batch(1), **{CACHE: cache, name: None}).logits.shape == (1, 40, 99)
