"""`pagedkv replay`: hit rates of policies and pool sizes over a request trace. core does the counting."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from rich.console import Console
from rich.progress import track
from rich.table import Table

from pagedkv.cli.options import Replaying, amount
from pagedkv.core.policies import POLICIES
from pagedkv.core.replay import BELADY, BLOCK_TOKENS, read_trace, replay, unbounded
from pagedkv.errors import InvalidRequest

EVERY: Final = (*POLICIES, BELADY)
"""The policies that `--policy all` stands for."""


def run(given: Replaying) -> None:
    """Replay a trace for each size and policy, and print a table or a JSON list of rows.

    Raises: InvalidRequest for an unreadable trace, an unknown policy or a bad size
    """
    sizes = given.num_frames or [_frames_in(text, given.bytes_per_token) for text in given.memory or ()]
    try:
        requests = read_trace(given.trace)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidRequest(f"{given.trace} cannot be read: {reason}; give a trace, a request on each line") from None
    pools = sorted(set(sizes)) or [unbounded(requests)]
    policies = given.policy or ["lru"]
    chosen = list(dict.fromkeys(name for each in policies for name in (EVERY if each == "all" else [each])))
    below = {size: _tier_frames(given.tier, size) for size in pools}
    replay(requests[:1], pools, chosen, tier=below[pools[0]])  # refuses bad arguments before the long run
    cases = [(size, policy) for size in pools for policy in chosen]
    progress = track(cases, "replaying", console=Console(stderr=True), transient=True, disable=given.as_json)
    rows = [row for size, policy in progress for row in replay(requests, [size], [policy], tier=below[size])]
    if given.as_json:
        print(json.dumps(rows))
    else:
        _print(rows, len(requests))


def _tier_frames(tier: str | None, size: int) -> int:
    """Return the frames of a tier below a pool of `size`. Raises: InvalidRequest unless it is a number, or as "8x"."""
    found = re.fullmatch(r"(\d{1,9})(x?)", tier or "0")
    if not found:
        raise InvalidRequest(f"--tier is {tier!r}; give frames, such as 65536, or a multiple of the pool, such as 8x")
    return int(found[1]) * (size if found[2] else 1)


def _frames_in(memory: str, bytes_per_token: int) -> int:
    """Return the number of frames, of one trace block each, in `memory`. Raises: InvalidRequest if none fits"""
    frames = amount("--memory", memory) // (bytes_per_token * BLOCK_TOKENS)
    if frames < 1:
        raise InvalidRequest(
            f"--memory is {memory}; give the bytes of a block at least, {bytes_per_token * BLOCK_TOKENS}"
        )
    return frames


def _print(rows: list[dict[str, Any]], num_requests: int) -> None:
    """Print a table with one line for each pool size and policy."""
    table = Table(
        caption=f"{num_requests:,} requests, {rows[0]['blocks']:,} blocks of {BLOCK_TOKENS} tokens",
        caption_justify="left",
    )
    heads = "frames", "policy", "hit rate", "last half", "evictions"
    below = ("below", "from there") if any(row["tier_frames"] for row in rows) else ()
    for name in (*heads, *below):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for row in rows:
        evictions = "" if row["evictions"] is None else f"{row['evictions']:,}"
        rates = f"{row['hit_rate']:.3f}", f"{row['hit_rate_last_half']:.3f}"
        of_tier = f"{row['tier_frames']:,}", f"{row['loaded'] / max(1, row['blocks']):.3f}"
        table.add_row(f"{row['num_frames']:,}", row["policy"], *rates, evictions, *of_tier[: len(below)])
    Console(highlight=False).print(table)
