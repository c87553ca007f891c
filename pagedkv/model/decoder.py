"""The decoder: token ids in, logits out, all keys and values through paged memory. One decoder serves all families.

The T new tokens of B sequences lie flat, one sequence after another ("ragged"), without padding; the batch says which
token belongs to which sequence. For each layer, x [T, hidden] is the residual stream and N, N', M, M' are norms (N' and
M' only in the Gemma families):

    q, k, v = split(N(x) Wqkv^T + b)            [T, H, D], [T, K, D], [T, K, D]
    q, k    = rotate(norm(q)), rotate(norm(k))  at batch.positions; the norms only where the family has them
    pool[batch.slots] = k, v                    write_kv, with the batch of the layer's group
    a       = paged_attention(q, pool, batch)   reads this step's keys too, so they are written first
    x       = x + N'(a Wout^T + b)
    g, u    = split(M(x) Wgu^T + b)             [T, intermediate] twice
    x       = x + M'((act(g) * u) Wdown^T + b)

    logits  = cap(norm(x) Whead^T)              only for the tokens asked for: the last one of a prefill
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import torch
import torch.nn.functional as F

from pagedkv.errors import InvalidRequest
from pagedkv.kernels.args import PagedBatch
from pagedkv.kernels.ops import paged_attention, write_kv
from pagedkv.model.config import ModelConfig
from pagedkv.model.rope import Rotary, rotate
from pagedkv.model.weights import Weights, load_weights

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from pagedkv.kernels.args import KVLayer
    from pagedkv.model.weights import LayerWeights

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Layers(Protocol):
    """An object whose item i is layer i of the pool: a `PagedKVCache`, or a list."""

    def __getitem__(self, layer: int, /) -> KVLayer: ...


class Batches(Protocol):
    """An object whose item i is the batch of layer i: a `PlannedBatch`, whose layers may be in several groups."""

    def __getitem__(self, layer: int, /) -> PagedBatch: ...


class Decoder:
    """A decoder-only language model over paged memory. It holds weights and no state, so it can serve many caches."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config: ModelConfig = config
        self.weights: Weights = weights
        self.dtype: torch.dtype = weights.embedding.dtype
        self.device: torch.device = weights.embedding.device
        self._rotary = {rope: Rotary(rope, config.head_dim, self.device) for rope in set(config.ropes)}
        # Rounded to the dtype of the weights: Gemma was trained with the rounded number.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=self.dtype, device=self.device)

    @classmethod
    def load(cls, folder: Path, *, dtype: str | None = None, device: str | torch.device = "cpu") -> Decoder:
        """Load a Hugging Face folder (config.json and safetensors).

        dtype: "float32", "bfloat16" or "float16"; None for the dtype of the checkpoint.
        Raises: CheckpointError if the folder is missing, damaged or of an unsupported model; InvalidRequest for an
            unknown dtype
        """
        if dtype is not None and dtype not in DTYPES:
            raise InvalidRequest(f"dtype is {dtype!r}; it must be None or one of {', '.join(DTYPES)}")
        config = ModelConfig.load(folder)
        weights = load_weights(folder, config, dtype=DTYPES[dtype or config.dtype], device=torch.device(device))
        return cls(config, weights)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        batch: PagedBatch | Batches,
        layers: Layers,
        *,
        logits_of: Tensor | None = None,
        backend: str | None = None,
    ) -> Tensor:
        """Store the keys and values of `token_ids` and return the logits of the tokens that follow them.

        Shapes:   token_ids int64 [T], below V; logits_of int64 [N], indices into the T tokens, None for all T;
                  returns float32 [N, V]
        Modifies: the pool behind `layers`, at batch.slots
        """
        batches = [batch[i] if hasattr(batch, "__getitem__") else batch for i in range(self.config.num_layers)]
        positions = batches[0].positions
        if positions is None:
            raise InvalidRequest("batch.positions is None; the decoder rotates queries and keys to int64 positions [T]")
        tables = {rope: rotary.tables(positions, self.dtype) for rope, rotary in self._rotary.items()}
        x = F.embedding(token_ids, self.weights.embedding) * self._embedding_scale
        for i, weights in enumerate(self.weights.layers):
            q, k, v = self._queries_keys_values(x, weights, tables[self.config.ropes[i]])
            write_kv(k, v, layers[i], batches[i], backend=backend)
            attended = paged_attention(
                q,
                layers[i],
                batches[i],
                scale=self.config.attention_scale,
                window=self.config.windows[i],
                softcap=self.config.attention_softcap,
                backend=backend,
            )
            x = x + self._norm(F.linear(attended.flatten(1), weights.out, weights.out_bias), weights.attention_out_norm)
            x = x + self._norm(self._mlp(self._norm(x, weights.mlp_norm), weights), weights.mlp_out_norm)
        return self._logits(x if logits_of is None else x[logits_of])

    def _queries_keys_values(
        self, x: Tensor, weights: LayerWeights, tables: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [T, H, D], k [T, K, D] and v [T, K, D] of one layer, q and k rotated to their positions."""
        c = self.config
        qkv = F.linear(self._norm(x, weights.attention_norm), weights.qkv, weights.qkv_bias)
        q, k, v = torch.split(qkv.view(len(x), -1, c.head_dim), [c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
        return rotate(self._norm(q, weights.q_norm), tables), rotate(self._norm(k, weights.k_norm), tables), v

    def _mlp(self, x: Tensor, weights: LayerWeights) -> Tensor:
        gate, up = F.linear(x, weights.gate_up, weights.gate_up_bias).chunk(2, dim=-1)
        gate = F.silu(gate) if self.config.activation == "silu" else F.gelu(gate, approximate="tanh")
        return F.linear(gate * up, weights.down, weights.down_bias)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Return x / sqrt(mean(x^2) + eps) * w (RMSNorm, Zhang and Sennrich, 2019); x itself if `weight` is None.

        The quotient is rounded to the weight's dtype before the product, as in training: the model's dtype for w,
        float32 for 1 + w.
        """
        if weight is None:
            return x
        wide = x.float()
        unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.norm_eps)
        return (unit.to(weight.dtype) * weight).to(x.dtype)

    def _logits(self, x: Tensor) -> Tensor:
        logits = F.linear(self._norm(x, self.weights.norm), self.weights.head).float()
        cap = self.config.logit_softcap
        return torch.tanh(logits / cap) * cap if cap else logits
