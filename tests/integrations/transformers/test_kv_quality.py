"""patch(model, kv_dtype="auto"): a model of transformers measures what the engine measures of the same weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pagedkv import kv_gate
from pagedkv.engine.model.kv_quality import calibration_of, kv_quality
from pagedkv.errors import InvalidRequest
from pagedkv.integrations.transformers import patch
from tests.engine.conftest import Checkpoint, build, prompt_of
from tests.models.outliers import plant

if TYPE_CHECKING:
    from pathlib import Path

IDS, OTHERS = prompt_of(200), prompt_of(150)


def tokenizer(text: str) -> Any:
    return SimpleNamespace(input_ids=IDS if text == "measure on this" else OTHERS)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_the_costs_are_those_of_the_engine(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", str(tmp_path / "cache"))
    plant(model := build(name))
    model.save_pretrained(tmp_path)
    decoder = Checkpoint(tmp_path, model).decoder()
    wanted = calibration_of(decoder, [*OTHERS, 1])
    expected, found = kv_quality(decoder, IDS, None, wanted), []
    kept = kv_gate._kept
    monkeypatch.setattr(kv_gate, "_kept", lambda *given: found.append(kept(*given)) or found[-1])
    options: dict[str, Any] = {"kv_dtype": "auto:0.5", "kv_text": "measure on this", "memory": "1MiB"}
    model.train()
    patch(model, tokenizer=tokenizer, **options).unpatch()
    assert model.training
    handle = patch(model.eval(), tokenizer=tokenizer, **options)
    assert found[0] == found[1], "the second one is kept"
    costs, calibration = found[0]
    for kind, cost in costs.items():
        if kind not in kv_gate.CALIBRATED or name == "qwen3":  # gemma3 has windows, and the host keeps no more keys
            assert cost[:7] == pytest.approx(expected[kind][:7], rel=0.05, abs=1e-3)
            torch.testing.assert_close(torch.tensor(calibration)[-1], wanted[-1], rtol=1e-3, atol=1e-3)
    assert handle.pool.kv.spec.kv_dtype == "k5v4"
    assert torch.equal(handle.pool.kv.calibration, torch.tensor(calibration))
    with torch.no_grad():
        assert model.generate(torch.tensor([IDS[:20]]), max_new_tokens=4, do_sample=False).shape == (1, 24)
    handle.unpatch()


def test_auto_needs_a_tokenizer_and_a_bound_and_leaves_the_model_as_it_was(llama: Any) -> None:
    before = vars(llama).keys() - {"_pagedkv"}
    for options, why in (
        ({"kv_dtype": "auto"}, "give the tokenizer, too"),
        ({"kv_dtype": "auto:x"}, "kv_dtype is 'auto:x'; give auto, or auto:BOUND"),
        ({"kv_text": "a text"}, "only kv_dtype auto reads a text"),
        ({"kv_dtype": "auto", "tokenizer": lambda text: SimpleNamespace(input_ids=[1, 2, 3])}, "and this one has 3"),
    ):
        with pytest.raises(InvalidRequest, match=why):
            patch(llama, **options)
    assert vars(llama).keys() == before
