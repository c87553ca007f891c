"""Outliers planted in the keys of a model: two RoPE pairs of each key times 100, the same pairs of each query by 100.

Scores stay the same, and so does the function of the model. A model that has norms of q and k gets them in the weights
of these norms, since a norm would undo what a projection does.
"""

from __future__ import annotations

from typing import Any

import torch


@torch.no_grad()
def plant(model: Any, pairs: tuple[int, ...] = (2, -3), factor: float = 100.0) -> None:
    """Multiply `pairs` of all keys by `factor`, and divide those of all queries by it.

    pairs:    pair i rotates the channels i and i + D / 2
    Modifies: the parameters of `model`, a transformers model in float32 (bfloat16 would round Gemma's weights too far)
    """
    spread = torch.ones(2, model.config.head_dim // 2)
    spread[:, list(pairs)] = factor
    parameters = dict(model.named_parameters())
    part = "norm" if any("k_norm" in name for name in parameters) else "proj"
    one = float(part == "norm" and model.config.model_type.startswith("gemma"))  # Gemma's norms multiply by 1 + weight
    for side, by in (("k", spread.flatten()), ("q", 1 / spread.flatten())):
        for name, parameter in parameters.items():
            if f".{side}_{part}." in name:
                factors = by.repeat(len(parameter) // len(by)).view(-1, *(1 for _ in parameter.shape[1:]))
                parameter.copy_((parameter + one) * factors - one)
