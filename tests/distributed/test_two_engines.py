"""Two engines in two processes over one store: the second answers a prompt that the first has computed."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from pagedkv.engine import Engine
from pagedkv.engine.sampling.params import SamplingParams
from tests.tiers.stores import Redis

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
