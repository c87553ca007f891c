"""The linear attention layers of a step: a gated delta rule behind a short convolution, over recurrent states.

For each layer, N is the norm before it, and a head of the state S is a matrix [K, V]:

    c, z     = split(N(x) Win^T)                [T, C], [T, H V]
    b, a     = split(N(x) Wgates^T)             [T, H] twice
    q, k, v  = split(silu(conv(c)))             [T, Hk, K] twice, [T, H, V]
    beta     = sigmoid(b)
    decay    = rate * softplus(a + step_bias)   the natural logarithm, below 0
    S        = exp(decay) S + k beta (v - (exp(decay) S)^T k)^T,  o = S^T q       one token after another
    out      = norm(o) * silu(z)                [T, H V]; the decoder multiplies it by Wout and adds it to x

(Gated DeltaNet: Yang, Kautz, Hatamizadeh, 2024.) A step reads the states of its sequences from the frames that the plan
names, and writes others: see pagedkv/core/states. The two operations in the middle are those of kernels/recurrent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F

from pagedkv.errors import InvalidRequest
from pagedkv.kernels.recurrent import ConvInputs, DeltaInputs, causal_conv, delta_rule

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.cache import PagedKVCache
    from pagedkv.cache.states import StateBatch, StateStorage
    from pagedkv.engine.checkpoint.config import ModelConfig
    from pagedkv.engine.checkpoint.weights import LayerWeights
    from pagedkv.kernels.linear import Operations


class DeltaLayers:
    """The linear layers of one step, called one after another. A call is that of the next layer."""

    def __init__(self, config: ModelConfig, states: StateBatch, storage: StateStorage, indptr: Tensor) -> None:
        """indptr: int32 [B + 1], the first token of each sequence."""
        assert config.linear is not None
        self._linear, self._eps = config.linear, config.norm_eps
        self._states, self._indptr = states, indptr
        self._stored = iter(storage.layers)
        self._inputs: Tensor | None = None  # where the first layer stored its results

    @classmethod
    def of(cls, config: ModelConfig, batch: object, indptr: Tensor, cache: PagedKVCache | None) -> DeltaLayers | None:
        """Return the linear layers of a step over `cache`; None for a model without them.

        Raises: InvalidRequest if the step has no states
        """
        if config.linear is None:
            return None
        states, storage = getattr(batch, "states", None), cache.state_storage if cache is not None else None
        if states is None or storage is None:
            raise InvalidRequest(
                "a step of a model with recurrent states came without them; make the cache with "
                "states=decoder.config.state_spec(), and give the decoder the batch of its plan"
            )
        return cls(config, states, storage, indptr)

    def __call__(self, ops: Operations, x: Tensor, at: LayerWeights) -> Tensor:
        """Return the output of the next layer, before its last matrix. Modifies: the states that the step writes

        Shapes: x [T, hidden]; returns [T, H V]
        """
        c, w, stored = self._linear, at.delta, next(self._stored)
        assert w is not None
        inputs = self._inputs = ops.norm_linear(x, at.attention_norm, at.qkv, None, self._eps, self._inputs)
        channels, z = inputs.split_with_sizes([c.channels, c.value_rows], dim=1)
        b, a = ops.norm_linear(x, at.attention_norm, w.gates, None, self._eps).float().chunk(2, dim=1)
        mixed = causal_conv(stored["conv"], self._states, self._indptr, ConvInputs(channels, w.conv, "silu"))
        keys = c.num_key_heads * c.key_dim
        q, k, v = mixed.split_with_sizes([keys, keys, c.value_rows], dim=1)
        given = DeltaInputs(
            q=q.view(len(x), -1, c.key_dim),
            k=k.view(len(x), -1, c.key_dim),
            v=v.view(len(x), -1, c.value_dim),
            decay=F.softplus(a + w.step_bias).mul_(w.rate),
            beta=b.sigmoid(),
        )
        out = delta_rule(stored["recurrent"], self._states, self._indptr, given)
        wide = out.float()
        unit = (wide * (wide.square().mean(-1, keepdim=True) + self._eps).rsqrt_()).to(out.dtype) * w.norm
        return (unit.flatten(1) * F.silu(z.float())).to(out.dtype)
