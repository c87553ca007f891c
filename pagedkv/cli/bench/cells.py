"""The cells that `pagedkv bench attention` and `bench bandwidth` measure, by the options of the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Final

import torch

from pagedkv.bench.attention.cells import BASE, Cell, full, quick
from pagedkv.errors import InvalidRequest

PROMPT: Final = {"new": 2048, "context": 2048, "batch": 1}
SIZES: Final[dict[str, dict[str, int]]] = {"decode": {}, "prefill": PROMPT, "write": PROMPT, "call": {"batch": 1}}
"""The size of a cell of a kind, where no axis says another."""


def chosen(
    axes: Mapping[str, Sequence[Any]], kinds: Sequence[str], threads: Sequence[int], *, is_full: bool
) -> list[Cell]:
    """Return the cells: without an axis those of a grid, else the product of the values around a typical cell.

    Raises: InvalidRequest for an impossible shape or an unknown kind
    """
    if unknown := [kind for kind in kinds if kind not in SIZES]:
        raise InvalidRequest(f"--kind {unknown[0]}: there is no such kind; there are {', '.join(SIZES)}")
    threads = threads or range(1, min(2, torch.get_num_threads()) + 1)
    given = {name: values for name, values in axes.items() if values}
    if not given:
        grid = full(threads) if is_full else quick(threads)
        return [cell for cell in grid if not kinds or cell.kind in kinds]
    cells = []
    for kind, *values in product(kinds or ["decode"], *given.values(), threads):
        named: dict[str, Any] = SIZES[kind] | dict(zip([*given, "threads"], values, strict=True))
        if "heads" in named:
            named["heads"], named["kv_heads"] = _heads(named["heads"])
        cell = replace(BASE, kind=kind, **named)
        cells.append(replace(cell, new=min(cell.new, cell.context)))
    return cells


def _heads(text: str) -> tuple[int, int]:
    parts = text.split("/")
    if len(parts) == 2 and all(part.isdecimal() and int(part) for part in parts) and not int(parts[0]) % int(parts[1]):
        return int(parts[0]), int(parts[1])
    raise InvalidRequest(f"--heads is {text!r}; give query heads / kv heads, such as 32/8")
