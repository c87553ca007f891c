"""Models that other people trained (`make models`): the tokens of transformers, and the cost of the KV kinds."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pagedkv.engine import Engine, SamplingParams
from pagedkv.engine.checkpoint.tokenizer import Tokenizer
from pagedkv.engine.model.decoder import Decoder
from pagedkv.engine.model.kv_quality import calibration_of, kv_quality
from pagedkv.kv_gate import Gate
from scripts.fetch_models import FOLDER, MODELS
from tests.engine.conftest import build, prompt_of
from tests.models.outliers import plant

PROMPTS = ("The capital of France is", "def fibonacci(n):\n", "Once upon a time there was a small", "1, 1, 2, 3, 5, 8,")
STUDY = {
    "smollm2-135m": {"fp8_e4m3": 0.0076, "int8": 0.0013, "k8v4": 0.0077, "k5v4": 0.0182},
    "gemma3-270m": {"fp8_e4m3": 0.0084, "int8": 0.0056, "k8v4": 0.0062, "k5v4": 0.0165},
}
"""KL divergence of keys and values that transformers read back from these kinds, over the text "English"."""


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest) -> Path:
    if not (FOLDER / request.param).is_dir():
        pytest.skip(f"there is no {FOLDER / request.param}; `make models` fetches and converts it")
    return FOLDER / request.param


def loaded(folder: Path) -> tuple[Any, Any]:
    """Return the tokenizer and the model of transformers, in float32."""
    auto = transformers.AutoTokenizer, transformers.AutoModelForCausalLM
    return auto[0].from_pretrained(folder), auto[1].from_pretrained(folder, dtype=torch.float32).eval()


def texts() -> dict[str, str]:
    """Return three texts of over 1,024 tokens. "English" is that of the study: a licence that numpy's wheel holds."""
    numpy, root = metadata.distribution("numpy"), Path(__file__).parents[2]
    licences = numpy.locate_file(f"numpy-{numpy.version}.dist-info/licenses/LICENSE.txt").read_text()
    english = licences[licences.index("GNU GENERAL PUBLIC LICENSE\n                       Version 3") - 20 :]
    python = (root / "pagedkv/core/manager.py").read_text()
    return {"English": english[1200:9000], "Apache": (root / "LICENSE").read_text(), "Python": python}


def test_greedy_tokens_are_those_of_transformers(folder: Path) -> None:
    tokenizer, model = loaded(folder)
    prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    engine = Engine.load(folder, dtype="float32", num_frames=64)
    answers = engine.generate(prompts, SamplingParams(max_tokens=16, temperature=0))
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0, len(prompt) :]
        assert list(answer.completions[0].token_ids) == expected.tolist()


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_planted_outliers_change_keys_and_not_logits(name: str) -> None:
    model, prompt = build(name), torch.tensor([prompt_of(60)])
    with torch.no_grad():
        before = model(prompt, use_cache=True)
        plant(model)
        after = model(prompt, use_cache=True)
    torch.testing.assert_close(after.logits, before.logits, rtol=1e-4, atol=1e-4)
    larger = after.past_key_values.layers[0].keys / before.past_key_values.layers[0].keys
    assert larger.median(2).values[0, 0].round().tolist().count(100) == 4


@pytest.mark.models
def test_kinds_cost_as_much_as_in_the_study(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer, decoder = Tokenizer.load(folder), Decoder.load(folder, dtype="float32")
    _, others = Gate.token_ids(tokenizer.encode, 1 << 20, None)
    calibration, encode = calibration_of(decoder, others), transformers.AutoTokenizer.from_pretrained(folder)
    for title, text in texts().items():
        found = kv_quality(decoder, encode(text).input_ids[:1024], None, calibration)
        with capsys.disabled():
            print(f"\n{folder.name}, {title}\n{Gate().table(found)}")
        for kind, kl in STUDY[folder.name].items() if title == "English" else ():
            assert found[kind].kl <= 1.25 * kl, kind


@pytest.mark.models
def test_outliers_planted_in_a_real_model_change_its_logits_by_rounding(folder: Path) -> None:
    tokenizer, model = loaded(folder)
    ids = tokenizer(texts()["English"]).input_ids[:1024]
    with torch.no_grad():
        before = model(torch.tensor([ids[:256]])).logits
        plant(model)
        torch.testing.assert_close(model(torch.tensor([ids[:256]])).logits, before, rtol=1e-3, atol=5e-3)
