"""The package has a known type for each of its public symbols: a type checker of an engine's author infers nothing.

`basedpyright --verifytypes` decides. A symbol is public if no part of its name begins with an underscore, and a type is
known if it is written down: an inferred one may differ between checkers.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the part of the checker's answer that is about symbols."""
    if importlib.util.find_spec("basedpyright") is None:
        pytest.skip("basedpyright is not installed")
    options = ["--pythonpath", sys.executable, "--verifytypes", "pagedkv", "--ignoreexternal", "--outputjson"]
    run = subprocess.run(
        [sys.executable, "-m", "basedpyright", *options],
        cwd=tmp_path_factory.mktemp("elsewhere"),  # as an engine's author sees the package: no settings of the checkout
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    answer: dict[str, Any] = json.loads(run.stdout)
    assert answer["summary"]["errorCount"] == 0, answer["generalDiagnostics"]
    completeness: dict[str, Any] = answer["typeCompleteness"]
    return completeness


UNTYPED_BASES = ("pagedkv.integrations.ray", "pagedkv.integrations.transformers", "pagedkv.integrations.vllm")
"""Their classes have bases of Ray, transformers and vLLM, the types of which are not known."""


def test_every_public_symbol_has_a_known_type(report: dict[str, Any]) -> None:
    assert report["packageRootDirectory"] == str(ROOT / "pagedkv")
    unknown = [
        f"{symbol['name']} ({symbol['category']}): {'; '.join(d['message'] for d in symbol.get('diagnostics', []))}"
        for symbol in report["symbols"]
        if symbol["isExported"]
        and (symbol["isTypeAmbiguous"] or not symbol["isTypeKnown"])
        and not symbol["name"].startswith(UNTYPED_BASES)
    ]
    assert not unknown, "write down the types of these:\n" + "\n".join(unknown)


def test_the_checker_sees_the_public_names(report: dict[str, Any]) -> None:
    """A checker that finds no symbols would find no unknown ones either."""
    seen = {symbol["name"] for symbol in report["symbols"]}
    assert len(seen) > 1000
    for name in ("PagedKVCache", "paged_attention", "KVSpec", "core.MemoryManager", "errors.OutOfFrames.shortfall"):
        assert f"pagedkv.{name}" in seen
