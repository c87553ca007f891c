"""PagedCache: the cache of one batch of sequences, for `cache` of a transformers model.

A forward pass of the model is a step:

    begin     frames for the new tokens are planned, before the first layer
    layers    each layer writes its K and V, and attends to the pages
    end       the step stays outstanding, so that `crop` can take drafts back: it is committed with fewer tokens
    settle    the next step, a reordering of beams or `close` commits it

Two modes. With the hooks of `patch`, layers attend to pages ("pagedkv", attention.py): padding is never stored, and
nothing is gathered. With any other attention function, `update` stores what it gets, padding too, and returns K and V
gathered from the pages. A cache stays in the mode of its first step.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from pagedkv import PagedBatch, gather_kv, write_kv
from pagedkv.errors import InvalidRequest
from pagedkv.integrations.transformers.geometry import CACHE, Shape
from pagedkv.integrations.transformers.identity import identity_of, is_reproducible
from pagedkv.integrations.transformers.pool import Pool
from pagedkv.integrations.transformers.step import Holdings, Step


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """The layer object that transformers expects; PagedCache keeps all its data."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: PagedCache, number: int, window: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of, self._number = weakref.ref(cache), number  # no circle: a dropped cache gives its pages back at once
        self.is_sliding = window is not None
        if window is not None:
            self.sliding_window = window

    @property
    def _cache(self) -> PagedCache:
        cache = self._of()
        if cache is None:
            raise InvalidRequest("a layer of a PagedCache that was dropped; keep the cache while you use its layers")
        return cache

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """Whether the layer has tokens."""
        return bool(self._cache.holdings.spaces)

    @is_initialized.setter
    def is_initialized(self, value: bool) -> None:
        """Ignore transformers' assignment: the cache knows whether the layer has tokens."""

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]
        """[B, K, L, D]: a copy, in columns of the host. None if there are no tokens."""
        return self._cache.gathered(self._number)[0] if self.is_initialized else None

    @keys.setter
    def keys(self, value: Any) -> None:
        """The host clears what this layer does not keep."""

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]
        """[B, K, L, Dv]: a copy, in columns of the host. None if there are no tokens."""
        return self._cache.gathered(self._number)[1] if self.is_initialized else None

    @values.setter
    def values(self, value: Any) -> None:
        """The host clears what this layer does not keep."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """The pool was made before."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """See PagedCache.update."""
        return self._cache.update(key_states, value_states, self._number)

    def get_seq_length(self) -> int:
        """Return the columns that the layer has stored, padding included."""
        return self._cache.get_seq_length(self._number)

    def get_max_length(self) -> int:
        """Return the window, or -1."""
        return self.sliding_window if self.is_sliding else -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (columns that `update` will return, the first of them)."""
        return self._cache.get_mask_sizes(query_length, self._number)


