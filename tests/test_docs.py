"""The manual is true: its examples run, its tables are the code's, what it names exists, and it builds offline.

The tests read the built site, too: it shows the docstring of each public name, and each page is light or dark.
"""

from __future__ import annotations

import doctest
import html
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import pagedkv
import pagedkv.core

ROOT = Path(__file__).parents[1]
MANUAL = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *MANUAL]
FIGURES = sorted((ROOT / "docs/img").rglob("*.svg"))
TREES = "pagedkv|csrc|triton_kernels|tests|bench|scripts|examples|docs|core|cache|kernels|model|integrations|serve|cli"
GROUPS = ["Start", "How-to", "Explanation", "Reference"]


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)


def without_comments(text: str) -> str:
    return re.sub(r"<!--.*?-->", "", text, flags=re.S)


EXAMPLES = [page for page in PAGES if python_blocks(page)]


@pytest.mark.parametrize("page", EXAMPLES, ids=ids)
def test_examples_run_as_printed(page):
    """Blocks with a prompt (>>>) print what the page shows; the others run. One page is one namespace."""
    names: dict[str, object] = {"__name__": "__main__"}
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    runner = doctest.DocTestRunner(optionflags=options)
    output: list[str] = []
    for number, block in enumerate(python_blocks(page)):
        if ">>>" not in block:
            exec(compile(block, f"{page.name}, block {number}", "exec"), names)
            continue
        example = doctest.DocTestParser().get_doctest(block, names, f"{page.name}, block {number}", str(page), 0)
        runner.run(example, out=output.append, clear_globs=False)
        names.update(example.globs)
    assert not runner.summarize(verbose=False).failed, "".join(output)


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_what_a_page_names_exists(page):
    text = without_comments(page.read_text())
    named = set(re.findall(rf"(?<![\w/])(?:{TREES})/[\w/.-]*\w\.(?:py|md|svg|cpp|hpp|inc|cuh?|jsonl)\b", text))
    assert not {name for name in named if not (ROOT / name).exists() and not (ROOT / "pagedkv" / name).exists()}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert not set(re.findall(r"`make ([a-z-]+)", text)) - targets
    prose = re.sub(r"^```.*?^```|`[^`]*`", "`code`", text, flags=re.M | re.S)
    links = {link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", prose) if not link.startswith(("http", "#"))}
    assert not {link for link in links if not (page.parent / link).exists()}


def test_the_pages_that_sources_name_exist():
    """A comment or a docstring may send its reader to the manual."""
    sources = [
        path
        for tree in ("pagedkv", "csrc", "triton_kernels", "bench", "scripts")
        for path in (ROOT / tree).rglob("*")
        if path.suffix in (".py", ".cpp", ".hpp", ".cuh", ".h", ".inc", ".md") and "__pycache__" not in path.parts
    ]
    named = {(path, name) for path in sources for name in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text())}
    assert named
    assert not {(ids(path), name) for path, name in named if not (ROOT / name).exists()}


@pytest.mark.parametrize("page", MANUAL, ids=ids)
def test_the_first_paragraph_of_a_page_is_its_answer(page):
    """It stands before every figure, table, list and block of code, and can be read at a glance."""
    title, first, *_ = [part for part in re.split(r"\n\s*\n", without_comments(page.read_text())) if part.strip()]
    assert title.startswith("# ")
    assert re.match(r"[A-Z`*]|pagedkv\b", first), first
    assert 40 <= len(first) < 400, f"{len(first)} characters: {first}"


@pytest.mark.parametrize("page", MANUAL, ids=ids)
def test_code_fits_the_page(page):
    """At the width of a laptop's screen no block of code scrolls sideways."""
    blocks = re.findall(r"^```.*?^```", page.read_text(), re.M | re.S)
    assert not [line for block in blocks for line in block.splitlines() if len(line) > 100]


def test_the_pages_are_grouped_and_none_is_left_out():
    config = (ROOT / "mkdocs.yml").read_text()
    nav = config[config.index("\nnav:") :]
    assert re.findall(r"^  - ([\w-]+):$", nav, re.M) == GROUPS
    pages = re.findall(r": ([\w/-]+\.md)$", nav, re.M)
    assert sorted(pages) == sorted(str(page.relative_to(ROOT / "docs")) for page in MANUAL)


def test_the_decode_step_is_drawn_as_the_code_has_it():
    """Each line that names a file and a function or class of it: the file defines it."""
    architecture = (ROOT / "docs/explanation/architecture.md").read_text()
    drawn = re.findall(r"([\w/]+\.py) +((?:[\w.]+, )*[\w.]+)", architecture)
    assert len(drawn) > 10
    for path, names in drawn:
        source = (ROOT / "pagedkv" / path).read_text()
        missing = [
            name
            for name in names.split(", ")
            for part in name.split(".")
            if not re.search(rf"\b(def|class) {part}\b", source)
        ]
        assert not missing, f"{path} does not define {missing}"


