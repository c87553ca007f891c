"""The definition of the recurrent layers, in torch: one token after the other, on every device.

    gated delta rule    S' = exp(g) S      u = beta (v - S'^T k)      S'' = S' + k u^T      o = S''^T q
                        a decay g for each head (Gated DeltaNet, Yang et al., 2024), or for each channel of k (KDA,
                        Kimi team, 2025)
    SSD                 S' = exp(dt A) S + dt x B^T      y = S' C + D x        (Mamba-2, Dao and Gu, 2024)
    causal convolution  y_t = act(sum_j w_j x_{t - W + 1 + j}) of each channel

A state of the pool is written once: a call reads frame state_in[b], and writes frame state_out[b] and the frames of the
saves. Sums are in float32, or in float64 for states of float64. Layouts of the states: delta_state, conv_state.

Letters: N frames, B sequences, T tokens, H heads, Hk heads of q and k, K and V their channels, C channels, W width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from pagedkv.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

BLOCK: Final = 16
"""Columns of a block of the delta rule's state. Two blocks of 8 KiB (K = 128) fit the first cache. See call.hpp."""

EPS: Final = 1e-6
"""Added to the sum of squares of q and of k. The same as in csrc/cpu/recurrent/delta.inc."""


class StateArrays(Protocol):
    """The frames of a step, as core.handles.StateStep has them. `cache.states.StateBatch` is one.

    Shapes: state_in, state_out int32 [B]; save_indptr int32 [B + 1]; save_offsets, save_frames int32 [C]
    """

    @property
    def state_in(self) -> Tensor:
        """The frame with the state before the step; -1: zeros."""

    @property
    def state_out(self) -> Tensor:
        """The frame for the state after the step; -1: it is not kept."""

    @property
    def save_indptr(self) -> Tensor:
        """The first save of each sequence."""

    @property
    def save_offsets(self) -> Tensor:
        """Tokens of the sequence in this step after which its state is saved, too; ascending in each sequence."""

    @property
    def save_frames(self) -> Tensor:
        """The frame of each save."""


class DeltaInputs(NamedTuple):
    """The tokens of a delta rule, sequence after sequence.

    q, k [T, Hk, K] are normed inside, to x / sqrt(sum(x^2) + 1e-6), and q is scaled by 1 / sqrt(K). v [T, H, V]. Head h
    reads q and k of head h // (H / Hk). decay float32 [T, H], or [T, H, K] for each channel of k: its natural
    logarithm, <= 0. beta float32 [T, H].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor


class ConvInputs(NamedTuple):
    """The tokens of a causal convolution: x [T, C], weight [C, W], activation "silu" or "" for none."""

    x: Tensor
    weight: Tensor
    activation: str


class SsdInputs(NamedTuple):
    """The tokens of an SSD layer: x [T, H, P], dt [T, H] (> 0), A [H] (< 0), B and C [T, G, N], D [H].

    Head h reads B and C of group h // (H / G).
    """

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor


def delta_state(heads: int, key_dim: int, value_dim: int) -> tuple[int, int, int]:
    """Return the shape of the float32 state of a delta rule: (H * V / W, K, W), blocks of W columns of a head.

    W is 16 if V is a multiple of 16, else V. The blocks of head 0 come first. So a block is one run of memory.
    """
    width = BLOCK if value_dim % BLOCK == 0 else value_dim
    return heads * (value_dim // width), key_dim, width


def conv_state(channels: int, width: int) -> tuple[int, int]:
    """Return the shape of the state of a convolution: the last W - 1 inputs [W - 1, C], oldest first, in x's dtype."""
    return width - 1, channels


