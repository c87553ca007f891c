"""Storage: the bytes of the pool in one allocation. A frame is one contiguous run: copying or sending it is one memcpy.

    frames      uint8 [F, frame_bytes]
    layer l     |K of all heads [K, S, D]|V of all heads [K, S, Dv]|k_scale [K, S]|v_scale [K, S]|
                at i * layer_bytes of each frame, where l is the i-th layer of its group. A frame belongs to one group
                at a time and is as large as the largest group needs.

Heads are outermost in a frame (HND): one head's page is one run, and a layer's slice is one stream in the order a
decode step reads it. The views are strided, `[F, S, K, D]`, and own no memory. This file knows geometry and bytes; it
must not know who uses a frame.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch.utils.dlpack import from_dlpack

from pagedkv.errors import InvalidRequest
from pagedkv.kernels import huge_pages, quant
from pagedkv.kernels.args import KVLayer
from pagedkv.spec import ELEMENTS, KVSpec

_FRAMES_PER_COPY: Final = 1024
"""Frames per copy in `take_over`: indexing makes a temporary copy."""

POISON: Final = 0xFF
"""A byte whose repetition is NaN in every float dtype. It fills unwritten frames at PAGEDKV_DEBUG >= 2."""


def _allocate(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Allocate uint8 [num_bytes]. On the CPU the system gives zeroed pages at their first touch."""
    if device.type != "cpu":
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return huge_pages.allocate(num_bytes)


