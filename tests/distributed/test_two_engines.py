"""Two engines in two processes over one store: the second answers a prompt that the first has computed.

The example of NIXL, over shared memory and over TCP: the answer of two processes is that of one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from pagedkv.engine import Engine
from pagedkv.engine.sampling.params import SamplingParams
from tests.tiers.stores import Redis

ROOT = Path(__file__).parents[2]
PARAMS = SamplingParams(max_tokens=8)

OTHER = """
import json, sys
from pagedkv.engine import Engine
from pagedkv.engine.sampling.params import SamplingParams

tier, prompt = sys.argv[1], json.loads(sys.stdin.read())
with Engine.load(tiers=[tier], num_frames=400) as engine:
    [request] = engine.generate([prompt], SamplingParams(max_tokens=8))
    print(json.dumps([request.completions[0].token_ids, request.completions[0].cached_tokens]))
"""


def elsewhere(tier: str, prompt: list[int]) -> tuple[list[int], int]:
    """Return the tokens of another process, and how many tokens of the prompt it found."""
    ended = subprocess.run(
        [sys.executable, "-c", OTHER, tier], input=json.dumps(prompt), capture_output=True, text=True, check=True
    )
    tokens, cached = json.loads(ended.stdout)
    return tokens, cached


@pytest.mark.parametrize("length", [500, pytest.param(4000, marks=pytest.mark.slow)])
def test_the_second_engine_computes_no_page_of_the_prompt(length: int, tmp_path: Path) -> None:
    store = Redis(tmp_path)
    tier = f"redis:256MiB:{store.url}"
    prompt = random.Random(length).choices(range(10, 600), k=length)
    want, cached = elsewhere(tier, prompt)
    assert (len(want) > 0, cached) == (True, 0)
    with Engine.load(tiers=[tier], num_frames=400) as engine:
        [request] = engine.generate([prompt], PARAMS)
        completion = request.completions[0]
        assert completion.token_ids == want
        assert completion.cached_tokens == (length - 1) // 16 * 16
        assert engine.cache.tiers.stats()["redis"].loaded == (length - 1) // 16
    store.close()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="no NIXL: pip install --no-deps nixl nixl-cu13")
@pytest.mark.parametrize("transports", ["all", "tcp"])
def test_the_pages_of_a_prompt_go_from_one_process_to_another(transports: str, tmp_path: Path) -> None:
    environment = {**os.environ, "UCX_TLS": transports, "NIXL_LOG_LEVEL": "WARN", "PAGEDKV_DEBUG": "3"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(ROOT / "examples/nixl_pages.py")]
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "tokens that came from the prefill process: 480" in run.stdout
