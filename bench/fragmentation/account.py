"""The account of the KV memory at one moment, and the interface of the allocators that keep it.

Sequences are small integers that the simulation chooses. Lengths are tokens, sizes are bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

HEADROOM: Final = 0.01
"""Share of the memory that an allocator without reservations keeps for running sequences when it admits a new one."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The KV memory to divide, and the model whose tokens it stores.

    slots:       tokens that fit.
    token_bytes: bytes of a token in all tensors.
    tensors:     a K and a V for each layer; the allocators of torch and of virtual memory divide a token among them.
    longest:     tokens that the model can handle.
    """

    slots: int
    token_bytes: int
    tensors: int
    longest: int

    @property
    def capacity(self) -> int:
        """Bytes of the memory."""
        return self.slots * self.token_bytes


@dataclass(frozen=True, slots=True)
class Account:
    """Bytes of the memory by use. The first five parts add up to the capacity; the package head defines them.

    saved: bytes that sharing saves: all pages of all sequences, less the distinct frames.
    """

    useful: int
    reserved: int
    internal: int
    rounded: int
    free: int
    saved: int = 0

    @property
    def capacity(self) -> int:
        """The sum of the parts."""
        return self.held + self.free

    @property
    def held(self) -> int:
        """Bytes that are not free."""
        return self.useful + self.reserved + self.internal + self.rounded


class Demand(NamedTuple):
    """Tokens that a sequence is about to store."""

    sequence: int
    tokens: int = 1


class Allocator(ABC):
    """A way to divide the memory among sequences.

    name:  as it appears in rows.
    moved: tokens that were copied because a sequence moved, or was forked or written after a fork.
    is_blind: whether it cannot tell how much it could still give. The simulation then admits no request from a
           preemption to the end of another, so that the two do not alternate.
    """

    name: str
    memory: Memory
    moved: int = 0
    is_blind: bool = False

    @abstractmethod
    def admit(self, sequence: int, length: int, final: int) -> bool:
        """Store the `length` tokens of a new sequence, or return False and change nothing.

        final: the tokens that it will have at its end. Only a baseline that the paper grants this knowledge may use it.
        """

    @abstractmethod
    def grow(self, demands: Sequence[Demand]) -> list[Demand]:
        """Store more tokens. Return the demands without memory, which the simulation repeats after a preemption."""

    @abstractmethod
    def fork(self, parent: int, child: int) -> bool:
        """Make `child` a sequence with the tokens of `parent`, or return False and change nothing."""

    @abstractmethod
    def overwrite(self, sequence: int, source: int) -> None:
        """Give `sequence` the tokens of `source` instead of its own. Both have the same length."""

    @abstractmethod
    def free(self, sequence: int) -> None:
        """Give back the memory of a sequence."""

    @abstractmethod
    def account(self, remaining: Mapping[int, int]) -> Account:
        """Return the account of this moment. remaining: tokens that each sequence will still store."""

    def figures(self) -> dict[str, float]:
        """Return figures of the whole run that only this allocator has."""
        return {}
