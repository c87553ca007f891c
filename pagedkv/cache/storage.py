"""Storage: the bytes of the pool. One allocation; a frame is one contiguous run of it, so copying or sending a frame is one memcpy.

    frames      uint8 [F, frame_bytes]
    layer l     |K of all heads [K, S, D]|V of all heads [K, S, Dv]|k_scale [K, S]|v_scale [K, S]|   at i * layer_bytes of each frame
                where l is the i-th layer of its group. A frame belongs to one group at a time and is as large as the largest needs.

Heads are outermost in a frame (HND): one head's page is one run, and a layer's slice is one stream in the order a decode step reads it.
The views are strided, `[F, S, K, D]`, and own nothing. This file knows geometry and bytes, never who uses a frame.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Final

import torch
from torch.utils.dlpack import from_dlpack

from pagedkv.errors import InvalidRequest
from pagedkv.kernels import quant
from pagedkv.kernels.args import KVLayer
from pagedkv.spec import KVSpec

_AT_ONCE: Final = 1024
"""Frames copied in one go: indexing makes a copy of them."""

POISON: Final = 0xFF
"""A byte that makes NaN of every float dtype, of scales too. Frames nobody has written are filled with it at PAGEDKV_DEBUG >= 2."""


def _allocate(num_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [num_bytes]. On the CPU zeroed pages that the system hands out when they are first touched, huge ones where it can."""
    if device.type != "cpu":
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory gets no huge pages
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(region, dtype=torch.uint8)


def _apart(view: torch.Tensor) -> torch.Tensor:
    """The same bytes as a tensor that is no view to torch: torch.compile refuses to mutate views of one base that differ in dtype.

    It cannot see any more that they alias `frames`, so copying frames stays outside a compiled step.
    """
    as_bytes = view.dtype in (
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    )  # dtypes that DLPack has no name for in every torch we support
    return from_dlpack(view.view(torch.uint8)).view(view.dtype) if as_bytes else from_dlpack(view)


def specs_of(given: KVSpec | Sequence[KVSpec]) -> tuple[KVSpec, ...]:
    """The geometry of each layer group, of which there may be one."""
    if isinstance(given, KVSpec):
        return (given,)
    if not isinstance(given, Sequence) or not given or not all(isinstance(spec, KVSpec) for spec in given):
        raise InvalidRequest(f"spec is {given!r}; give a KVSpec, or a list with one for each layer group")
    return tuple(given)


def groups_of_layers(specs: tuple[KVSpec, ...], given: Sequence[int] | None) -> tuple[int, ...]:
    """The group of each layer."""
    if len({spec.block_size for spec in specs}) > 1:
        raise InvalidRequest(
            f"block sizes {[spec.block_size for spec in specs]}: groups share one pool of equal frames; give one size"
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
            f"layer_groups gives the {len(specs)} groups {counts} of {len(layers)} layers, their specs have "
            f"{[spec.num_layers for spec in specs]}; name the group of each layer"
        )
    return layers


class Storage:
    """The pool's bytes and a typed view of each layer.

    spec: the geometry, or that of each layer group; then `layer_groups[l]` is the group of layer l, None for one group after the other.
    Shapes: frames uint8 [F, frame_bytes]; layers[l].k [F, S, K, D] (D/2 for int4), v [F, S, K, Dv], scales float32 [F, S, K] or None
    Raises: InvalidRequest if the memory cannot be had, or the groups and their layers do not fit together
    """

    def __init__(
        self,
        spec: KVSpec | Sequence[KVSpec],
        num_frames: int,
        device: torch.device | str = "cpu",
        *,
        layer_groups: Sequence[int] | None = None,
    ) -> None:
        self.specs = specs_of(spec)
        self.layer_groups = groups_of_layers(self.specs, layer_groups)
        self.num_frames, self.device = num_frames, torch.device(device)
        self.frame_bytes = max(spec.frame_bytes for spec in self.specs)
        num_bytes = num_frames * self.frame_bytes
        try:
            self.bytes = _allocate(num_bytes, self.device)
        except (OSError, RuntimeError, OverflowError, ValueError) as error:
            raise InvalidRequest(
                f"{num_frames} frames of {self.frame_bytes} bytes are {num_bytes} bytes, and {self.device} has not as much ({error}); "
                "give fewer frames"
            ) from error
        self.frames = self.bytes.view(num_frames, self.frame_bytes)
        order = [self.layer_groups[:layer].count(group) for layer, group in enumerate(self.layer_groups)]
        self.layers = [
            self._layer(self.specs[group], index) for group, index in zip(self.layer_groups, order, strict=True)
        ]

    def _layer(self, spec: KVSpec, index: int) -> KVLayer:
        parts = {}
        packed = 2 if spec.stored_dtype == "int4" else 1
        for name, (offset, _) in spec.regions().items():
            is_scale = name.endswith("_scale")
            dtype = torch.float32 if is_scale else quant.DTYPES[spec.stored_dtype]
            dim = 1 if is_scale else (spec.head_dim if name == "k" else spec.value_dim) // packed
            typed, size = self.bytes.view(dtype), dtype.itemsize
            shape = (self.num_frames, spec.block_size, spec.num_kv_heads, dim)
            strides = (self.frame_bytes // size, dim, spec.block_size * dim, 1)
            view = typed.as_strided(shape, strides, (index * spec.layer_bytes + offset) // size)
            parts[name] = _apart(view[..., 0] if is_scale else view)
        return KVLayer(**parts)

    def take_over(self, old: Storage, used: torch.Tensor, moves: torch.Tensor) -> None:
        """Fill this pool with what `old` holds: frames `used` (int64 [n]) as they are, and moves[:, 0] as moves[:, 1] (int64 [M, 2]).

        Both pools exist meanwhile; what nobody holds is not touched, so it costs no memory. Modifies: the bytes of these frames
        """
        for sources, targets in ((used, used), (moves[:, 0], moves[:, 1])):
            for at in range(0, len(sources), _AT_ONCE):
                here = slice(at, at + _AT_ONCE)
                self.frames[targets[here].to(self.device)] = old.frames[sources[here].to(self.device)]

    def poison(self, frames: torch.Tensor) -> None:
        """Fill `frames` (int64 [n]) with NaN, so that a read of what nobody wrote shows.

        Modifies: the bytes of these frames
        """
        self.frames[frames.to(self.device)] = POISON
