"""The page "What can go wrong?" counts what the tests try."""

from __future__ import annotations

from pathlib import Path

from tests.cli import hostile
from tests.core.interrupts.test_interrupts import CALLS, MANAGERS

PAGE = Path(__file__).parents[2] / "docs/how-to/what-can-go-wrong.md"


def test_the_figures_of_the_page_are_those_of_the_tests() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    numbers = {3: "three", 4: "four"}
    for claim in (
        f"every instruction of {len(CALLS)} calls of the manager, for {numbers[len(MANAGERS)]} kinds of managers",
        f"{len(hostile.CHECKPOINTS)} damaged checkpoints, {len(hostile.TEMPLATES)} hostile templates and "
        f"{len(hostile.PROMPTS)} damaged files of prompts",
    ):
        assert claim in text
