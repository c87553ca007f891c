"""Recurrent states as bytes: the geometry of a state frame, its storage, and the arrays of a step as tensors.

    frames      uint8 [N, frame_bytes]
    layer l     its tensors one after the other, each at a multiple of 64 bytes; layers in order

A state frame is one contiguous run, as a frame of pages is. This file knows shapes and bytes; it must not know when a
state is kept (core/states) or what a layer computes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from pagedkv.core.arguments import whole
from pagedkv.core.handles import StateStep
from pagedkv.errors import InvalidRequest
from pagedkv.kernels import huge_pages
from pagedkv.spec import parse_bytes

_ALIGNMENT: Final = 64

LEAST_FRAMES: Final = 3
"""A running sequence holds two frames, and a third while it has drafts or keeps a checkpoint."""

DTYPES: Final = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}


@dataclass(frozen=True)
class StateSpec:
    """The recurrent state of one sequence: for each layer that has one, its tensors by name, as (shape, dtype).

        StateSpec([{"conv": ((8192, 4), "bfloat16"), "recurrent": ((32, 128, 128), "float32")}] * 24)

    The names are the caller's. dtype: "float32", "float16" or "bfloat16".
    Raises: InvalidRequest
    """

    layers: Sequence[Mapping[str, tuple[tuple[int, ...], str]]]

    def __post_init__(self) -> None:
        if not isinstance(self.layers, Sequence) or not all(isinstance(layer, Mapping) for layer in self.layers):
            raise InvalidRequest(
                f"layers of a StateSpec are {self.layers!r:.80}; give a list with a dict for each layer"
            )
        layers = tuple({str(name): _checked(name, given) for name, given in layer.items()} for layer in self.layers)
        object.__setattr__(self, "layers", layers)
        if not any(layers):
            raise InvalidRequest("a StateSpec without a tensor; give the tensors of each layer, or no spec at all")

    def places(self) -> list[dict[str, tuple[int, tuple[int, ...], torch.dtype]]]:
        """Return (offset in bytes, shape, dtype) of each tensor of each layer."""
        end, found = 0, []
        for layer in self.layers:
            parts = {}
            for name, (shape, dtype) in layer.items():
                parts[name] = end, shape, DTYPES[dtype]
                end += _padded(math.prod(shape) * DTYPES[dtype].itemsize)
            found.append(parts)
        return found

    @property
    def frame_bytes(self) -> int:
        """int: bytes of the state of one sequence, all layers."""
        sizes = (math.prod(shape) * DTYPES[dtype].itemsize for layer in self.layers for shape, dtype in layer.values())
        return sum(map(_padded, sizes))

    def frames_in(self, memory: str | int, pool_bytes: int) -> int:
        """Return the frames of a `state_memory`: a number of them, bytes such as "2GiB", or a share such as "5%".

        pool_bytes: the bytes of the pages. Raises: InvalidRequest for fewer than LEAST_FRAMES
        """
        if isinstance(memory, str):
            percent = memory.replace(" ", "").removesuffix("%")
            share = "%" in memory and percent.replace(".", "", 1).isdigit()
            num_bytes = int(float(percent) / 100 * pool_bytes) if share else parse_bytes(memory)
            count = num_bytes // self.frame_bytes
        else:
            count = whole(memory, "state_memory", 0, 2**31)
        if count < LEAST_FRAMES:
            raise InvalidRequest(
                f"state_memory={memory!r} holds {count} states of {self.frame_bytes} bytes, beside a pool of "
                f"{pool_bytes} bytes; give at least {LEAST_FRAMES}, as '2GiB', '5%' or a number of states: two for "
                "each sequence that runs, and some to keep"
            )
        return count


def _checked(name: object, given: Any) -> tuple[tuple[int, ...], str]:
    shape, dtype = given if isinstance(given, tuple | list) and len(given) == 2 else (None, None)
    if not isinstance(dtype, str) or dtype not in DTYPES or not isinstance(shape, tuple | list):
        raise InvalidRequest(f"tensor {name!r} is {given!r}; give (shape, dtype) with a dtype of {', '.join(DTYPES)}")
    return tuple(whole(size, f"a size of {name!r}", 1, 2**31) for size in shape), dtype


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class StateStorage:
    """The bytes of the state frames, and typed views of each layer.

    Shapes: frames uint8 [N, frame_bytes]; `layers[l][name]` [N, *shape], strided, each state contiguous
    Raises: InvalidRequest if the memory cannot be had
    """

    def __init__(self, spec: StateSpec, num_frames: int, device: torch.device) -> None:
        self.spec: StateSpec = spec
        try:
            if device.type == "cpu":  # pages that the system hands out as they are first written
                region = huge_pages.allocate(num_frames * spec.frame_bytes)
            else:
                region = torch.zeros(num_frames * spec.frame_bytes, dtype=torch.uint8, device=device)
        except (RuntimeError, OverflowError, OSError, ValueError) as error:
            raise InvalidRequest(
                f"{num_frames} states of {spec.frame_bytes} bytes do not fit {device} ({error}); lower state_memory"
            ) from error
        self.frames: torch.Tensor = region.view(num_frames, spec.frame_bytes)
        self.layers: list[dict[str, torch.Tensor]] = [
            {name: self._view(*place) for name, place in layer.items()} for layer in spec.places()
        ]

    def _view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        return self.frames[:, offset : offset + size].view(dtype).view(len(self.frames), *shape)

    def copy(self, state_in: torch.Tensor, state_out: torch.Tensor) -> int:
        """Copy each state to the frame that a step writes, for kernels that change a state in place. Return how many.

        Shapes: state_in, state_out int32 [B]; zeros are written where state_in is -1, nothing where state_out is -1
        """
        writes = state_out >= 0
        source, target = state_in[writes].long(), state_out[writes].long()
        self.frames[target[source < 0]] = 0
        self.frames[target[source >= 0]] = self.frames[source[source >= 0]]
        return len(target)

    def read(self, layer: int, name: str, state_in: torch.Tensor) -> torch.Tensor:
        """Return a copy of one tensor of the states `state_in` (int32 [B]), zeros for -1: [B, *shape]."""
        found: torch.Tensor = self.layers[layer][name][state_in.clamp(min=0).long()]
        found[state_in < 0] = 0
        return found

    def poison(self, *frames: torch.Tensor) -> None:
        """Fill state frames with NaN, so that a read before the first write shows."""
        for some in frames:
            self.frames[some[some >= 0].long()] = 0xFF


@dataclass(frozen=True, eq=False)
class StateBatch:
    """The states of a step as tensors on the device of the cache. See core.handles.StateStep for what they mean.

    Shapes: state_in, state_out int32 [B]; save_indptr int32 [B + 1]; save_offsets, save_frames int32 [C]
    """

    state_in: torch.Tensor
    state_out: torch.Tensor
    save_indptr: torch.Tensor
    save_offsets: torch.Tensor
    save_frames: torch.Tensor

    @classmethod
    def of(cls, step: StateStep, device: torch.device) -> StateBatch:
        """Return the arrays of a step on `device`, in one transfer. On the CPU they share the memory of the step."""
        numbers = torch.from_numpy(step.numbers).to(device, non_blocking=True)
        batch, saves = len(step.state_in), len(step.save_frames)
        first = 3 * batch + 1
        half = (first + len(numbers)) // 2
        return cls(
            *(numbers[:batch], numbers[batch : 2 * batch], numbers[2 * batch : first]),
            *(numbers[first : first + saves], numbers[half : half + saves]),
        )
