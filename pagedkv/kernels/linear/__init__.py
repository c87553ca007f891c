"""The linear operations of a decoder's step: `reference` defines them in torch, `cpu` has them in C++.

A decode step reads every weight once for a few tokens, so memory is its limit. The C++ code reads weights at the speed
of memory and fuses what lies between two of them: norms, biases, gates, residuals. For many tokens arithmetic is the
limit, and torch's matrix products are used. Without AVX-512, torch has no fast products of 16 bits, so weights are
widened to float32.

    ops = choose(x.device, x.dtype, num_tokens, backend)      once for a step
    ops.norm_linear(x, norm, weights, bias, eps)

    kernel name     operations
    None, "cpu"     `cpu` if it does not object, else `reference`, with widened weights if that is faster
    any other       `reference`: these kernels only attend

Weights are a tensor, or a `Matrix` of integers with scales (matrix.py), of which a step reads fewer bytes.
`pagedkv.linear` is one such layer for other engines.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from pagedkv import debug
from pagedkv.errors import InvalidRequest
from pagedkv.kernels import cpu as kernel
from pagedkv.kernels import registry
from pagedkv.kernels.linear import cpu
from pagedkv.kernels.linear.matrix import Matrix
from pagedkv.kernels.linear.reference import Operations

__all__ = ["Matrix", "Operations", "choose", "linear"]


def choose(device: torch.device, dtype: torch.dtype, num_tokens: int, backend: str | None = None) -> Operations:
    """Return the operations of a step of `num_tokens` tokens.

    backend: a kernel's name; None for PAGEDKV_KERNELS, or else the fastest.
    Raises:  InvalidRequest if PAGEDKV_CPU_ISA names a set that this processor lacks
    """
    if backend is None or backend == registry.AUTO:
        backend = debug.forced_backend() or registry.AUTO
    if backend in (registry.AUTO, "cpu"):
        if not cpu.objections(device, dtype, num_tokens):
            return cpu.Native()
        if device.type == "cpu" and num_tokens > cpu.most_tokens(dtype) and cpu.is_slow_in_torch(dtype):
            return cpu.Widened()
    return Operations()


def linear(x: Tensor, weights: Tensor, bias: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """Return x W^T + bias, as torch.nn.functional.linear. C++ computes a few rows of x on a CPU.

    torch computes more rows, those of 16 bits in float32 if that is faster. It also computes what the C++ operation
    does not serve: other devices, float64, gradients, autocast, torch.func, subclasses of Tensor. A graph of
    torch.compile calls one operator, and so does a call that the profiler or a mode of torch observes. Sums may be
    added in another order than torch's.

    backend: a kernel's name; None for PAGEDKV_KERNELS, or else the fastest.
    Shapes:  x [..., K]; weights [N, K], row-major; bias [N]; returns [..., N]
    Dtypes:  float32, bfloat16 or float16, the same for all
    Raises:  InvalidRequest if the columns of x are not those of the weights
    """
    if weights.dim() != 2 or x.shape[-1:] != weights.shape[1:]:
        raise InvalidRequest(
            f"x has shape {list(x.shape)} and the weights {list(weights.shape)}; give x [..., K] and weights [N, K]"
        )
    is_compiling = torch.compiler.is_compiling()
    if _is_torchs(x, weights, bias) or (not is_compiling and _is_transformed()):
        return F.linear(x, weights, bias)
    if is_compiling or _is_observed(x, weights, bias):
        found: Tensor = torch.ops.pagedkv.linear.default(x, weights, bias, backend)
        return found
    return _linear(x, weights, bias, backend)


def _is_torchs(x: Tensor, weights: Tensor, bias: Tensor | None) -> bool:
    """Return whether a call differentiates, is on another device, is under autocast, or is of a subclass of Tensor."""
    if torch.is_grad_enabled() and (
        x.requires_grad or weights.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return True
    if x.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return True
    return _has_own_dispatch(x) or _has_own_dispatch(weights) or (bias is not None and _has_own_dispatch(bias))


def _has_own_dispatch(x: Tensor) -> bool:
    """Return whether `x` is of a class that computes for itself, such as quantised weights. A Parameter is not."""
    return type(x) is not Tensor and type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__


def _linear(x: Tensor, weights: Tensor, bias: Tensor | None, backend: str | None) -> Tensor:
    *leading, num_columns = x.shape
    num_rows = math.prod(leading)
    ops = _operations(x.device, x.dtype, num_rows, backend)
    if type(ops) is Operations:
        return F.linear(x, weights, bias)
    rows = x if len(leading) == 1 else x.reshape(num_rows, num_columns)
    bias = None if bias is None else bias.detach()  # the C++ code takes no subclass of Tensor, such as Parameter
    found = ops.norm_linear(rows, None, weights.detach(), bias, 0.0)
    return found if len(leading) == 1 else found.view(*leading, found.shape[1])


def _state() -> tuple[Any, ...] | None:
    """Return all that may change the choice of operations, and a `cpu.Native`: that of the environment, and torch's.

    None without the extension.
    """
    return None if kernel.missing() else (*kernel.extension().kernel_choices(), torch.get_num_threads())


def _is_observed(x: Tensor, weights: Tensor, bias: Tensor | None) -> bool:
    """Return whether a mode, a transform, a trace or the profiler must see the call, or a tensor is a negative view.

    The C++ code computes unseen, and reads memory as it is.
    """
    if not kernel.OBSERVERS:
        return True
    for observes in kernel.OBSERVERS:
        if observes():
            return True
    return x.is_neg() or weights.is_neg() or (bias is not None and bias.is_neg())


def _is_transformed() -> bool:
    """Return whether torch.func transforms the call, or torch.autograd.forward_ad differentiates it."""
    if forward_ad._current_level >= 0:
        return True
    return bool(kernel.OBSERVERS) and torch._C._functorch.peek_interpreter_stack() is not None


_CHOSEN: Final[dict[tuple[Any, ...], Operations]] = {}
"""Operations by the arguments of `choose` and all else that it depends on: it takes microseconds to read os.environ."""

_MOST_CHOSEN: Final = 64


def _operations(device: torch.device, dtype: torch.dtype, num_rows: int, backend: str | None) -> Operations:
    """Return choose(device, dtype, num_rows, backend) from `_CHOSEN` if it is there."""
    state = _state()
    if state is None:
        return choose(device, dtype, num_rows, backend)
    key = (device, dtype, num_rows > cpu.most_tokens(dtype), backend, state)
    found = _CHOSEN.get(key)
    if found is None:
        if len(_CHOSEN) >= _MOST_CHOSEN:
            _CHOSEN.clear()
        found = _CHOSEN[key] = choose(device, dtype, num_rows, backend)
    return found


_LIBRARY: Any = torch.library.Library("pagedkv", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("linear(Tensor x, Tensor weights, Tensor? bias, str? backend) -> Tensor")
_LIBRARY.impl("linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake(
    "pagedkv::linear", lambda x, weights, *_: x.new_empty(*x.shape[:-1], weights.shape[0]), lib=_LIBRARY
)
