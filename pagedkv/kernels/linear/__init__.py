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

from typing import TYPE_CHECKING

from pagedkv import debug
from pagedkv.kernels import registry
from pagedkv.kernels.linear import cpu
from pagedkv.kernels.linear.matrix import Matrix
from pagedkv.kernels.linear.reference import Operations

if TYPE_CHECKING:
    import torch

__all__ = ["Matrix", "Operations", "choose"]


def choose(device: torch.device, dtype: torch.dtype, num_tokens: int, backend: str | None = None) -> Operations:
    """Return the operations of a step of `num_tokens` tokens.

    backend: a kernel's name; None for PAGEDKV_KERNELS, or else the fastest.
    Raises:  InvalidRequest if PAGEDKV_CPU_ISA names a set that this processor lacks
    """
    if backend is None or backend == registry.AUTO:
        backend = debug.forced_backend() or registry.AUTO
    if backend in (registry.AUTO, "cpu") and not cpu.objections(device, dtype, num_tokens):
        return cpu.Body()
    return Operations()
