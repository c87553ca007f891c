"""The README's table and picture, charts and tables of the manual: `make bench-readme` writes them from kept rows.

The part of a page between the two marks is made from rows. A test compares the pages and the charts with the rows.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from pagedkv.bench import record, rows
from pagedkv.bench.bandwidth.words import text as words_of_bandwidth
from pagedkv.bench.chart import bars, stacked
from pagedkv.bench.headlines import Headline, headlines
from pagedkv.bench.report.page import charts_of
from pagedkv.bench.tiers.words import text as words_of_tiers

BEGIN: Final = "<!-- figures: made by `make bench-readme` from bench/results -->"
END: Final = "<!-- /figures -->"
CHARTS: Final = Path("docs/img/bench")
PAGES: Final = {
    "bandwidth": (Path("docs/explanation/bandwidth.md"), words_of_bandwidth),
    "tiers": (Path("docs/how-to/tiers.md"), words_of_tiers),
}
"""Benchmark: the page of the manual with its figures, and the function that words them."""
TITLE: Final = "pagedkv beside its peers"


def written(root: Path) -> dict[Path, str]:
    """Return the files of a checkout that are made from its rows: paths and texts."""
    found = rows.read_all(root / "bench/results")
    lines = headlines(row for some in found.values() for row in some)
    texts = {root / CHARTS / f"{name}.svg": stacked(charts) for name, charts in _charts(found)}
    texts[root / CHARTS / "field.svg"] = stacked([bars(TITLE, _drawn(lines), is_scaled_by_group=True)])
    for name, (page, words_of) in PAGES.items():
        if name in found:
            texts[root / page] = _filled(root / page, words_of(found[name]))
    return texts | {root / "README.md": _filled(root / "README.md", _table(lines))}


def _filled(page: Path, made: str) -> str:
    """Return the text of a page with `made` between its marks."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.partition(END)[2]}"


def _charts(found: dict[str, list[dict[str, Any]]]) -> Iterable[tuple[str, Sequence[Any]]]:
    return ((name, charts) for name, some in found.items() if (charts := charts_of(name, some)))


def _drawn(lines: list[Headline]) -> list[Any]:
    return [bar for line in lines for bar in line.drawn]


def _table(lines: list[Headline]) -> str:
    heads = ["| | pagedkv | beside it | measured |", "|---|---|---|---|"]
    measured = [
        f"`pagedkv bench {line.benchmark}`, {line.days}{', disturbed' if line.is_disturbed else ''}" for line in lines
    ]
    table = [
        f"| {line.question} | **{line.ours}** | {'; '.join(line.beside)} | {words} |"
        for line, words in zip(lines, measured, strict=True)
    ]
    machines = "; ".join(dict.fromkeys(line.source["machine"] for line in lines))
    picture = f"![{TITLE}: the figures of the table as bars](docs/img/bench/field.svg)"
    ends = [textwrap.fill(f"Measured on {machines}.", 120, break_on_hyphens=False)]
    if any(line.is_disturbed for line in lines):
        ends.append("Other processes, the clock or memory disturbed most turns of a figure that is called disturbed.")
    return "\n".join([picture, "", *heads, *table, "", *ends])


def main() -> None:
    """Write the files, and print the paths of those that changed."""
    folder = record.results()
    assert folder, "only a checkout has rows"
    for path, text in written(folder.parents[1]).items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(path.name)


if __name__ == "__main__":
    main()
