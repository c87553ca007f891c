"""`pagedkv bench report`: one file without network, made from kept rows, fit for a dark room and a screen reader."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from itertools import pairwise, product
from pathlib import Path

import pytest

from pagedkv.bench import rows
from pagedkv.bench.chart import Axis, Bar, Series, bars, lines, stacked
from pagedkv.bench.chart.sheet import COLOURS
from pagedkv.bench.headlines import headlines
from pagedkv.bench.report import readme
from pagedkv.bench.report.sections import ABOUT

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "bench/results"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture
def report(command, tmp_path) -> Path:
    """The report of the rows of this checkout."""
    status, out, err = command("bench", "report", "--out", tmp_path / "report.html")
    assert (status, out) == (0, f"{tmp_path / 'report.html'}\n"), err
    return tmp_path / "report.html"


def test_the_report_has_each_headline_and_a_section_of_each_benchmark(report):
    text = report.read_text()
    found = rows.read_all(RESULTS)
    for line in headlines(row for some in found.values() for row in some):
        assert f'<p class="big">{line.ours}</p>' in text
    for name in found:
        (section,) = re.findall(rf'<section id="{name}".*?</section>', text, re.S)
        assert "<svg" in section
        assert "<caption>" in section
        assert "$ pagedkv bench" in section
        assert all(word in section for word in ("<dt>Method</dt>", "<dt>Limits</dt>"))


def test_a_screen_reader_gets_every_chart_in_words_and_every_table_with_its_heads(report):
    text = report.read_text()
    charts = re.findall(r"<svg[^>]*>", text)
    assert charts
    assert all('role="img"' in chart and len(re.search('aria-label="([^"]*)"', chart)[1]) > 40 for chart in charts)
    assert re.findall(r"<th(?! scope)[ >]", text) == []
    levels = [int(level) for level in re.findall(r"<h(\d)", text)]
    assert levels[0] == 1
    assert all(below <= above + 1 for above, below in pairwise(levels))


def browse(page: Path, folder: Path) -> tuple[list[str], str]:
    """Open a page in chromium. Return the lines of its console, and the page after its script has run."""
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    command += [f"--user-data-dir={folder}", "--enable-logging=stderr", "--virtual-time-budget=2000", "--dump-dom"]
    run = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120)
    return re.findall(r".*CONSOLE.*", run.stderr), run.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium")
def test_a_browser_finds_no_error_in_the_report_and_no_request_to_elsewhere(report, tmp_path):
    """The page forbids every request (Content-Security-Policy), and a browser says so if it would have made one."""
    console, dom = browse(report, tmp_path / "profile")
    assert console == []
    assert "data-tip=" in dom  # the script has run
    tampered = tmp_path / "tampered.html"
    tampered.write_text(report.read_text().replace("<h1>", '<img src="http://example.invalid/x.png"><h1>'))
    console, _ = browse(tampered, tmp_path / "profile")
    assert len(console) == 1
    assert "example.invalid" in console[0]


def test_the_charts_are_drawn_for_the_manual(command, tmp_path):
    options = ("--out", tmp_path / "r.html", "--charts", tmp_path)
    assert command("bench", "report", *options).status == 0
    drawn = sorted(tmp_path.glob("*.svg"))
    assert {path.stem for path in drawn} >= {"manager", "attention", "generate", "transformers", "vllm"}
    for path in drawn:
        ElementTree.parse(path)
        assert "prefers-color-scheme: dark" in path.read_text()


def test_a_report_without_rows_or_without_a_place_is_one_line(command, tmp_path):
    status, _, err = command("bench", "report", "--results", tmp_path)
    assert status == 2
    assert "holds no rows" in err
    status, _, err = command("bench", "report", "--out", tmp_path / "no/report.html")
    assert status == 2
    assert "--out FILE names another file" in err
    (tmp_path / "manager.jsonl").write_text("{}\nno row\n")
    status, _, err = command("bench", "report", "--results", tmp_path)
    assert status == 2
    assert "line 2 is no row" in err


def row(when: str, who: str, median: float | None, machine: str = "here") -> dict[str, object]:
    case = {"bench": "manager", "who": who, "case": "decode step, 1,024 sequences", "unit": "us", "median": median}
    return case | {"machine": machine, "when": when, "commit": "c"}


def test_the_figures_of_a_cell_come_from_one_run_with_a_peer():
    older = [row("1", "pagedkv", 50.0), row("1", "vLLM KVCacheManager", 4000.0)]
    newer = [row("2", "pagedkv", 90.0), row("2", "vLLM KVCacheManager", None)]
    assert rows.latest([*older, *newer]) == older
    (line,) = headlines(rows.latest([*older, *newer]))
    assert (line.ours, line.beside) == ("50 µs", ("vLLM 4 ms",))
    elsewhere = [row("3", "pagedkv", 20.0, "elsewhere")]
    assert rows.latest([*older, *elsewhere]) == elsewhere


def test_rows_of_a_shallow_model_count_if_their_case_has_no_others():
    whole = [row("1", "pagedkv", 50.0)]
    shallow = [{"layers": 7} | row("2", "pagedkv", 10.0)]
    assert rows.latest([*whole, *shallow]) == whole
    assert rows.latest(shallow) == shallow
    other = [shallow[0] | {"case": "another"}]
    assert rows.latest([*whole, *other]) == [*whole, *other]
    elsewhere = [{"layers": 7} | row("3", "pagedkv", 10.0, "elsewhere")]
    assert rows.latest([*whole, *elsewhere]) == whole, "they choose no machine"
    assert rows.latest(elsewhere) == elsewhere


@pytest.mark.parametrize(("clean", "is_disturbed"), [(0, True), (5, False), (None, False)])
def test_a_disturbed_headline_says_so_everywhere(clean, is_disturbed, tmp_path, command):
    given = [row("1", "pagedkv", 50.0), row("1", "vLLM KVCacheManager", 4000.0)]
    given[1] |= {} if clean is None else {"clean": clean}
    (tmp_path / "manager.jsonl").write_text("".join(json.dumps(one | {"variant": ""}) + "\n" for one in given))
    assert command("bench", "report", "--results", tmp_path, "--out", tmp_path / "r.html").status == 0
    assert ("Disturbed: other processes ran" in (tmp_path / "r.html").read_text()) is is_disturbed
    made = readme._table(headlines(given))
    assert ("1, disturbed |" in made, "that is called disturbed" in made) == (is_disturbed, is_disturbed)


def test_the_readme_tells_the_first_and_the_last_day_of_the_rows_of_a_figure():
    case = {"bench": "generate", "case": "decode", "batch": 1, "context": 128, "machine": "here", "commit": "c"}
    given = [
        case | {"variant": "pagedkv", "over_bound": 1.2, "median": 20.0, "when": "2026-11-28T11:31:21Z"},
        case | {"variant": "OpenVINO", "over_bound": 1.4, "median": 30.0, "when": "2026-11-27T10:00:00Z"},
    ]
    assert "`pagedkv bench generate`, 2026-11-27 to 2026-11-28 |" in readme._table(headlines(given))
    assert "`pagedkv bench generate`, 2026-11-28 |" in readme._table(headlines(given[:1]))


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize(("name", "scheme"), list(product(COLOURS, range(2))))
def test_every_colour_stands_out_from_its_ground(name, scheme):
    """The contrast that WCAG 2.2 asks for: 4.5 for text and the names of series, 3 for bars."""
    if name in ("bg", "grid"):
        return
    ground, colour = luminance(COLOURS["bg"][scheme]), luminance(COLOURS[name][scheme])
    contrast = (max(ground, colour) + 0.05) / (min(ground, colour) + 0.05)
    assert contrast >= (3 if name in ("peer", "also") else 4.5)


def test_a_chart_says_its_numbers_and_escapes_its_words():
    chart = bars("a < b", [Bar("ours & theirs", 2.0, "ours", "one"), Bar("peer", 4.0, group="one")], unit="ms")
    drawn = ElementTree.fromstring(stacked([chart]))
    texts = ["".join(element.itertext()) for element in drawn.iter() if element.tag.endswith("text")]
    assert {"a < b", "ours & theirs", "2 ms", "4 ms", "one"} <= set(texts)
    widths = [float(element.get("width")) for element in drawn.iter() if element.get("class") == "mark"]
    assert widths[1] == pytest.approx(2 * widths[0], abs=0.2)


def test_the_line_of_a_bound_leaves_out_the_words_that_it_would_cross():
    """Bars of 50 and 99 of 100: the label of the longer one lies where the line is; bars of 300 are drawn below it."""
    given = [Bar("a", 50.0), Bar("b", 99.0), Bar("c", 300.0)]
    (path,) = re.findall(r'class="bound" d="([^"]*)"', stacked([bars("t", given, bound=(100.0, "bound"))]))
    assert re.fullmatch(r"M([\d.]+) 22V50M\1 66V94", path)


def test_the_names_of_lines_do_not_overlap_and_a_log_axis_has_ticks():
    series = [Series(f"line {i}", [(1, 10 + i / 10), (1000, 20 + i / 10)]) for i in range(5)]
    drawn = ElementTree.fromstring(stacked([lines("t", series, x=Axis("x", log=True), y=Axis("y", low=0))]))
    texts = {"".join(e.itertext()): float(e.get("y")) for e in drawn.iter() if e.tag.endswith("text")}
    places = sorted(place for name, place in texts.items() if name.startswith("line "))
    assert min(b - a for a, b in pairwise(places)) >= 16
    assert {"1", "10", "100", "1,000"} <= set(texts)


def test_readme_and_the_charts_of_the_manual_are_those_of_the_rows():
    """If this fails, run `make bench-readme`."""
    texts = readme.written(ROOT)
    different = [path.name for path, text in texts.items() if not path.exists() or path.read_text() != text]
    assert not different
    shown = (ROOT / "README.md").read_text()
    assert shown.count(readme.BEGIN) == shown.count(readme.END) == 1


def test_each_section_names_its_page_of_the_manual(report):
    text = report.read_text()
    for name, about in ABOUT.items():
        assert (ROOT / "docs" / f"{about.page}.md").is_file(), name
    for name in rows.read_all(RESULTS):
        assert f"<code>docs/{ABOUT[name].page}.md</code>" in text


@pytest.mark.parametrize("kind", ["ours", "peer"])
def test_a_long_name_stands_whole_before_its_bar(kind):
    name = "schedule, plan, sample, commit, deliver"
    drawn = ElementTree.fromstring(stacked([bars("t", [Bar(name, 2.0, kind, note="note"), Bar("b", 4.0)], unit="ms")]))
    (element,) = (e for e in drawn.iter() if e.tag.endswith("text") and "".join(e.itertext()) == name)
    assert float(element.get("x")) >= 0.5 * 13 * len(name)  # it ends there
    assert any("".join(e.itertext()) == "2 ms, note" for e in drawn.iter() if e.tag.endswith("text"))
