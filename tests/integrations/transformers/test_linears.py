"""The linear layers of a patched model: which calls compute with our operation, how exactly, and what is left of it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from pagedkv.integrations.transformers import PagedCache, Patched, linears, patch
from pagedkv.integrations.transformers.geometry import CACHE
from pagedkv.kernels import cpu as kernels
from pagedkv.kernels.linear import cpu
from tests.integrations.transformers.families import OPTIONS, model_of, prompts

LAYERS = 2 * 7 + 1

pytestmark = pytest.mark.skipif(bool(kernels.missing()), reason="no C++ kernels")


@pytest.fixture
def llama() -> Any:
    return model_of("llama", num_hidden_layers=2)


@pytest.fixture
def rows(monkeypatch: Any) -> list[int]:
    """The rows of each call of our operation."""
    found, computed = [], cpu.Native._linear

    def noted(self: Any, mode: str, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        found.append(len(x))
        return computed(self, mode, x, *rest)

    monkeypatch.setattr(cpu.Native, "_linear", noted)
    return found


def test_each_linear_layer_of_a_step_is_ours(llama: Any, patched: Patched, rows: list[int]) -> None:
    inputs = prompts(40, (0, 0))
    assert patched.num_linears == LAYERS
    llama.generate(**inputs, **OPTIONS)
    # a prompt of 40 tokens is computed by torch, but for its logits
    assert rows == [2] * (1 + 11 * LAYERS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_are_as_exact_as_those_of_torch(dtype: torch.dtype) -> None:
    model = model_of("llama", seed=3, num_hidden_layers=2)
    ids = torch.randint(1, 99, (2, 60))
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(ids).logits
        model = model.to(dtype)
        error = [(_stepwise(model, ids, fast) - expected).abs().mean() for fast in (False, True)]
    assert 0 < error[1] <= 2 * error[0]


def _stepwise(model: Any, ids: torch.Tensor, fast: bool) -> torch.Tensor:
    handle = patch(model, memory="16MiB", fast_linears=fast)
    assert handle.num_linears == (LAYERS if fast else 0)
    with PagedCache(model.config, pool=handle.pool) as cache:
        found = [model(part, **{CACHE: cache}).logits for part in ids.split(4, 1)]
    handle.unpatch()
    return torch.cat(found, 1).double()


@pytest.mark.parametrize("way", ["another cache", "gradients", "autocast", "other kernels"])
def test_a_forward_pass_without_pages_or_with_other_kernels_is_torchs(
    way: str, llama: Any, patched: Patched, rows: list[int], monkeypatch: Any
) -> None:
    ids = prompts()["input_ids"][:, :4]
    if way == "another cache":
        llama.generate(ids, **OPTIONS, **{CACHE: DynamicCache(config=llama.config)})
    elif way == "gradients":
        llama(ids, labels=ids, use_cache=False).loss.backward()
        assert llama.lm_head.weight.grad is not None
    elif way == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            llama.generate(ids, **OPTIONS)
    else:
        monkeypatch.setenv("PAGEDKV_KERNELS", "reference")
        llama.generate(ids, **OPTIONS)
    assert rows == []


def test_a_forward_that_is_replaced_for_all_linear_layers_is_theirs_too(
    llama: Any, patched: Patched, monkeypatch: Any
) -> None:
    forward = torch.nn.Linear.forward
    before = llama.generate(**prompts(), **OPTIONS)
    with monkeypatch.context() as replaced:
        replaced.setattr(torch.nn.Linear, "forward", lambda self, x: forward(self, x) * 1.5)
        found = llama.generate(**prompts(), **OPTIONS)
        assert found.equal(llama.generate(**prompts(), **OPTIONS, use_cache=False))
    assert not found.equal(before)
    assert llama.generate(**prompts(), **OPTIONS).equal(before)


def test_copies_of_layers_are_torchs(llama: Any, patched: Patched) -> None:
    layer = llama.model.layers[0]
    for made in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), copy.copy(layer.mlp.up_proj)):
        assert not any(isinstance(module, linears.PagedLinear) for module in made.modules())
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        made = pickle.loads(pickle.dumps(layer.mlp.up_proj, protocol))
        assert type(made) is torch.nn.Linear
        assert made.weight.equal(layer.mlp.up_proj.weight)


def test_layers_that_are_no_plain_linear_stay_as_they_are(llama: Any, rows: list[int]) -> None:
    class Own(torch.nn.Linear):
        pass

    llama.model.layers[0].mlp.up_proj.__class__ = Own
    replaced = llama.model.layers[1].mlp.up_proj
    replaced.forward = lambda x: torch.nn.functional.linear(x, replaced.weight)
    handle = patch(llama, memory="16MiB")
    assert handle.num_linears == LAYERS - 2
    rows.clear()
    llama.generate(**prompts(40, (0, 0)), **OPTIONS)
    assert rows == [2] * (1 + 11 * (LAYERS - 2))
    handle.unpatch()
    assert type(llama.model.layers[0].mlp.up_proj) is Own
