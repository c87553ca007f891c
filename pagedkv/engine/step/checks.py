"""Checks: a request when it is submitted, and a cache when an engine is built over it. Knows no sequence and no step.

A request that passes can be computed: the pool holds it alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pagedkv.core.arguments import real, token_row
from pagedkv.engine.requests.beams import search_of
from pagedkv.engine.requests.limits import Limits
from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.errors import InvalidRequest

if TYPE_CHECKING:
    from pagedkv.cache import PagedKVCache
    from pagedkv.engine.checkpoint.config import ModelConfig
    from pagedkv.engine.checkpoint.tokenizer import Tokenizer
    from pagedkv.engine.model.decoder import Decoder
    from pagedkv.engine.requests.request import OnText, Request

Prompt = str | Sequence[int]
"""Text, or token ids."""


def prompt_ids(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of a prompt, which may be text. Raises: InvalidRequest"""
    if isinstance(prompt, str):
        ids: list[int] = tokenizer.encode(prompt)
    elif isinstance(prompt, bytes | bytearray | memoryview) or (
        isinstance(prompt, Sequence) and not {bool, np.bool_}.isdisjoint(map(type, prompt))
    ):
        raise InvalidRequest(f"the prompt is {type(prompt).__name__}; give text (str), or a list of token ids")
    else:
        ids = token_row(prompt).tolist()
    if not ids:
        raise InvalidRequest("the prompt is empty; give at least one token")
    return ids