def _without_base(view: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same bytes that torch does not know to be a view.

    torch.compile refuses to mutate views of one base that differ in dtype. Without the base torch cannot see that the
    tensor aliases `frames`, so copies of frames stay outside a compiled step.
    """
    # DLPack has a name for these dtypes in newer versions of torch only.
    as_bytes = view.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    return from_dlpack(view.view(torch.uint8)).view(view.dtype) if as_bytes else from_dlpack(view)


def specs_of(given: KVSpec | Sequence[KVSpec]) -> tuple[KVSpec, ...]:
    """Return the geometry of each layer group, given as one KVSpec or a list of them."""
    if isinstance(given, KVSpec):
        return (given,)
    if not isinstance(given, Sequence) or not given or not all(isinstance(spec, KVSpec) for spec in given):
        raise InvalidRequest(f"spec is {given!r}; give a KVSpec, or a list with one for each layer group")
    return tuple(given)


def groups_of_layers(specs: tuple[KVSpec, ...], given: Sequence[int] | None) -> tuple[int, ...]:
    """Return the group of each layer; `given` is None if the layers of each group lie next to each other."""
    if len({spec.block_size for spec in specs}) > 1:
        raise InvalidRequest(
            f"block sizes are {[spec.block_size for spec in specs]}; groups share one pool of frames: give one size"
        )
    if given is not None and not isinstance(given, Sequence):
        raise InvalidRequest(f"layer_groups is {given!r}; give a list: the group of each layer")
    layers = (
        tuple(given)
        if given is not None
        else tuple(group for group, spec in enumerate(specs) for _ in range(spec.num_layers))
    )
    counts = [layers.count(group) for group in range(len(specs))]
    if counts != [spec.num_layers for spec in specs] or sum(counts) != len(layers):
        raise InvalidRequest(
            f"layer_groups gives the {len(specs)} groups {counts} of {len(layers)} layers, and their specs "
            f"{[spec.num_layers for spec in specs]}; name the group of each layer"
        )
    return layers


class Storage:
    """The pool's bytes and a typed view of each layer.

    spec:         the geometry, or a list with that of each layer group.
    layer_groups: the group of each layer; None if the layers of group 0 come first, then those of group 1, and so on.
    calibration:  a centre and a divisor of K's channels, for rotated kinds; None for none.
    Shapes: frames uint8 [F, frame_bytes]; layers[l].k [F, S, K, D], v [F, S, K, Dv], scales float16 [F, S, K] or None;
            calibration float32 [layers, K, 2, D], on the device of the frames
    Raises: InvalidRequest if the memory cannot be had, or the groups do not fit their layers
    """

    def __init__(
        self,
        spec: KVSpec | Sequence[KVSpec],
        num_frames: int,
        device: torch.device | str = "cpu",
        *,
        layer_groups: Sequence[int] | None = None,
        calibration: torch.Tensor | None = None,
    ) -> None:
        self.specs: tuple[KVSpec, ...] = specs_of(spec)
        self.layer_groups: tuple[int, ...] = groups_of_layers(self.specs, layer_groups)
        self.num_frames: int = num_frames
        self.device: torch.device = torch.device(device)
        self.frame_bytes: int = max(spec.frame_bytes for spec in self.specs)
        num_bytes = num_frames * self.frame_bytes
        try:
            self.bytes: torch.Tensor = _allocate(num_bytes, self.device)
        except (OSError, RuntimeError, OverflowError, ValueError) as error:
            raise InvalidRequest(
                f"{num_frames} frames of {self.frame_bytes} bytes are {num_bytes} bytes, more than {self.device} "
                f"can give ({error}); give fewer frames or less memory"
            ) from error
        self.frames: torch.Tensor = self.bytes.view(num_frames, self.frame_bytes)
        places = [self.layer_groups[:layer].count(group) for layer, group in enumerate(self.layer_groups)]
        self.layers: list[KVLayer] = [
            self._layer(self.specs[group], place) for group, place in zip(self.layer_groups, places, strict=True)
        ]
        if calibration is not None:
            self.layers = [
                replace(layer, calibration=of_layer)
                for layer, of_layer in zip(self.layers, calibration.unbind(0), strict=True)
            ]

    def _layer(self, spec: KVSpec, place: int) -> KVLayer:
        """Return the views of the layer that has this place, from 0, in its group."""
        parts: dict[str, Any] = {}
        rows = spec.num_kv_heads * spec.block_size
        for name, (offset, num_bytes) in spec.regions().items():
            is_scale = name.endswith("_scale")
            dtype = torch.float16 if is_scale else quant.DTYPES[ELEMENTS[spec.stored_dtype][name == "v"]]
            dim = num_bytes // (rows * dtype.itemsize)
            typed, size = self.bytes.view(dtype), dtype.itemsize
            shape = (self.num_frames, spec.block_size, spec.num_kv_heads, dim)
            strides = (self.frame_bytes // size, dim, spec.block_size * dim, 1)
            view = typed.as_strided(shape, strides, (place * spec.layer_bytes + offset) // size)
            parts[name] = _without_base(view[..., 0] if is_scale else view)
        if spec.value_in_key:  # torch knows these views, as it must: a store into the keys changes the values
            parts |= {"v": parts["k"][..., : spec.value_dim], "v_scale": parts.get("k_scale")}
        return KVLayer(**parts)

    @staticmethod
    def calibrated(
        specs: tuple[KVSpec, ...], layer_groups: tuple[int, ...], given: torch.Tensor | None, device: torch.device
    ) -> tuple[tuple[KVSpec, ...], torch.Tensor | None]:
        """Return the specs with the digest of a calibration, and it on `device`: float32 [layers, K, 2, D].

        Raises: InvalidRequest unless it fits the layers, its numbers are finite and the divisors positive
        """
        if given is None:
            return specs, None
        spec, shapes = specs[0], {(x.num_kv_heads, x.head_dim) for x in specs}
        want = f"float32 [{len(layer_groups)} layers, {spec.num_kv_heads}, 2, {spec.head_dim}]"
        if len(shapes) > 1 or not all(x.rotated for x in specs):
            raise InvalidRequest(
                f"a calibration is given for KV of {spec.stored_dtype}; only k8v4 and k5v4 take one, and all layer "
                "groups then have equally many kv heads and head dims"
            )
        shape = (len(layer_groups), spec.num_kv_heads, 2, spec.head_dim)
        if not isinstance(given, torch.Tensor) or given.dtype != torch.float32 or given.shape != shape:
            found = f"{given.dtype} {list(given.shape)}" if isinstance(given, torch.Tensor) else type(given).__name__
            raise InvalidRequest(f"calibration is {found}; it must be {want}: a centre and a divisor of K's channels")
        values = given.detach().cpu().contiguous()
        if not values.isfinite().all() or not (values[:, :, 1] > 0).all():
            raise InvalidRequest("calibration has numbers that are not finite, or divisors that are not positive")
        digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()
        return tuple(replace(x, calibration=digest) for x in specs), values.to(device, copy=True)

    def take_over(self, old: Storage, used: torch.Tensor, moves: torch.Tensor) -> None:
        """Copy frames of `old` into this pool: `used` to the same numbers, moves[:, 0] to moves[:, 1].

        Shapes: used int64 [n], moves int64 [M, 2]
        Both pools exist meanwhile. Other frames are not touched, so the system gives them no memory.
        Modifies: the bytes of these frames
        """
        for sources, targets in ((used, used), (moves[:, 0], moves[:, 1])):
            for first in range(0, len(sources), _FRAMES_PER_COPY):
                part = slice(first, first + _FRAMES_PER_COPY)
                self.frames[targets[part].to(self.device)] = old.frames[sources[part].to(self.device)]

    def poison(self, frames: torch.Tensor) -> None:
        """Fill `frames` (int64 [n]) with NaN, so that a read before the first write shows.

        Modifies: the bytes of these frames
        """
        self.frames[frames.to(self.device)] = POISON
