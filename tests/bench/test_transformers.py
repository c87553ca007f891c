"""`pagedkv bench transformers` where torch is slow in bfloat16: shorter prompts, and a reason for each missing row."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture
def runner() -> Any:
    """Return the benchmark. It imports triton, which tests/kernels/triton must be the first to do."""
    pytest.importorskip("transformers")
    from pagedkv.bench.transformers import runner

    return runner


@pytest.fixture
def small_model(runner: Any) -> Any:
    """Return a model of the benchmark's kind that computes a prompt in milliseconds."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32_000, hidden_size=64, intermediate_size=64, num_hidden_layers=12, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=512, eos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()


@pytest.mark.parametrize("is_slow", [True, False])
@pytest.mark.parametrize("shape", [(1, 100), (2, 100)])
def test_long_prompts_are_left_out_where_torch_is_slow(
    shape: tuple[int, int], is_slow: bool, runner: Any, small_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "is_slow_in_torch", lambda dtype: is_slow)
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        runner.report_prefill(rows.append, small_model, shape, 1)

    medians = {row["variant"]: row["median"] for row in rows}
    if is_slow and shape == (2, 100):
        assert medians["pages"] > 0
        assert medians["DynamicCache"] is None
        assert rows[0]["why_not"] == runner.SLOW_PROMPT
    else:
        assert set(medians) == {"DynamicCache", "pages"}
        assert min(medians.values()) > 0
    from pagedkv.bench.transformers import plot

    assert len(plot.charts(rows)) == 1, "rows without a figure are not drawn"


@pytest.mark.parametrize("is_slow", [True, False])
def test_rows_of_a_shallow_model_say_so_and_promise_nothing(
    is_slow: bool, runner: Any, small_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "is_slow_in_torch", lambda dtype: is_slow)
    monkeypatch.setattr(runner, "model_of", lambda: small_model)
    monkeypatch.setattr(runner, "STEPS", 2)
    monkeypatch.setattr(runner, "PROMPTS", {})
    for case in ("prefix", "batch", "quality", "memory"):
        monkeypatch.setattr(runner, f"report_{case}", lambda report, *_, case=case: report({"case": case, "must": 1.0}))
    monkeypatch.setattr(runner, "report_recall", lambda report: None)
    rows: list[dict[str, Any]] = []
    runner.measure([(2, 16)], 1, rows.append)
    assert {row["case"] for row in rows} >= {"decode", "memory", "prefix"}
    assert all(row.get("layers") == (runner.SLOW_LAYERS if is_slow else None) for row in rows)
    assert any(row["must"] for row in rows) is not is_slow


@pytest.mark.parametrize(("is_slow", "shape"), [(True, (4, 32)), (False, (8, 96))])
def test_the_batch_has_shorter_prompts_where_torch_is_slow(
    is_slow: bool, shape: tuple[int, int], runner: Any, small_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if runner.HOST < runner.NEEDED:
        pytest.skip("this transformers has no generate_batch with pages")
    monkeypatch.setattr(runner, "is_slow_in_torch", lambda dtype: is_slow)
    monkeypatch.setattr(runner, "BATCH_STEPS", 2)
    monkeypatch.setattr(runner, "BATCH", (8, 96))
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        runner.report_batch(rows.append, small_model, 1)
    assert {(row["batch"], row["context"]) for row in rows} == {shape}
    assert all(row["median"] > 0 for row in rows)
