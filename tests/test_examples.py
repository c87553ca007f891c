"""The scripts of examples/: each runs as a script, prints something to check, and is short.

A script inside another program is at most half as long as the prototype that it replaces. The scripts of vLLM
need an environment of their own: here they are only read. `make test-vllm` runs them (integrations/vllm/host). The
modules `kernels_of_*` are for the kit: tests/kernels/test_kit.py.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from pagedkv.core import FramePool

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if not path.stem.startswith("kernels_of_"))
MAX_LINES = 60
# the most lines of a script inside another program
HOSTED = {"nixl_pages": 120, "transformers_cache": 191, "vllm_backend": 79, "vllm_block_pool": 212}
RUN = [path for path in EXAMPLES if not path.stem.startswith(("vllm_", "nixl_"))]  # tests/distributed runs the latter


def test_there_is_an_example_of_each_way_in() -> None:
    names = {path.stem for path in EXAMPLES}
    assert names == {
        "own_engine_manager",
        "own_page_tables",
        "foreign_tensors",
        "prefix_and_forks",
        "replay_trace",
        *HOSTED,
    }


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= HOSTED.get(path.stem, MAX_LINES)
    assert f"Run: python examples/{path.name}" in text
    assert "assert " in text


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_names_and_keywords_of_an_example_are_those_of_pagedkv(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    known: dict[str, object] = {"self.frames": FramePool}  # of vllm_block_pool
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "pagedkv":
            module = importlib.import_module(str(node.module))
            known |= {alias.name: getattr(module, alias.name) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in known:
            known[ast.unparse(node)] = getattr(known[ast.unparse(node.value)], node.attr)
    assert len(known) > 1
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and callable(function := known.get(ast.unparse(node.func))):
            parameters = inspect.signature(function).parameters
            takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
            assert takes_any or {keyword.arg for keyword in node.keywords if keyword.arg} <= set(parameters)


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_an_example_runs_and_its_claims_hold(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Run as a script in another folder, without arguments. The assertions are in the example."""
    if path.stem == "transformers_cache" and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    # a proof after each of thousands of commits takes minutes
    monkeypatch.setenv("PAGEDKV_DEBUG", "0" if path.stem == "replay_trace" else "3")
    monkeypatch.setattr(sys, "argv", [str(path)])
    monkeypatch.chdir(tmp_path)
    if "sys.modules" in path.read_text(encoding="utf-8"):  # it says what it has not imported
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        assert subprocess.run([sys.executable, str(path)], timeout=300, check=False).returncode == 0
    else:
        runpy.run_path(str(path), run_name="__main__")
    said = capfd.readouterr()
    assert 1 <= len(said.out.splitlines()) <= 20
    assert said.err == ""
