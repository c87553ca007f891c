"""Trial: compute a few tokens with pages and without, and compare the logits.

A config does not say all that a model does with its K and V. So `patch` tries the model before it serves requests: two
short prompts, one of them with padding before it, then a decode step with the rows exchanged, then two more tokens;
and a prompt that is given without a mask. Without pages the prompts are computed at once, with pages in two parts. With
pages only the last of the two more tokens is asked for (`logits_to_keep`): some models compute fewer columns then. A
model whose logits differ is refused. The logits of a model that is not causal differ, and no prefix of its prompts
could be used again. A few tokens cannot show windows and chunks: these are read from the config, see geometry.py.

Some models with recurrent states begin a pass of several tokens without the state before it: in transformers, too.
`resumes` finds them with a prompt of more tokens. They are served, but their prompts are computed at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from transformers import DynamicCache

from pagedkv.errors import InvalidRequest
from pagedkv.integrations.transformers.attention import ACTIVE
from pagedkv.integrations.transformers.cache import PagedCache
from pagedkv.integrations.transformers.geometry import CACHE, Shapes, refusal, refused_if_it_fails, said
from pagedkv.integrations.transformers.pool import Pool

Paging = Callable[[bool], AbstractContextManager[Any]]
"""A context in which forward passes of the model with a PagedCache attend to pages (True), or gather them (False)."""

_PROMPT, _PADDING = 7, 3  # columns; columns of padding in the second row
_FRAMES, _STATES = 64, 10
_TOLERANCES = {torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""dtype: the largest difference of two logits that rounding explains, relative to the range of the logits."""


_LONG, _CUTS = 61, (33, 48)
"""Tokens of a prompt for `resumes`, and where it is cut: inside a chunk of the model's kernels, with tokens left."""


def resumes(model: Any, config: Any) -> bool:
    """Return whether `model` computes a prompt in two parts as it does at once, with the cache of transformers.

    Random weights and rounding may hide that the second part ignores a state. So the part is computed with another
    state, too: the state after it must then be another one.
    """
    with torch.no_grad(), _plain(model), refused_if_it_fails(config, "it computes no prompt with a DynamicCache"):
        expected, _ = _of_two_parts(model, _LONG)
        for cut in _CUTS if model.dtype == torch.float32 else ():
            if _difference(_of_two_parts(model, cut)[0], expected) > _TOLERANCES[model.dtype]:
                return False
        _, states = _of_two_parts(model, _LONG - 3)
        _, others = _of_two_parts(model, _LONG - 3, changes_states=True)
    return not states or not all(torch.equal(state, other) for state, other in zip(states, others, strict=True))


def _of_two_parts(model: Any, cut: int, *, changes_states: bool = False) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the logits of a prompt in two parts, [1, columns, vocabulary], and the recurrent states after it.

    changes_states: whether the second part gets other states than the first part left
    """
    ids, cache = _ids(model, _LONG)[:1], DynamicCache(config=model.config)
    logits = [_forward(model, ids[:, :cut], None, cache)]
    kept = [one for layer in cache.layers for one in getattr(layer, "recurrent_states", {}).values() if one is not None]
    if cut < _LONG:
        for state in kept if changes_states else ():
            state.add_(1 + state.abs().max())
        logits.append(_forward(model, ids[:, cut:], None, cache, start=cut))
    return torch.cat(logits, 1).float(), kept


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference of two logits, relative to the range of those that are expected."""
    return float((found - expected).abs().max() / (expected.max() - expected.min()).clamp(min=1e-6))


def served(model: Any, shapes: Shapes, paging: Paging, *, in_parts: bool) -> bool:
    """Return whether layers of `model` attend to pages; False if it is served by gathering K and V in each step.

    in_parts: whether prompts are computed in two parts with pages.
    Raises: InvalidRequest if the model computes something else either way; its message has the reason
    """
    config = model.config

    def logits(*caches: Any) -> torch.Tensor:
        return torch.cat([_logits(model, caches[0], in_parts=in_parts), _unmasked(model, caches[1], in_parts=in_parts)])

    with torch.no_grad(), _plain(model):
        with refused_if_it_fails(config, "it computes no padded prompt with a DynamicCache"):
            expected = logits(DynamicCache(config=config), DynamicCache(config=config))
        reasons = []
        for paged in (True, False):
            pool = Pool(config, num_frames=_FRAMES, prefix_cache=False, state_memory=_STATES)
            pool.fit(shapes, model.device)
            try:
                ACTIVE.asked = set()
                with paging(paged), PagedCache(config, pool=pool) as cache, PagedCache(config, pool=pool) as other:
                    found = logits(cache, other)
                windows = pool.geometry.windows
                seen = pool.geometry.cached if pool.has_states else range(len(windows))
                has_windows = {windows[layer] is not None for layer in seen}
                if ACTIVE.asked and ACTIVE.asked != has_windows:
                    raise InvalidRequest("its masks have other windows than its cache")
                difference = _difference(found, expected)
                dtype = next((shape.dtype for shape in shapes.kv.values()), model.dtype)
                if difference <= _TOLERANCES.get(dtype, 8e-2):
                    return paged
                reasons.append(f"its logits differ by {difference:.2g} of their range")
            except Exception as error:  # whatever a model does with a cache that it does not know
                reasons.append(said(error))
            finally:
                ACTIVE.asked = None
                pool.close()
    why = f"neither attention to pages serves it ({reasons[0]}), nor K and V that are gathered ({reasons[1]})"
    raise InvalidRequest(refusal(config, why))


