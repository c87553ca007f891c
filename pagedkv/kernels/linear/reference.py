"""The definition of the linear operations, in torch: every device, every float dtype, any number of tokens.

    norm(x) = round(x / sqrt(mean(x^2) + eps)) * w        RMSNorm (Zhang and Sennrich, 2019)

The quotient is rounded to the dtype of w before the product, as in training: the model's dtype for w, float32 for 1 + w
(Gemma). A norm of None changes nothing.

Shapes: x [T, K]; weights [N, K], row-major as safetensors has them; bias [N]; norm [K]; T tokens. Weights may be a
        `Matrix` of integers: its values, rounded to the dtype of x, are the weights.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from pagedkv.kernels.linear.matrix import Matrix

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor


class Operations:
    """The operations. For inference: no gradient is followed.

    out: memory that an operation may use for its result. The definition makes new tensors.
    `out`, `residual` and `qkv` overlap no other argument.
    """

    def step(self) -> AbstractContextManager[None]:
        """Return a context for a whole step of this thread: its linear operations, its writes and its attention."""
        return nullcontext()

    def norm_linear(
        self, x: Tensor, norm: Tensor | None, weights: Tensor | Matrix, bias: Tensor | None, eps: float,
        out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return norm(x) W^T + bias: [T, N]."""
        return self._linear("store", x, norm, weights, bias, eps, out)

    def norm_gate_up(
        self, x: Tensor, norm: Tensor | None, weights: Tensor | Matrix, bias: Tensor | None, eps: float,
        activation: str, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return act(gate) * up, where gate and up are the halves of norm(x) W^T + bias [T, 2 I].

        activation: "silu", or "gelu_tanh".
        Shapes: returns [T, I]
        """
        return self._linear(activation, x, norm, weights, bias, eps, out)

    def linear_add(
        self,
        residual: Tensor,
        x: Tensor,
        weights: Tensor | Matrix,
        bias: Tensor | None,
        norm: Tensor | None,
        eps: float,
    ) -> None:
        """Add norm(x W^T + bias) to `residual` [T, N]."""
        if norm is None:
            self._linear("add", x, None, weights, bias, eps, residual)
        else:
            self._add_normed(residual, self._linear("store", x, None, weights, bias, eps, None), norm, eps)

    def logits(self, x: Tensor, norm: Tensor, head: Tensor | Matrix, eps: float, out: Tensor | None = None) -> Tensor:
        """Return norm(x) head^T, rounded to the dtype of x, as float32 [T, V]."""
        return self._linear("logits", x, norm, head, None, eps, out)

    def norm_rotate(
        self, qkv: Tensor, heads: tuple[int, int], norms: tuple[Tensor | None, Tensor | None],
        angles: tuple[Tensor, Tensor], eps: float,
    ) -> None:  # fmt: skip
        """Norm the heads of q and k, then rotate dimensions i and i + D / 2 of each head by an angle. Values stay.

        heads:  the number of heads of q, and of k (and v).
        norms:  the weights [D] for q and for k.
        angles: cos and sin of the tokens, of qkv's dtype.
        Shapes: qkv [T, (H + 2 K) D]; cos, sin [T, D / 2]
        Modifies: qkv
        """
        cos, sin = (table[:, None] for table in angles)
        each = qkv.view(len(qkv), -1, 2 * cos.shape[-1])
        for part, norm in zip(torch.split(each, [*heads, heads[1]], dim=1), norms, strict=False):
            first, second = _normed(part, norm, eps).chunk(2, dim=-1)
            part.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))

    def _linear(
        self, mode: str, x: Tensor, norm: Tensor | None, weights: Tensor | Matrix, bias: Tensor | None, eps: float,
        out: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Return y = norm(x) W^T + bias.

        mode: "store" and "logits", y; "add", `out` after y was added; the name of an activation, act(gate) * up
        """
        y = self._product(_normed(x, norm, eps), _dense(weights, x.dtype), bias)
        if mode == "add":
            assert out is not None
            return out.add_(y)
        if mode in ("store", "logits"):
            return y.float() if mode == "logits" else y
        gate, up = y.chunk(2, dim=-1)
        return (F.silu(gate) if mode == "silu" else F.gelu(gate, approximate="tanh")) * up

    def _product(self, x: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weights, bias)

    def _add_normed(self, residual: Tensor, y: Tensor, norm: Tensor, eps: float) -> None:
        residual += _normed(y, norm, eps)


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return the norm of the last dim of x; x itself if `weight` is None."""
    if weight is None:
        return x
    wide = x.float()
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (unit.to(weight.dtype) * weight).to(x.dtype)


def _dense(weights: Tensor | Matrix, dtype: torch.dtype) -> Tensor:
    """Return weights as a tensor: those of a `Matrix` in `dtype`, others as they are."""
    return weights.dense(dtype) if isinstance(weights, Matrix) else weights