def test_the_times_of_the_smallest_calls_are_those_of_the_rows_named():
    page = (ROOT / "docs/explanation/cpu-kernels.md").read_text().replace("`", "")
    commit = re.search(r"rows of commit (\w+) in bench/results/calls.jsonl", page)[1]
    rows = [json.loads(line) for line in (ROOT / "bench/results/calls.jsonl").read_text().splitlines()]
    times = {(row["what"], row["caches"]): row["us"] for row in rows if row["commit"] == commit}
    assert times, commit
    for what in {name for name, _ in times}:
        warm, cold = re.search(rf"^\| {what} \| ([\d.]+) \| (\d+) \|$", page, re.M).groups()
        assert float(warm) == pytest.approx(times[what, "warm"], abs=0.0501), what
        assert int(cold) == pytest.approx(times[what, "cold"], abs=0.501), what


@pytest.mark.parametrize("figure", FIGURES, ids=ids)
def test_figures_stand_alone_and_can_be_read_in_the_dark(figure):
    text = figure.read_text()
    drawing = ElementTree.fromstring(text)
    assert drawing.find("{http://www.w3.org/2000/svg}title") is not None, "for those who cannot see it"
    assert "prefers-color-scheme: dark" in text
    assert not re.findall(r"(?:href|src)\s*=\s*[\"']?http|@import|url\(\s*http", text)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The manual, built strictly: every warning is an error."""
    pytest.importorskip("mkdocstrings", reason="the docs extra is not installed")
    built = tmp_path_factory.mktemp("site")
    # Not --quiet: it silences the warnings that --strict counts.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(built)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    run = subprocess.run(command, cwd=ROOT, env=quiet, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert run.returncode == 0, run.stdout
    return built


def text_of(page: Path) -> str:
    """The visible words of an HTML page, one space between them."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page.read_text())).split())


def first_sentence(docstring: str) -> str:
    """The words of the first sentence, without Markdown."""
    paragraph = docstring.strip().split("\n\n")[0].split("\n")
    sentence = re.split(r"(?<=[.:;])\s", " ".join(line.strip() for line in paragraph))[0]
    return squeezed(sentence.replace("`", ""))


def squeezed(text: str) -> str:
    """Only letters and digits: tags may split words, and typography differs."""
    return re.sub(r"\W+", "", text)


def test_the_manual_loads_nothing_from_elsewhere(site):
    built = list(site.rglob("*.html"))
    assert len(built) >= len(MANUAL)
    loads = (
        r"<(?:script|img|iframe)[^>]*\bsrc=\"?(?:https?:)?//"
        r"|<link[^>]*rel=\"?(?:stylesheet|preconnect)\"?[^>]*href=\"?(?:https?:)?//"
    )
    assert not [page.name for page in built if re.search(loads, page.read_text())]


def test_the_reference_shows_no_private_name(site):
    """`members: false` alone leaves the inherited members, the private ones too."""
    names = [
        name for page in site.rglob("index.html") for name in re.findall(r'id="(pagedkv\.[\w.]+)"', page.read_text())
    ]
    assert len(names) > 300
    assert not [name for name in names if re.search(r"\._[a-z]", name)]


@pytest.mark.parametrize("name", pagedkv.__all__)
def test_the_reference_shows_the_docstring_of_every_public_name(site, name):
    page = site / "reference/pagedkv/index.html"
    assert re.search(rf'id="pagedkv\.(?:[\w.]+\.)?{name}"', page.read_text()), f"{name} has no entry"
    assert first_sentence(getattr(pagedkv, name).__doc__) in squeezed(text_of(page))


@pytest.mark.parametrize("name", pagedkv.core.__all__)
def test_the_reference_shows_the_docstrings_of_core(site, name):
    """`AddressSpace` is a name of the package, too, and is shown there."""
    page = site / f"reference/{'pagedkv' if name in pagedkv.__all__ else 'core'}/index.html"
    documented, shown = getattr(pagedkv.core, name), squeezed(text_of(page))
    assert first_sentence(documented.__doc__) in shown
    public = [key for key in dir(documented) if not key.startswith("_") and getattr(documented, key).__doc__]
    own = [
        key
        for key in public
        if inspect.isroutine(getattr(documented, key)) or isinstance(vars(documented).get(key), property)
    ]
    assert not [key for key in own if f'.{name}.{key}"' not in page.read_text()], "without an entry"
    assert not [key for key in own if first_sentence(getattr(documented, key).__doc__) not in shown]


def test_a_docstring_becomes_prose_fields_and_drawings(monkeypatch):
    pytest.importorskip("griffe", reason="the docs extra is not installed")
    monkeypatch.syspath_prepend(str(ROOT / "docs/hooks"))
    as_markdown = importlib.import_module("docstring_style").as_markdown
    assert as_markdown("int, frames: a * b.") == "int, frames: a \\* b.\n"  # the first line is prose
    fields = as_markdown("Go.\n\na, b: one\n    more. c: two.\nShapes: q [T]\n        out [T]\nRaises: Error")
    assert re.findall(r"^(\S.*)\n:   (.*)", fields, re.M) == [
        ("`a, b`", "one more."),
        ("`c`", "two."),
        ("Shapes", "q [T]<br>out [T]"),
        ("Raises", "Error"),
    ]
    assert "\n```text\nA\n └── B\n```\n" in as_markdown("Tree.\n\nA\n └── B\n")