@contextmanager
def _plain(model: Any) -> Iterator[None]:
    """Let `model` compute without dropout, and without weights of attention, for which K and V are gathered."""
    training = [module for module in model.modules() if module.training]
    config = model.config.get_text_config(decoder=True)
    returns_weights = getattr(config, "output_attentions", False)
    model.eval()
    if returns_weights:
        config.output_attentions = False
    try:
        yield
    finally:
        if returns_weights:
            config.output_attentions = returns_weights
        for module in training:
            module.training = True


def _logits(model: Any, cache: Any, *, in_parts: bool) -> torch.Tensor:
    """Return float32 [N, vocabulary]: the logits of a prefill, of a step after it, and of the last of two more tokens.

    in_parts: whether pages get the prompt in two parts, and there are more tokens
    """
    parts = 2 if in_parts and isinstance(cache, PagedCache) else 1
    ids = _ids(model, _PROMPT)
    mask = torch.ones_like(ids)
    mask[1, :_PADDING] = 0
    first = _prefill(model, ids, mask, cache, parts)
    held = _PROMPT if all(cache.is_linear) else cache.get_seq_length()  # the host counts in layers with K and V
    if held != _PROMPT:
        raise InvalidRequest(refusal(model.config, f"it computed {_PROMPT} tokens, and stored {held} in the cache"))
    rows = torch.tensor([1, 0], device=model.device)
    cache.reorder_cache(rows)
    mask = torch.cat([mask[rows], mask.new_ones(2, 1)], 1)
    second = _forward(model, ids[:, :1], mask, cache)
    made = [first[0], first[1, _PADDING:], second[:, 0]]
    if in_parts:
        mask = torch.cat([mask, mask.new_ones(2, 2)], 1)
        made.append(_forward(model, ids[:, 1:3], mask, cache, kept=1 if isinstance(cache, PagedCache) else 0)[:, -1])
    return torch.cat(made).float()


def _unmasked(model: Any, cache: Any, *, in_parts: bool) -> torch.Tensor:
    """Return float32 [columns, vocabulary]: the logits of a prompt that is given without a mask."""
    parts = 2 if in_parts and isinstance(cache, PagedCache) else 1
    return _prefill(model, _ids(model, _PROMPT)[:1], None, cache, parts)[0].float()


def _prefill(model: Any, ids: torch.Tensor, mask: torch.Tensor | None, cache: Any, parts: int) -> torch.Tensor:
    """Return [rows, columns, vocabulary]: the logits of prompts, the first of two parts longer than the padding."""
    ends = [_PROMPT] if parts == 1 else [_PADDING + 1, _PROMPT]
    counts = isinstance(cache, PagedCache) and cache.pool.has_states
    made = [
        _forward(model, ids[:, start:end], None if mask is None else mask[:, :end], cache, start=start * counts)
        for start, end in zip([0, *ends], ends, strict=False)
    ]
    return torch.cat(made, 1)


def _ids(model: Any, columns: int) -> torch.Tensor:
    """Return the tokens of two prompts: int64 [2, columns]."""
    embeddings = model.get_input_embeddings()
    vocabulary = getattr(embeddings, "num_embeddings", None) or len(embeddings.weight)  # PEFT's have a weight alone
    return (torch.arange(2 * columns, device=model.device).view(2, -1) * 7 + 3) % vocabulary


def _forward(model: Any, ids: torch.Tensor, mask: torch.Tensor | None, cache: Any, **options: int) -> torch.Tensor:
    """Return the logits of a pass. options: kept, the columns of logits; start, the first position without a mask."""
    kept, start = options.get("kept", 0), options.get("start", 0)
    inputs: dict[str, Any] = {"input_ids": ids, CACHE: cache, "use_cache": True}
    takes = inspect.signature(model.forward).parameters
    if mask is not None:
        inputs["attention_mask"] = mask
    if mask is not None and "position_ids" in takes:
        inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    elif start and "position_ids" in takes:  # some hybrid models count from zero in each call
        inputs["position_ids"] = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
    if kept and "logits_to_keep" in takes:
        inputs["logits_to_keep"] = kept
    logits: torch.Tensor = model(**inputs).logits
    return logits