def delta_rule(
    states: Tensor, step: StateArrays, indptr: Tensor, inputs: DeltaInputs, out: Tensor | None = None
) -> Tensor:
    """Define recurrent.delta_rule; also for float64, and with a decay for each channel."""
    q, k, v, decay, beta = inputs
    T, H, V, Hk, K = (*v.shape, *k.shape[1:]) if v.dim() == k.dim() == 3 else (0, 1, 0, 0, 0)
    fits = Hk > 0 and not H % Hk and q.shape == k.shape == (T, Hk, K) and beta.shape == (T, H)
    if not fits or decay.shape not in ((T, H), (T, H, K)):
        raise InvalidRequest(
            f"q, k, v, decay and beta have shapes {', '.join(str(list(x.shape)) for x in inputs)}; give [T, Hk, K] "
            "twice, [T, H, V] with H a multiple of Hk, [T, H] or [T, H, K], and [T, H]"
        )
    _expect(states, delta_state(H, K, V), "states")
    dtype, width = states.dtype, states.shape[-1]
    q, k = (_normed(x.to(dtype)).repeat_interleave(H // Hk, 1) for x in (q, k))
    factor = (decay if decay.dim() == 3 else decay[..., None]).to(dtype).exp()[:, :, None, :, None]
    fresh, beta = v.to(dtype).reshape(T, H, V // width, width), beta.to(dtype)[..., None, None]
    found = torch.empty_like(fresh)

    def advance(state: Tensor, t: int) -> Tensor:
        state = state.view(H, -1, *state.shape[1:]) * factor[t]
        u = beta[t] * (fresh[t] - torch.einsum("hnkw,hk->hnw", state, k[t]))
        state = state + k[t][:, None, :, None] * u[:, :, None]
        found[t] = torch.einsum("hnkw,hk->hnw", state, q[t])
        return state.flatten(0, 1)

    _scan(states, step, indptr, T, advance)
    return _result(found.view(T, H, V) * K**-0.5, v.dtype, out)


def causal_conv(
    states: Tensor, step: StateArrays, indptr: Tensor, inputs: ConvInputs, out: Tensor | None = None
) -> Tensor:
    """Define recurrent.causal_conv."""
    x, weight, activation = inputs
    (T, C), W = x.shape, weight.shape[-1]
    _expect(states, conv_state(C, W), "states")
    if weight.shape != (C, W) or activation not in ("silu", ""):
        raise InvalidRequest(
            f"weights {list(weight.shape)} and activation {activation!r}; give [{C}, W] and silu or ''"
        )
    dtype = torch.promote_types(x.dtype, torch.float32)
    found, taps = torch.empty(T, C, dtype=dtype, device=x.device), weight.to(dtype).t()

    def advance(state: Tensor, t: int) -> Tensor:
        window = torch.cat([state, x[t : t + 1]])
        y = (window.to(dtype) * taps).sum(0)
        found[t] = F.silu(y) if activation else y
        return window[1:]

    _scan(states, step, indptr, T, advance)
    return _result(found, x.dtype, out)


def ssd(states: Tensor, step: StateArrays, indptr: Tensor, inputs: SsdInputs, out: Tensor | None = None) -> Tensor:
    """Compute an SSD layer over the tokens of each sequence, from its state on. Return y [T, H, P], as x.

    Shapes:   states float32 [frames, H, P, N]; indptr int32 [B + 1], the first token of each sequence
    Modifies: states, the frames of state_out and of the saves. out, if given
    Raises:   InvalidRequest for shapes and frames that are not there
    """
    (T, H, P), (G, N), dtype = inputs.x.shape, inputs.B.shape[1:], states.dtype
    _expect(states, (H, P, N), "states")
    x, dt, A, B, C, D = (part.to(dtype) for part in inputs)
    B, C = (part.repeat_interleave(H // G, 1) for part in (B, C))
    found = torch.empty(T, H, P, dtype=dtype, device=x.device)

    def advance(state: Tensor, t: int) -> Tensor:
        fresh = (dt[t, :, None] * x[t])[..., None] * B[t][:, None]
        state = (dt[t] * A).exp()[:, None, None] * state + fresh
        found[t] = torch.einsum("hpn,hn->hp", state, C[t]) + D[:, None] * x[t]
        return state

    _scan(states, step, indptr, T, advance)
    return _result(found, inputs.x.dtype, out)


def _expect(states: Tensor, shape: tuple[int, ...], name: str) -> None:
    """Raise InvalidRequest unless `states` has `shape` behind its first dim."""
    if states.shape[1:] != shape:
        raise InvalidRequest(f"{name} has shape {list(states.shape)}; give [frames, {', '.join(map(str, shape))}]")


def _normed(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt()


def _scan(
    states: Tensor, step: StateArrays, indptr: Tensor, total: int, advance: Callable[[Tensor, int], Tensor]
) -> None:
    """Go over the `total` tokens, sequence by sequence. advance(state, t): the state after token t."""
    starts, first = indptr.tolist(), step.save_indptr.tolist()
    offsets, targets = step.save_offsets.tolist(), step.save_frames.tolist()
    frames, rows = [*step.state_in.tolist(), *step.state_out.tolist(), *targets], len(step.state_in)
    if starts != sorted(starts) or [*starts[:1], *starts[-1:], len(starts)] != [0, total, rows + 1]:
        raise InvalidRequest(f"indptr is {starts!r:.80} for {total} tokens of {rows} sequences")
    if len(step.state_out) != rows:
        raise InvalidRequest(f"state_out names {len(step.state_out)} frames for {rows} sequences; give one for each")
    if first != sorted(first) or [*first[:1], len(first), len(offsets)] != [0, rows + 1, len(targets)]:
        raise InvalidRequest(f"save_indptr is {first!r:.80} for {len(targets)} saves")
    if first[-1] > len(targets) or min(targets, default=0) < 0:
        raise InvalidRequest(
            f"save_indptr is {first!r:.80}, save_frames is {targets!r:.80}; name a frame for each save"
        )
    if any(not -1 <= frame < len(states) for frame in frames):
        raise InvalidRequest(f"the step names a frame of {min(frames)} .. {max(frames)}; there are {len(states)}")
    kept = []
    for row, source in enumerate(step.state_in.tolist()):
        state = states[source].clone() if source >= 0 else states.new_zeros(states.shape[1:])
        after, count = offsets[first[row] : first[row + 1]], starts[row + 1] - starts[row]
        if after != sorted(set(after)) or any(not 0 < offset <= count for offset in after):
            raise InvalidRequest(
                f"sequence {row} has {count} tokens, and is to be saved after {after}; give them rising"
            )
        saves = dict(zip(after, targets[first[row] : first[row + 1]], strict=True))
        for n in range(count + 1):
            if n:
                state = advance(state, starts[row] + n - 1)
            if n in saves:
                kept.append((saves[n], state))
        kept.append((int(step.state_out[row]), state))
    for frame, state in kept:
        if frame >= 0:
            states[frame] = state


def _result(found: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    if out is None:
        return found.to(dtype)
    if out.shape != found.shape:
        raise InvalidRequest(f"out has shape {list(out.shape)}; give {list(found.shape)}")
    return out.copy_(found)
