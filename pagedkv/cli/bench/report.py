"""`pagedkv bench report`: the kept rows as one HTML file, and as the charts of the manual."""

from __future__ import annotations

from pathlib import Path

from pagedkv.bench import record, rows
from pagedkv.bench.chart import stacked
from pagedkv.bench.report.page import charts_of, page
from pagedkv.errors import InvalidRequest


def run(out: Path, results: Path | None, charts: Path | None) -> None:
    """Write the report to `out`, and the charts of each benchmark to `charts`/NAME.svg; print the paths.

    Raises: InvalidRequest without a row, or for a file that cannot be written
    """
    folder = results or record.results()
    if folder is None:
        raise InvalidRequest("an installed package has no rows; --results DIR is the bench/results of a checkout")
    found = rows.read_all(folder)
    if not found:
        raise InvalidRequest(f"{folder} holds no rows; `pagedkv bench all` makes some")
    texts = {out: page(found)}
    if charts:
        drawn = {name: charts_of(name, some) for name, some in found.items()}
        texts |= {charts / f"{name}.svg": stacked(some) for name, some in drawn.items() if some}
    try:
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
            print(path)
    except OSError as why:
        raise InvalidRequest(f"the report cannot be written: {why}; --out FILE names another file") from None
