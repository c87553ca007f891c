"""Opening: the methods of MemoryManager that look a prompt up and open a space for it.

The identity of a prompt is its tenant, its tokens and its salts (prefix/roots.py). `open` maps what is known and takes
references; `lookup` and `why` only look: they change no reference, no order of eviction and no statistic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pagedkv.core.arguments import real, salt_row, tenant_name, token_row
from pagedkv.core.handles import AddressSpace
from pagedkv.core.observe.misses import Miss, explain, known_tokens
from pagedkv.core.recovery import RecoveryMixin
from pagedkv.core.state import State
from pagedkv.core.tables import page_tables
from pagedkv.core.tenants import TenantMixin
from pagedkv.core.thread_guard import exclusive

Salt = bytes | Mapping[int, bytes]


class OpeningMixin(RecoveryMixin, TenantMixin):
    """The methods of MemoryManager that take prompts."""

    state: State
    block_size: int

    if TYPE_CHECKING:

        def _grow_tables(self, pages: int = 0) -> None: ...
        def _retention(self, priority: float, half_life: float) -> int: ...

    @exclusive
    def open(
        self,
        token_ids: Sequence[int] | npt.NDArray[np.integer] = (),
        *,
        tenant: bytes = b"",
        salt: Salt = b"",
        priority: float = 1.0,
        half_life: float = 1000.0,
    ) -> AddressSpace:
        """Open a space that maps the longest known prefix of `token_ids`; its `len(space)` tokens need no computation.

        At least one token is left to compute, since the caller needs its logits. Equal tokens of different tenants
        never match each other.
        salt: what the tokens do not name: the digest of an adapter, as bytes, or {position: digest} of images and other
              media. From the page of a position on, prompts match only with an equal salt there.
        priority, half_life: see advise(retain=).
        Raises: InvalidRequest if the ids are not one row of int32 numbers, or for a priority that the policy does not
                use
        """
        self._report_lost()
        ids, tenant, salts = token_row(token_ids), tenant_name(tenant), () if salt == b"" else salt_row(salt)
        priority, half_life = real(priority, "priority"), real(half_life, "half_life")
        advice = self._retention(priority, half_life) if (priority, half_life) != (1.0, 1000.0) else 0
        self._grow_tables(pages=len(ids) // self.block_size + 1)
        root, self.state = self._roots.of(tenant, self.state, salts)
        self._charge_root(tenant, root.number)
        asid, generation = page_tables.open_space(self.state, root.number, root.seed, advice, ids)
        if self._is_observed:
            self._record_open((tenant, salts), root, ids, asid)
        return self._opened(asid, generation)

    @exclusive
    def lookup(
        self, token_ids: Sequence[int] | npt.NDArray[np.integer], *, tenant: bytes = b"", salt: Salt = b""
    ) -> int:
        """Return how many of `token_ids` are known: the length of the space that `open` would return now.

        Nothing is changed: no reference is taken, no page counts as used, and no statistic counts the prompt.
        O(pages matched).
        Raises: InvalidRequest if the ids are not one row of int32 numbers
        """
        return known_tokens(self.state, self._roots, (tenant_name(tenant), salt_row(salt)), token_row(token_ids))

    def why(self, token_ids: Sequence[int] | npt.NDArray[np.integer], *, tenant: bytes = b"", salt: Salt = b"") -> Miss:
        """Return why `open` finds no more whole pages of `token_ids`, see misses.Miss.

        For operators: the answer depends on the pages of all tenants.
        """
        return explain(self.state, self._roots, (tenant_name(tenant), salt_row(salt)), token_row(token_ids))
