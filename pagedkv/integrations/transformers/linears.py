"""Linears: the linear layers of a patched model are `pagedkv.linear` while a forward pass attends to pages.

A decode step reads each weight once, so memory is its limit, and `pagedkv.linear` reads weights faster than torch does.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from pagedkv import linear
from pagedkv.integrations.transformers.attention import ACTIVE

_FORWARD: Final = torch.nn.Linear.forward  # someone may replace it later, for all layers


class PagedLinear(torch.nn.Linear):
    """The class that a linear layer has while its model is patched. It adds no state, and copies are torch's layers."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return input times weight, plus bias. Shapes: input [..., in_features]; returns [..., out_features]."""
        if ACTIVE.cache is None or torch.nn.Linear.forward is not _FORWARD:
            # A wrapper may keep this method beyond unpatch, when super() would refuse the layer.
            return torch.nn.Linear.forward(self, input)
        return linear(input, self.weight, self.bias)

    def __reduce_ex__(self, _: Any) -> Any:
        parts: Any = super().__reduce_ex__(1)  # later protocols take no class but that of self
        make, arguments, *rest = parts
        return make, tuple(torch.nn.Linear if x is PagedLinear else x for x in arguments), *rest


def install(model: Any, into: list[torch.nn.Linear]) -> None:
    """Make the linear layers of `model` ours, and add them to `into`.

    Layers of another class (quantised, parametrised), with weights of a class of their own, on a GPU, or with a forward
    that was replaced stay as they are.

    Modifies: into, before any layer, so that an interrupt leaves none out
    """
    layers = [module for module in model.modules() if type(module) is torch.nn.Linear]
    into += [layer for layer in layers if "forward" not in vars(layer) and _is_plain(layer.weight)]
    _become(PagedLinear, into)


def remove(layers: list[torch.nn.Linear]) -> None:
    """Give layers their class back, unless something else has changed it since."""
    _become(torch.nn.Linear, [layer for layer in layers if type(layer) is PagedLinear])


def _is_plain(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and type(weight.detach()) is torch.Tensor


def _become(kind: type[torch.nn.Linear], layers: list[torch.nn.Linear]) -> None:
    for layer in layers:
        layer.__class__ = kind
