"""The gated delta rule over state frames, beside copies: a decode step of one sequence, and a prompt.

The decode step has the states of 24 layers of Qwen3.5-9B, 48 MiB: each is read from one frame and written to another.
The streaming copy moves the same bytes of states past the caches, in one thread. A prompt goes through one layer: its
bytes are those of the state, q, k, v and the results, but arithmetic is the limit, so compare it with torch. torch's
code is that of transformers.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch

from pagedkv.bench.bandwidth.subjects import Subject
from pagedkv.bench.clock import Step
from pagedkv.cache.states import StateBatch
from pagedkv.kernels import cpu, huge_pages
from pagedkv.kernels.recurrent import DeltaInputs, delta_rule, delta_state

LAYERS: Final = 24
HEADS: Final = 32
KEY_HEADS: Final = 16
DIM: Final = 128


def _frames(source: int, target: int) -> StateBatch:
    """Return the frames of a step of one sequence without saves."""
    numbers = ([source], [target], [0, 0], [], [])
    return StateBatch(*(torch.tensor(some, dtype=torch.int32) for some in numbers))


def deltas(tokens: Iterable[int]) -> Iterator[Subject]:
    """Yield the gated delta rule over `tokens` tokens of a sequence: a decode step of all layers for one token."""
    for count in tokens:
        layers = LAYERS if count == 1 else 1
        inputs = _inputs(count)
        state = 4 * HEADS * DIM * DIM
        num_bytes = layers * 2 * state + (sum(x.nbytes for x in inputs) + inputs.v.nbytes) * layers
        variants: dict[str, Step | str] = {"pagedkv": _ours(layers, inputs), "torch": _torchs(layers, inputs)}
        if count == 1:
            variants["streaming copy"] = _copied(layers)
        axes = {"tokens": count, "layers_of_states": layers, "heads": f"{HEADS}/{KEY_HEADS}", "head_dim": DIM}
        yield Subject("delta", axes, num_bytes, "copy", variants)


def _inputs(count: int) -> DeltaInputs:
    q, k, v = (torch.randn(count, heads, DIM).bfloat16() for heads in (KEY_HEADS, KEY_HEADS, HEADS))
    return DeltaInputs(q, k, v, -torch.rand(count, HEADS), torch.rand(count, HEADS))


def _pool(layers: int) -> torch.Tensor:
    shape = (2, layers, *delta_state(HEADS, DIM, DIM))
    return huge_pages.allocate(4 * math.prod(shape)).view(torch.float32).view(shape).zero_()


def _ours(layers: int, inputs: DeltaInputs) -> Step:
    storage = list(_pool(layers).unbind(1))
    steps, indptr, out = [_frames(0, 1), _frames(1, 0)], torch.tensor([0, len(inputs.v)]).int(), inputs.v.clone()

    def prepare() -> Callable[[], object]:
        steps.reverse()
        return lambda: [delta_rule(states, steps[0], indptr, inputs, out) for states in storage]

    return prepare


def _copied(layers: int) -> Step:
    """Return a copy of the states past the caches, in runs of a layer, by one thread."""
    frames = _pool(layers)
    addresses = [torch.tensor([state.data_ptr() for state in frame]) for frame in frames]

    def prepare() -> Callable[[], object]:
        addresses.reverse()  # as in the kernel's steps: what was written last is read, so no part of it is cached
        args = (addresses[0].data_ptr(), addresses[1].data_ptr(), layers, frames[0, 0].nbytes, 0, 0.0)
        return lambda: (cpu.extension().copy_runs(*args), frames)

    return prepare


def _torchs(layers: int, inputs: DeltaInputs) -> Step | str:
    try:
        theirs: Any = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    except ImportError:
        return "transformers is not installed"
    call = theirs.torch_recurrent_gated_delta_rule if len(inputs.v) == 1 else theirs.torch_chunk_gated_delta_rule
    states, padded = [torch.zeros(1, HEADS, DIM, DIM) for _ in range(layers)], [x[None] for x in inputs]
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}

    def step() -> None:
        for layer in range(layers):
            states[layer] = call(*padded, initial_state=states[layer], **options)[1]

    return lambda: step
