"""Opening: the methods of MemoryManager that look a prompt up and open a space for it.

The identity of a prompt is its tenant, its tokens and its salts (prefix/roots.py). `open` maps what is known and takes
references; `lookup`, `awaited` and `why` only look: they change no reference, order of eviction or statistic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.core.arguments import salt_row, tenant_name, token_row, whole
from pagedkv.core.handles import AddressSpace
from pagedkv.core.observe.misses import Miss, explain, known_tokens
from pagedkv.core.prefix.roots import Salts
from pagedkv.core.recovery import RecoveryMixin
from pagedkv.core.spaces.awaited import Awaited, OpenPrompts
from pagedkv.core.state import I32, State
from pagedkv.core.tables import page_tables
from pagedkv.core.tenants import TenantMixin
from pagedkv.core.thread_guard import exclusive
from pagedkv.errors import InvalidRequest

Salt = bytes | Mapping[int, bytes]


class Opened(NamedTuple):
    """The result of `open_batch`.

    spaces: one for each row, in order.
    skip:   how many leading columns need no computation in any row: padding, or tokens that are known. With `pads`,
            each space ends at that column. Without, a row may know more tokens: `len(space)` says how many.
    """

    spaces: list[AddressSpace]
    skip: int


def _listed(value: Any, what: str) -> list[Any]:
    """Return the entries of a list, an array, or a tensor of the host."""
    if not isinstance(value, str | bytes | Mapping) and isinstance(value, Sequence):
        return list(value)
    try:
        return list(np.asarray(value if hasattr(value, "__array__") else None))
    except (TypeError, ValueError):  # no array, one without dims, or a tensor of another device
        raise InvalidRequest(f"{what} is {value!r:.60}; give a list") from None


def _for_each(value: Any, count: int, what: str) -> list[Any]:
    """Return a list of `count` entries: `value` itself, or its value for every row."""
    if isinstance(value, bytes | Mapping):
        return [value] * count
    entries = _listed(value, what)
    if len(entries) != count:
        raise InvalidRequest(f"{what} has {len(entries)} entries for {count} rows; give one for each row")
    return entries


def _first_end(lengths: list[int], pads: list[int]) -> int:
    """Return the column at which the first of the rows ends; 0 without rows."""
    return min((pad + length for pad, length in zip(pads, lengths, strict=True)), default=0)


class OpeningMixin(RecoveryMixin, TenantMixin):
    """The methods of MemoryManager that take prompts."""

    state: State
    block_size: int
    _open_prompts: OpenPrompts

    if TYPE_CHECKING:

        def _grow_tables(self, pages: int = 0, spaces: int = 1) -> None: ...

    @exclusive
    def open(
        self,
        token_ids: Sequence[int] | npt.NDArray[np.integer] = (),
        *,
        tenant: bytes = b"",
        salt: Salt = b"",
    ) -> AddressSpace:
        """Open a space that maps the longest known prefix of `token_ids`; its `len(space)` tokens need no computation.

        At least one token is left to compute, since the caller needs its logits. Equal tokens of different tenants
        never match each other.
        salt: identity besides the tokens: the digest of an adapter, as bytes, or {position: digest} of images and
              other media. From the page of a position on, prompts match only with an equal salt there.
        Raises: InvalidRequest if the ids are not one row of int32 numbers
        """
        self._report_lost()
        ids, tenant, salts = token_row(token_ids), tenant_name(tenant), () if salt == b"" else salt_row(salt)
        self._grow_tables(pages=len(ids) // self.block_size + 1)
        return self._open(ids, tenant, salts, len(ids))

    @exclusive
    def open_batch(
        self,
        rows: Sequence[Sequence[int] | npt.NDArray[np.integer]],
        *,
        tenant: bytes | Sequence[bytes] = b"",
        salt: Salt | Sequence[Salt] = b"",
        pads: Sequence[int] | npt.NDArray[np.integer] | None = None,
    ) -> Opened:
        """Open a space for each prompt of `rows`, as `open` does: for all of them or for none.

        tenant, salt: for all rows, or a list with one for each row.
        pads: for a host that computes rectangles: how many columns of padding stand before each row. Each space then
              ends at the last column up to which all rows are known, and a window sees the pages before that column.
        Raises: as `open`; InvalidRequest if a list has not one entry for each row. Nothing was changed then
        """
        self._report_lost()
        ids = [token_row(row) for row in _listed(rows, "rows")]
        tenants = [tenant_name(one) for one in _for_each(tenant, len(ids), "tenant")]
        salts = [salt_row(one) for one in _for_each(salt, len(ids), "salt")]
        columns = None if pads is None else [whole(pad, "a pad") for pad in _for_each(pads, len(ids), "pads")]
        prompts = list(zip(tenants, salts, ids, strict=True))
        most = list(map(len, ids)) if columns is None else self._up_to_one_column(prompts, columns)
        self._grow_tables(pages=max(map(len, ids), default=0) // self.block_size + 1, spaces=len(ids))
        spaces: list[AddressSpace] = []
        try:
            for (name, own, row), length in zip(prompts, most, strict=True):
                spaces.append(self._open(row, name, own, length))
        except BaseException:
            for space in spaces:
                page_tables.release_space(self.state, space.asid)
            raise
        lengths = [int(self.state.spaces["length"][space.asid]) for space in spaces]
        return Opened(spaces, _first_end(lengths, columns or [0] * len(ids)))

    def _up_to_one_column(self, prompts: list[tuple[bytes, Salts, I32]], pads: list[int]) -> list[int]:
        """Return how many tokens of each prompt lie before the last column up to which all of them are known.

        A window may lack a page before that column which it does not see from a later one, so the search is repeated.
        """
        most = [len(ids) for _, _, ids in prompts]
        while True:
            known = [
                known_tokens(self.state, self._roots, (tenant, salts), ids, length)
                for (tenant, salts, ids), length in zip(prompts, most, strict=True)
            ]
            column = _first_end(known, pads)
            most = [max(0, column - pad) for pad in pads]
            if most == known:
                return most

    def _open(self, ids: I32, tenant: bytes, salts: Salts, most: int) -> AddressSpace:
        """Open a space of at most `most` tokens. The tables are long enough, and the arguments were checked."""
        root, self.state = self._roots.of(tenant, self.state, salts)
        self._charge_root(tenant, root.number)
        asid, generation = page_tables.open_space(self.state, root.number, root.seed, ids, most, self._is_restoring())
        if self._observe.events:
            self._name_roots(tenant, salts)
        self._open_prompts.add((asid, generation), tenant, salts, ids, self.block_size)
        return self._opened(asid, generation)

    @exclusive
    def lookup(
        self, token_ids: Sequence[int] | npt.NDArray[np.integer], *, tenant: bytes = b"", salt: Salt = b""
    ) -> int:
        """Return how many of `token_ids` are known: the length of the space that `open` would return now.

        The call changes nothing: it takes no reference, and neither the order of eviction nor a statistic notices it.
        O(pages matched).
        Raises: InvalidRequest if the ids are not one row of int32 numbers
        """
        ids = token_row(token_ids)
        return known_tokens(self.state, self._roots, (tenant_name(tenant), salt_row(salt)), ids, len(ids))

    @exclusive
    def awaited(
        self, token_ids: Sequence[int] | npt.NDArray[np.integer], *, tenant: bytes = b"", salt: Salt = b""
    ) -> Awaited | None:
        """Return the longest prefix of `token_ids` that an open space will publish and `open` does not find yet.

        None if `open` finds all there is.

        For prompts that arrive together: open the others when the space has `tokens` tokens, and their common pages
        are computed once. Wait only while that space is in your steps: one that is released, cut or left alone never
        gets there. The call changes nothing that others see. O(length of the prompt) for each open space that computes
        a prompt with the same first page.
        Raises: InvalidRequest if the ids are not one row of int32 numbers
        """
        ids, prompt = token_row(token_ids), (tenant_name(tenant), salt_row(salt))
        if not self.prefix_cache:
            return None
        known = known_tokens(self.state, self._roots, prompt, ids, len(ids))
        return self._open_prompts.longest(self.state, prompt, ids, known)

    def why(self, token_ids: Sequence[int] | npt.NDArray[np.integer], *, tenant: bytes = b"", salt: Salt = b"") -> Miss:
        """Return why `open` finds no more whole pages of `token_ids`, see misses.Miss.

        For operators: the answer depends on the pages of all tenants.
        """
        return explain(self.state, self._roots, (tenant_name(tenant), salt_row(salt)), token_row(token_ids))
