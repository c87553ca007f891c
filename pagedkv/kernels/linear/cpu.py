"""The linear operations in C++ (csrc/cpu/linear/linear.inc), their objections, and what they leave to torch.

A call that the C++ code refuses (an unusual stride or dtype) is answered by the definition.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

import pagedkv.kernels.bound  # noqa: F401  # registers torch's tensors with the extension
from pagedkv.kernels import cpu
from pagedkv.kernels.linear import reference
from pagedkv.kernels.linear.matrix import Matrix
from pagedkv.kernels.threads import num_threads

if TYPE_CHECKING:
    from torch import Tensor

MOST_TOKENS: Final = 32
"""Beyond it torch's matrix products are faster: arithmetic is the limit, no longer memory."""

FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)
_STORE, _ADD, _SILU, _GELU = range(4)  # Linear::Mode of csrc/cpu/contract.hpp
_GATES: Final = {"silu": _SILU, "gelu_tanh": _GELU}


def objections(device: torch.device, dtype: torch.dtype, num_tokens: int) -> list[str]:
    """Return all reasons why these operations cannot serve a step of `num_tokens` tokens."""
    reasons = cpu.missing()
    if device.type != "cpu":
        reasons.append(f"it runs on cpu, the tensors are on {device.type}")
    if dtype not in FLOATS:
        reasons.append(f"the weights are {dtype}; it takes float32, bfloat16 and float16")
    if num_tokens > MOST_TOKENS:
        reasons.append(f"the step has {num_tokens} tokens; it serves at most {MOST_TOKENS}")
    return reasons


def _parts(weights: Tensor | Matrix) -> tuple[Tensor, Tensor | None]:
    """Return the elements and the scales of weights."""
    return (weights.stored, weights.scales) if isinstance(weights, Matrix) else (weights, None)


class Body:
    """The operations on the instruction set and the threads of this moment. Made anew for each step."""

    def __init__(self) -> None:
        self._x: Any = cpu.extension()
        self._isa, self._threads = cpu.isa(), num_threads()

    def norm_linear(
        self,
        x: Tensor,
        norm: Tensor | None,
        weights: Tensor | Matrix,
        bias: Tensor | None,
        eps: float,
        out: Tensor | None = None,
    ) -> Tensor:
        """As `reference.norm_linear`."""
        result = x.new_empty(len(x), len(weights)) if out is None else out
        if self._x.linear(_STORE, x, norm, *_parts(weights), bias, result, eps, self._isa, self._threads):
            return result
        return reference.norm_linear(x, norm, weights, bias, eps)

    def norm_gate_up(
        self,
        x: Tensor,
        norm: Tensor | None,
        weights: Tensor | Matrix,
        bias: Tensor | None,
        eps: float,
        activation: str,
        out: Tensor | None = None,
    ) -> Tensor:
        """As `reference.norm_gate_up`."""
        result = x.new_empty(len(x), len(weights) // 2) if out is None else out
        if self._x.linear(_GATES[activation], x, norm, *_parts(weights), bias, result, eps, self._isa, self._threads):
            return result
        return reference.norm_gate_up(x, norm, weights, bias, eps, activation)

    def linear_add(
        self,
        residual: Tensor,
        x: Tensor,
        weights: Tensor | Matrix,
        bias: Tensor | None,
        norm: Tensor | None,
        eps: float,
    ) -> None:
        """As `reference.linear_add`."""
        if norm is not None:
            y = self.norm_linear(x, None, weights, bias, eps)
            if not self._x.add_normed(residual, y, norm, eps, self._isa):
                residual += reference.normed(y, norm, eps)
        elif not self._x.linear(_ADD, x, None, *_parts(weights), bias, residual, eps, self._isa, self._threads):
            reference.linear_add(residual, x, weights, bias, norm, eps)

    def norm_rotate(
        self,
        qkv: Tensor,
        heads: tuple[int, int],
        norms: tuple[Tensor | None, Tensor | None],
        angles: tuple[Tensor, Tensor],
        eps: float,
    ) -> None:
        """As `reference.norm_rotate`."""
        if not self._x.turn_heads(qkv, *norms, *angles, *heads, eps, self._isa, self._threads):
            reference.norm_rotate(qkv, heads, norms, angles, eps)

    def logits(self, x: Tensor, norm: Tensor, head: Tensor | Matrix, eps: float, out: Tensor | None = None) -> Tensor:
        """As `reference.logits`."""
        result = torch.empty(len(x), len(head), dtype=torch.float32) if out is None else out
        if self._x.linear(_STORE, x, norm, *_parts(head), None, result, eps, self._isa, self._threads):
            return result
        return reference.logits(x, norm, head, eps)
