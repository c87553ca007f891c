"""Draw the pictures of the manual from runs of today: docs/img/NAME.svg, and NAME's text in the page that shows it.

    python scripts/draw_pictures.py                    run all, measure, and draw
    python scripts/draw_pictures.py batching           only these
    python scripts/draw_pictures.py --draw             draw again from the facts of the last run

A picture is made in three steps, each of them a function of its module in pictures/:

    repeat()   what each run repeats: page tables, slots, tokens, steps      compared with a run of today by the tests
    measure()  times, which differ between runs and machines                 kept in pictures/facts with the others
    draw()     the SVG; text(): the same in words                            compared with docs/ by the tests
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
FACTS: Final = Path(__file__).parent / "pictures" / "facts"
PAGES: Final = {
    "one_token": "docs/explanation/one-token.md",
    "prefill": "docs/explanation/prefill-and-decode.md",
    "batching": "docs/explanation/batching.md",
    "speculation": "docs/explanation/speculation.md",
    "serving": "docs/start/serve.md",
}
"""Picture → the page that shows it."""


def image_of(name: str) -> Path:
    """Return the path of a picture."""
    return ROOT / "docs" / "img" / f"{name.replace('_', '-')}.svg"


def facts_of(name: str) -> dict[str, Any]:
    """Return the facts of the run that a picture shows."""
    facts: dict[str, Any] = json.loads((FACTS / f"{name}.json").read_text(encoding="utf-8"))
    return facts


def with_text(page: str, name: str, text: str) -> str:
    """Return a page whose picture `name` is followed by `text` as its text."""
    pattern = rf"(img/{image_of(name).name}\).*?<summary>.*?```text\n).*?(```)"
    return re.sub(pattern, lambda found: f"{found[1]}{text}{found[2]}", page, count=1, flags=re.S)


def main() -> None:
    """Run and draw the pictures that the command line names."""
    parser = argparse.ArgumentParser(description="Draw the pictures of the manual from runs of today.")
    parser.add_argument("names", nargs="*", choices=[*PAGES, []], help="pictures; all if none is named")
    parser.add_argument("--draw", action="store_true", help="draw again from the facts of the last run")
    options = parser.parse_args()
    for name in options.names or PAGES:
        picture = importlib.import_module(f"pictures.{name}")
        if not options.draw:
            facts = {**picture.repeat(), "measured": picture.measure()}
            (FACTS / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        facts = facts_of(name)
        image_of(name).write_text(picture.draw(facts), encoding="utf-8")
        page = ROOT / PAGES[name]
        if page.exists():
            page.write_text(with_text(page.read_text(encoding="utf-8"), name, picture.text(facts)), encoding="utf-8")
        print(f"drew {image_of(name).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
