"""Linears: the linear layers of a patched model are `pagedkv.linear` while a forward pass attends to pages.

A decode step reads each weight once, so memory is its limit, and `pagedkv.linear` reads weights faster than torch does.
"""

from __future__ import annotations

from typing import Any

import torch

from pagedkv import linear
from pagedkv.integrations.transformers.attention import ACTIVE


class PagedLinear(torch.nn.Linear):
    """The class that a linear layer has while its model is patched. It adds no state."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As in torch. Shapes: input [..., in_features]; returns [..., out_features]."""
        if ACTIVE.cache is None:
            return super().forward(input)
        return linear(input, self.weight, self.bias)


def install(model: Any) -> list[torch.nn.Linear]:
    """Make the linear layers of `model` ours, and return them.

    Layers of another class (quantised, parametrised), on a GPU, or with a forward that was replaced stay as they are.
    """
    layers = [module for module in model.modules() if type(module) is torch.nn.Linear]
    layers = [layer for layer in layers if "forward" not in vars(layer) and layer.weight.device.type == "cpu"]
    _become(PagedLinear, layers)
    return layers


def remove(layers: list[torch.nn.Linear]) -> None:
    """Give layers their class back, unless something else has changed it since."""
    _become(torch.nn.Linear, [layer for layer in layers if type(layer) is PagedLinear])


def _become(kind: type[torch.nn.Linear], layers: list[torch.nn.Linear]) -> None:
    for layer in layers:
        layer.__class__ = kind
