"""Rows of every benchmark in one form: the figure of one variant in one cell, for the report's tables and `compare`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from pagedkv.bench.rows import cell_of

Row = dict[str, Any]
RATIOS: Final = {
    "over_bound": "of its bound", "times_as_fast": "× vLLM", "pages_over_this": "pages × this",
    "hit_over_miss": "of an unknown prompt", "efficiency": "of its ceiling", "of_bare": "of the bare transfer",
    "of_computing": "of computing it", "of_alone": "of a step alone", "ratio": "ratio",
    "over_static": "of StaticCache's",
}  # fmt: skip
"""The field of a row that holds its ratio, and the ratio in words."""
NOT_AXES: Final = ("bench", "case", "variant", "who", "unit")
LARGER_IS_BETTER: Final = ("/s", "of 100", "hit", "%")
"""Ends of units whose larger values are better; all other units are times, bytes and errors."""
COUNTED: Final = ("fragmentation",)
"""Benchmarks that count: a row of theirs without turns is the same in each run."""
ATTENTION: Final = {"of_ceiling": "of a bare read", "of_torch.mm": "of torch.mm"}


@dataclass(frozen=True)
class Figure:
    """A figure.

    key:    the cell as a text that is the same in all runs.
    isa:    the instruction set of the CPU kernels; "" where the row does not say.
    case:   the case in words; `axes` are the rest of the cell, in words.
    turns:  the figure of each turn; None for a disturbed one; () where the row does not say.
    is_exact: the figure is counted, not timed, so that two runs of one program give the same.
    is_disturbed: the row says that too few of the turns were clean; the figure judges no promise and no comparison.
    ratio:  the figure over that of a bound or a peer of its own run, `against` in words; `ratios` are those of the
            turns.
    """

    bench: str
    key: str
    case: str
    axes: str
    variant: str
    unit: str
    median: float
    low: float | None = None
    high: float | None = None
    turns: tuple[float | None, ...] = ()
    ratio: float | None = None
    ratios: tuple[float, ...] = ()
    against: str = ""
    must: float | None = None
    is_disturbed: bool = False
    is_exact: bool = False
    isa: str = ""

    @property
    def is_better_if_larger(self) -> bool:
        """Whether a larger figure is the better one."""
        return self.unit.endswith(LARGER_IS_BETTER)


def figures(rows: Iterable[Row]) -> list[Figure]:
    """Return the figures of rows; a variant that could not be measured has none."""
    return [figure for row in rows for figure in (_of_attention(row) if "cell" in row else _of(row))]


def _of(row: Row) -> Iterator[Figure]:
    if row["median"] is None:
        return
    names = list(row)[: list(row).index("unit")]
    axes = ", ".join(f"{name.replace('_', ' ')} {_worded(row[name])}" for name in names if name not in NOT_AXES)
    field = next((name for name in RATIOS if row.get(name) is not None), "")
    variant, unit = row.get("variant") or row["who"], row["unit"].replace("us", "µs")
    yield Figure(
        row["bench"], cell_of(row), row["case"], axes, variant, unit, row["median"],
        row.get("best"), row.get("worst"), tuple(row.get("turns", ())),
        row.get(field), tuple(row.get("ratios", ())), RATIOS.get(field, ""), row.get("must") or row.get("limit"),
        row.get("clean") == 0, row["bench"] in COUNTED and "turns" not in row,
    )  # fmt: skip


def _worded(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def _of_attention(row: Row) -> Iterator[Figure]:
    cell = row["cell"]
    shape = f"{cell['batch']} × {cell['context']:,}, blocks of {cell['block_size']}, {cell['threads']} threads"
    kv, heads = cell["kv"] and f"KV in {cell['kv']}", f"{cell['heads']}/{cell['kv_heads']} heads of {cell['head_dim']}"
    special = cell["lengths"].replace("uniform", ""), cell["pages"].replace("permuted", "")
    axes = ", ".join(filter(None, [shape, cell["dtype"], kv, heads, *special]))
    for who, result in row["results"].items():
        field = next((name for name in ATTENTION if name in result), "")
        bound = row["results"].get(field.removeprefix("of_"), result)
        is_disturbed = 0 in (result["clean"], bound["clean"])
        turns = tuple(result.get("turns", ()))
        ratios = tuple(b / t for b, t in zip(bound.get("turns", ()), turns, strict=False) if b and t)
        variant = "pagedkv" if who == "cpu" else who
        yield Figure(
            "attention", cell_of(row), cell["kind"], axes, variant, "µs", result["us"], None, None, turns,
            result.get(field), ratios, ATTENTION.get(field, ""), None, is_disturbed, isa=row.get("isa") or "",
        )  # fmt: skip
