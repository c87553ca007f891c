"""Patching: let `model.generate` and `model(...)` keep K and V in pages, and take that back without a trace.

    before a forward pass    plan the step from ids and mask, put "pagedkv" into the model's config
    after it, or an error    put the model's own name back, end or undo the step
    generate()               makes a PagedCache over the model's pool, maps known prefixes, and closes it at the end
    of hybrid models         generate() first computes prompts in passes that end where a state is kept

A forward pass without a PagedCache (training, use_cache=False, another cache) is that of the host.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from pagedkv.errors import InvalidRequest
from pagedkv.integrations.transformers import linears, trial
from pagedkv.integrations.transformers.attention import ACTIVE, IN_CONFIG, OF_GENERATE, register
from pagedkv.integrations.transformers.batching import BATCHING_NAME
from pagedkv.integrations.transformers.cache import PagedCache
from pagedkv.integrations.transformers.geometry import CACHE, HOST, shapes_of
from pagedkv.integrations.transformers.identity import makes_own_inputs
from pagedkv.integrations.transformers.kv_quality import _settled_kind
from pagedkv.integrations.transformers.padding import has_padding_behind, sees_nothing
from pagedkv.integrations.transformers.pool import Pool
from pagedkv.kv_gate import Gate
from pagedkv.tiers import Tier

_ATTRIBUTE: Final = "_pagedkv"  # of a patched model: its Patched
_OLD_NAME: Final = "past_key_values"  # of the argument CACHE: newer hosts rename it after our hook has run

_PLAIN_INPUTS: Final = OF_GENERATE | frozenset(
    ("attention_mask", "cache_position", "input_ids", "labels", "logits_to_keep", "output_attentions",
     "output_hidden_states", "output_router_logits", "position_ids", "return_dict", "use_cache", CACHE)
)  # fmt: skip
"""If a forward pass has no other inputs, its K and V depend on ids and positions alone."""

_DRAFTING: Final = ("assistant_model", "prompt_lookup_num_tokens")
_COMPUTED_WHOLE: Final = (
    "assistant_early_exit", "custom_generate", "output_hidden_states", "output_attentions", "token_healing", "use_mtp",
)  # fmt: skip
"""Options of generate() with which the host expects an empty cache, or returns something for each token of a prompt,
or changes the prompt. So it does when it drafts; with recurrent states, the prompt is then cut off in `_before`."""


def patch(
    model: Any,
    *,
    memory: str | int | None = None,
    kv_dtype: str | None = None,
    block_size: int = 16,
    prefix_cache: bool = True,
    tiers: Sequence[Tier | str] = (),
    state_memory: str | int | None = None,
    weights: str = "",
    pool: Pool | None = None,
    fast_linears: bool = True,
    kv_text: str | None = None,
    tokenizer: Any = None,
) -> Patched:
    """Let `model.generate` keep K and V in pages from now on, and attend to them where they lie.

    The model computes a few tokens with pages and without, and is refused if the logits differ.
    memory, block_size, prefix_cache, tiers, state_memory, weights: see Pool. pool: one of Pool.for_model(model).
    kv_dtype:     "auto" or "auto:BOUND", too: measure the kinds, and take the smallest one with a KL divergence under
                  the bound (pagedkv/kv_gate.py). It takes a minute, once for a model.
    kv_text:      a text to measure on, like those that the model will read; None for that of the package.
    tokenizer:    the tokenizer that reads it; None for that in the folder of the model.
    fast_linears: whether linear layers on a CPU compute few tokens with our operation: it reads weights faster than
                  torch, and adds in another order.
    Returns: a handle with `pool` and `unpatch()`
    Raises:  InvalidRequest for a model that pages cannot serve; the model is unchanged then
    """
    if not isinstance(model, PreTrainedModel):
        hint = "; patch(model.get_base_model())" if hasattr(model, "get_base_model") else ""
        raise InvalidRequest(f"patch got a {type(model).__name__}; give a PreTrainedModel of transformers{hint}")
    if not hasattr(model, "generate"):
        raise InvalidRequest(
            f"{type(model).__name__} has no generate(); give a model such as AutoModelForCausalLM loads"
        )
    if _ATTRIBUTE in vars(model):
        raise InvalidRequest("the model is patched already; call unpatch(model) first to patch it with other options")
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        raise InvalidRequest("the layers of the model are on several devices, and a pool is on one; load it onto one")
    if any(weight.is_meta for weight in model.parameters()):
        raise InvalidRequest("weights of the model are offloaded or not loaded, and a pool needs its device; load them")
    if pool is not None and not isinstance(pool, Pool):
        raise InvalidRequest(f"patch got a {type(pool).__name__} as its pool; give a Pool, or leave it out")
    of_pool = (memory, kv_dtype, block_size, prefix_cache, *(tiers or ()), state_memory, weights)
    if pool is not None and of_pool != (None, None, 16, True, None, ""):
        raise InvalidRequest("patch got a pool and options of a pool; give one of them")
    if model.config._attn_implementation == BATCHING_NAME:
        raise InvalidRequest("patch(model) inside of paged_batching(model); patch before its context, or after it")
    register()
    gate, is_own = Gate.of(kv_dtype, kv_text), pool is None
    if pool is None:
        kind: dict[str, Any] = {"kv_dtype": kv_dtype}
        if gate is not None:
            patched = functools.partial(Patched, model, owns_pool=True, with_linears=fast_linears)
            kind = _settled_kind(gate, model, patched, tokenizer, kv_text)
        pool = Pool(
            model.config, memory=memory, block_size=block_size, prefix_cache=prefix_cache, tiers=tiers,
            state_memory=state_memory, weights=weights, **kind,
        )  # fmt: skip
    return Patched(model, pool, owns_pool=is_own, with_linears=fast_linears)


def unpatch(model: Any) -> None:
    """Undo `patch`: the model is what it was before, and the memory of its pool is given back."""
    handle = getattr(model, "__dict__", {}).get(_ATTRIBUTE)
    if handle is None:
        raise InvalidRequest(f"unpatch of a {type(model).__name__} that is not patched")
    handle.unpatch()


class Patched:
    """A model that is patched. Made by `patch`.

    pool:             the frames that its calls of generate() share.
    attends_to_pages: whether layers read the pages. False: the model's own attention gets K and V gathered in each
                      step, because it changes them after the cache or does not use the AttentionInterface. That is no
                      faster than the cache of the host.
    resumes:          whether a prompt may be computed in parts. False for a model whose recurrent states do not allow
                      it in transformers: its prompts find nothing, and it takes no drafts.
    """

    def __init__(self, model: Any, pool: Pool, *, owns_pool: bool, with_linears: bool) -> None:
        self.model, self.pool = model, pool
        self.attends_to_pages = self.resumes = True
        self._owns_pool, self._made_for = owns_pool, (model.dtype, model.device)
        self._config = model.config.get_text_config(decoder=True)
        self._takes = inspect.signature(model.forward)
        self._rest = next((name for name, one in self._takes.parameters.items() if one.kind is one.VAR_KEYWORD), "")
        self._shares_keys = len({*pool.geometry.cached, *pool.geometry.states}) < len(pool.geometry.windows)
        self._hooks: list[Any] = []
        self._linears: list[torch.nn.Linear] = []
        pool.claim(model)
        shapes = shapes_of(model, pool.geometry)
        try:
            if with_linears:
                linears.install(model, self._linears)
            self._install()
            self.resumes = not shapes.states or trial.resumes(model, model.config)
            self.attends_to_pages = trial.served(model, shapes, self._paging, in_parts=self.resumes)
            self._shapes = shapes
            pool.fit(shapes, model.device)
            if shapes.states and self._reuses:
                vars(model)["_is_stateful"] = False  # the host refuses to draft for a model with states
            if not self.resumes:
                warnings.warn(
                    f"a model of type {model.config.model_type!r} is served without reuse of prompts: in transformers, "
                    "a pass of several tokens begins without the recurrent state before it",
                    stacklevel=3,
                )
        except BaseException:
            self._remove()
            raise

    @property
    def num_linears(self) -> int:
        """The linear layers that are ours. Zero on a GPU, or with fast_linears=False."""
        return len(self._linears)

    @property
    def _reuses(self) -> bool:
        """Whether a prompt may be computed in parts. Masks of the host, with windows, may be others for its parts."""
        return self.resumes and (self.attends_to_pages or not any(self.pool.geometry.windows))

    def unpatch(self) -> None:
        """Undo `patch`. A second call does nothing."""
        self._remove()
        if self._owns_pool:
            self.pool.close()

    def _install(self) -> None:
        self._hooks = [
            self.model.register_forward_pre_hook(self._before, with_kwargs=True),
            self.model.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]
        self._generate, self._set_before = self.model.generate, "generate" in vars(self.model)

        @functools.wraps(self._generate)
        def generate(*args: Any, **kwargs: Any) -> Any:
            return (self._paged_generate if self._hooks else self._generate)(*args, **kwargs)

        self._paged = generate
        vars(self.model).update({"generate": generate, _ATTRIBUTE: self})

    def _remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        linears.remove(self._linears)
        self._hooks, self._linears = [], []
        IN_CONFIG.take(self._config, lambda user: user[1] == id(self))
        if vars(self.model).get(_ATTRIBUTE) is self:
            del vars(self.model)[_ATTRIBUTE]
            vars(self.model).pop("_is_stateful", None)
            if vars(self.model).get("generate") is self._paged:  # not one that was put there after patch()
                del vars(self.model)["generate"]
                if self._set_before:
                    vars(self.model)["generate"] = self._generate

    @contextmanager
    def _paging(self, paged: bool) -> Iterator[None]:
        before, self.attends_to_pages = self.attends_to_pages, paged
        try:
            yield
        finally:
            self.attends_to_pages = before
            self._leave()

    # -- a forward pass ------------------------------------------------------------------------------------------------

    def _enter(self, cache: PagedCache, kept: int) -> None:
        ACTIVE.cache, ACTIVE.shared, ACTIVE.kept = cache, {} if self._shares_keys else None, kept
        IN_CONFIG.put(self._config, (get_ident(), id(self)))

    def _leave(self) -> None:
        ACTIVE.cache = ACTIVE.shared = None
        this = get_ident(), id(self)
        IN_CONFIG.take(self._config, lambda user: user == this)

    def _before(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = self._given(args, kwargs)
        cache = given.get(CACHE)
        if not isinstance(cache, PagedCache):
            self._leave()  # a forward pass before may have been interrupted
            return None
        if cache.pool.has_states:
            kwargs = self._without_known(cache, kwargs)
            given = self._given(args, kwargs)
        mask, ids = given.get("attention_mask"), given.get("input_ids")
        if mask is not None and (not isinstance(mask, torch.Tensor) or mask.ndim != 2):
            raise InvalidRequest("a PagedCache takes masks of shape [batch, tokens]; custom masks need another cache")
        tokens = ids if ids is not None else given.get("inputs_embeds")
        if tokens is None or not len(tokens):
            raise InvalidRequest("the model got no input_ids and no inputs_embeds, or a batch of no rows; give some")
        if cache.holdings.spaces:
            cache.identify()
        else:
            self._meet(cache)
        shape, positions = (tokens.shape[0], tokens.shape[1]), given.get("position_ids")
        is_plain = (
            self._reuses
            and not self.model.training
            and not set(given) - _PLAIN_INPUTS
            and (positions.ndim == 2 if positions is not None else self._counts_itself(cache))
        )
        ids = ids if is_plain else None
        returns_weights = given.get("output_attentions", getattr(self._config, "output_attentions", False))
        attends = self.attends_to_pages and not returns_weights  # the kernels keep no weights
        if cache.begin(ids, shape, mask, positions, attends=attends):
            kept = given.get("logits_to_keep", 0)
            self._enter(cache, kept if isinstance(kept, int) else 0)
        else:
            self._leave()  # a forward pass before may have been interrupted
        return (args, kwargs) if cache.pool.has_states else None

    def _counts_itself(self, cache: PagedCache) -> bool:
        """Return whether a call without positions counts them on. Some hybrid models count from zero in each call."""
        is_counted = cache.pool.has_states and "position_ids" in self._takes.parameters
        return not is_counted or not cache.get_seq_length()

    def _without_known(self, cache: PagedCache, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Bring each row of `cache` to its state. Return the arguments without columns that were computed before.

        With drafts, the host begins with all columns of the prompt. Of their logits it reads those of the drafts.
        """
        cache.settle()
        for number, ids in cache.owed():
            row = cache.row(number)
            try:
                self._compute(row, ids, None)
                row.settle()
            finally:
                row.holdings.spaces = []  # they are those of `cache`
        ahead, cache.ahead = cache.ahead, 0
        given = kwargs.get("input_ids")
        if not ahead or given is None or given.shape[1] <= ahead:
            return kwargs
        cut = {
            name: kwargs[name][..., ahead:] for name in ("input_ids", "position_ids") if kwargs.get(name) is not None
        }
        return kwargs | cut

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _compute(self, row: PagedCache, ids: list[int], most: int | None) -> None:
        """Compute the tokens `ids` of a cache of one row from its state on, in passes that end where one is kept.

        most: the most tokens of a pass
        """
        space, takes = row.holdings.spaces[0], self._takes.parameters
        while space.ready < len(ids):
            start, end = space.ready, space.stops(len(ids))[0]
            end = end if most is None else min(end, start + most)
            inputs: dict[str, Any] = {"input_ids": torch.tensor([ids[start:end]], device=self.model.device)}
            if "position_ids" in takes:
                inputs["position_ids"] = torch.arange(start, end, device=self.model.device)[None]
            if "logits_to_keep" in takes:
                inputs["logits_to_keep"] = 1
            self.model(**inputs, use_cache=True, **{CACHE: row})
            row.settle()

    def _after(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        cache = self._given(args, kwargs).get(CACHE)
        if isinstance(cache, PagedCache):
            self._leave()
            unread = cache.pending if output is not None else None
            cache.end(is_done=output is not None and unread is None)
            if unread is not None:
                cache.pending = unread
                cache.refuse_pending()

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a forward pass that are not None, with the cache at CACHE."""
        given = self._takes.bind_partial(*args, **kwargs).arguments
        given = given | given.pop(self._rest, {})
        if given.get(_OLD_NAME) is not None:
            given.setdefault(CACHE, given.pop(_OLD_NAME))
        return {name: value for name, value in given.items() if value is not None}

    def _meet(self, cache: PagedCache) -> None:
        """Prepare a cache that begins: its pool has frames for this model, and pages of its weights alone."""
        pool, now = cache.pool, (self.model.dtype, self.model.device)
        if now != self._made_for:
            raise InvalidRequest(
                f"the model is {now[0]} on {now[1]}, and was {self._made_for[0]} on {self._made_for[1]} when it was "
                "patched; call unpatch(model), then patch(model)"
            )
        pool.claim(self.model)
        if not pool.is_ready:
            pool.fit(self._shapes, self.model.device)
        cache.identify()

    # -- generate ------------------------------------------------------------------------------------------------------

    def _paged_generate(self, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        config = args[0] if args else kwargs.get("generation_config")
        given = next((kwargs[name] for name in (CACHE, _OLD_NAME) if kwargs.get(name) is not None), None)
        ids: Any = inputs if inputs is not None else kwargs.get("input_ids")
        mask = self._mask_of(ids, config, kwargs)
        if isinstance(given, PagedCache):
            self._go_on(given, mask, config)
        if given is not None or self._needs_hidden_padding(mask) or not self._is_served(config, kwargs):
            return self._generate(inputs, *args, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in (CACHE, _OLD_NAME)}  # None, if given
        cache = PagedCache(self.model.config, pool=self.pool)
        cache.may_repeat = True
        try:
            whole = _COMPUTED_WHOLE if HOST >= (5, 23) else (*_COMPUTED_WHOLE, "prefill_chunk_size")
            whole = whole if self.pool.has_states else (*_DRAFTING, *whole)
            is_whole = makes_own_inputs(self.model) or any(self._option(name, config, kwargs) for name in whole)
            if self._reuses and not is_whole and self._may_find(ids, mask, kwargs):
                self._meet(cache)
                if cache.shares and self.pool.has_states:
                    self._prefill_rows(cache, ids, mask, self._option("prefill_chunk_size", config, kwargs))
                elif cache.shares:
                    cache.find(ids, mask)
                    self._prefill(cache, ids, mask, config, kwargs)
            result = self._generate(inputs, *args, **kwargs | {CACHE: cache})
        except BaseException:
            self._leave()
            cache.reset()
            raise
        cache.may_repeat = False
        if getattr(result, CACHE, None) is not cache:
            cache.close()
        return result

    def _is_served(self, config: Any, kwargs: dict[str, Any]) -> bool:
        """Return whether a call of generate() that names no cache may have a PagedCache."""
        if self._option("use_cache", config, kwargs) is False or not self.model._supports_default_dynamic_cache():
            return False
        default = self.model.generation_config.cache_implementation
        asked = kwargs.get("cache_implementation") or getattr(config, "cache_implementation", None)
        if "offloaded" in str(asked or default):
            raise InvalidRequest(
                f"cache_implementation is {asked or default!r}, and pages are not offloaded; call without it, with "
                "patch(model, kv_dtype='int8') for half the memory, or call unpatch(model) first"
            )
        return asked is None and default in (None, "hybrid")  # "hybrid" is what the host reads as None

    def _needs_hidden_padding(self, mask: Any) -> bool:
        """Return whether the last column of a row sees no token and the host's attention is not sdpa.

        Such attention averages V of hidden padding, which pages do not store. Sinks take all the weight instead.
        """
        if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or IN_CONFIG.own(self._config) == "sdpa":
            return False
        sinks = sum(name.endswith(".sinks") for name, _ in self.model.named_parameters())
        return sinks < len(self.pool.geometry.windows) and sees_nothing(mask, self.pool.geometry.windows)

    def _go_on(self, cache: PagedCache, mask: Any, config: Any) -> None:
        """Prepare a call of generate() with a cache that the user gives."""
        if self._needs_hidden_padding(mask):
            raise InvalidRequest(
                "the attention_mask shows no token to the last column of a row, and pages have no padding; pad on the "
                "left (padding_side='left'), or call generate() without a PagedCache"
            )
        if not getattr(config, "is_assistant", False):  # an assistant goes on with the cache of the same call
            cache.pool.forget_others()

    def _option(self, name: str, config: Any, kwargs: dict[str, Any]) -> Any:
        """Return an option of a call of generate(): of the call, else of its generation config, else the model's."""
        if name in kwargs:
            return kwargs[name]  # the host lets None replace the value of a config
        value = getattr(config, name, None)
        return getattr(self.model.generation_config, name, None) if value is None else value

    def _mask_of(self, ids: Any, config: Any, kwargs: dict[str, Any]) -> Any:
        """Return the mask of a call of generate(): the one given, or else the host's guess. None for other inputs."""
        mask = kwargs.get("attention_mask")
        if mask is not None or not isinstance(ids, torch.Tensor) or ids.ndim != 2 or not ids.numel():
            return mask
        padding, ends = (self._option(name, config, kwargs) for name in ("pad_token_id", "eos_token_id"))
        ends = [] if ends is None else torch.as_tensor(ends).view(-1).tolist()
        can_guess = ids.dtype in (torch.int32, torch.int64) and "attention_mask" in self._takes.parameters
        if not can_guess or padding is None or int(padding) in ends:
            return torch.ones_like(ids)
        return (ids != int(padding)).long()

    def _may_find(self, ids: Any, mask: Any, kwargs: dict[str, Any]) -> bool:
        """Return whether prompts are ids alone, with padding before them alone."""
        inputs = set(kwargs) & set(self._takes.parameters)
        if inputs - {"attention_mask", "input_ids", "use_cache"}:
            return False
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.is_floating_point():
            return False
        is_mask = isinstance(mask, torch.Tensor) and mask.shape == ids.shape and bool(((mask == 0) | (mask == 1)).all())
        return is_mask and not has_padding_behind(mask)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _prefill(self, cache: PagedCache, ids: torch.Tensor, mask: torch.Tensor, config: Any, kwargs: Any) -> None:
        """Compute the prompts once if each has several beams or samples; the host would compute them for each."""
        copies = [self._option(name, config, kwargs) or 1 for name in ("num_beams", "num_return_sequences")]
        held = cache.get_seq_length()
        if self._option("prefill_chunk_size", config, kwargs):
            return  # the prompt may be too long to be computed at once
        if max(copies) == 1 or held >= ids.shape[1] - 1 or not bool(mask[:, :-1].any(1).all()):
            return
        chunk: dict[str, Any] = {"input_ids": ids[:, held:-1], "attention_mask": mask[:, :-1]}
        if "position_ids" in self._takes.parameters:
            chunk["position_ids"] = (mask[:, :-1].long().cumsum(1) - 1).clamp(min=0)[:, held:]
        if "logits_to_keep" in self._takes.parameters:
            chunk["logits_to_keep"] = 1
        self.model(**chunk, use_cache=True, **{CACHE: cache})

    def _prefill_rows(self, cache: PagedCache, ids: torch.Tensor, mask: torch.Tensor, most: int | None) -> None:
        """Compute all columns of the prompts but the last, each row by itself: their states are at other columns."""
        rows = []
        with ExitStack() as made:
            for row, real in zip(ids, mask.bool(), strict=True):
                rows.append(made.enter_context(PagedCache(cache.config, pool=cache.pool, salt=cache.salt)))
                rows[-1].begin_row(row[real][None])
                self._compute(rows[-1], row[:-1][real[:-1]].tolist(), most)
            cache.adopt(rows, mask[:, :-1])

    def __reduce_ex__(self, _: Any) -> Any:
        raise InvalidRequest("a patched model cannot be copied or pickled, as its pages cannot; call unpatch() before")

    def __repr__(self) -> str:
        how = "attends to pages" if self.attends_to_pages else "gathers K and V"
        return f"Patched({type(self.model).__name__}, {how}, {self.pool})"
