"""The definition of the linear operations, in torch: every device, every float dtype, any number of tokens.

    norm(x) = round(x / sqrt(mean(x^2) + eps)) * w        RMSNorm (Zhang and Sennrich, 2019)

The quotient is rounded to the dtype of w before the product, as in training: the model's dtype for w, float32 for 1 + w
(Gemma). A norm of None changes nothing.

out:    memory that an operation may use for its result. The definition makes new tensors.
Shapes: x [T, K]; weights [N, K], row-major as safetensors has them; bias [N]; norm [K]; T tokens. Weights may be a
        `Matrix` of integers: its values, rounded to the dtype of x, are the weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from pagedkv.kernels.linear.matrix import Matrix

if TYPE_CHECKING:
    from torch import Tensor


def norm_linear(
    x: Tensor, norm: Tensor | None, weights: Tensor | Matrix, bias: Tensor | None, eps: float, out: Tensor | None = None
) -> Tensor:
    """Return norm(x) W^T + bias: [T, N]."""
    return F.linear(normed(x, norm, eps), dense(weights, x.dtype), bias)


def norm_gate_up(
    x: Tensor,
    norm: Tensor | None,
    weights: Tensor | Matrix,
    bias: Tensor | None,
    eps: float,
    activation: str,
    out: Tensor | None = None,
) -> Tensor:
    """Return act(gate) * up, where gate and up are the halves of norm(x) W^T + bias [T, 2 I].

    activation: "silu", or "gelu_tanh".
    Shapes: returns [T, I]
    """
    gate, up = F.linear(normed(x, norm, eps), dense(weights, x.dtype), bias).chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def linear_add(
    residual: Tensor, x: Tensor, weights: Tensor | Matrix, bias: Tensor | None, norm: Tensor | None, eps: float
) -> None:
    """Add norm(x W^T + bias) to `residual` [T, N]."""
    residual += normed(F.linear(x, dense(weights, x.dtype), bias), norm, eps)


def norm_rotate(
    qkv: Tensor,
    heads: tuple[int, int],
    norms: tuple[Tensor | None, Tensor | None],
    angles: tuple[Tensor, Tensor],
    eps: float,
) -> None:
    """Norm the heads of q and k, then rotate dimensions i and i + D / 2 of each head by an angle. Values stay.

    heads:  of q, and of k (and v).
    norms:  the weights [D] for q and for k.
    angles: cos and sin of the tokens, of qkv's dtype.
    Shapes: qkv [T, (H + 2 K) D]; cos, sin [T, D / 2]
    Modifies: qkv
    """
    cos, sin = (table[:, None] for table in angles)
    each = qkv.view(len(qkv), -1, 2 * cos.shape[-1])
    for part, norm in zip(torch.split(each, [*heads, heads[1]], dim=1), norms, strict=False):
        first, second = normed(part, norm, eps).chunk(2, dim=-1)
        part.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))


def logits(x: Tensor, norm: Tensor, head: Tensor | Matrix, eps: float, out: Tensor | None = None) -> Tensor:
    """Return norm(x) head^T, rounded to the dtype of x, as float32 [T, V]."""
    return F.linear(normed(x, norm, eps), dense(head, x.dtype)).float()


def normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return the norm of the last dim of x; x itself if `weight` is None."""
    if weight is None:
        return x
    wide = x.float()
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (unit.to(weight.dtype) * weight).to(x.dtype)


def dense(weights: Tensor | Matrix, dtype: torch.dtype) -> Tensor:
    """Return weights as a tensor: those of a `Matrix` in `dtype`, others as they are."""
    return weights.dense(dtype) if isinstance(weights, Matrix) else weights
