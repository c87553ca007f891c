"""KVSpec: the geometry of a KV cache, and its byte arithmetic. No torch: dtypes are names.

One layer's slice of a frame, in address order (K kv heads, S block_size, D head_dim, Dv head_dim_v):

    | K  [K, S, D] | V  [K, S, Dv] | k_scale f16 [K, S] | v_scale f16 [K, S] |

Each region is padded to 64 bytes; scales exist only if the KV is quantised. In "k5v4" the page of a head, S keys of 5
bits an element, is two planes: the low 4 bits [S, D / 2], then the fifth bits [S, D / 8]. If
values lie in keys (`value_in_key`), V and v_scale have no region of their own: they are views of K and k_scale. A frame
is `num_layers` such slices, one after the other: one contiguous run of bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, Final

from pagedkv.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

COMPUTE_DTYPES: Final = ("float32", "bfloat16", "float16")

BITS: Final = dict(zip(COMPUTE_DTYPES, (32, 16, 16), strict=True)) | {
    "fp8_e4m3": 8, "fp8_e5m2": 8, "int8": 8, "int5": 5, "code4": 4,
}  # fmt: skip
"""Bits of one stored element. All but the first three are quantised: a float16 scale is kept per (token, head)."""

NUMBERS: Final = {name: number for number, name in enumerate(BITS)}
"""The number of each element in kernels: csrc/cuda/elements.cuh, csrc/cpu/call.hpp, kernels/numba/elements.py."""

ELEMENTS: Final = {name: (name, name) for name in (*COMPUTE_DTYPES, "fp8_e4m3", "fp8_e5m2", "int8")} | {
    "k8v4": ("int8", "code4"),
    "k5v4": ("int5", "code4"),
}
"""The elements of K and of V in each kind of KV. K and V of the last two are rotated before they are quantised."""
ALIGNMENT: Final = 64
"""Every K, V and scale region starts at a multiple of this many bytes: a cache line, and any vector load."""

STEP_TOKENS: Final = 2048
"""The most new tokens of a step of the reference engine, and so of one sequence, unless another limit is given."""

_UNITS: Final = {"": 1} | {
    f"{letter}{binary}": base**power
    for power, letter in enumerate("kmgt", 1)
    for binary, base in (("", 1000), ("i", 1024))
}


def parse_bytes(text: str | int) -> int:
    """Return the bytes of an amount like "40GiB", "512 MB" or "1.5g"; an int is bytes already."""
    if not isinstance(text, str | bool) and hasattr(text, "__index__"):
        return index(text)
    found = isinstance(text, str) and re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?i?)b?\s*", text.lower())
    if not found or found[2] not in _UNITS:
        raise InvalidRequest(
            f"{text!r} is not an amount of memory; give an int of bytes, or text like '2GiB', '512MB' or '1.5g'"
        )
    amount = float(found[1]) * _UNITS[found[2]]
    if amount >= 2**63:
        raise InvalidRequest(f"{text!r} is more memory than any machine has; give an amount like '2GiB' or '512MB'")
    return int(amount)


def _count(value: Any, name: str, least: int = 1) -> int:
    """Return `value` as an int of at least `least`. Integers of numpy and torch count as ints; bools do not."""
    try:
        number = least - 1 if type(value).__name__ in ("bool", "bool_") else index(value)  # bool_: numpy 1
    except TypeError:
        number = least - 1
    if number < least:
        raise InvalidRequest(f"KVSpec.{name} is {value!r}; it must be an int of at least {least}")
    return number


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class KVSpec:
    """The geometry of one group of layers that share page tables.

    num_layers, num_kv_heads (K), head_dim (D), head_dim_v (Dv; D if None), block_size (S, tokens per frame).
    dtype:    the dtype that the model computes in: "float32", "bfloat16" or "float16".
    kv_dtype: the kind of the stored KV: None for `dtype`, or "fp8_e4m3", "fp8_e5m2", "int8", "k8v4", "k5v4".
    window:   the number of positions that a query sees, its own included; None for all.
    keep:     how many positions behind the window stay in the pool, so that a rollback (truncate) may cross the window.
    sinks:    how many first positions every query sees beside its window; their pages are never given back.
    calibration: the SHA-256 of the statistics of K's channels, in hex; a cache that is given statistics sets it.
    value_in_key: each value is the first Dv elements of its key, as the latents of MLA with absorbed attention:
              head_dim 576, head_dim_v 512, num_kv_heads 1. Only keys are stored: `write_kv(k, None, ...)`.
    Raises:   InvalidRequest for a geometry that cannot be laid out.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int | None = None
    block_size: int = 16
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    window: int | None = None
    keep: int = 0
    value_in_key: bool = False
    sinks: int = 0
    calibration: str | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size", "head_dim_v", "window"):
            value = getattr(self, name)
            if value is not None or name not in ("head_dim_v", "window"):
                object.__setattr__(self, name, _count(value, name))
        for name, otherwise in (("keep", "every position stays"), ("sinks", "a query sees all positions")):
            count = _count(getattr(self, name), name, 0)
            object.__setattr__(self, name, count)
            if count and self.window is None:
                raise InvalidRequest(f"KVSpec.{name} is {count} without a window; {otherwise} without one")
        if not isinstance(self.dtype, str) or self.dtype not in COMPUTE_DTYPES:
            raise InvalidRequest(f"KVSpec.dtype is {self.dtype!r}; it must be one of {', '.join(COMPUTE_DTYPES)}")
        stored = [name for name in ELEMENTS if name == self.dtype or name not in COMPUTE_DTYPES]
        if self.kv_dtype is not None and (not isinstance(self.kv_dtype, str) or self.kv_dtype not in stored):
            instead = "; int4 changed what models say, take k5v4 or k8v4" if self.kv_dtype == "int4" else ""
            raise InvalidRequest(
                f"KVSpec.kv_dtype is {self.kv_dtype!r}; it must be None or, with dtype {self.dtype}, one of "
                f"{', '.join(stored)}{instead}"
            )
        if self.rotated and (self.head_dim % 8 or self.value_dim % 8 or self.value_in_key):
            raise InvalidRequest(
                f"{self.kv_dtype} rotates runs of 8 elements or more, and K apart from V: head dims {self.head_dim} "
                f"and {self.value_dim} must be multiples of 8, and value_in_key False; int8 and fp8 take any"
            )
        if not isinstance(self.value_in_key, bool) or (self.value_in_key and self.value_dim > self.head_dim):
            raise InvalidRequest(
                f"KVSpec.value_in_key is {self.value_in_key!r} with head_dim {self.head_dim} and head_dim_v "
                f"{self.value_dim}; it must be a bool, and a value in a key is no longer than the key"
            )

    @property
    def value_dim(self) -> int:
        """Dv: `head_dim_v`, or `head_dim` if that is None."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def stored_dtype(self) -> str:
        """The kind of KV in the pool."""
        return self.dtype if self.kv_dtype is None else self.kv_dtype

    @property
    def quantised(self) -> bool:
        """True if each (token, head) of K and of V has a float16 scale."""
        return self.stored_dtype not in COMPUTE_DTYPES

    @property
    def rotated(self) -> bool:
        """True if K and V are rotated before they are quantised (kernels/quant.py)."""
        return ELEMENTS[self.stored_dtype][1] == "code4"

    def regions(self) -> dict[str, tuple[int, int]]:
        """Return (offset in a layer's slice, bytes used) of "k", "v" and, if quantised, "k_scale" and "v_scale".

        Without those of V if values lie in keys.
        """
        rows = self.num_kv_heads * self.block_size
        k, v = (BITS[element] for element in ELEMENTS[self.stored_dtype])
        sizes = {"k": rows * self.head_dim * k // 8, "v": rows * self.value_dim * v // 8}
        if self.quantised:
            sizes |= {"k_scale": rows * 2, "v_scale": rows * 2}
        if self.value_in_key:
            sizes = {name: size for name, size in sizes.items() if name.startswith("k")}
        offset, regions = 0, {}
        for name, size in sizes.items():
            regions[name] = (offset, size)
            offset += _padded(size)
        return regions

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's slice of a frame, padding included."""
        return sum(_padded(size) for _, size in self.regions().values())

    @property
    def frame_bytes(self) -> int:
        """Bytes of one frame: `block_size` tokens, all layers, K, V and scales."""
        return self.num_layers * self.layer_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV and scales that one token adds, without padding."""
        return self.num_layers * sum(size for _, size in self.regions().values()) // self.block_size

    def frames_in(self, memory: str | int) -> int:
        """Return how many frames fit into `memory`: bytes, or text such as "40GiB".

        Raises: InvalidRequest if not one frame fits, or `memory` is no amount
        """
        frames = parse_bytes(memory) // self.frame_bytes
        if frames < 1:
            raise InvalidRequest(
                f"{memory} holds no frame: one takes {self.frame_bytes} bytes. Give at least that, or lower block_size"
            )
        return frames

    def pages(self, num_tokens: int) -> int:
        """Return how many pages `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)


def frames_for(specs: Iterable[KVSpec], num_tokens: int, at_once: int) -> int:
    """Return the most frames that a sequence holds until it has `num_tokens` tokens, over all layer groups.

    specs: one geometry for each group. at_once: the most tokens that one plan adds. Under a window, a group holds the
    pages of the window, of these tokens, and one page that both ends of the window cut.
    """
    total = 0
    for spec in specs:
        pages = spec.pages(num_tokens)
        if spec.window is not None:
            seen = spec.window - 1 + spec.keep + min(at_once, num_tokens)
            if seen < num_tokens:
                pages = min(pages, spec.pages(seen) + 1 + spec.pages(spec.sinks))
        total += pages
    return total
