"""lm-eval's own client over loopback: a task of 20 questions, and the scores of transformers.

    pip install 'lm-eval[api]'

The client sends the ids of a question and of one answer, and asks for the log-probabilities of the prompt.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagedkv.engine.checkpoint import BUNDLED
from tests.engine.serve.server import serving

pytestmark = pytest.mark.slow
TASK = Path(__file__).parent / "lm_eval_task"


@pytest.fixture
def lm_eval(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return the package, which neither asks the hub nor writes outside of the test's folder."""
    for name, value in {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("tenacity", "aiohttp"):
        pytest.importorskip(name, reason="lm-eval's client is not installed: pip install 'lm-eval[api]'")
    return pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'lm-eval[api]'")


def expected_of(text: str, answer: str, model: Any, tokenizer: Any) -> tuple[float, bool]:
    """Return the log-probability of an answer behind a text by transformers, and whether it is the likeliest text."""
    import torch

    prompt, ids = (tokenizer.encode(one) for one in (text, text + answer))
    with torch.inference_mode():
        told = model(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    behind = torch.tensor(ids[len(prompt) :])
    return float(told.gather(1, behind[:, None]).sum()), bool((told.argmax(-1) == behind).all())


@pytest.mark.usefixtures("extra")
def test_a_task_of_twenty_questions_has_the_scores_of_transformers(
    lm_eval: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers
    from lm_eval.tasks import TaskManager

    monkeypatch.chdir(TASK)  # the file of the task names its data beside it
    with serving("--num-frames", 320, "--dtype", "float32") as server:
        client = {
            "model": "bundled",
            "base_url": f"{server.url}/v1/completions",
            "tokenizer": str(BUNDLED),
            "tokenizer_backend": "huggingface",
            "add_bos_token": True,  # the circuit of the bundled checkpoint reads it
            "num_concurrent": 4,
            "max_retries": 1,
        }
        found = lm_eval.simple_evaluate(
            model="local-completions",
            model_args=client,
            tasks=["records"],
            task_manager=TaskManager(include_path=str(TASK), include_defaults=False),
            batch_size=2,
            bootstrap_iters=0,
        )
        assert server.end() == (0, "")
    model = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED, dtype="float32").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(BUNDLED)
    samples = found["samples"]["records"]
    questions = [json.loads(line) for line in (TASK / "records.json").read_text().splitlines()]
    assert len(samples) == len(questions) == 20
    for sample in samples:
        doc = sample["doc"]
        for choice, (told,) in zip(doc["choices"], sample["resps"], strict=True):
            logprob, is_greedy = expected_of(f"{doc['records']} {doc['question']}", f" {choice}", model, tokenizer)
            # float32 has seven digits, and the logits of this circuit are in the hundreds
            assert float(told[0]) == pytest.approx(logprob, abs=1e-3, rel=5e-5)
            assert str(told[1]) == str(is_greedy)
    assert found["results"]["records"]["acc,none"] == 1.0
