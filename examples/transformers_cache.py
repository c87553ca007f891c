"""Hugging Face transformers over pagedkv: `model.generate` keeps K and V in pages and attends to them where they lie.

    pool = connect(model)                                    once: our attention function, and a pool of frames
    with PagedCache(pool, **inputs) as cache:                maps what the pool knows of the prompts
        model.generate(**inputs, **{CACHE: cache})           greedy, samples, beams; prompt lookup with PagedCache(pool)

Each forward is a step: a hook before it plans, each layer writes and attends, a hook after it commits. Padding is never
stored. Beams fork pages. It serves text decoders of full and sliding attention; others are refused.

Run: python examples/transformers_cache.py
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, LlamaConfig, MistralConfig
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from pagedkv import KVSpec, PagedKVCache, paged_attention, write_kv

NAME = "pagedkv_example"  # of our attention function; "pagedkv" is that of patch()
IS_OLD = tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 24)
CACHE = "past_key_values" if IS_OLD else "cache"  # the argument of a model that is its cache
CROP = 64  # tokens that prompt lookup may take back: a layer with a window keeps as many positions behind it


class PagedCache(Cache, AbstractContextManager):
    """The cache of one batch of generate(): address spaces in `pool`, one for each row."""

    is_linear = (False,)  # no layer is recurrent: without it, transformers would compute known columns again

    def __init__(
        self, pool: PagedKVCache, input_ids: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None
    ) -> None:
        super().__init__(layers=[])  # a Cache asks its layers; this one answers itself
        self.pool, self.step = pool, None
        self.spaces, self.columns = [], 0  # columns: tokens and padding that every row has already
        if input_ids is not None:
            mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            if (mask.diff() < 0).any():
                raise NotImplementedError("padding must stand before the prompts; set tokenizer.padding_side='left'")
            rows = [row[real.bool()].tolist() for row, real in zip(input_ids, mask, strict=True)]
            pads = (mask.shape[1] - mask.sum(1)).tolist()
            self.spaces, self.columns = pool.open_batch(rows, pads=pads)

    def begin(self, ids: torch.Tensor | None, B: int, L: int, mask: torch.Tensor | None) -> None:
        """Plan the new tokens of a forward: those of `ids` [B, L] that the last L columns of `mask` name."""
        mask = torch.ones(B, L, dtype=torch.bool) if mask is None else mask[:, -L:].bool()
        self.spaces = self.spaces or self.pool.open_batch([()] * B).spaces
        if B % len(self.spaces):
            raise ValueError(f"a batch of {B} rows over a cache of {len(self.spaces)}; make a cache for each batch")
        self.batch_repeat_interleave(B // len(self.spaces))  # beams of one prompt
        batch = self.pool.plan(self.spaces, mask.sum(1).tolist())
        batch = batch if mask.all() else batch.padded(mask)
        self.step = batch, L, None if ids is None else ids[mask].cpu().numpy()

    def update(self, k: torch.Tensor, v: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        if self.step is None:
            raise RuntimeError("call the model that connect() was given, not a part of it: its hooks plan the step")
        write_kv(as_tokens(k), as_tokens(v), self.pool[layer_idx], self.step[0][layer_idx])
        k.cache = self  # for `attention`
        return k, v

    def end(self, is_done: bool) -> None:
        """Commit the step, or undo it if the forward raised. Prompts find tokens with known ids."""
        (batch, L, ids), self.step = self.step, None
        if is_done:
            self.pool.commit(batch, ids)
            self.columns += L
        else:
            self.pool.abort(batch)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last -tokens_to_remove columns."""
        self.columns += int(tokens_to_remove)
        for space in self.spaces if tokens_to_remove else ():
            space.truncate(max(0, len(space) + int(tokens_to_remove)))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.spaces = self.pool.reorder(self.spaces, beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(len(self.spaces)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.reorder_cache(torch.arange(len(self.spaces))[indices])

    def reset(self) -> None:
        """Give the pages back. The pool keeps pages of known tokens until it needs their frames."""
        if self.step:  # Ctrl-C in a forward: torch calls no hook then
            self.end(is_done=False)
        self.spaces, self.columns = self.pool.reorder(self.spaces, []), 0

    def __exit__(self, *_: object) -> None:
        self.reset()


def as_tokens(x: torch.Tensor) -> torch.Tensor:
    """Return [B, heads, L, D] as the kernels read it, [B * L, heads, D]: a view of what models make."""
    return x.transpose(1, 2).flatten(0, 1)


def attention(module: Any, q: Any, k: Any, v: Any, mask: None, scaling: Any = None, **options: Any) -> tuple[Any, None]:
    """Return out [B, L, H, D] of q [B, H, L, D]: the function that models call by the name in their config."""
    cache = getattr(k, "cache", None)
    if cache is None or options.get("position_bias") is not None or options.get("output_attentions"):
        what = f"attn_implementation={NAME!r} attends to a PagedCache, without position_bias or output_attentions"
        raise NotImplementedError(f"{what}; pass {CACHE}=PagedCache(pool), or set another attn_implementation")
    layer = module.layer_idx
    out = paged_attention(
        as_tokens(q), cache.pool[layer], cache.step[0][layer], scale=scaling, softcap=options.get("softcap") or 0.0,
        window=cache.pool.specs[cache.pool.layer_groups[layer]].window, sinks=options.get("s_aux"),
    )  # fmt: skip
    return out.view(q.shape[0], q.shape[2], *out.shape[1:]), None


def no_mask(*_: Any, allow_is_causal_skip: bool = True, **__: Any) -> None:
    """Return no mask: pages hold no padding, and attention is causal. Any other mask is refused."""
    if not allow_is_causal_skip:
        raise NotImplementedError(f"attn_implementation={NAME!r} is causal, and this model asks for another mask")


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, no_mask)


def connect(model: Any, **options: Any) -> PagedKVCache:
    """Let `model` attend to PagedCaches from now on. Return a pool for its geometry; options are PagedKVCache's."""
    config, layers = model.config, DynamicCache(config=model.config).layers
    if config.get_text_config() is not config or {type(x) for x in layers} - {DynamicLayer, DynamicSlidingWindowLayer}:
        raise NotImplementedError(f"{type(model).__name__} is no text decoder of full and sliding attention alone")
    windows = [getattr(layer, "sliding_window", None) for layer in layers]
    groups = sorted(set(windows), key=lambda window: (window is not None, window or 0))  # all-seeing layers lead
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    shape = {"num_kv_heads": heads, "head_dim": head_dim, "dtype": str(model.dtype)[6:]}
    specs = [KVSpec(windows.count(w), **shape, window=w, keep=0 if w is None else CROP) for w in groups]

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(cache := kwargs.get(CACHE), PagedCache):
            ids = args[0] if args else kwargs.get("input_ids")
            B, L = (kwargs["inputs_embeds"] if ids is None else ids).shape[:2]
            cache.begin(ids, B, L, kwargs.get("attention_mask"))

    def after(_: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if isinstance(cache := kwargs.get(CACHE), PagedCache) and cache.step:
            cache.end(is_done=output is not None)

    model.set_attn_implementation(NAME)
    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after, with_kwargs=True, always_call=True)
    return PagedKVCache(specs, layer_groups=[groups.index(w) for w in windows], device=model.device, **options)


if __name__ == "__main__":
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 99, "initializer_range": 0.3, "eos_token_id": None}
    ids = torch.cat([torch.zeros(2, 5, dtype=torch.long), torch.arange(96).view(2, 48) % 11 + 1], 1)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0  # the second prompt has padding before it
    padded, single = {"input_ids": ids, "attention_mask": mask}, {"input_ids": ids[:1], "prompt_lookup_num_tokens": 4}
    ways = {"greedy": padded, "known": padded, "beams": padded | {"num_beams": 3}, "prompt lookup": single}
    for config in (LlamaConfig(**sizes), MistralConfig(**sizes, sliding_window=16)):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
        expected = {way: model.generate(**inputs, **options) for way, inputs in ways.items()}
        pool = connect(model, num_frames=64)
        for way, inputs in ways.items():
            # generate() looks prompts up in an empty cache only, here and with DynamicCache
            with PagedCache(pool, **({} if way == "prompt lookup" else padded)) as cache:
                computed = ids.shape[1] - cache.columns
                tokens = model.generate(**inputs, **options, **{CACHE: cache})
            assert torch.equal(tokens, expected[way]), way
            print(f"{config.model_type}, {way}: the tokens of DynamicCache; {computed} of 53 columns computed")
        assert pool.stats().mapped == 0
