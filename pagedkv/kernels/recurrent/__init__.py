"""The recurrent layers of hybrid models: a call reads one state frame of a sequence and writes another.

    delta_rule     the gated delta rule of Qwen3-Next and Qwen3.5, and of Kimi-Linear with a decay for each channel
    causal_conv    the short convolution before it

`reference` defines them in torch, and Mamba-2's SSD, too; `cpu` has them in C++. A state is never copied and never
changed in place: the plan of a step names the frames (core.handles.StateStep).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedkv.kernels.recurrent import cpu, reference
from pagedkv.kernels.recurrent.reference import ConvInputs, DeltaInputs, StateArrays, conv_state, delta_state

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ConvInputs", "DeltaInputs", "StateArrays", "causal_conv", "conv_state", "delta_rule", "delta_state"]


def delta_rule(
    states: Tensor, step: StateArrays, indptr: Tensor, inputs: DeltaInputs, out: Tensor | None = None
) -> Tensor:
    """Compute the gated delta rule over the tokens of each sequence, from its state on. Return o [T, H, V], as v.

    For inference: no gradient is followed.
    C++ serves it on a CPU (cpu.py); reference.delta_rule is the definition, and serves the rest. PAGEDKV_KERNELS and
    PAGEDKV_CPU_ISA choose, as for attention.

    Shapes:   states float32 [N, *delta_state(H, K, V)], frames as far apart as you like; indptr int32 [B + 1], the
              first token of each sequence
    Modifies: states, the frames of state_out and of the saves. out, if given; it overlaps no other tensor
    Raises:   InvalidRequest for shapes and frames that are not there
    """
    result = inputs.v.new_empty(inputs.v.shape) if out is None else out
    if cpu.delta_rule(states, step, indptr, inputs, result):
        return result
    return reference.delta_rule(states, step, indptr, inputs, result)


def causal_conv(
    states: Tensor, step: StateArrays, indptr: Tensor, inputs: ConvInputs, out: Tensor | None = None
) -> Tensor:
    """Convolve the tokens of each sequence, after the inputs that its state has kept. Return y [T, C], as x.

    C++ serves it on a CPU (cpu.py); reference.causal_conv is the definition, and serves the rest.

    inputs:   ConvInputs, or (x [T, C], weight [C, W], "silu" or "")
    Shapes:   states [N, *conv_state(C, W)], as x; indptr int32 [B + 1], the first token of each sequence
    Modifies: states, the frames of state_out and of the saves. out, if given; it overlaps no other tensor
    Raises:   InvalidRequest for shapes, frames and activations that are not there
    """
    result = inputs[0].new_empty(inputs[0].shape) if out is None else out
    if cpu.causal_conv(states, step, indptr, inputs, result):
        return result
    return reference.causal_conv(states, step, indptr, inputs, result)
