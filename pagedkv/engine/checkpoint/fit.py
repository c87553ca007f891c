"""Memory arithmetic: how much KV fits beside the weights of a model, and how fast memory lets it decode. No torch.

    KV of n tokens    of each layer group: min(n, window) tokens
    frames(n)         spec.frames_for, by which the engine takes a request; under a window, a chunk of the prompt counts
    num_frames        (memory - weights) / frame bytes
    tokens/s          B sequences: B * bandwidth / (weights that a step reads + B * KV of the context + 2 B * state)
    states            of a hybrid model: STATES for each sequence, from the same memory; a step reads one and writes one

A step reads all weights but the embedding, of which a token reads one row, unless it is the head too.
Activations, communication and time of computation are not counted: the speed is a bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pagedkv.errors import InvalidRequest
from pagedkv.spec import BITS, STEP_TOKENS, frames_for

if TYPE_CHECKING:
    from pagedkv.engine.checkpoint.config import ModelConfig
    from pagedkv.spec import KVSpec

WEIGHT_BITS: Final = {"int8": 8.5, "int4": 4.5}
"""Bits of a weight of a linear layer, its share of a scale included; pagedkv.kernels.linear.matrix has the formats."""

GROUP: Final = 64
"""Columns that share a scale."""

MOST_TOKENS: Final = 2**40
"""The longest context that is looked at. A sequence of windows alone may be longer in any memory."""


STATES: Final = 3
"""Recurrent states of a sequence: two while it runs, and a third for drafts or for its prompt."""


@dataclass(frozen=True)
class Footprint:
    """The memory that a model takes.

    specs: one geometry per layer group. weight_bytes: bytes of all weights. read_bytes: bytes that each step reads.
    at_once: the most tokens of one sequence that a step computes. state_bytes: bytes of the recurrent state of one
    sequence; 0 for a model without.
    """

    specs: tuple[KVSpec, ...]
    weight_bytes: int
    read_bytes: int
    at_once: int = STEP_TOKENS
    state_bytes: int = 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV and scales that one token adds."""
        return sum(spec.bytes_per_token for spec in self.specs)

    @property
    def frame_bytes(self) -> int:
        """Bytes of one frame of the pool, which serves every layer group."""
        return max(spec.frame_bytes for spec in self.specs)

    def frames(self, num_tokens: int) -> int:
        """Return the most frames that a sequence holds until it has `num_tokens` tokens."""
        return frames_for(self.specs, num_tokens, self.at_once)

    @property
    def state_frames(self) -> int:
        """Return the frames that the recurrent states of one sequence displace."""
        return -(-STATES * self.state_bytes // self.frame_bytes)

    def kv_bytes(self, num_tokens: int) -> int:
        """Return the bytes of KV that a step reads for a sequence of `num_tokens` tokens."""
        return sum(spec.bytes_per_token * min(num_tokens, spec.window or num_tokens) for spec in self.specs)

    def num_frames(self, memory: int) -> int:
        """Return how many frames fit into `memory` bytes beside the weights."""
        return max(0, memory - self.weight_bytes) // self.frame_bytes

    def longest_context(self, num_frames: int) -> int | None:
        """Return the most tokens that one sequence can have in so many frames; None for no limit."""
        low, high, num_frames = 0, MOST_TOKENS, num_frames - self.state_frames
        if self.frames(high) <= num_frames:
            return None
        while low < high:  # frames(low) <= num_frames < frames(high + 1)
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.frames(middle) <= num_frames else (low, middle - 1)
        return low

    def sequences(self, num_frames: int, context: int) -> int:
        """Return how many sequences of `context` tokens fit: one that computes its prompt, others that decode."""
        free = num_frames - self.frames(context) - self.state_frames
        return 0 if free < 0 else 1 + free // (frames_for(self.specs, context, 1) + self.state_frames)

    def tokens_per_s(self, bandwidth: int, context: int, sequences: int = 1) -> float:
        """Return the tokens per second of all `sequences` together, if memory gives `bandwidth` bytes a second."""
        of_each = self.kv_bytes(context) + 2 * self.state_bytes
        return sequences * bandwidth / (self.read_bytes + sequences * of_each)


def footprint_of_numbers(spec: KVSpec, weight_bytes: int) -> Footprint:
    """Return the footprint of a model of which only its KV and the bytes of its weights are known."""
    return Footprint((spec,), weight_bytes, weight_bytes)


def footprint_of_config(config: ModelConfig, specs: tuple[KVSpec, ...], weights: str | int | None = None) -> Footprint:
    """Return the footprint of a model.

    specs: the result of `config.specs`. weights: "int8" or "int4" for the linear layers, None for the dtype of the
    specs, or the bytes of all weights.
    Raises: InvalidRequest for a kind that the matrices of the model cannot have
    """
    linear = config.linear
    state_bytes = linear.state_bytes(BITS[specs[0].dtype] // 8) if linear else 0
    if isinstance(weights, int):
        return Footprint(specs, weights, weights, state_bytes=state_bytes)
    columns: tuple[int, ...] = (config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size)
    columns += (linear.value_rows,) if linear else ()
    if weights is not None and (odd := [number for number in columns if number % GROUP]):
        raise InvalidRequest(
            f"weights of {weights} have a scale for {GROUP} columns, and a matrix of this model has {odd[0]} columns; "
            "count them without it"
        )
    total, embedding = _weight_bytes(config, specs[0].dtype, weights)
    return Footprint(specs, total, total - embedding, state_bytes=state_bytes)


def _weight_bytes(config: ModelConfig, dtype: str, kind: str | None) -> tuple[int, int]:
    """Return the bytes of all weights, and those of an embedding that is not the head; as `Weights` has."""
    c, element = config, BITS[dtype] // 8
    a_weight = WEIGHT_BITS[kind] / 8 if kind else element
    norm = 4 if c.unit_offset_norms else element
    qkv, out, gate = c.qkv_rows, c.num_heads * c.head_dim, c.intermediate_size
    biases = c.qkv_bias * qkv + c.output_bias * c.hidden_size + c.mlp_bias * (2 * gate + c.hidden_size)
    norms = (4 if c.sandwich_norms else 2) * c.hidden_size
    layer = int(c.hidden_size * (qkv + out + 3 * gate) * a_weight) + biases * element
    layers = len(c.windows) * (layer + (norms + c.qk_norm * 2 * c.head_dim) * norm)
    if (at := c.linear) is not None:
        layer = int(c.hidden_size * (at.channels + 2 * at.value_rows + 3 * gate) * a_weight) + norms * norm
        small = 2 * at.num_value_heads * c.hidden_size + at.channels * at.conv_width + at.value_dim
        layers += len(at.layers) * (layer + small * element + 2 * at.num_value_heads * 4)
    embedding = c.vocab_size * c.hidden_size * element
    is_one = c.tie_embeddings and kind is None
    of_head = WEIGHT_BITS["int8"] / 8 if kind else element
    head = embedding if is_one else int(c.vocab_size * c.hidden_size * of_head)
    unread = 0 if is_one else embedding
    return layers + c.hidden_size * norm + head + unread, unread
