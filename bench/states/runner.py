"""The rows of `pagedkv bench states`: every rule serves the same traces, with each limit of states.

A row has prompt tokens a request beyond the least possible; further

    hits              per cent of the possible ones
    made, held        states made a request; the most states held at once
    computed, least   prompt tokens a request: computed, and the least possible
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Final

from pagedkv.bench.clock import track
from pagedkv.bench.states.rules import RULES, Tally, play
from pagedkv.bench.states.trace import KINDS, Request, requests
from pagedkv.errors import InvalidRequest

Row = dict[str, Any]
Report = Callable[[Row], None]
Player = Callable[[Sequence[Request]], Tally]

SEEDS: Final = {"agent": 2, "chat": 3}
LIMITS: Final = {0: "no limit", 64: "64 states", 16: "16 states"}
OURS: Final = {"pagedkv": "cost", "pagedkv, LRU": "lru"}
"""variant: the policy of the states."""
MUSTS: Final = {("agent", 0): 60.0, ("agent", 64): 400.0, ("agent", 16): 850.0}
"""(trace, limit): tokens beyond the least, at most. Of chats without a limit, MISSED of the possible hits."""
MISSED: Final = 0.01


def measure(report: Report, *, is_quick: bool, only: Sequence[str] = (), rules: Sequence[str] = ()) -> None:
    """Replay the traces, and hand each row to `report`.

    is_quick: whether one trace of a kind is replayed, not SEEDS of them; then nothing is promised.
    only:     kinds of traces; all if empty.
    rules:    texts, one of which the name of a variant contains; all if empty.
    Raises: InvalidRequest for an unknown trace, or a text that names no rule
    """
    if unknown := [name for name in only if name not in KINDS]:
        raise InvalidRequest(f"--trace {unknown[0]}: there is no such trace; there are {', '.join(KINDS)}")
    names = [*(rule.name for rule in RULES), *OURS]
    wanted = [name for name in names if not rules or any(text in name for text in rules)]
    if not wanted:
        raise InvalidRequest(f"no rule is named by --rule {', '.join(rules)}; there are: {'; '.join(names)}")
    kinds = [kind for kind in KINDS if not only or kind in only]
    served = {kind: [requests(KINDS[kind], seed) for seed in range(1 if is_quick else SEEDS[kind])] for kind in kinds}
    players = {limit: _players(limit, wanted) for limit in LIMITS}
    runs = [(kind, limit, name) for kind in kinds for limit in LIMITS for name in players[limit]]
    for kind, limit, name in track(runs, "replaying"):
        tally = Tally()
        for trace in served[kind]:
            tally.add(players[limit][name](trace))
        report(row_of(kind, limit, name, tally) | ({"must": None} if is_quick else {}))


def _players(limit: int, wanted: Sequence[str]) -> dict[str, Player]:
    """Return the variants that are replayed with a limit. Without a limit, all policies of ours agree."""
    chosen = [rule for rule in RULES if rule.name in wanted and (rule.is_limited or not limit)]
    players: dict[str, Player] = {rule.name: partial(play, rule=rule, limit=limit) for rule in chosen}
    ours = {name: policy for name, policy in OURS.items() if name in wanted and (limit or policy == "cost")}
    if ours:
        live = import_module("pagedkv.bench.states.live")  # the rules of others need no manager
        players |= {name: partial(live.play, policy=policy, limit=limit) for name, policy in ours.items()}
    return players


def row_of(kind: str, limit: int, variant: str, tally: Tally) -> Row:
    """Return the row of a variant."""
    least = tally.tokens - tally.possible
    must = MUSTS.get((kind, limit)) if kind == "agent" or limit else MISSED * tally.possible / tally.requests
    row: Row = {"case": kind, "limit": LIMITS[limit], "variant": variant, "unit": "tokens"}
    row |= {"median": (tally.computed - least) / tally.requests, "must": must if variant == "pagedkv" else None}
    row |= {"hits": 100 * (tally.tokens - tally.computed) / max(1, tally.possible)}
    row |= {"made": tally.made / tally.requests, "held": tally.held}
    row |= {"computed": tally.computed / tally.requests, "least": least / tally.requests}
    return row | {"requests": tally.requests}
