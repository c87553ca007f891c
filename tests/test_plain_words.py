"""The prose of the project is plain, as far as a machine can see that (tests/plain_words.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import plain_words

ROOT = Path(__file__).parents[1]
TREES = """
pagedkv triton_kernels csrc bench scripts tests examples docs README.md CHANGELOG.md CONTRIBUTING.md setup.py
""".split()


@pytest.mark.parametrize("tree", TREES)
def test_prose_is_plain(tree):
    found = [line for path in plain_words.files([ROOT / tree]) for line in plain_words.complaints(path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("tree", TREES)
def test_no_line_is_wider_than_120_columns(tree):
    """Tables of Markdown may be wider; so may a line that is one address."""
    wide = [
        f"{path.relative_to(ROOT)}:{number}: {len(line)} columns"
        for path in plain_words.files([ROOT / tree])
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 120 and not (path.suffix == ".md" and line.startswith(("|", "[", "![")))
    ]
    assert not wide, "\n".join(wide)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ('"""What a step costs."""', "begins without a subject"),
        ('"""Where the table is."""', "docstring begins without a subject"),
        ("# nobody reads this frame\n", "say who or what"),
        ("x = 1  # Those that are free\n", "begins without a subject"),
        ('"""Return the frames that are free."""', ""),
        ('"""Is it free? Who asks?"""', ""),
        ("x = 'What is in a string is not prose'\n", ""),
        ("raise ValueError(f'{x} is read by nobody')\n", "say who or what"),
        ("def f(x):\n    text = f'whose {x} is asked'\n    raise ValueError(text)\n", "begins without a subject"),
        ("x = About('everybody who reads a page')\n", "say who or what"),
        ('"""A step.\n\nsteps: all steps. drafts: those that were kept\n"""', "field begins without a noun"),
        ('"""A step.\n\nsteps:    steps that computed tokens\n"""', ""),
        ('"""A step.\n\na ─▶ what nobody has\n"""', ""),
    ],
)
def test_the_checker_sees_what_it_should(tmp_path, source, complaint):
    path = tmp_path / "module.py"
    path.write_text(source)
    found = plain_words.complaints(path)
    assert bool(found) is bool(complaint), found
    assert not found or complaint in found[0]


@pytest.mark.parametrize(
    ("name", "text", "plain"),
    [
        ("kernel.cuh", "// The rows that\n// Nobody is a warp\n", False),
        ("kernel.cpp", 'throw error("what is asked is not there");\n', False),
        ("page.md", "A page.\nWho commits first wins.\n", False),
        ("page.md", "```\nWhat is in a block of code is not prose\n```\n", True),
    ],
)
def test_other_languages_are_read_too(tmp_path, name, text, plain):
    (tmp_path / name).write_text(text)
    assert (plain_words.complaints(tmp_path / name) == []) is plain