def params_of_each(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[tuple[Prompt, SamplingParams | None]]:
    """Return each prompt with its parameters.

    Raises: InvalidRequest for one text in place of a list, or for another number of parameters
    """
    if isinstance(prompts, str | bytes):
        raise InvalidRequest("generate takes a list of prompts, and one text was given; give [text]")
    each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
    if len(each) != len(prompts):
        raise InvalidRequest(
            f"there are {len(prompts)} prompts and {len(each)} params; give one for all prompts, or one for each"
        )
    return list(zip(prompts, each, strict=True))


def limits_of(limits: Limits | None) -> Limits:
    """Return the limits of an engine. Raises: InvalidRequest for another object"""
    if limits is not None and not isinstance(limits, Limits):
        raise InvalidRequest(f"limits is {limits!r}; give Limits, such as Limits(max_sequences=8), or None")
    return limits or Limits()


def check_request(
    ids: list[int], params: SamplingParams, config: ModelConfig, cache: PagedKVCache, limits: Limits
) -> None:
    """Raise InvalidRequest if the model or the pool cannot hold the prompt and its output."""
    spec, frames = cache.spec, cache.num_frames
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(f"params is {params!r}; give SamplingParams, or None for greedy decoding")
    strange = [token for token in ids if not 0 <= token < config.vocab_size]
    if strange:
        raise InvalidRequest(
            f"token id {strange[0]} is outside the vocabulary of {config.vocab_size} tokens; "
            "encode the prompt with the tokenizer of this model"
        )
    for name, named in (("logit_bias", params.logit_bias), ("allowed_ids", params.allowed_ids or ())):
        if strange := [token for token in named if token >= config.vocab_size]:
            raise InvalidRequest(
                f"{name} has token id {strange[0]}, outside the vocabulary of {config.vocab_size} tokens; leave it out"
            )
    if len(ids) >= config.max_position_embeddings:
        raise InvalidRequest(
            f"the prompt has {len(ids)} tokens, the model ends at {config.max_position_embeddings} "
            "(one is left for the output); shorten the prompt"
        )
    # The KV of the last token is never computed.
    longest = min(len(ids) + params.max_tokens, config.max_position_embeddings) - 1
    if (needed := cache.frames_for(longest, limits.chunk)) > frames:
        raise InvalidRequest(
            f"the prompt of {len(ids)} tokens and up to {params.max_tokens} new ones take {needed} frames of "
            f"{spec.block_size} tokens, the pool has {frames}; raise num_frames or memory, or lower max_tokens"
        )


def check_samples(num_samples: int, limits: Limits) -> None:
    """Raise InvalidRequest if the samples of a request could never run together."""
    if num_samples > limits.max_sequences:
        raise InvalidRequest(
            f"num_samples is {num_samples}, and {limits.max_sequences} sequences may run at once; "
            "lower it, or raise Limits.max_sequences"
        )


def check_listener(on_text: OnText | None) -> None:
    """Raise InvalidRequest if the listener cannot be called."""
    if on_text is not None and not callable(on_text):
        raise InvalidRequest(f"on_text is {on_text!r}; give a function of (completion, text), or None")


def deadline_of(timeout: float | None, now: float) -> float | None:
    """Return the time at which a request ends, or None. Raises: InvalidRequest if that is not after `now`"""
    deadline = None if timeout is None else now + real(timeout, "timeout")
    if deadline is not None and deadline <= now:
        raise InvalidRequest(f"timeout is {timeout} s: the request would end before it begins; give more than 0")
    return deadline


def check_search(request: Request, num_samples: int, config: ModelConfig, cache: PagedKVCache, limits: Limits) -> None:
    """Raise InvalidRequest if the vocabulary, the pool or a step cannot have all beams of a request.

    One sequence of the request passed `check_request`.
    """
    search = search_of(request)
    assert search is not None
    beams, most = request.params.num_beams, min(limits.max_sequences, limits.max_batch_tokens)
    if num_samples > beams:
        raise InvalidRequest(f"num_samples is {num_samples}, num_beams {beams}; a search gives up to num_beams outputs")
    if beams > most:
        raise InvalidRequest(
            f"num_beams is {beams}, a step takes {most} sequences; raise max_sequences and max_batch_tokens of Limits"
        )
    if (num_others := config.vocab_size - len(search.ends)) < beams:
        raise InvalidRequest(
            f"num_beams is {beams}, but only {num_others} of the {config.vocab_size} tokens in the vocabulary do not "
            f"end an output; lower num_beams"
        )
    prompt, at_once = len(request.prompt_ids), limits.chunk
    # Beams share the whole pages of the prompt, unless a window gives them back.
    shared = prompt // cache.spec.block_size if cache.specs == (cache.spec,) and cache.spec.window is None else 0
    needed = shared + beams * (cache.frames_for(prompt + request.params.max_tokens - 1, at_once) - shared)
    if needed > cache.num_frames:
        raise InvalidRequest(
            f"{beams} beams of {prompt} tokens and up to {request.params.max_tokens} new ones take {needed} frames, "
            f"the pool has {cache.num_frames}; raise num_frames or memory, or lower num_beams or max_tokens"
        )


def check_geometry(decoder: Decoder, cache: PagedKVCache) -> None:
    """Raise InvalidRequest if the cache was not made for the keys and values of `decoder`."""
    dtype = str(decoder.dtype).removeprefix("torch.")
    wanted = decoder.config.spec(block_size=cache.spec.block_size, dtype=dtype)
    facts = [("num_layers", wanted.num_layers, len(cache)), ("device", decoder.device.type, cache.device.type)]
    for spec in cache.specs:
        facts += [
            ("num_kv_heads", wanted.num_kv_heads, spec.num_kv_heads),
            ("head_dim", wanted.head_dim, spec.head_dim),
            ("head_dim_v", wanted.value_dim, spec.value_dim),
            ("dtype", wanted.dtype, spec.dtype),
        ]
    for layer, needed in enumerate(decoder.config.windows) if len(cache) == wanted.num_layers else ():
        kept = cache.specs[cache.layer_groups[layer]].window
        suffices = kept is None or (needed is not None and needed <= kept)
        facts.append((f"window of layer {layer}", needed, needed if suffices else kept))
        if kept is not None:
            facts.append(("sinks", decoder.config.sinks, cache.specs[cache.layer_groups[layer]].sinks))
    for name, need, have in facts:
        if need != have:
            raise InvalidRequest(
                f"the cache was made for {name} {have}, the decoder has {need}; build the cache from "
                "decoder.config.spec() or decoder.config.specs()"
            )
