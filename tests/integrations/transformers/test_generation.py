"""Arguments of generate() are handed on, and arguments that reach attention are checked.

Under paged_batching(), generate_batch() of transformers gives the tokens of generate().
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig, TextGenerationPipeline, TextIteratorStreamer
from transformers.generation import ContinuousBatchingConfig

from pagedkv.errors import InvalidRequest
from pagedkv.integrations.transformers import PagedCache, Patched, paged_batching, patch
from pagedkv.integrations.transformers.batching import NEEDED
from pagedkv.integrations.transformers.geometry import CACHE, HOST
from tests.integrations.transformers.families import model_of, prompts

ASKED: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


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
    "stop strings, beams": lambda model, tokenizer: stop_strings(model, tokenizer, 2, num_beams=2),
    "stop strings, chunks": lambda model, tokenizer: stop_strings(model, tokenizer, 2, prefill_chunk_size=7),
    "token healing": lambda model, tokenizer: healed(model, tokenizer).tolist(),
    "a streamer": streamed,
    "a way of the user": lambda model, tokenizer: model.generate(
        **batch(1), **ASKED, custom_generate=own_way, tokenizer=tokenizer, extra=3
    ).tolist(),
    "a pipeline": lambda model, tokenizer: TextGenerationPipeline(model, tokenizer)(
        [tokenizer.decode(row[row > 1]) for row in batch(2)["input_ids"]], **ASKED, batch_size=2,
        stop_sequence=tokenizer.decode([50]), repetition_penalty=1.3,
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


NEW = 8
needs_batches = pytest.mark.skipif(HOST < NEEDED, reason="an old host has other batches")


def requests() -> list[list[int]]:
    """Return prompts of different lengths; some begin alike, and one is longer than a chunk of the host."""
    dice = random.Random(0)
    common = [dice.randrange(1, 99) for _ in range(40)]
    return [
        common[: dice.randrange(5, 40)] + [dice.randrange(1, 99) for _ in range(length)]
        for length in (3, 40, 9, 110, 1)
    ]


@needs_batches
@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(one, marks=pytest.mark.slow) for one in ("mistral", "gemma3_text", "gpt_oss"))]
)
def test_a_batch_gives_the_tokens_of_generate(name: str) -> None:
    model: Any = model_of(name)
    inputs = requests()
    expected = [
        model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)[0, len(ids) :].tolist()
        for ids in inputs
    ]
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=64)
    own = model.config._attn_implementation
    with paged_batching(model):
        found = model.generate_batch(
            inputs, generation_config=config, continuous_batching_config=batching, progress_bar=False
        )
    ordered = sorted(found.values(), key=lambda output: int(output.request_id.rpartition("_")[2]))
    assert [output.generated_tokens for output in ordered] == expected
    assert model.config._attn_implementation == own


@needs_batches
def test_other_calls_inside_of_the_context_are_refused() -> None:
    model = model_of("llama")
    with paged_batching(model), pytest.raises(InvalidRequest, match="generate_batch"):
        model.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=2)
    with paged_batching(model), pytest.raises(InvalidRequest, match="patch before its context"):
        patch(model)
    with pytest.raises(InvalidRequest, match="Linear"), paged_batching(torch.nn.Linear(2, 2)):
        pass
    with pytest.raises(InvalidRequest, match="does not use the AttentionInterface"), paged_batching(model_of("falcon")):
        pass


def test_a_cache_says_what_was_known_of_each_prompt() -> None:
    model = model_of("llama")
    ids = prompts(40, (0, 0))["input_ids"]
    other = ids.clone()
    other[1, 21] ^= 1
    patched = patch(model)
    try:
        for given, reasons in ((ids, ["new", "new"]), (other, ["hit", "differs"])):
            mask = torch.ones_like(given)
            out = model.generate(given, attention_mask=mask, **ASKED, return_dict_in_generate=True)
            cache = out.past_key_values
            assert [cache.receipt(row).reason for row in range(2)] == reasons
        told = cache.receipt(1)
        assert (told.position, told.was, told.now) == (21, int(ids[1, 21]), int(other[1, 21]))
        assert cache.receipt(2) is None
    finally:
        patched.unpatch()
