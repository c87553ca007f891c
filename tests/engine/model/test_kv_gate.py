"""`kv_dtype="auto"`: the smallest KV kind under a bound on its measured KL divergence (pagedkv/kv_gate.py)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import tokenizers
import torch
import transformers

from pagedkv import kv_gate
from pagedkv.engine import Engine
from pagedkv.engine.model import kv_quality
from pagedkv.errors import InvalidRequest
from pagedkv.kv_gate import Gate, _Cost
from pagedkv.spec import KVSpec
from tests.engine.conftest import VOCAB, Checkpoint, Checkpoints, build, prompt_of
from tests.models.outliers import plant

if TYPE_CHECKING:
    from pathlib import Path

FULL = _Cost(0, 0, 0, 1, 10, 16, 1024)
TEXT = " ".join(f"w{token}" for token in prompt_of(200))


def cost(kl: float, error: float, size: int) -> _Cost:
    return FULL._replace(kl=kl, kl_error=error, bytes_per_token=size)


def encode(text: str) -> list[int]:
    """Return tokens of a random model. The texts of the package become two random texts."""
    return prompt_of(200, seed=len(text) % 7)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: Checkpoints) -> Path:
    """Return the folder of a random model that has a tokenizer of the words w0, w1, .. and an empty cache folder."""
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", str(tmp_path / "cache"))
    checkpoint("qwen3").model.save_pretrained(tmp_path)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize("bound", ["x", "-1", "0", "nan", "inf", ""])
def test_a_bound_that_is_no_positive_number_is_refused_at_the_call(bound: str) -> None:
    with pytest.raises(InvalidRequest, match=f"kv_dtype is 'auto:{bound}'; give auto, or auto:BOUND"):
        Engine.load("/no/such/folder", kv_dtype=f"auto:{bound}")


def test_a_text_without_a_gate_is_refused() -> None:
    assert Gate.of("int8") is Gate.of(None) is None
    assert Gate.of("auto") == Gate(0.02)
    assert Gate.of("auto:1e-3") == Gate(0.001)
    with pytest.raises(InvalidRequest, match="kv_text is given, and kv_dtype is 'int8'; only kv_dtype auto reads"):
        Engine.load("/no/such/folder", kv_dtype="int8", kv_text=TEXT)


@pytest.mark.parametrize(
    ("costs", "taken"),
    [
        ({"int8": cost(0.001, 0.0001, 500), "k5v4": cost(0.017, 0.002, 300)}, "k5v4"),
        ({"int8": cost(0.001, 0.0001, 500), "k5v4": cost(0.0190, 0.0011, 300)}, "int8"),
        ({"int8": cost(0.002, 0.0001, 500), "fp8_e4m3": cost(0.001, 0.0001, 500)}, "fp8_e4m3"),
        ({"int8": cost(0.5, 0.1, 500), "k5v4": cost(float("nan"), float("nan"), 300)}, None),
    ],
)
def test_the_smallest_kind_under_the_bound_is_taken(costs: dict[str | None, _Cost], taken: str | None) -> None:
    """The bound holds for the mean plus one standard error; of equal sizes the better kind is taken."""
    gate, every = Gate(0.02), {None: FULL, **costs}
    assert gate.choose(every) == taken
    refused = {line.split()[0] for line in gate.table(every).splitlines() if line.endswith("over the bound")}
    assert refused == {kind for kind, its in costs.items() if not its.kl + its.kl_error < 0.02}


def test_a_geometry_that_cannot_be_rotated_has_two_kinds() -> None:
    assert Gate.kinds([KVSpec(1, 1, 64)]) == ["fp8_e4m3", "int8", "k8v4", "k5v4"]
    assert Gate.kinds([KVSpec(1, 1, 64), KVSpec(1, 1, 12)]) == ["fp8_e4m3", "int8"]


def test_the_texts_of_the_package_are_long_and_two() -> None:
    ids, others = Gate.token_ids(lambda text: text.split(), 10_000, None)  # type: ignore[arg-type, return-value]
    assert ids != others
    assert min(len(ids), len(others)) > 600
    assert len(Gate.token_ids(str.split, 200, None)[0]) == 200  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["w1 w2 w3", "hello " * 500])
def test_a_text_that_is_short_or_of_unknown_words_is_refused(folder: Path, text: str) -> None:
    with pytest.raises(InvalidRequest, match="a text of 64 different tokens or more, and this one has"):
        Engine.load(folder, kv_dtype="auto", kv_text=text)


def test_a_calibration_is_that_of_the_keys_of_transformers(checkpoint: Checkpoints) -> None:
    found = kv_quality.calibration_of((tiny := checkpoint("gemma3")).decoder(), [*(ids := prompt_of(150)), 1])
    config = tiny.model.config
    assert found is not None
    assert found.shape == (config.num_hidden_layers, config.num_key_value_heads, 2, config.head_dim)
    whole = transformers.DynamicCache()  # without a config, it keeps the keys behind a window
    with torch.no_grad():
        tiny.model(torch.tensor([ids]), past_key_values=whole)
    keys = whole.layers[0].keys[0].transpose(0, 1)
    torch.testing.assert_close(found[0, :, 0], keys.mean(0), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found[0, :, 1], keys.std(0).sqrt(), rtol=1e-3, atol=1e-3)
    assert Gate.calibration(torch.ones(9, 1, 8))[0, 1].tolist() == [1] * 8


def test_planted_outliers_are_refused_unless_keys_are_calibrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", str(tmp_path / "cache"))
    caplog.set_level(logging.WARNING, kv_gate.__name__)
    plant(model := build("qwen3"))
    model.save_pretrained(tmp_path)
    decoder = Checkpoint(tmp_path, model).decoder()

    def settled(bound: float, **options: object) -> tuple[str | None, str]:
        caplog.clear()
        kind, found = kv_quality._settled_kind(Gate(bound), decoder, encode, None, f"planted {options}")
        assert (found is None) is (kind not in ("k8v4", "k5v4") or bool(options))
        return kind, caplog.text

    kind, text = settled(0.02)
    assert kind == "k8v4"
    assert "int8" in next(line for line in text.splitlines() if line.endswith("over the bound"))
    kind, text = settled(1e-6)
    assert kind is None
    assert "full precision stays, as no kind has a mean KL plus one standard error under 1e-06" in text
    monkeypatch.setattr(kv_quality, "calibration_of", lambda *_: None)
    kind, text = settled(0.02, calibrated=False)
    assert kind == "fp8_e4m3"
    assert text.count("over the bound") == 3


def test_a_second_load_measures_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    measure, calls = kv_quality.kv_quality, []
    monkeypatch.setattr(kv_quality, "kv_quality", lambda *given: calls.append(1) or measure(*given))

    def load(bound: str, text: str = TEXT) -> tuple[str | None, torch.Tensor | None]:
        cache = Engine.load(folder, dtype="float32", num_frames=16, kv_dtype=f"auto{bound}", kv_text=text).cache
        return cache.spec.kv_dtype, cache.calibration

    caplog.set_level(logging.WARNING, kv_gate.__name__)
    kind, calibration = load("")
    table = caplog.text
    caplog.clear()
    again, same = load("")
    assert (kind, len(calls)) == (again, 1)
    assert table.endswith(caplog.text)
    assert "k5v4" in caplog.text
    assert calibration is same is None or torch.equal(calibration, same)
    assert load(":1e-9")[0] is None
    assert len(calls) == 1
    load("", TEXT + " w1")
    assert len(calls) == 2
    for file in (folder / "cache/kv-gate").glob("*.json"):
        file.write_text("[1")
    load("")
    assert len(calls) == 3
