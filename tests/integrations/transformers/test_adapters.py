"""Adapters of PEFT and hooks of accelerate: patched models with them give the tokens that they give without us."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedkv.integrations.transformers import PagedCache, patch
from pagedkv.integrations.transformers.linears import PagedLinear
from tests.integrations.transformers.families import OPTIONS, model_of, prompts


def tokens(model: Any) -> list[list[int]]:
    found: list[list[int]] = model.generate(**prompts(), **OPTIONS).tolist()
    return found


def known(pool: Any, model: Any) -> int:
    """Return how many columns of the prompts are known with the adapters that are active now."""
    with PagedCache(model.config, pool=pool) as cache:
        return cache.find(**prompts())


def has_our_layers(model: Any) -> bool:
    return any(isinstance(module, PagedLinear) for module in model.modules())


def lora(*targets: str) -> Any:
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(r=4, target_modules=list(targets), init_lora_weights=False, task_type="CAUSAL_LM")


@pytest.fixture
def adapted() -> Any:
    """Return a Llama with two adapters, a and b, of which a is active."""
    config = lora("q_proj", "k_proj", "up_proj")
    from peft import get_peft_model

    model = get_peft_model(model_of("llama"), config, adapter_name="a")
    model.add_adapter("b", lora("v_proj", "down_proj"))
    model.set_adapter("a")
    return model.eval()


def test_adapters_are_switched_and_disabled_while_a_model_is_patched(adapted: Any) -> None:
    expected = {}
    for name in ("a", "b"):
        adapted.set_adapter(name)
        expected[name] = tokens(adapted)
    with adapted.disable_adapter():
        expected["none"] = tokens(adapted)
    assert len({str(one) for one in expected.values()}) == 3
    handle = patch(adapted.get_base_model(), memory="16MiB")
    assert handle.attends_to_pages
    assert handle.num_linears > 4 * 7  # those of the adapters, too
    for name in ("a", "b", "a"):
        adapted.set_adapter(name)
        assert tokens(adapted) == expected[name]
        assert tokens(adapted) == expected[name]
        assert known(handle.pool, handle.model) == 9 + 16  # of the row with nine columns of padding
    with adapted.disable_adapter():
        assert known(handle.pool, handle.model) == 0
        assert tokens(adapted) == expected["none"]
    handle.unpatch()
    assert not has_our_layers(adapted)
    assert tokens(adapted) == expected["a"]


def test_rows_of_equal_tokens_with_other_adapters_share_no_pages(adapted: Any) -> None:
    ids = prompts(37, (0,))["input_ids"].repeat(3, 1)
    options = OPTIONS | {"num_beams": 2}

    def rows(*names: str) -> list[list[int]]:
        found: list[list[int]] = adapted.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), adapter_names=list(names), **options
        ).tolist()
        return found

    orders = (("a", "b", "__base__"), ("b", "a", "a"))
    expected = [rows(*order) for order in orders]
    alone = adapted.generate(input_ids=ids, **options).tolist()
    assert expected[0][0] != expected[0][1] != expected[0][2]
    patch(adapted.get_base_model(), memory="16MiB")
    for _ in range(2):
        assert [rows(*order) for order in orders] == expected
        assert adapted.generate(input_ids=ids, **options).tolist() == alone


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_prompts_after_virtual_tokens_find_no_pages_of_prompts_without(kind: str) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(model_of("llama"), getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=5))
    with torch.no_grad():
        for name, parameter in model.eval().named_parameters():
            parameter.mul_(3 if "prompt" in name else 1)
    expected = tokens(model)
    with model.disable_adapter():
        without = tokens(model)
    assert expected != without
    handle = patch(model.get_base_model(), memory="16MiB")
    for _ in range(2):
        assert tokens(model) == expected
        with model.disable_adapter():
            assert tokens(model) == without
    assert known(handle.pool, handle.model) == 9 + 16
    handle.unpatch()
    assert tokens(model) == expected


@pytest.mark.parametrize(
    ("order", "places"), [("hooks first", {"": "cpu"}), ("patch first", {"model": "cpu", "lm_head": "cpu"})]
)
def test_hooks_of_accelerate_on_one_device_change_no_token(places: dict[str, str], order: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = model_of("llama")
    expected = tokens(model)

    def dispatch() -> None:
        accelerate.dispatch_model(model, places, main_device="cpu", force_hooks=True)

    if order == "hooks first":
        dispatch()
    handle = patch(model, memory="16MiB")
    if order == "patch first":
        dispatch()
    for _ in range(2):
        assert tokens(model) == expected
    assert handle.pool.stats().cached > 0
    handle.unpatch()
    assert not has_our_layers(model)
    assert tokens(model) == expected
