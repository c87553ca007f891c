"""PagedCache: the cache of one batch of sequences, for `cache` of a transformers model.

A forward pass of the model is a step:

    begin     frames for the new tokens are planned, before the first layer
    layers    each layer writes its K and V, and attends to the pages
    end       the step stays outstanding, so that `crop` can take drafts back: it is committed with fewer tokens
    settle    the next step, a reordering of beams or `close` commits it

Two kinds of steps. With the hooks of `patch`, layers attend to pages ("pagedkv", attention.py): nothing is gathered.
If pages would show a token something else than the host does (padding.py), and with any other attention function,
`update` returns K and V gathered from the pages, in columns of the host. The hooks know the mask, so padding is not
stored; without them it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin

from pagedkv import AddressSpace, PagedBatch, gather_kv, write_kv
from pagedkv.core import Receipt
from pagedkv.errors import InvalidRequest
from pagedkv.integrations.transformers.geometry import CACHE, Shape, Shapes
from pagedkv.integrations.transformers.identity import identity_of, is_reproducible
from pagedkv.integrations.transformers.padding import computes_padding, has_padding_behind, spread, windows_agree
from pagedkv.integrations.transformers.pool import Pool
from pagedkv.integrations.transformers.state_layers import UNPATCHED, StateLayers
from pagedkv.integrations.transformers.step import Holdings, Step


class _PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
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


class PagedCache(StateLayers):
    """Sequences in pages: what `model(..., cache=)` and `model.generate(..., cache=)` take.

        cache = PagedCache(model.config)                any model, any attention: K and V are gathered in each step
        patch(model); model.generate(...)               makes one for each call, and the kernels read its pages

    Before transformers 5.24, the argument is `past_key_values`. Newer ones take that name too, with a warning.
    config: the model's config. pool: a pool shared with other caches; None: an own pool, made of `options`, see Pool.
    salt:   prompts find pages with the same salt alone. It is added to what the model computes with: the adapters of
            PEFT and autocast.
    A model with recurrent states needs `patch`, with which it may have a PagedCache of its pool.
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
                _PagedLayer(self, number, window) if number in geometry.cached else _dummy()
                for number, window in enumerate(geometry.windows)
            ]
        )
        self.config, self.salt, self.holdings = config, salt, Holdings()
        self._columns = 0
        self._receipts: list[Receipt | None] = []
        self._mask: torch.Tensor | None = None  # bool [B, columns]: which columns are stored. None: all
        self._lacking: dict[int, int] = {}  # layer: its first column that has no K and V
        self._identity = identity_of(None, salt)  # with the model as it was when the cache began
        self._is_identified = False  # whether the pages of the pool are those of the weights now
        self.shares = True  # whether its pages can be found, and it finds pages
        self.may_repeat = False  # whether a step may have beams of the rows: in generate()
        self.ahead = 0  # columns that were computed before generate() began, with states
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
        attends: bool | None,
    ) -> bool:
        """Plan the step of a forward pass with `shape` (rows, columns) of new tokens.

        ids:       the token ids, [B, L], or None if pages of these tokens must not be shared.
        mask:      which columns of each row are tokens, [B, columns so far + L]. None: all.
        positions: for which the model computes K, [B or 1, L]; None: the host counts columns. Pages are not shared if
                   these are not the places of the tokens in their sequence.
        attends:   whether layers can attend to pages. None if the model is not patched: a layer's `update` calls.
        Returns: whether layers attend to pages in this step
        """
        rows, width = shape
        with self.pool.lock:
            self.settle()
            self._set_rows(rows)
            if mask is not None and len(mask) != rows and not (self._mask is None and bool(mask.all())):
                raise InvalidRequest(f"the attention_mask has {len(mask)} rows and the batch {rows}; give one for each")
            if mask is None and self._mask is not None and not self.pool.geometry.cached:
                mask = torch.nn.functional.pad(self._mask, (0, width), value=True)  # some models of states take no mask
            fits = attends is not None and self._fits(mask, width)
            if self.pool.has_states and mask is not None and has_padding_behind(mask):
                fits = False  # the host's states go on over such padding
            if not fits:  # Store padding too. A later mask may then show any of these columns.
                mask = None if self._mask is None else torch.nn.functional.pad(self._mask, (0, width), value=True)
            mask = None if mask is None else mask.bool()
            real = None if mask is None or bool(mask[:, -width:].all()) else mask[:, -width:]
            agrees = fits and (mask is None or windows_agree(mask, width, self.pool.geometry.windows))
            paged = bool(attends) and agrees and (mask is None or real is None or not computes_padding(mask, width))
            counts = [width] * rows if real is None else real.sum(1).tolist()
            batch = tokens = self.pool.plan(self, counts)
            try:
                known = None
                if ids is not None and agrees and self.shares and self._counts_up(positions, batch, real):
                    known = _packed(ids, real).to(torch.int32).numpy()
                if paged and real is not None:
                    batch = batch.padded(real.to(self.pool.kv.device))
            except BaseException:
                self.pool.kv.abort(batch)
                raise
            states = self.pool.states_of(tokens)
            step = Step(batch, width, known, paged, tokens, real, attends is not None, states)
            self.holdings.step = step
            self._mask = mask if real is not None or self._mask is not None else None
        return paged

    def _counts_up(self, positions: torch.Tensor | None, batch: Any, real: torch.Tensor | None) -> bool:
        """Return whether the positions of the tokens are their places in their sequences, and pages can be shared."""
        if not self.pool.finds_prefixes and not self.pool.has_states:
            return False
        rows, width = len(batch.plan.counts), int(batch.plan.counts.max()) if real is None else real.shape[1]
        if positions is None:
            positions = torch.arange(self._columns, self._columns + width)[None]
        if positions.shape not in ((1, width), (rows, width)):
            return False
        return _packed(positions.expand(rows, width), real).equal(torch.from_numpy(batch.plan.positions))

    def _fits(self, mask: torch.Tensor | None, width: int) -> bool:
        """Return whether a mask has a column for each token so far, and shows those that are stored and no others.

        The host takes other masks too: columns that a mask lacks are hidden, and those that it has too many are not
        read. They are served by gathering, without a step over pages.
        Raises: InvalidRequest if it shows a column that is not stored, or is missing while the cache holds padding
        """
        if self._mask is None:
            return mask is None or (mask.shape[1] == self._columns + width and bool(mask[:, :-width].all()))
        if mask is None:
            raise InvalidRequest(
                "the cache holds padding and the call has no attention_mask; give the attention_mask of the calls "
                "before with a column for each new token"
            )
        before = mask[:, : self._columns].bool().to(self._mask.device)  # `find` has it where the user has it
        if before.equal(self._mask):
            return mask.shape[1] == self._columns + width
        if not bool((before & ~self._mask[:, : before.shape[1]]).any()):
            return False
        raise InvalidRequest(
            "the attention_mask shows columns that were padding in the calls before, and padding is not stored; give "
            "the attention_mask of the calls before with a column for each new token"
        )

    def end(self, *, is_done: bool) -> None:
        """End the step: it stays outstanding until `settle`, or is undone if the forward pass raised."""
        with self.pool.lock:
            self.pending, step = None, self.holdings.step
            if step is not None and not step.done:
                step.done = is_done and bool(step.stored or (step.states and step.states.touched))
                if step.done:
                    missing = set(self.pool.geometry.cached) - step.stored
                    if step.states is not None:
                        step.states.write()
                        missing |= step.states.missing
                    for layer in missing:
                        self._lacking.setdefault(layer, self._columns)
                    self._columns += step.width
                    step.ids = None if self._lacking else step.ids
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
        self._lacking = {layer: first for layer, first in self._lacking.items() if first < self._columns}
        self._keep(None if self._mask is None else self._mask[:, : self._columns])

    def _keep(self, mask: torch.Tensor | None) -> None:
        self._mask = None if mask is None or bool(mask.all()) else mask

    def _is_whole(self, step: Step) -> bool:
        """Return whether all layers have stored K and V in a step of a cache without hooks."""
        return not step.is_hooked and not step.done and len(step.stored) == len(self.pool.geometry.cached)

    def note_stored(self, layer: int) -> None:
        """Note that `layer` stores K and V of the step's tokens. A page can be found if each layer has.

        Raises: InvalidRequest if it has stored them before, or has not stored those of the steps before
        """
        step = self.holdings.step
        if step is not None and layer in step.stored:
            raise InvalidRequest(
                f"layer {layer} stores K and V twice in a forward pass, which pages do not serve; use the model "
                "without patch()"
            )
        self.note_complete(layer)
        if step is not None:
            step.stored.add(layer)

    def note_complete(self, layer: int) -> None:
        """Raise InvalidRequest if a forward pass before has not computed `layer`."""
        if layer in self._lacking:
            raise InvalidRequest(
                f"layer {layer} has not computed all tokens of the cache: a forward pass before used fewer layers; "
                "crop its tokens, use a new PagedCache, or as many layers in each call"
            )

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
        if layer_idx >= len(self.layers):
            raise InvalidRequest(
                f"layer {layer_idx} stores K and V, and the pool was made for {len(self.layers)} layers; make it, or "
                "patch the model, with as many layers as a call may use"
            )
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
        if step is None or step.done or (layer in step.stored and not step.is_hooked):
            if step is not None and not step.done and not self._is_whole(step):
                missing = sorted(set(self.pool.geometry.cached) - step.stored)[:8]
                self._abort()
                raise InvalidRequest(
                    f"the forward pass before ended while layers {missing} had stored no K and V; its tokens were "
                    "taken back, so call the model again. If no error has interrupted it, the model is not served"
                )
            if self.pool.geometry.states:
                raise InvalidRequest(UNPATCHED)
            if not self.pool.is_ready:
                shapes = Shapes(dict.fromkeys(self.pool.geometry.cached, Shape.of(k, v)), {})
                self.pool.fit(shapes, k.device)
            self.begin(None, (k.shape[0], k.shape[2]), None, attends=None)
            step = self.holdings.step
            assert step is not None
        place, kv = self.pool.place(layer), self.pool.kv
        spec = kv.specs[kv.layer_groups[place]]
        if (k.shape[1], k.shape[-1], v.shape[-1]) != (spec.num_kv_heads, spec.head_dim, spec.head_dim_v):
            raise InvalidRequest(
                f"layer {layer} has {k.shape[1]} heads of {k.shape[-1]} and {v.shape[-1]} elements, and the pool is "
                f"made for {spec.num_kv_heads} of {spec.head_dim} and {spec.head_dim_v}; use pool=Pool.for_model(model)"
            )
        self.note_stored(layer)
        real = None if step.real is None else step.real.to(k.device)
        k, v = (x.transpose(1, 2).flatten(0, 1) if real is None else x.transpose(1, 2)[real] for x in (k, v))
        write_kv(k, v, kv[place], step.tokens[place])
        return self.gathered(layer)

    def gathered(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K [B, K, L, D] and V [B, K, L, Dv] of the columns that the layer sees: copies, padding as zeros."""
        place, kv, step = self.pool.place(layer), self.pool.kv, self.holdings.step
        width = step.width if step is not None else 0
        if step is None or (layer not in step.stored and not (step.paged and step.done)):
            if self.owed():
                raise InvalidRequest("K and V of a cache with states after crop(); call the model before you read them")
            with self.pool.lock:
                self.settle()
                batch, width = kv.plan(self.holdings.spaces, [0] * len(self.holdings.spaces)), 0
                try:
                    return self._gather(place, batch[place], self.get_seq_length(layer), width)
                finally:
                    kv.abort(batch)
        return self._gather(place, step.tokens[place], self.get_seq_length(layer), width)

    def _gather(self, place: int, batch: PagedBatch, columns: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        kv = self.pool.kv
        spec = kv.specs[kv.layer_groups[place]]
        seen = columns if spec.window is None else min(columns, spec.window - 1 + width)
        real = None if self._mask is None else self._mask[:, columns - seen : columns]
        counts = None if real is None else real.sum(1, dtype=torch.int32).to(kv.device)
        most = seen if counts is None else int(counts.max())
        rows, dtype = len(self.holdings.spaces), getattr(torch, spec.dtype)
        k = torch.empty(rows, spec.num_kv_heads, most, spec.head_dim, dtype=dtype, device=kv.device)
        v = torch.empty(rows, spec.num_kv_heads, most, spec.value_dim, dtype=dtype, device=kv.device)
        first = batch.seq_lens - (seen if counts is None else counts)
        gather_kv(kv[place], batch, first, (k.transpose(1, 2), v.transpose(1, 2)))
        return (k, v) if real is None else (spread(k, real), spread(v, real))

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
        With recurrent states, all rows need a state after the same column.
        Shapes: input_ids, attention_mask [B, L]
        """
        if self.holdings.spaces or not self.pool.is_ready or not self.pool.finds_prefixes:
            return 0
        self.identify()
        if not self.shares:
            return 0
        mask = (torch.ones_like(input_ids) if attention_mask is None else attention_mask).bool().int()
        if mask.shape != input_ids.shape or has_padding_behind(mask) or not bool(mask.any()):
            return 0
        rows = [row[real.bool()].tolist() for row, real in zip(input_ids, mask, strict=True)]
        pads = (mask.shape[1] - mask.sum(1)).tolist()
        fetches = self.pool.fetch(rows, self._identity)
        with self.pool.lock:
            self.pool.sweep()
            self._receipts = [self._receipt(row) for row in rows]
            spaces, columns = self.pool.kv.open_batch(rows, pads=pads, salt=self._identity)
            self.holdings.spaces = list(spaces)
            if self.pool.has_states:
                columns = self._resumed(spaces, pads)
            for fetch in fetches:
                fetch.cancel()
            self._columns = columns
            self._keep(mask[:, :columns].bool())
        return columns

    def _receipt(self, row: list[int]) -> Receipt:
        return Receipt.of(self.pool.kv.why(row, salt=self._identity, private=True), len(row))

    def receipt(self, row: int = 0) -> Receipt | None:
        """Return what the pool knew of the prompt of a row, and why no more. None if no prompt was looked up.

        A row of a padded batch may compute more: its known columns are those that all rows know.
        """
        return self._receipts[row] if 0 <= row < len(self._receipts) else None

    def _resumed(self, spaces: Sequence[AddressSpace], pads: Sequence[int]) -> int:
        """Return the column after which each row has a state. If there is none, the rows begin without one."""
        ends = {pad + space.ready for pad, space in zip(pads, spaces, strict=True)}
        if len(ends) == 1:
            return ends.pop()
        for space in spaces:
            space.truncate(0)
        return 0

    def begin_row(self, ids: torch.Tensor) -> None:
        """Open the sequence of one prompt, [1, L], at the last state that the pool has of it."""
        self.find(ids)
        if not self.holdings.spaces:
            self.identify()
            self._set_rows(1)

    def adopt(self, rows: Sequence[PagedCache], mask: torch.Tensor) -> None:
        """Take over the sequences of caches of one row each, which hold the tokens of `mask` [B, L]."""
        self.identify()
        with self.pool.lock:
            for row in rows:
                row.settle()
            self._receipts = [row.receipt() for row in rows]
            self.holdings.spaces = [row.holdings.spaces[0] for row in rows]
            for row in rows:
                row.holdings.spaces = []
            self._columns = self.ahead = mask.shape[1]
            self._keep(mask.bool())

    def owed(self) -> list[tuple[int, list[int]]]:
        """Return (row, its tokens) of each row that lacks the state after its last token.

        Raises: InvalidRequest if tokens of such a row are not known
        """
        found = []
        for row, space in enumerate(self.holdings.spaces if self.pool.has_states else ()):
            length = self._tokens_of(row)
            if space.ready < length:
                ids = space.token_ids[:length].tolist()
                if min(ids[space.ready :]) < 0:
                    raise InvalidRequest(
                        "tokens of a model with recurrent states were taken back, and those before them are to be "
                        "computed again, but their ids are not known; use a new PagedCache"
                    )
                found.append((row, ids))
        return found

    def row(self, number: int) -> PagedCache:
        """Return a cache of one row, which has the sequence of a row of this cache; it begins at the row's state."""
        other = PagedCache(self.config, pool=self.pool, salt=self.salt)
        with self.pool.lock:
            self.settle()
            other.holdings.spaces = [self.holdings.spaces[number]]
            other._columns = other.holdings.spaces[0].ready
        return other

    def _tokens_of(self, row: int) -> int:
        """Return the tokens in the columns of a row."""
        return self._columns if self._mask is None else int(self._mask[row].sum())

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
                self._keep(None if self._mask is None else self._mask[list(index)])

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
            kept = max(0, self._columns - dropped)
            lengths = [kept] * len(self.holdings.spaces)
            if self._mask is not None:
                lengths = self._mask[:, :kept].sum(1).tolist()
            for space, length in zip(self.holdings.spaces, lengths, strict=True):
                space.truncate(min(len(space), length))
            self._forget_columns(dropped)

    def __deepcopy__(self, _: Any) -> PagedCache:
        """Return a cache that continues the same sequences. Pages are shared; no bytes are copied."""
        other = PagedCache(self.config, pool=self.pool, salt=self.salt)
        with self.pool.lock:
            self.settle()
            other.holdings.spaces = [space.fork() for space in self.holdings.spaces]
        other._columns, other._mask, other._lacking = self._columns, self._mask, dict(self._lacking)
        other._is_identified, other._identity, other.shares = self._is_identified, self._identity, self.shares
        return other

    __copy__ = None  # a shallow copy would give pages back twice

    def activate_past_recording(self) -> None:
        """Do nothing: drafts can be taken back always."""

    def reset(self) -> None:
        """Give all pages back; the cache is empty, and may be used again."""
        with self.pool.lock:
            self.pending = None
            self.holdings.release(self.pool.kv if self.pool.is_ready else None)
            if self._is_identified:
                self.pool.forget_others()  # the weights changed meanwhile
            self._columns, self._mask, self._lacking, self.ahead = 0, None, {}, 0
            self._is_identified, self.shares, self.may_repeat = False, True, False

    close = reset

    def __enter__(self) -> PagedCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"PagedCache({len(self.holdings.spaces)} rows, {self.get_seq_length()} columns, {self.pool})"


def _packed(columns: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """Return the numbers of the tokens, on the CPU, without those of padding. Shapes: columns, real [B, L]."""
    columns = columns.cpu()
    return (columns if real is None else columns[real.cpu()]).reshape(-1)


def _dummy() -> Any:
    """Return the host's layer that stores nothing, for layers that use the K and V of others."""
    from transformers.cache_utils import DummyLayer

    return DummyLayer()  # type: ignore[no-untyped-call]
