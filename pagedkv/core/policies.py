"""Eviction policies: frozen objects that set up the lists of pool/eviction_order.py, for managers and for `replay`.

A policy states how frames are ranked (`rule`), by how much each list prolongs the stay of a frame (`bonuses`, which
never fall), and whether the clock is the number of plans or the value of the last victim (`inflation`). The manager
reads the object once, at the start; the compiled code of pool/eviction_order.py does the choosing.

To add a policy: write a rule in eviction_order.rank (or take an existing one), and add a dataclass here and to
POLICIES. I9 holds without further work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from pagedkv.core import state as st
from pagedkv.core.arguments import whole
from pagedkv.core.pool import eviction_order
from pagedkv.core.state import I64
from pagedkv.errors import InvalidRequest


class Policy(Protocol):
    """The attributes of a policy that a manager reads."""

    name: ClassVar[str]
    rule: ClassVar[int]
    inflation: ClassVar[bool]

    @property
    def scale(self) -> int:
        """int: the parameter of the rule."""

    def bonuses(self) -> list[int]:
        """Return the bonus of each list from NORMAL on."""


@dataclass(frozen=True)
class LRU:
    """LRU: the least recently used page is evicted first."""

    name: ClassVar[str] = "lru"
    rule: ClassVar[int] = eviction_order.UNRANKED
    inflation: ClassVar[bool] = False
    scale: int = 1

    def bonuses(self) -> list[int]:
        """Return one bonus: all frames are on one list."""
        return [0]


@dataclass(frozen=True)
class TwoQueues:
    """2Q: pages used once go first while they hold more than 1/`scale` of the evictable frames; else LRU.

    A page that is published again soon after its eviction counts as used again. After Johnson and Shasha, VLDB 1994.
    """

    name: ClassVar[str] = "2q"
    rule: ClassVar[int] = eviction_order.TWO_QUEUES
    inflation: ClassVar[bool] = False
    scale: int = 4

    def bonuses(self) -> list[int]:
        """Return two bonuses: the list of pages used once, the list of pages used again."""
        return [0, 0]


@dataclass(frozen=True)
class LFU:
    """LFU with dynamic ageing: value of a page = uses + the value of the last victim at the time the page was dropped.

    After Arlitt et al., "Evaluating content management techniques for web proxy caches", 2000.
    """

    name: ClassVar[str] = "lfu"
    rule: ClassVar[int] = eviction_order.USES
    inflation: ClassVar[bool] = True
    scale: int = 1

    def bonuses(self) -> list[int]:
        """Return one bonus for each number of uses."""
        return list(range(st.NUM_LISTS - st.NORMAL))


@dataclass(frozen=True)
class Cost:
    """Greedy dual: value of a page = uses x cost of computing it + the value of the last victim when it was dropped.

    The cost of a page is 1 + position / `scale`: all pages have one size, and attention reads all tokens before a page.
    `scale` is the context length at which attention costs a token as much as the rest of the model: about 6 x hidden
    size for a Llama. After Cao and Irani, USITS 1997.
    """

    name: ClassVar[str] = "cost"
    rule: ClassVar[int] = eviction_order.COST
    inflation: ClassVar[bool] = True
    scale: int = 24576

    def bonuses(self) -> list[int]:
        """Return the bonus of each list: two lists for each doubling of the value."""
        return [round(16 * 2 ** (level / 2)) for level in range(st.NUM_LISTS - st.NORMAL)]


POLICIES: dict[str, type[LRU] | type[TwoQueues] | type[LFU] | type[Cost]] = {
    policy.name: policy for policy in (LRU, TwoQueues, LFU, Cost)
}


def chosen(policy: str | Policy) -> Policy:
    """Return the policy of that name with its defaults, or the object itself."""
    if all(hasattr(policy, name) for name in ("name", "rule", "inflation", "scale", "bonuses")) and not isinstance(
        policy, type
    ):
        whole(policy.scale, "scale of the policy", 1)  # type: ignore[union-attr]
        return policy  # type: ignore[return-value]
    if not isinstance(policy, str) or policy not in POLICIES:
        raise InvalidRequest(
            f"policy is {policy!r}; give one of {', '.join(POLICIES)}, or an object of pagedkv.core.policies"
        )
    return POLICIES[policy]()


def install(policy: Policy, reg: I64) -> None:
    """Write `policy` into the registers of a new state."""
    bonuses = policy.bonuses()
    reg[st.RULE], reg[st.INFLATION], reg[st.SCALE] = policy.rule, policy.inflation, policy.scale
    reg[st.USED_LISTS] = st.NORMAL + len(bonuses)
    st.list_registers(reg)[st.NORMAL : st.NORMAL + len(bonuses), eviction_order.BONUS] = bonuses
