"""Linear layers of vLLM: which are ours. vLLM is a stand-in here; host/test_tokens.py runs it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import wraps
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import pagedkv
from pagedkv.errors import InvalidRequest

NAME = "pagedkv.integrations.vllm.linears"


class Host:
    """Stands in for the parts of vLLM that the file imports."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.config: Any = None
        self.is_zen, self.served, self.said = False, [], []  # type: ignore[var-annotated]
        modules: dict[str, Any] = {
            name: ModuleType(name)
            for name in ("vllm", "vllm.config", "vllm.logger", "vllm.platforms", "vllm.model_executor.layers.utils")
        }
        for name in ("vllm.model_executor", "vllm.model_executor.layers"):
            modules[name] = ModuleType(name)
        self.utils = modules["vllm.model_executor.layers"].utils = modules["vllm.model_executor.layers.utils"]
        modules["vllm.config"].get_current_vllm_config_or_none = lambda: self.config
        logger = SimpleNamespace(info_once=lambda text, *values: self.said.append(text % values))
        modules["vllm.logger"].init_logger = lambda _: logger
        modules["vllm.platforms"].current_platform = SimpleNamespace(is_zen_cpu=lambda: self.is_zen)
        # as if another plug-in had wrapped it
        self.utils.dispatch_cpu_unquantized_gemm = wraps(self.choose)(
            lambda *given, **named: self.choose(*given, **named)
        )
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)

    def choose(self, layer: Any, remove_weight: bool) -> None:
        self.served.append((layer, remove_weight))
        layer.cpu_linear = "vLLM's"

    def layer(self, dtype: torch.dtype = torch.float32, *shape: int, remove_weight: bool = True) -> Any:
        """Return a layer that was given what it computes with."""
        weight = torch.nn.Parameter(torch.ones(shape or (6, 4), dtype=dtype), requires_grad=False)
        layer = SimpleNamespace(weight=weight)
        self.utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=remove_weight)
        return layer


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    made = Host(monkeypatch)
    sys.modules.pop(NAME, None)
    from pagedkv.integrations.vllm import linears

    linears.install()
    linears.install()  # vLLM may call `register` again
    yield made
    sys.modules.pop(NAME, None)
    del pagedkv.integrations.vllm.linears


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_layer_without_quantisation_is_ours_and_keeps_its_weights(host: Host, dtype: torch.dtype) -> None:
    layer = host.layer(dtype)
    assert layer.cpu_linear is pagedkv.linear
    assert layer.weight.shape == (6, 4)
    assert layer.cpu_linear(torch.ones(3, 4, dtype=dtype), layer.weight, None).equal(torch.full((3, 6), 4, dtype=dtype))
    assert host.said == [f"Linear layers by pagedkv: steps of few tokens, weights of {dtype}"]
    assert host.served == []


@pytest.mark.parametrize("case", ["float64", "3-D", "meta", "AMX", "zentorch", "refused"])
def test_other_layers_are_those_of_vllm(host: Host, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host.is_zen = case == "zentorch"
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: case == "AMX")
    host.config = SimpleNamespace(additional_config={"pagedkv_linears": case != "refused"})
    with torch.device("meta" if case == "meta" else "cpu"):
        shape = (2, 6, 4) if case == "3-D" else (6, 4)
        layer = host.layer(torch.float64 if case == "float64" else torch.float32, *shape, remove_weight=case != "3-D")
    assert layer.cpu_linear == "vLLM's"
    assert host.served == [(layer, case != "3-D")]


def test_a_wrong_key_stops_the_engine(host: Host) -> None:
    host.config = SimpleNamespace(additional_config={"pagedkv_linear": False})
    with pytest.raises(InvalidRequest, match="pagedkv reads 'pagedkv_policy', 'pagedkv_linears': correct"):
        host.layer()
