"""The recurrent layers in C++ (csrc/cpu/recurrent). Each returns False for a call that C++ does not serve.

The definition then answers, or says what is wrong. C++ serves float32, bfloat16 and float16 on a CPU, K and V
of multiples of 16 channels, and one decay for each head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from pagedkv import debug
from pagedkv.kernels import cpu, registry
from pagedkv.kernels.threads import num_threads

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.kernels.recurrent.reference import ConvInputs, DeltaInputs, StateArrays

_CHOSEN: Final[dict[tuple[Any, ...], tuple[str, int] | None]] = {}
"""Instruction set and threads by all that they depend on: it takes microseconds to read os.environ. None: not C++."""


def _choice() -> tuple[str, int] | None:
    """Return the instruction set and the threads of a call. None without the extension, or if it is not to serve."""
    if cpu.missing():
        return None
    key = (*cpu.extension().kernel_choices(), torch.get_num_threads())
    if key not in _CHOSEN:
        is_wanted = debug.forced_backend() in (None, registry.AUTO, "cpu")
        _CHOSEN[key] = (cpu.isa(), num_threads()) if is_wanted else None
    return _CHOSEN[key]


def _arrays(step: StateArrays, indptr: Tensor) -> tuple[Tensor, ...]:
    return step.state_in, step.state_out, step.save_indptr, step.save_offsets, step.save_frames, indptr


def delta_rule(states: Tensor, step: StateArrays, indptr: Tensor, inputs: DeltaInputs, out: Tensor) -> bool:
    """Compute the gated delta rule. Modifies: states, out"""
    choice = _choice()
    return choice is not None and bool(
        cpu.extension().delta_rule(states, *_arrays(step, indptr), *inputs, out, *choice)
    )


def causal_conv(states: Tensor, step: StateArrays, indptr: Tensor, inputs: ConvInputs, out: Tensor) -> bool:
    """Convolve. Modifies: states, out"""
    (x, weight, activation), choice = inputs, _choice()
    return choice is not None and bool(
        cpu.extension().causal_conv(states, *_arrays(step, indptr), x, weight, activation, out, *choice)
    )
