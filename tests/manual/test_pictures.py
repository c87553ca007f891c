"""The pictures of the manual show runs of today: each run repeats what its picture shows, all but the times."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NAMES = ["one_token", "prefill", "batching", "speculation", "serving"]


@pytest.fixture(scope="module", autouse=True)
def scripts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        yield
        for name in [name for name in sys.modules if name.partition(".")[0] in ("pictures", "draw_pictures")]:
            del sys.modules[name]


def picture(name: str) -> tuple[ModuleType, ModuleType, dict[str, Any]]:
    """The module of a picture, the script, and the facts from which the picture was drawn."""
    script = importlib.import_module("draw_pictures")
    return importlib.import_module(f"pictures.{name}"), script, script.facts_of(name)


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_and_its_text_are_those_of_its_facts(name):
    module, script, facts = picture(name)
    assert script.image_of(name).read_text(encoding="utf-8") == module.draw(facts)
    page = (ROOT / script.PAGES[name]).read_text(encoding="utf-8")
    assert f"```text\n{module.text(facts)}```" in page
    assert script.with_text(page, name, module.text(facts)) == page


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "serving")) for name in NAMES])
def test_a_run_of_today_is_the_one_in_the_picture(name, monkeypatch):
    if name == "serving":
        pytest.importorskip("uvicorn", reason="the serve extra is not installed")
        pytest.importorskip("fastapi", reason="the serve extra is not installed")
    module, _, facts = picture(name)
    shown = {key: value for key, value in facts.items() if key != "measured"}
    assert json.loads(json.dumps(module.repeat())) == shown


def test_all_pictures_of_the_script_are_tested():
    assert list(picture("one_token")[1].PAGES) == NAMES
