"""The linear operations in C++ (csrc/cpu/linear/linear.inc), their objections, and what they leave to torch.

A call that the C++ code refuses (an unusual stride or dtype) is answered by the definition.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.nn.functional as F

from pagedkv.kernels import cpu, quant
from pagedkv.kernels.linear.matrix import PIECE, Matrix
from pagedkv.kernels.linear.reference import Operations
from pagedkv.kernels.threads import num_threads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

_BLOCK: Final = 2048
"""Tokens of a block: its results stay in the caches from one operation of torch to the next."""

_MODES: Final = {"store": 0, "logits": 0, "add": 1, "silu": 2, "gelu_tanh": 3}
"""Linear::Mode of csrc/cpu/call.hpp."""


def objections(device: torch.device, dtype: torch.dtype, num_tokens: int) -> list[str]:
    """Return all reasons why these operations cannot serve a step of `num_tokens` tokens."""
    reasons = cpu.missing()
    if device.type != "cpu":
        reasons.append(f"it runs on cpu, the tensors are on {device.type}")
    if quant.NAMES.get(dtype) not in quant.FLOATS:
        reasons.append(f"the weights are {dtype}; it takes {', '.join(quant.FLOATS)}")
    if num_tokens > (most := most_tokens(dtype)):
        reasons.append(f"the step has {num_tokens} tokens; it serves at most {most}")
    return reasons


def most_tokens(dtype: torch.dtype) -> int:
    """Return beyond how many tokens torch's matrix products are faster: arithmetic is the limit, not memory."""
    is_without_avx512 = is_slow_in_torch(torch.bfloat16)
    return 64 if is_without_avx512 and is_slow_in_torch(dtype) else 32


@cache
def is_slow_in_torch(dtype: torch.dtype) -> bool:
    """Return whether torch multiplies matrices of 16 bits without oneDNN, as on processors without AVX-512."""
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype, "")
    ask = getattr(torch.ops.mkldnn, name, None)  # none in a torch without oneDNN
    return ask is not None and not ask()


class Native(Operations):
    """The operations in C++, on the instruction set and the threads of the moment at which it is made."""

    def __init__(self) -> None:
        self._x: Any = cpu.extension()
        self._isa, self._threads = cpu.isa(), num_threads()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run the C++ kernels of this thread on their own team: no loop of torch comes between them in such a step."""
        before = self._x.use_own_team(True)
        try:
            yield
        finally:
            self._x.use_own_team(before)

    def norm_rotate(
        self, qkv: Tensor, heads: tuple[int, int], norms: tuple[Tensor | None, Tensor | None],
        angles: tuple[Tensor, Tensor], eps: float,
    ) -> None:  # fmt: skip
        """Rotate as the definition does; in C++ if C++ takes these tensors."""
        if not self._x.norm_rotate(qkv, *norms, *angles, *heads, eps, self._isa, self._threads):
            super().norm_rotate(qkv, heads, norms, angles, eps)

    def _linear(
        self, mode: str, x: Tensor, norm: Tensor | None, weights: Tensor | Matrix, bias: Tensor | None, eps: float,
        out: Tensor | None,
    ) -> Tensor:  # fmt: skip
        parts = (weights.stored, weights.scales) if isinstance(weights, Matrix) else (weights, None)
        result = out
        if result is None:
            num_rows = parts[0].shape[0]  # len() of a tensor takes longer
            columns = num_rows // 2 if mode in ("silu", "gelu_tanh") else num_rows
            result = x.new_empty(x.shape[0], columns, dtype=torch.float32 if mode == "logits" else None)
        if self._x.linear(_MODES[mode], x, norm, *parts, bias, result, eps, self._isa, self._threads):
            return result
        return super()._linear(mode, x, norm, weights, bias, eps, out)

    def _add_normed(self, residual: Tensor, y: Tensor, norm: Tensor, eps: float) -> None:
        if not self._x.add_normed(residual, y, norm, eps, self._isa):
            super()._add_normed(residual, y, norm, eps)


class Widened(Operations):
    """The definition with products in float32, of a block of tokens and a piece of the weights. Sums round once."""

    def _linear(self, mode: str, x: Tensor, *rest: Any) -> Tensor:
        norm, weights, bias, eps, out = rest
        dense = weights.dense(x.dtype) if isinstance(weights, Matrix) else weights
        results = [
            Operations._linear(self, mode, x[at], norm, dense, bias, eps, None if out is None else out[at])
            for at in (slice(i, i + _BLOCK) for i in range(0, max(1, len(x)), _BLOCK))
        ]
        return out if mode == "add" else results[0] if len(results) == 1 else torch.cat(results)

    def _product(self, x: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
        N, K = weights.shape
        if weights.dtype != x.dtype or not (bias is None or (bias.dtype == x.dtype and bias.shape == (N,))):
            return super()._product(x, weights, bias)  # its product raises, with the reason
        wide, result = x.float(), x.new_empty(len(x), N)
        # Many tokens take long to read again for each piece. torch is slow for rows of no multiple of 128.
        elements = torch.get_num_threads() * PIECE * min(4, max(1, len(x) // 256))
        rows = max(128, elements // max(1, K) // 128 * 128)
        for first in range(0, N, rows):
            part = slice(first, first + rows)
            result[:, part] = F.linear(wide, weights[part].float(), None if bias is None else bias[part].float())
        return result
