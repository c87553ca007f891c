"""Trial: compute a few tokens with pages and without, and compare the logits.

A config does not say all that a model does with its K and V. So `patch` tries the model before it serves requests: two
short prompts, one of them with padding before it, then a decode step with the rows exchanged, then two more tokens;
and a prompt that is given without a mask. Without pages the prompts are computed at once, with pages in two parts. With
pages only the last of the two more tokens is asked for (`logits_to_keep`): some models compute fewer columns then. A
model whose logits differ is refused. The logits of a model that is not causal differ, and no prefix of its prompts
could be used again. A few tokens cannot show windows and chunks: these are read from the config, see geometry.py.
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
from pagedkv.integrations.transformers.geometry import CACHE, Shape, refusal, refused_if_it_fails, said
from pagedkv.integrations.transformers.pool import Pool

Paging = Callable[[bool], AbstractContextManager[Any]]
"""A context in which forward passes of the model with a PagedCache attend to pages (True), or gather them (False)."""

_PROMPT, _PADDING = 7, 3  # columns; columns of padding in the second row
_FRAMES = 64
_TOLERANCES = {torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""dtype: the largest difference of two logits that rounding explains, relative to the range of the logits."""


def served(model: Any, config: Any, shapes: dict[int, Shape], paging: Paging) -> bool:
    """Return whether layers of `model` attend to pages; False if it is served by gathering K and V in each step.

    Raises: InvalidRequest if the model computes something else either way; its message has the reason
    """
    with torch.no_grad(), _plain(model):
        with refused_if_it_fails(config, "it computes no padded prompt with a DynamicCache"):
            caches = (DynamicCache(config=config), DynamicCache(config=config))
            expected = torch.cat([_logits(model, caches[0], parts=1), _unmasked(model, caches[1], parts=1)])
        reasons = []
        for paged in (True, False):
            pool = Pool(config, num_frames=_FRAMES, prefix_cache=False)
            pool.fit(shapes, model.device)
            try:
                ACTIVE.asked = set()
                with paging(paged), PagedCache(config, pool=pool) as cache, PagedCache(config, pool=pool) as other:
                    found = torch.cat([_logits(model, cache, parts=2), _unmasked(model, other, parts=2)])
                has_windows = {window is not None for window in pool.geometry.windows}
                if ACTIVE.asked and ACTIVE.asked != has_windows:
                    raise InvalidRequest("its masks have other windows than its cache")
                difference = float((found - expected).abs().max() / (expected.max() - expected.min()).clamp(min=1e-6))
                if difference <= _TOLERANCES.get(next(iter(shapes.values())).dtype, 8e-2):
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


def _logits(model: Any, cache: Any, parts: int) -> torch.Tensor:
    """Return float32 [N, vocabulary]: the logits of a prefill in `parts`, of a step after it, and of a last token."""
    ids = _ids(model)
    mask = torch.ones_like(ids)
    mask[1, :_PADDING] = 0
    first = _prefill(model, ids, mask, cache, parts)
    if cache.get_seq_length() != _PROMPT:
        held = cache.get_seq_length()
        raise InvalidRequest(refusal(model.config, f"it computed {_PROMPT} tokens, and stored {held} in the cache"))
    rows = torch.tensor([1, 0], device=model.device)
    cache.reorder_cache(rows)
    mask = torch.cat([mask[rows], mask.new_ones(2, 1)], 1)
    second = _forward(model, ids[:, :1], mask, cache)
    mask = torch.cat([mask, mask.new_ones(2, 2)], 1)
    third = _forward(model, ids[:, 1:3], mask, cache, kept=0 if parts == 1 else 1)
    return torch.cat([first[0], first[1, _PADDING:], second[:, 0], third[:, -1]]).float()


def _unmasked(model: Any, cache: Any, parts: int) -> torch.Tensor:
    """Return float32 [columns, vocabulary]: the logits of a prompt in `parts` that is given without a mask."""
    return _prefill(model, _ids(model)[:1], None, cache, parts)[0].float()


def _prefill(model: Any, ids: torch.Tensor, mask: torch.Tensor | None, cache: Any, parts: int) -> torch.Tensor:
    """Return [rows, columns, vocabulary]: the logits of prompts, the first of two parts longer than the padding."""
    ends = [_PROMPT] if parts == 1 else [_PADDING + 1, _PROMPT]
    made = [
        _forward(model, ids[:, start:end], None if mask is None else mask[:, :end], cache)
        for start, end in zip([0, *ends], ends, strict=False)
    ]
    return torch.cat(made, 1)


def _ids(model: Any) -> torch.Tensor:
    """Return the tokens of two prompts: int64 [2, columns]."""
    embeddings = model.get_input_embeddings()
    vocabulary = getattr(embeddings, "num_embeddings", None) or len(embeddings.weight)  # PEFT's have a weight alone
    return (torch.arange(2 * _PROMPT, device=model.device).view(2, -1) * 7 + 3) % vocabulary


def _forward(model: Any, ids: torch.Tensor, mask: torch.Tensor | None, cache: Any, kept: int = 0) -> torch.Tensor:
    inputs: dict[str, Any] = {"input_ids": ids, CACHE: cache, "use_cache": True}
    takes = inspect.signature(model.forward).parameters
    if mask is not None:
        inputs["attention_mask"] = mask
    if mask is not None and "position_ids" in takes:
        inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    if kept and "logits_to_keep" in takes:
        inputs["logits_to_keep"] = kept
    logits: torch.Tensor = model(**inputs).logits
    return logits
