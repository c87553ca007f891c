"""The decoder: token ids in, logits out, all keys and values through paged memory. One decoder serves all families.

The T new tokens of B sequences lie flat, one sequence after another ("ragged"), without padding; the batch says which
token belongs to which sequence. For each layer, x [T, hidden] is the residual stream and N, N', M, M' are norms (N' and
M' only in the Gemma families):

    q, k, v = split(N(x) Wqkv^T + b)            [T, H, D], [T, K, D], [T, K, D]
    q, k    = rotate(norm(q)), rotate(norm(k))  at batch.positions; the norms only where the family has them
    pool[batch.slots] = k, v                    a bound write, with the batch of the layer's group
    a       = attention(q, pool, batch)         reads this step's keys too, so they are written first
    x       = x + N'(a Wout^T + b)
    g, u    = split(M(x) Wgu^T + b)             [T, intermediate] twice
    x       = x + M'((act(g) * u) Wdown^T + b)

    logits  = cap(norm(x) Whead^T)              only for the tokens asked for: the last one of a prefill

Each line but the two in the middle is one of the operations of pagedkv.kernels.linear, chosen once for a step. With an
output gate, the projection has one more part, and a is multiplied by its sigmoid. In a linear layer, delta_layers.py
computes a; such a layer has recurrent states in place of keys and values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, Unpack

import torch

from pagedkv.cache import PagedKVCache
from pagedkv.cache.devices import device_of
from pagedkv.engine.checkpoint.config import ModelConfig, RopeConfig
from pagedkv.engine.checkpoint.weights import Weights, load_weights
from pagedkv.engine.model.delta_layers import DeltaLayers
from pagedkv.engine.model.rope_angles import Rotary
from pagedkv.engine.model.streaming import FarBatches, SinkAttention
from pagedkv.errors import InvalidRequest
from pagedkv.kernels import linear, quant
from pagedkv.kernels.args import PagedBatch
from pagedkv.kernels.bound import BoundAttention, BoundWrite, bind_attention, bind_write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from pagedkv.engine.model.workspace import Workspace
    from pagedkv.kernels.args import KVLayer, Options

DTYPES: Final = {name: quant.DTYPES[name] for name in quant.FLOATS}


class _Layers(Protocol):
    """An object whose item i is layer i of the pool: a `PagedKVCache`, or a list."""

    def __getitem__(self, layer: int, /) -> KVLayer: ...


class _Batches(Protocol):
    """An object whose item i is the batch of layer i: a `PlannedBatch`, whose layers may be in several groups."""

    def __getitem__(self, layer: int, /) -> PagedBatch: ...


class _BoundLayer(NamedTuple):
    """The write into a layer of a pool, and the attention over it."""

    store: BoundWrite
    attend: Callable[..., Tensor]


class BoundLayers(tuple[_BoundLayer, ...]):
    """All layers of a pool, bound for many steps: the result of `Decoder.bind`.

    cache: the cache with the recurrent states of a hybrid model; None for other models
    """

    cache: PagedKVCache | None = None


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
    def load(
        cls, folder: Path, *, dtype: str | None = None, device: str | torch.device = "cpu", weights: str | None = None
    ) -> Decoder:
        """Load a Hugging Face folder (config.json and safetensors).

        dtype: "float32", "bfloat16" or "float16"; None for the dtype of the checkpoint.
        weights: "int8" or "int4" for linear layers of integers with scales; None for `dtype`.
        Raises: CheckpointError if the folder is missing, damaged or of an unsupported model; InvalidRequest for an
            unknown name, or if the matrices of the model cannot be quantised
        """
        if dtype is not None and dtype not in DTYPES:
            raise InvalidRequest(f"dtype is {dtype!r}; it must be None or one of {', '.join(DTYPES)}")
        config = ModelConfig.load(folder)
        computed_in, where = DTYPES[dtype or config.dtype], device_of(device)
        return cls(config, load_weights(folder, config, dtype=computed_in, device=where, kind=weights))

    def bind(self, layers: _Layers, backend: str | None = None) -> BoundLayers:
        """Return the write and the attention of each layer, checked once for all steps.

        Calls bound to a PagedKVCache follow its `resize`, and have its kernel.
        Raises: InvalidRequest; KernelUnavailable
        """
        c = self.config
        far_batches = FarBatches(c.sinks)

        def attention(i: int, **options: Unpack[Options]) -> BoundAttention:
            options |= {"scale": c.attention_scale, "softcap": c.attention_softcap}
            if isinstance(layers, PagedKVCache):
                return layers.attention(i, **options)
            return bind_attention(layers[i], backend=backend, **options)

        def bound(i: int) -> _BoundLayer:
            window, near = c.windows[i], attention(i, window=c.windows[i])
            store = layers.write(i) if isinstance(layers, PagedKVCache) else bind_write(layers[i], backend=backend)
            if not c.sinks or window is None:
                return _BoundLayer(store, near)
            far, rotary = attention(i, causal=False), self._rotary[c.ropes[i]]
            return _BoundLayer(store, SinkAttention(near, far, far_batches, rotary, window=window, sinks=c.sinks))

        calls = BoundLayers(bound(i) for i in range(len(c.windows)))
        if c.linear is not None:
            if not isinstance(layers, PagedKVCache):
                raise InvalidRequest("a model with recurrent states needs a PagedKVCache(states=config.state_spec())")
            calls.cache = layers
        return calls

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        batch: PagedBatch | _Batches,
        layers: _Layers | BoundLayers,
        *,
        logits_of: Tensor | None = None,
        backend: str | None = None,
        memory: Workspace | None = None,
        watch: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Store the keys and values of `token_ids` and return the logits of the tokens that follow them.

        layers:   the pool; for many steps, the result of `bind`
        backend:  a kernel's name, or None for the fastest
        memory:   for T tokens, for the results; None to allocate. The next step that uses it overwrites the logits.
        watch:    called with the rows of all T tokens before the head, [T, hidden]: `logits` makes those of some
        Shapes:   token_ids int64 [T], below V; logits_of int64 [N], indices into the T tokens, None for all T;
                  returns float32 [N, V]
        Modifies: the pool behind `layers`, at batch.slots; `memory`
        """
        c, w, eps = self.config, self.weights, self.config.norm_eps
        batches = [batch[i] if hasattr(batch, "__getitem__") else batch for i in range(len(c.windows))]
        angles = self._angles(batches[0].positions, memory)
        ops, norm_rotate = self._operations(len(token_ids), backend)
        x = self._embedded(token_ids, memory and memory.x)
        calls = layers if isinstance(layers, BoundLayers) else self.bind(layers, backend)
        delta = DeltaLayers.of(c, batch, batches[0].cu_seqlens_q, calls.cache)
        heads = [c.num_heads, c.num_kv_heads, c.num_kv_heads, c.num_heads][: 3 + c.output_gate]
        turned = sum(heads[:3]) * c.head_dim
        # Each layer stores its results where the first one did.
        qkv, attended, gated = (memory.qkv, memory.attended, memory.gated) if memory else (None, None, None)
        q = flat = None
        attending = zip(calls, batches, c.ropes, strict=True)
        with ops.step():
            for at in w.layers:
                if at.delta is not None and delta is not None:
                    rows = delta(ops, x, at)
                else:
                    call, of_layer, rope = next(attending)
                    before, qkv = qkv, ops.norm_linear(x, at.attention_norm, at.qkv, at.qkv_bias, eps, qkv)
                    if q is None or qkv is not before:
                        q, k, v, *gate = qkv.view(len(x), -1, c.head_dim).split_with_sizes(heads, dim=1)
                        to_turn = qkv[:, :turned] if gate else qkv
                    norm_rotate(to_turn, (c.num_heads, c.num_kv_heads), (at.q_norm, at.k_norm), angles[rope], eps)
                    call.store(k, v, of_layer)
                    before, attended = attended, call.attend(q, of_layer, out=attended)
                    if flat is None or attended is not before:
                        flat = attended.flatten(1)
                    if gate:
                        attended *= gate[0].sigmoid()
                    rows = flat
                ops.linear_add(x, rows, at.out, at.out_bias, at.attention_out_norm, eps)
                gated = ops.norm_gate_up(x, at.mlp_norm, at.gate_up, at.gate_up_bias, eps, c.activation, gated)
                ops.linear_add(x, gated, at.down, at.down_bias, at.mlp_out_norm, eps)
            if watch is not None:
                watch(x)
            if logits_of is not None:
                x = x[logits_of]
            return self.logits(x, backend, memory.logits[: len(x)] if memory else None)

    def _angles(self, positions: Tensor | None, memory: Workspace | None) -> dict[RopeConfig, tuple[Tensor, Tensor]]:
        """Return cos and sin of the positions of a step, for each rope. Raises: InvalidRequest without positions"""
        if positions is None:
            raise InvalidRequest("batch.positions is None; the decoder rotates queries and keys to int64 positions [T]")
        there = memory.angles if memory else {}
        return {rope: rotary.angles(positions, self.dtype, there.get(rope)) for rope, rotary in self._rotary.items()}

    def _operations(self, num_tokens: int, backend: str | None) -> tuple[linear.Operations, Callable[..., None]]:
        """Return the linear operations of a step, and its rotation."""
        ops = linear.choose(self.device, self.dtype, num_tokens, backend)
        # C++ rotates any number of tokens, so the operations of one token serve.
        for_one = ops if isinstance(ops, linear.cpu.Native) else linear.choose(self.device, self.dtype, 1, backend)
        return ops, for_one.norm_rotate

    def _embedded(self, token_ids: Tensor, out: Tensor | None) -> Tensor:
        """Return the scaled embeddings of tokens. Shapes: token_ids int64 [T]; returns [T, hidden]"""
        x = torch.index_select(self.weights.embedding, 0, token_ids, out=out)
        x *= self._embedding_scale
        return x

    def logits(self, x: Tensor, backend: str | None = None, out: Tensor | None = None) -> Tensor:
        """Return the logits of rows before the head. Shapes: x [N, hidden]; returns float32 [N, V]"""
        ops = linear.choose(self.device, self.dtype, len(x), backend)
        logits = ops.logits(x, self.weights.norm, self.weights.head, self.config.norm_eps, out)
        cap = self.config.logit_softcap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits
