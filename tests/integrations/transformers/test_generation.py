"""Arguments of generate() are handed on, and arguments that reach attention are checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import TextGenerationPipeline, TextIteratorStreamer

from pagedkv.errors import InvalidRequest
from pagedkv.integrations.transformers import PagedCache, Patched, patch
from pagedkv.integrations.transformers.geometry import CACHE
from tests.integrations.transformers.families import prompts

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