class PagedCache(Cache):
    """Sequences in pages: what `model(..., cache=)` and `model.generate(..., cache=)` take.

        cache = PagedCache(model.config)                any model, any attention: K and V are gathered in each step
        patch(model); model.generate(...)               makes one for each call, and the kernels read its pages

    Before transformers 5.24, the argument is `past_key_values`. Newer ones take that name too, with a warning.
    config: the model's config. pool: a pool shared with other caches; None: an own pool, made of `options`, see Pool.
    salt:   prompts find pages with the same salt alone. It is added to what the model computes with: the adapters of
            PEFT and autocast.
    It is a context manager: the pages are given back at its end. Then, or when `close` is called, full pages of known
    tokens can be found by later prompts of the same pool.
    Raises: InvalidRequest for a model that pages cannot serve
    """

    def __init__(self, config: Any, *, pool: Pool | None = None, salt: bytes = b"", **options: Any) -> None:
        if pool is not None and not isinstance(pool, Pool):
            raise InvalidRequest(f"PagedCache got a {type(pool).__name__} as its pool; give a Pool, or leave it out")
        if pool is not None and options:
            raise InvalidRequest(f"PagedCache got a pool and {sorted(options)}; these are options of the pool")
        self.pool: Pool = Pool(config, **options) if pool is None else pool
        geometry = self.pool.geometry
        super().__init__(
            layers=[
                PagedLayer(self, number, window) if number in geometry.cached else _dummy()
                for number, window in enumerate(geometry.windows)
            ]
        )
        self.config, self.salt, self.holdings = config, salt, Holdings()
        self._columns = 0
        self._mask: torch.Tensor | None = None  # bool [B, columns]: which columns are tokens. None: all
        self._mode: bool | None = None  # whether layers attend to pages; None before the first step
        self._identity = identity_of(None, salt)  # with the model as it was when the cache began
        self._is_identified = False  # whether the pages of the pool are those of the weights now
        self.shares = True  # whether its pages can be found, and it finds pages
        self.may_repeat = False  # whether a step may have beams of the rows: in generate()
        self.pending: tuple[int, torch.Tensor, torch.Tensor] | None = None
        self.pool.add(self, self.holdings)

    # -- the step ------------------------------------------------------------------------------------------------------

    def begin(
        self,
        ids: torch.Tensor | None,
        shape: tuple[int, int],
        mask: torch.Tensor | None,
        positions: torch.Tensor | None = None,
        *,
        paged: bool,
    ) -> None:
        """Plan the step of a forward pass with `shape` (rows, columns) of new tokens.

        ids:       the token ids, [B, L], or None if pages of these tokens must not be shared.
        mask:      which columns of each row are tokens, [B, columns so far + L]. None: all.
        positions: for which the model computes K, [B or 1, L]; None: the host counts columns. Pages are not shared if
                   these are not the places of the tokens in their sequence.
        """
        rows, width = shape
        mask = None if mask is None else mask.bool()
        real = None if mask is None or bool(mask[:, -width:].all()) else mask[:, -width:]
        with self.pool.lock:
            self.settle()
            if self._mode not in (None, paged):
                raise InvalidRequest(
                    "the attention function changed while this cache holds tokens; use a new PagedCache for each batch"
                )
            self._set_rows(rows)
            if paged:
                self._refuse_other_columns(mask, width)
            stored = real if paged else None
            counts = [width] * rows if stored is None else stored.sum(1).tolist()
            batch = tokens = self.pool.plan(self, counts)
            try:
                known = None
                if (
                    ids is not None
                    and self.shares
                    and (paged or real is None)
                    and self._counts_up(positions, batch, stored)
                ):
                    known = _packed(ids, stored).to(torch.int32).numpy()
                if stored is not None:
                    batch = batch.padded(stored.to(self.pool.kv.device))
            except BaseException:
                self.pool.kv.abort(batch)
                raise
            self._mode, self.holdings.step = paged, Step(batch, width, known, paged, tokens, stored)
            self._mask = mask if paged and (real is not None or self._mask is not None) else None

    def _counts_up(self, positions: torch.Tensor | None, batch: Any, real: torch.Tensor | None) -> bool:
        """Return whether the positions of the tokens are their places in their sequences, and pages can be shared."""
        if not self.pool.finds_prefixes:
            return False
        rows, width = len(batch.plan.counts), int(batch.plan.counts.max()) if real is None else real.shape[1]
        if positions is None:
            positions = torch.arange(self._columns, self._columns + width)[None]
        if positions.shape not in ((1, width), (rows, width)):
            return False
        return _packed(positions.expand(rows, width), real).equal(torch.from_numpy(batch.plan.positions))

    def can_attend_to_pages(self, mask: torch.Tensor | None) -> bool:
        """Return whether the steps of this cache can attend to pages; its first mask decides.

        Padding behind tokens is computed by the host, which reads what it computes. Pages have no padding: for such
        prompts K and V are gathered, with the padding.
        """
        return mask is None or not has_padding_behind(mask) if self._mode is None else self._mode

    def _refuse_other_columns(self, mask: torch.Tensor | None, width: int) -> None:
        """Raise unless the mask has a column for each token so far, and shows those that were stored."""
        if mask is not None and mask.shape[1] != self._columns + width:
            raise InvalidRequest(
                f"a mask of {mask.shape[1]} columns for {self._columns} columns in the cache and {width} new ones; "
                "give one column for each"
            )
        before = None if mask is None else mask[:, :-width]
        if self._mask is None:
            is_same = before is None or bool(before.all())
        else:
            is_same = before is not None and before.shape == self._mask.shape and before.equal(self._mask)
        if not is_same:
            raise InvalidRequest(
                "the mask of the columns before this call is another than in the calls before; padding is not stored, "
                "so give the same mask with a column for each new token"
            )

    def end(self, *, is_done: bool) -> None:
        """End the step: it stays outstanding until `settle`, or is undone if the forward pass raised."""
        with self.pool.lock:
            self.pending, step = None, self.holdings.step
            if step is not None and not step.done:
                step.done = is_done
                if is_done:
                    self._columns += step.width
                else:
                    self._abort()

    def settle_ended(self) -> None:
        """Commit the step if its forward pass has ended."""
        with self.pool.lock:
            if self.holdings.step is not None and self.holdings.step.done:
                self.settle()

    def settle(self, dropped: int = 0) -> None:
        """Commit the step under way, but for the last `dropped` columns of each row. Undo one that was interrupted."""
        with self.pool.lock:
            step = self.holdings.step
            if step is not None and self._is_whole(step):
                self.end(is_done=True)  # without hooks, the forward pass does not say that it ends
            if step is not None and not step.done:
                self._abort()
            elif step is not None:
                kept, ids = None, step.ids
                if dropped:
                    counts = step.batch.plan.counts
                    kept = (counts - dropped).clip(0)
                    if ids is not None:
                        starts = step.batch.plan.cu_seqlens_q[:-1]
                        parts = [ids[start : start + count] for start, count in zip(starts, kept, strict=True)]
                        ids = np.concatenate(parts)
                self.pool.kv.commit(step.batch, ids, kept)
                self.holdings.step = None
                self._forget_columns(dropped)

    def _forget_columns(self, dropped: int) -> None:
        self._columns = max(0, self._columns - dropped)
        self._mask = None if self._mask is None else self._mask[:, : self._columns]

    def _is_whole(self, step: Step) -> bool:
        """Return whether all layers have stored K and V in a step of a cache without hooks."""
        return not step.paged and not step.done and len(step.stored) == len(self.pool.geometry.cached)

    def _abort(self) -> None:
        step, self.holdings.step = self.holdings.step, None
        self._forget_columns(0)
        if step is not None and self.pool.is_ready:
            self.pool.kv.abort(step.batch)

    def _set_rows(self, rows: int) -> None:
        """Open the sequences of a first step, or repeat those of prompts whose beams begin."""
        held = len(self.holdings.spaces)
        if not held:
            self.holdings.spaces = list(self.pool.kv.open_batch([()] * rows, salt=self._identity).spaces)
        elif rows > held and rows % held == 0 and self.may_repeat:
            self.batch_repeat_interleave(rows // held)
        elif rows != held:
            raise InvalidRequest(f"the batch has {rows} rows and the cache {held}; use a new PagedCache for each batch")

    # -- what layers call ----------------------------------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the K and V of new tokens, [B, K, L, D].

        Returns: the tensors to attend to. With paged attention the given tensors, which attention.py stores; else K
                 and V of all columns that the layer sees, gathered
        """
        step = self.holdings.step
        if step is not None and step.paged and not step.done:
            if self.pending is not None:
                self.refuse_pending()
            self.pending = (layer_idx, key_states, value_states)
            return key_states, value_states
        gathered: tuple[torch.Tensor, torch.Tensor] = self._store_and_gather(key_states, value_states, layer_idx)
        return gathered

    def refuse_pending(self) -> None:
        """Raise because a layer gave K and V to the cache and did not attend through our attention function."""
        layer = self.pending[0] if self.pending is not None else -1
        self.pending = None
        raise InvalidRequest(
            f"layer {layer} does not attend through the AttentionInterface of transformers, so it cannot read pages; "
            f"pass {CACHE}=PagedCache(model.config) to the model without patch()"
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _store_and_gather(self, k: torch.Tensor, v: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise InvalidRequest("pages have no gradients; call the model under no_grad(), or with use_cache=False")
        if layer not in self.pool.geometry.cached:
            raise InvalidRequest(f"layer {layer} stores K and V, and its config says that it has none of its own")
        step = self.holdings.step
        if step is not None and not step.done and layer in step.stored and not self._is_whole(step):
            missing = sorted(set(self.pool.geometry.cached) - step.stored)[:8]
            self._abort()
            raise InvalidRequest(
                f"the forward pass before ended while layers {missing} had stored no K and V; its tokens were taken "
                "back, so call the model again. If no error has interrupted it, the model is not served"
            )
        if step is None or step.done or layer in step.stored:
            if not self.pool.is_ready:
                self.pool.fit(dict.fromkeys(self.pool.geometry.cached, Shape.of(k, v)), k.device)
            self.begin(None, (k.shape[0], k.shape[2]), None, paged=False)
            step = self.holdings.step
            assert step is not None
        place, kv = self.pool.place(layer), self.pool.kv
        spec = kv.specs[kv.layer_groups[place]]
        if (k.shape[1], k.shape[-1], v.shape[-1]) != (spec.num_kv_heads, spec.head_dim, spec.head_dim_v):
            raise InvalidRequest(
                f"layer {layer} has {k.shape[1]} heads of {k.shape[-1]} and {v.shape[-1]} elements, and the pool is "
                f"made for {spec.num_kv_heads} of {spec.head_dim} and {spec.head_dim_v}; use pool=Pool.for_model(model)"
            )
        write_kv(k.transpose(1, 2).flatten(0, 1), v.transpose(1, 2).flatten(0, 1), kv[place], step.batch[place])
        step.stored.add(layer)
        return self.gathered(layer)

    def gathered(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K [B, K, L, D] and V [B, K, L, Dv] of the columns that the layer sees: copies, padding as zeros."""
        place, kv, step = self.pool.place(layer), self.pool.kv, self.holdings.step
        width = step.width if step is not None else 0
        if step is None or (layer not in step.stored and not (step.paged and step.done)):
            with self.pool.lock:
                self.settle()
                batch, width = kv.plan(self.holdings.spaces, [0] * len(self.holdings.spaces)), 0
                try:
                    return self._gather(place, batch[place], self.get_seq_length(layer), width)
                finally:
                    kv.abort(batch)
        return self._gather(place, step.batch[place], self.get_seq_length(layer), width)

    def _gather(self, place: int, batch: PagedBatch, columns: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        kv = self.pool.kv
        layer, spec = kv[place], kv.specs[kv.layer_groups[place]]
        seen = columns if spec.window is None else min(columns, spec.window - 1 + width)
        rows, dtype = len(self.holdings.spaces), getattr(torch, spec.dtype)
        k = torch.empty(rows, spec.num_kv_heads, seen, spec.head_dim, dtype=dtype, device=kv.device)
        v = torch.empty(rows, spec.num_kv_heads, seen, layer.v.shape[-1], dtype=dtype, device=kv.device)
        gather_kv(layer, batch, batch.seq_lens - seen, (k.transpose(1, 2), v.transpose(1, 2)))
        return k, v

    # -- lengths -------------------------------------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the columns that the layer has stored, padding included."""
        step = self.holdings.step
        under_way = step is not None and not step.done and (layer_idx in step.stored)
        return self._columns + (step.width if step is not None and under_way else 0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return (columns that `update` will return, the first of them)."""
        seen, window = self.get_seq_length(layer_idx), self.pool.geometry.windows[layer_idx]
        first = 0 if window is None else max(seen - window + 1, 0)
        return seen - first + query_length, first

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return the window of the layer, or -1: a paged cache grows."""
        window = None if layer_idx is None else self.pool.geometry.windows[layer_idx]
        return -1 if window is None else window

    @property
    def batch_size(self) -> int:
        """Rows of the batch, or -1 before the first step."""
        return len(self.holdings.spaces) or -1

    @property
    def is_compileable(self) -> bool:
        """False: generate() does not compile the forward pass by itself."""
        return False

    # -- the batch as a whole ------------------------------------------------------------------------------------------

    def find(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> int:
        """Map the pages that the pool has of these prompts; return how many leading columns need no computation.

        For an empty cache. Prompts with padding inside or behind them find nothing, nor does a model in training mode.
        Shapes: input_ids, attention_mask [B, L]
        """
        if self.holdings.spaces or not self.pool.is_ready or not self.pool.finds_prefixes:
            return 0
        self.identify()
        if not self.shares:
            return 0
        mask = (torch.ones_like(input_ids) if attention_mask is None else attention_mask).bool().int()
        if mask.shape != input_ids.shape or has_padding_behind(mask):
            return 0
        rows = [row[real.bool()].tolist() for row, real in zip(input_ids, mask, strict=True)]
        pads = (mask.shape[1] - mask.sum(1)).tolist()
        with self.pool.lock:
            self.pool.sweep()
            spaces, columns = self.pool.kv.open_batch(rows, pads=pads, salt=self._identity)
            self.holdings.spaces = list(spaces)
            self._columns = columns
            self._mask = mask[:, :columns].bool() if columns and not bool(mask[:, :columns].all()) else None
        return columns

    def identify(self) -> None:
        """Let the cache share pages with prompts that the same model would compute alike, and with no others."""
        model = self.pool.model
        if model is not None and not self._is_identified:
            self.pool.forget_others()
            self._identity = identity_of(model, self.salt)
            self.shares, self._is_identified = is_reproducible(model), True
        elif self._is_identified and self._identity != identity_of(model, self.salt):
            self.shares = False  # other adapters go on with these tokens

    def _rearrange(self, index: Sequence[int]) -> None:
        with self.pool.lock:
            self.settle()
            if list(index) != list(range(len(self.holdings.spaces))):
                self.holdings.spaces = self.pool.kv.reorder(self.holdings.spaces, index)
                self._mask = None if self._mask is None else self._mask[list(index)]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row i continue row beam_idx[i]. Pages are shared; no bytes are copied."""
        self._rearrange(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times. Pages are shared; no bytes are copied."""
        self._rearrange([row for row in range(len(self.holdings.spaces)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows that `indices` names, by number or as a mask of bools."""
        self._rearrange(torch.arange(len(self.holdings.spaces))[torch.as_tensor(indices).cpu()].tolist())

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last -tokens_to_remove columns. A positive number, as before 5.20, is the length to keep.

        Raises: InvalidRequest beyond the positions that a window has kept
        """
        dropped, held = int(tokens_to_remove), self.get_seq_length()
        dropped = -dropped if dropped <= 0 else max(0, held - dropped)
        with self.pool.lock:
            step = self.holdings.step
            if step is not None and 0 < dropped <= step.width and bool((step.batch.plan.counts == step.width).all()):
                return self.settle(dropped)
            self.settle()
            tokens = [dropped] * len(self.holdings.spaces)
            if self._mask is not None:
                tokens = self._mask[:, max(0, self._columns - dropped) :].sum(1).tolist()
            for space, count in zip(self.holdings.spaces, tokens, strict=True):
                space.truncate(max(0, len(space) - count))
            self._forget_columns(dropped)

    def __deepcopy__(self, _: Any) -> PagedCache:
        """Return a cache that continues the same sequences. Pages are shared; no bytes are copied."""
        other = PagedCache(self.config, pool=self.pool, salt=self.salt)
        with self.pool.lock:
            self.settle()
            other.holdings.spaces = [space.fork() for space in self.holdings.spaces]
        other._columns, other._mask, other._mode = self._columns, self._mask, self._mode
        other._is_identified, other._identity, other.shares = self._is_identified, self._identity, self.shares
        return other

    __copy__ = None  # a shallow copy would give pages back twice

    def activate_past_recording(self) -> None:
        """Do nothing: drafts can be taken back always."""

    def reset(self) -> None:
        """Give all pages back; the cache is empty, and may be used again."""
        with self.pool.lock:
            self.pending = None
            self.holdings.release(self.pool)
            if self._is_identified:
                self.pool.forget_others()  # the weights changed meanwhile
            self._columns, self._mask, self._mode = 0, None, None
            self._is_identified, self.shares, self.may_repeat = False, True, False

    close = reset

    def __enter__(self) -> PagedCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"PagedCache({len(self.holdings.spaces)} rows, {self.get_seq_length()} columns, {self.pool})"


def has_padding_behind(mask: torch.Tensor) -> bool:
    """Return whether a row of a mask, [B, L], has padding after a token."""
    return bool((mask.bool().int().diff() < 0).any())


def _packed(columns: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """Return the numbers of the tokens, on the CPU, without those of padding. Shapes: columns, real [B, L]."""
    columns = columns.cpu()
    return (columns if real is None else columns[real.cpu()]).reshape(-1)


def _dummy() -> Any:
    """Return the host's layer that stores nothing, for layers that use the K and V of others."""
    from transformers.cache_utils import DummyLayer

    return DummyLayer()  # type: ignore[no-untyped-call]
