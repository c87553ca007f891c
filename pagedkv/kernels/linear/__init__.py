"""The linear operations of a decoder's step: `reference` defines them in torch, `cpu` has them in C++.

A decode step reads every weight once for a few tokens, so memory is its limit. The C++ body reads weights at the speed
of memory and fuses what lies between two of them: norms, biases, gates, residuals. For many tokens arithmetic is the
limit, and torch's matrix products are used.

    ops = choose(x.device, x.dtype, num_tokens, backend)      once for a step
    ops.norm_linear(x, norm, weights, bias, eps)

    kernel name     operations
    None, "cpu"     `cpu` if it does not object, else `reference`
    any other       `reference`: these kernels only attend

Weights are a tensor, or a `Matrix` of integers with scales (matrix.py), of which a step reads fewer bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from pagedkv import debug
from pagedkv.kernels import registry
from pagedkv.kernels.linear import cpu, reference
from pagedkv.kernels.linear.matrix import Matrix

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Matrix", "Operations", "choose"]


class Operations(Protocol):
    """The operations. A result may lie in `out`, if that is given. Formulas and shapes: reference.py.

    For inference: no gradient is followed. `out`, `residual` and `qkv` overlap no other argument.
    """

    def norm_linear(
        self,
        x: Tensor,
        norm: Tensor | None,
        weights: Tensor | Matrix,
        bias: Tensor | None,
        eps: float,
        out: Tensor | None = ...,
    ) -> Tensor:
        """Return norm(x) W^T + bias."""

    def norm_gate_up(
        self,
        x: Tensor,
        norm: Tensor | None,
        weights: Tensor | Matrix,
        bias: Tensor | None,
        eps: float,
        activation: str,
        out: Tensor | None = ...,
    ) -> Tensor:
        """Return act(gate) * up, where gate and up are the halves of norm(x) W^T + bias."""

    def linear_add(
        self,
        residual: Tensor,
        x: Tensor,
        weights: Tensor | Matrix,
        bias: Tensor | None,
        norm: Tensor | None,
        eps: float,
    ) -> None:
        """Add norm(x W^T + bias) to `residual`."""

    def norm_rotate(
        self,
        qkv: Tensor,
        heads: tuple[int, int],
        norms: tuple[Tensor | None, Tensor | None],
        angles: tuple[Tensor, Tensor],
        eps: float,
    ) -> None:
        """Norm and rotate the heads of q and k."""

    def logits(self, x: Tensor, norm: Tensor, head: Tensor | Matrix, eps: float, out: Tensor | None = ...) -> Tensor:
        """Return norm(x) head^T as float32."""


def choose(device: torch.device, dtype: torch.dtype, num_tokens: int, backend: str | None = None) -> Operations:
    """Return the operations of a step of `num_tokens` tokens.

    backend: a kernel's name; None for PAGEDKV_KERNELS, or else the fastest.
    Raises:  InvalidRequest if PAGEDKV_CPU_ISA names a set that this processor lacks
    """
    if backend is None or backend == registry.AUTO:
        backend = debug.forced_backend() or registry.AUTO
    if backend in (registry.AUTO, "cpu") and not cpu.objections(device, dtype, num_tokens):
        return cpu.Body()
    return cast(Operations, reference)
