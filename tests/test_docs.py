"""The manual says what is true: its examples run, its tables are the code's, what it names exists, and it builds offline, strictly."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from pagedkv import debug

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
FIGURES = sorted((ROOT / "docs/img").glob("*.svg"))
TREES = "pagedkv|csrc|triton_kernels|tests|bench|scripts|docs|core|cache|kernels|model|integrations|cli"


def ids(path: Path) -> str:
    return path.name


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)


EXAMPLES = [page for page in PAGES if python_blocks(page)]


@pytest.mark.parametrize("page", EXAMPLES, ids=ids)
def test_examples_run_as_printed(page):
    """Blocks with a prompt (>>>) must print what the page shows; the others must run. One page, one namespace, top to bottom."""
    names: dict[str, object] = {}
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    runner = doctest.DocTestRunner(optionflags=options)
    said: list[str] = []
    for number, block in enumerate(python_blocks(page)):
        if ">>>" not in block:
            exec(compile(block, f"{page.name}, block {number}", "exec"), names)
            continue
        example = doctest.DocTestParser().get_doctest(block, names, f"{page.name}, block {number}", str(page), 0)
        runner.run(example, out=said.append, clear_globs=False)
        names.update(example.globs)
    assert not runner.summarize(verbose=False).failed, "".join(said)


def test_the_example_pages_are_where_readers_look():
    assert {"README.md", "tutorial.md"} <= {page.name for page in EXAMPLES}


def test_environment_variables_are_listed_as_in_the_code():
    table = [line for line in (debug.__doc__ or "").splitlines() if line.startswith("|")]
    assert len(table) > 2
    assert "\n".join(table) in (ROOT / "docs/environment.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_what_a_page_names_exists(page):
    text = page.read_text()
    named = set(re.findall(rf"(?<![\w/])(?:{TREES})/[\w/.-]*\w\.(?:py|md|svg|cpp|cuh?|jsonl)\b", text))
    assert not {name for name in named if not (ROOT / name).exists() and not (ROOT / "pagedkv" / name).exists()}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert not set(re.findall(r"`make ([a-z-]+)", text)) - targets
    links = {link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith(("http", "#"))}
    assert not {link for link in links if not (page.parent / link).exists()}


def test_the_decode_step_is_drawn_as_the_code_has_it():
    """Each line that names a file and a function or class of it: the file defines it."""
    drawn = re.findall(r"([\w/]+\.py) +((?:[\w.]+, )*[\w.]+)", (ROOT / "docs/architecture.md").read_text())
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


@pytest.mark.parametrize("figure", FIGURES, ids=ids)
def test_figures_stand_alone_and_can_be_read_in_the_dark(figure):
    text = figure.read_text()
    drawing = ElementTree.fromstring(text)
    assert drawing.find("{http://www.w3.org/2000/svg}title") is not None, "for those who cannot see it"
    assert "prefers-color-scheme: dark" in text
    assert not re.findall(r"(?:href|src)\s*=\s*[\"']?http|@import|url\(\s*http", text)


def test_the_manual_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("mkdocs", reason="the docs extra is not installed")
    # Not --quiet: it silences the warnings that --strict counts.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    run = subprocess.run(command, cwd=ROOT, env=quiet, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert run.returncode == 0, run.stdout
    built = list(tmp_path.rglob("*.html"))
    assert len(built) >= len(list((ROOT / "docs").glob("*.md")))
    loads = r"<(?:script|img|iframe)[^>]*\bsrc=\"?(?:https?:)?//|<link[^>]*rel=\"?(?:stylesheet|preconnect)\"?[^>]*href=\"?(?:https?:)?//"
    assert not [page.name for page in built if re.search(loads, page.read_text())]
