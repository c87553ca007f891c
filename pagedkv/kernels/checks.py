"""Kernels rely on these checks of a call's arguments. An error names the argument in the letters of the contract,
with one text for all backends.

Shapes, dtypes, devices and strides are always checked: that costs no device synchronisation. Values (slots inside the
pool, lengths inside the tables, entries that name frames) are always checked on the CPU, by the kernels; on another
device they are read back only with PAGEDKV_DEBUG >= 1. Slots are proven distinct with >= 2.

A table has the dtypes and sizes of the tensors of each operation. A size is a letter of the contract. The first tensor
with a letter sets it, unless the layer has set it (K, D, Dv). ">=B" is any size from B on, and "B+1" one more than B.
Rules that join several tensors (H is a multiple of K) are functions. The C++ extension has the same table
(`of_extension`) and the same rules, beside each call in csrc/cpu/python, and says yes or no: a call that it refuses
comes here.
"""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from pagedkv import debug
from pagedkv.errors import InvalidRequest
from pagedkv.kernels import layout, quant
from pagedkv.kernels.args import KVLayer, PagedBatch, RotaryTable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pagedkv.kernels.args import AttentionCall, AttentionOptions, GatherCall, GatherSource, WriteCall


class _Rule(NamedTuple):
    """The rule for one tensor of a call.

    dtypes:      torch's names; "" for the dtype of the table's first tensor
    sizes:       the size of each dim
    name:        the name that callers know; "" for that of the field
    is_optional: it may be None
    has_rows:    its last dim is contiguous
    is_written:  no two of its elements share memory
    about:       the end of an error
    """

    field: str
    dtypes: str
    sizes: str
    name: str = ""
    is_optional: bool = False
    has_rows: bool = False
    is_written: bool = False
    about: str = ""


_FLOATS: Final = "float32 bfloat16 float16 float64"
_STORED: Final = f"{_FLOATS} float8_e4m3fn float8_e5m2"
_RESULT: Final = "float32 bfloat16 float16"
_POOL: Final = f"{_RESULT} float8_e4m3fn float8_e5m2 int8 uint8"
_OF_TREE: Final = ": may t see the j-th new token of its sequence?"
_OF_PAIR: Final = ": k and v have the same rows and dtype"
_TABLES: Final = (
    _Rule("seq_lens", "int32", "B", "batch.seq_lens", has_rows=True),
    _Rule("rows", "int32", "B", "batch.rows", is_optional=True),
    _Rule("block_table", "int32", "A P", "batch.block_table", has_rows=True),
)

ATTENTION: Final = (
    _Rule("q", _FLOATS, "T H D", has_rows=True),
    *_TABLES,
    _Rule("cu_seqlens_q", "int32", "B+1", "batch.cu_seqlens_q", has_rows=True),
    _Rule("sinks", "float32", "H", is_optional=True),
    _Rule("alibi_slopes", "float32", "H", is_optional=True),
    _Rule("causal_of", "bool", ">=B", "causal", is_optional=True, about=": which sequences are causal?"),
    _Rule("tree_mask", "bool", "T >=max_seqlen_q", is_optional=True, about=_OF_TREE),
    _Rule("out", "", "T H Dv", is_optional=True, has_rows=True, is_written=True),
    _Rule("lse", "float32", "T H"),
)
WRITE: Final = (
    _Rule("k_new", _STORED, "T K D", "k", has_rows=True, about=": the store quantises floats itself"),
    _Rule("v_new", _STORED, "T K Dv", "v", has_rows=True, about=": the store quantises floats itself"),
    _Rule("slots", "int64", "T"),
    _Rule("positions", "int64", "T", is_optional=True, about=": to turn keys"),
)
LAYER: Final = (
    _Rule("k", _POOL, "F S K D", "layer.k", has_rows=True),
    _Rule("v", f"{_POOL}", "F S K Dv", "layer.v", has_rows=True, about=": K and V of one layer"),
)
GATHERED, GATHERED_PADDED = (
    (
        _Rule("k_out", _RESULT, f"{rows} K D", "out's k", has_rows=True, is_written=True),
        _Rule("v_out", "", f"{rows} K Dv", "out's v", has_rows=True, is_written=True, about=_OF_PAIR),
    )
    for rows in ("N", "B L")
)
GATHER: Final = (*_TABLES, _Rule("first", "int32", "B", has_rows=True, about=", or an int"))
MERGE: Final = (
    _Rule("out_a", _FLOATS, "T H Dv", about=": as paged_attention returns it"),
    _Rule("lse_a", "float32", "T H", about=": a natural logarithm"),
    _Rule("out_b", "", "T H Dv", about=": the two states must match"),
    _Rule("lse_b", "float32", "T H", about=": a natural logarithm"),
)


def given(**tensors: object) -> None:
    """Raise InvalidRequest for an argument that must be a tensor, and is not."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise InvalidRequest(f"{name} is {x!r}; it must be a tensor, or a PagedBatch that has one")


def is_layer(layer: object) -> None:
    """Raise InvalidRequest for an argument that must be a KVLayer, and is not."""
    if not isinstance(layer, KVLayer):
        raise InvalidRequest(f"layer is of type {type(layer).__name__}; give a KVLayer, such as cache[0]")


def is_batch(batch: object) -> None:
    """Raise InvalidRequest unless `batch` is a PagedBatch of tensors and host ints."""
    if not isinstance(batch, PagedBatch):
        raise InvalidRequest(f"batch is of type {type(batch).__name__}; give a PagedBatch, such as batch[0] of a plan")
    tables = {f"batch.{name}": getattr(batch, name) for name in ("block_table", "seq_lens", "cu_seqlens_q")}
    given(**tables)
    for name in ("max_seqlen_q", "max_seqlen_k"):
        bound = getattr(batch, name)
        if not isinstance(bound, (Integral, torch.SymInt)):
            raise InvalidRequest(
                f"batch.{name} is {bound!r:.60}; give an int of the host, at least the largest of the batch's lengths"
            )


def is_backend(name: object) -> None:
    """Raise InvalidRequest for an argument that must name a backend, and is no text."""
    if not isinstance(name, str):
        raise InvalidRequest(f"there is no kernel {name!r}; give the name of one, such as 'cpu', or None to choose")


def writable_views(**tensors: Tensor | None) -> None:
    """Raise InvalidRequest for a view of negated memory: torch hands an operator a copy of it, and loses the result."""
    for name, x in tensors.items():
        if x is not None and not is_dynamo_compiling() and x.is_neg():
            raise InvalidRequest(
                f"{name} is a view of negated memory, which no kernel writes; give {name}.resolve_neg()"
            )


def inference_only(**tensors: Tensor | None) -> None:
    """Raise InvalidRequest if torch would record the call for a backward pass: no operator has a derivative."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise InvalidRequest(
                f"{name} requires grad, and the kernels are for inference only: they have no derivative; "
                "call them under torch.inference_mode() or torch.no_grad()"
            )


def attention(call: AttentionCall) -> None:
    """Raise InvalidRequest if `call` breaks the contract of `paged_attention`."""
    layer(call)
    K, D, Dv = call.k.shape[2], quant.head_dim(call.k), quant.head_dim(call.v, is_value=True)
    _query_dtype(call)
    sizes = _keep(ATTENTION, call._asdict(), D=D, Dv=Dv, max_seqlen_q=call.max_seqlen_q)
    if sizes["H"] % K or not sizes["H"]:
        raise InvalidRequest(f"q has H={sizes['H']} heads but layer.k has K={K} kv heads: H must be a multiple of K")
    _enough_rows(call, sizes)
    numbers(call)
    _one_device(call, "q")
    if debug.level() >= 1:
        table_values(call)


def keys_alone(call: WriteCall) -> WriteCall:
    """Return `call` as a store of keys that hold their values: V has no elements. Raise InvalidRequest if they do not.

    Scales per tensor may be apart: the store does not change them.
    """
    layer(call)
    scales = (call.k_scale, call.v_scale)
    per_tensor = all(scale is not None and not scale.dim() for scale in scales)
    if not layout.is_v_in_k(call.k, call.v) or not (per_tensor or layout.is_one_scale(*scales)):
        raise InvalidRequest(
            "v is None, but layer.v is not the first part of layer.k with the same scales; give v, or a layer of a "
            "cache with KVSpec.value_in_key"
        )
    return call._replace(v=call.k.new_empty((*call.k.shape[:3], 0)), v_scale=None)


def scales_of_two(layer: KVLayer | WriteCall) -> bool:
    """Return False if K and V share scales per (token, head): a value would replace the scale of its key."""
    k_scale, v_scale = layer.k_scale, layer.v_scale
    per_token = k_scale is not None and k_scale.dim() == 3 and k_scale.numel() > 0
    return not per_token or not layout.is_one_scale(k_scale, v_scale)


def write(call: WriteCall) -> None:
    """Raise InvalidRequest if `call` breaks the contract of `write_kv`."""
    if call.v.shape[-1]:  # else `keys_alone` has looked at the layer
        layer(call)
    if not scales_of_two(call):
        raise InvalidRequest("layer.k and layer.v have the same scales, as values lie in keys; give v=None")
    K, D, Dv = call.k.shape[2], quant.head_dim(call.k), quant.head_dim(call.v, is_value=True)
    sizes = _keep(WRITE, call._asdict(), K=K, D=D, Dv=Dv)
    writable(call)
    if call.cos is not None or call.sin is not None:
        _angles(call.cos, call.sin, D)
        if call.positions is None:
            raise InvalidRequest(f"positions is None; it must be int64 [T={sizes['T']}] to turn keys")
    _one_device(call, "k_new")
    if debug.level() >= 1:
        slot_values(call)


def position(first: Any) -> int:
    """Return `first` of a gather, given as an int. Raise InvalidRequest if it is none of 32 bits."""
    number = int(first) if isinstance(first, Integral) else 2**31
    if not -(2**31) <= number < 2**31:
        raise InvalidRequest(f"first is {first!r}; give a position, or a tensor int32 [B] of them")
    return number


def result_dtype(layer: KVLayer, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of what is gathered from `layer`. Raise InvalidRequest if there is none, or no float."""
    given = layer.k.dtype if dtype is None else dtype
    if quant.NAMES.get(given) not in quant.FLOATS:
        of_layer = "None, and layer.k is " if dtype is None else ""
        raise InvalidRequest(
            f"dtype is {of_layer}{str(given).removeprefix('torch.')}; give one of {', '.join(quant.FLOATS)}"
        )
    return given


def gather_source(source: GatherSource) -> None:
    """Raise InvalidRequest if `source` breaks the contract of `gather_kv`."""
    layer(source)
    _enough_rows(source, _keep(GATHER, source._asdict()))
    _one_device(source, "k")
    if debug.level() >= 1 or source.k.device.type == "cpu":
        _gather_values(source)


def gather_results(call: GatherCall) -> None:
    """Raise InvalidRequest unless the tensors of `out` can hold what `gather_kv` returns."""
    x, rows = call.source, call.k_out.shape[:-2]
    dims = quant.head_dim(x.k), quant.head_dim(x.v, is_value=True)
    sizes = {"B": len(x.seq_lens), "K": x.k.shape[2], "D": dims[0], "Dv": dims[1]}
    rules = GATHERED_PADDED if call.k_out.dim() == 4 else GATHERED
    _keep(rules, {"k_out": call.k_out, "v_out": call.v_out}, **sizes)
    _same_device({"layer.k": x.k, "out's k": call.k_out, "out's v": call.v_out})
    if call.starts is not None and (debug.level() >= 1 or x.k.device.type == "cpu") and rows[0] < int(call.starts[-1]):
        raise InvalidRequest(
            f"out holds {rows[0]} rows and the sequences have {int(call.starts[-1])} tokens from `first` on; "
            "give at least as many"
        )


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """Raise InvalidRequest unless the two states have the same shape, dtype and device."""
    states = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    _keep(MERGE, states)
    _same_device(states)


def copies(storage: Tensor, pairs: Tensor) -> None:
    """Raise InvalidRequest unless `pairs` are copies between frames of `storage`."""
    if storage.dim() < 1 or pairs.dtype != torch.int32 or pairs.dim() != 2 or pairs.shape[1] != 2:
        text = f"storage is {list(storage.shape)} and copies is {list(pairs.shape)} {_dtype_of(pairs)}"
        raise InvalidRequest(
            f"{text}; storage must have frames as its first dim, copies must be int32 [C, 2]: source and destination"
        )
    _same_device({"storage": storage, "copies": pairs})
    _no_overlap(storage=storage)
    if not len(pairs):
        return
    # A wrong frame is written anywhere. On the CPU a look at the values costs no synchronisation.
    if debug.level() >= 1 or pairs.device.type == "cpu":
        _in_range(pairs, "copies", storage.shape[0], "frames in storage")
    if debug.level() >= 1 and len(_repeated(pairs[:, 1])):
        raise InvalidRequest(
            "copies names a destination frame twice: which source should win? Each destination may appear once"
        )


def writable(call: KVLayer | WriteCall) -> None:
    """Raise InvalidRequest if two elements of k, or two of v, share memory."""
    _no_overlap(**{"layer.k": call.k, "layer.v": call.v})


def rotary(rope: RotaryTable | None, D: int) -> None:
    """Raise InvalidRequest unless `rope` is None, or the tables of RoPE for heads of D elements."""
    if rope is not None and not isinstance(rope, RotaryTable):
        raise InvalidRequest(f"rope is {rope!r}; give a RotaryTable, or None")
    if rope is not None:
        _angles(rope.cos, rope.sin, D)


def _angles(cos: Tensor | None, sin: Tensor | None, D: int) -> None:
    """Raise InvalidRequest unless `cos` and `sin` are the two tables of a RotaryTable for heads of D elements."""
    if cos is None or sin is None:
        raise InvalidRequest("of rope.cos and rope.sin one is None; give both")
    for name, x in (("cos", cos), ("sin", sin)):
        if x.dtype != torch.float32 or x.dim() != 2 or not 0 < 2 * x.shape[1] <= D or x.shape != cos.shape:
            want = f"two tables float32 [positions, R/2] with R from 2 to D={D}"
            raise InvalidRequest(f"rope.{name} is {_described(x)}; cos and sin must be {want}")
    _has_rows(**{"rope.cos": cos, "rope.sin": sin})


def _keep(rules: Iterable[_Rule], tensors: dict[str, Any], **sizes: int) -> dict[str, int]:
    """Return the size of each letter. Raise InvalidRequest for the first tensor that breaks its rule.

    tensors: by field
    sizes:   the letters that the layer sets
    """
    first = ""
    for rule in rules:
        x, name = tensors[rule.field], rule.name or rule.field
        if x is None and rule.is_optional:
            continue
        dtypes, wanted = _dtypes(rule.dtypes or first), _sizes(rule.sizes)
        if "B" in sizes:
            sizes["B+1"] = sizes["B"] + 1
        is_right = isinstance(x, Tensor) and x.dtype in dtypes and x.dim() == len(wanted)
        for (letter, is_least), size in zip(wanted, x.shape if is_right else (), strict=False):
            known = sizes.setdefault(letter, size)
            is_right = is_right and (size >= known if is_least else size == known)
        if not is_right:
            shape = (
                f"{'>=' * is_least}{letter}" + (f"={sizes[letter]}" if letter in sizes else "")
                for letter, is_least in wanted
            )
            text = f"{', '.join(dtypes.values())} [{', '.join(shape)}]" + (", or None" if rule.is_optional else "")
            raise InvalidRequest(f"{name} is {_described(x)}; it must be {text}{rule.about}")
        first = first or _dtype_of(x)
        if rule.has_rows and x.stride(-1) != 1:
            _has_rows(**{name: x})
        if rule.is_written and not x.is_contiguous():
            _no_overlap(**{name: x})
    return sizes


_KNOWN_DTYPES: Final[dict[str, dict[torch.dtype, str]]] = {}
_KNOWN_SIZES: Final[dict[str, tuple[tuple[str, bool], ...]]] = {}
"""The results of `_dtypes` and `_sizes` so far. functools.cache would keep them too, but torch.compile warns of it."""


def _dtypes(names: str) -> dict[torch.dtype, str]:
    if names not in _KNOWN_DTYPES:
        _KNOWN_DTYPES[names] = {getattr(torch, name): name for name in names.split()}
    return _KNOWN_DTYPES[names]


def _sizes(dims: str) -> tuple[tuple[str, bool], ...]:
    if dims not in _KNOWN_SIZES:
        _KNOWN_SIZES[dims] = tuple((size.lstrip(">="), size.startswith(">=")) for size in dims.split())
    return _KNOWN_SIZES[dims]


def _has_rows(**tensors: Tensor) -> None:
    """Raise InvalidRequest unless the last dim of each tensor is contiguous."""
    for name, x in tensors.items():
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise InvalidRequest(
                f"{name} has strides {x.stride()}; its last dim must be contiguous (stride 1): pass {name}.contiguous()"
            )


def _no_overlap(**tensors: Tensor) -> None:
    """Raise InvalidRequest if elements share memory: sorted by stride, each dim must step over all that the smaller
    ones span."""
    for name, x in tensors.items():
        span, dims = 1, zip(x.stride(), x.shape, strict=True)
        for stride, size in sorted(pair for pair in dims if pair[1] > 1 and not x.is_contiguous()):
            if stride < span:
                raise InvalidRequest(
                    f"{name} has strides {x.stride()}: several of its elements share memory, so it cannot be written"
                )
            span += stride * (size - 1)


def _dtype_of(x: Tensor) -> str:
    """Return torch's name of the dtype of `x`."""
    return str(x.dtype).removeprefix("torch.")


def _described(x: object) -> str:
    """Return the dtype and the shape of a tensor, or what else was given."""
    return f"{_dtype_of(x)} {list(x.shape)}" if isinstance(x, Tensor) else f"{x!r:.60}"


def of_extension(rules: Iterable[_Rule], *fields: str) -> list[tuple[Any, ...]]:
    """Return the rules as the extension takes them, each with the place of its tensor among `fields`."""
    return [
        (fields.index(rule.field), rule.dtypes.split(), rule.sizes.split(), *rule[4:7])
        for rule in rules
        if rule.field in fields
    ]


def _one_device(call: AttentionCall | WriteCall | GatherSource, first: str) -> None:
    """Raise InvalidRequest unless all tensors are on the device of the field `first`, and have their memory."""
    tensors = {name: x for name, x in call._asdict().items() if isinstance(x, Tensor)}
    _same_device({first: tensors[first]} | tensors)
    for name, x in tensors.items():
        if x.numel():
            _in_memory(_ARGUMENTS.get(name) or name, x)


def _same_device(tensors: dict[str, Tensor]) -> None:
    """Raise InvalidRequest unless all tensors are on the device of the first."""
    first, device = next((name, x.device) for name, x in tensors.items())
    for name, x in tensors.items():
        if x.device != device:
            raise InvalidRequest(
                f"{first} is on {device} but {name} is on {x.device}: all tensors of a call live on one device"
            )


_ARGUMENTS = {rule.field: rule.name for rule in ATTENTION + WRITE} | {"k": "layer.k", "v": "layer.v"}


def _in_memory(name: str, x: Tensor) -> None:
    """Raise InvalidRequest if `x` reaches beyond its storage: an owner freed or shrank it (`resize_`)."""
    reach = x.storage_offset() + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    wanted, given = (reach + 1) * x.element_size(), x.untyped_storage().nbytes()
    if wanted > given:
        raise InvalidRequest(
            f"{name} spans {wanted} bytes but its storage has {given}: the memory was freed or shrunk; "
            "pass a tensor that owns its memory"
        )


def layer(call: KVLayer | AttentionCall | WriteCall | GatherSource) -> None:
    """Raise InvalidRequest unless k, v, their scales and the calibration are one layer of a pool."""
    k, v = call.k, call.v
    _keep(LAYER, {"k": k, "v": v})
    if 0 in (*k.shape[1:], v.shape[3]):
        raise InvalidRequest(f"layer.k is {list(k.shape)} and layer.v is {list(v.shape)}: only F may be 0")
    if quant.kind_name(k, v) is None:
        raise InvalidRequest(
            f"layer.k is {_dtype_of(k)} and layer.v is {_dtype_of(v)}: K and V of one layer have one dtype, or V is "
            "uint8 (codes) and K int8 or uint8 (integers of 5 bits)"
        )
    is_rotated = quant.is_rotated(v)
    for name, scale in (("k_scale", call.k_scale), ("v_scale", call.v_scale)):
        per_token = (torch.float16, tuple(k.shape[:3]))
        want = f"float16 {list(k.shape[:3])} (one per token and head)"
        allowed = (per_token,) if is_rotated else (per_token, (torch.float32, ()))
        want = want if is_rotated else f"float32 [] (one for all) or {want}"
        if scale is None:
            if k.dtype in (torch.int8, torch.uint8):
                raise InvalidRequest(f"layer.{name} is None but layer.k is {_dtype_of(k)}; it must be {want}")
        elif (scale.dtype, tuple(scale.shape)) not in allowed:
            raise InvalidRequest(f"layer.{name} is {_described(scale)}; it must be {want}")
        elif k.dtype not in quant.QMAX:
            raise InvalidRequest(
                f"layer.{name} is given but layer.k is {_dtype_of(k)}: only fp8 and integers have scales; pass None"
            )
    if is_rotated or call.calibration is not None:
        _rotated(call)


def _rotated(call: KVLayer | AttentionCall | WriteCall | GatherSource) -> None:
    """Raise InvalidRequest unless the tensors of a rotated layer fit together."""
    k, v, calibration = call.k, call.v, call.calibration
    K, D = k.shape[2], quant.head_dim(k)
    if calibration is not None and not quant.is_rotated(v):
        raise InvalidRequest(f"a calibration is given but layer.v is {_dtype_of(v)}; only k8v4 and k5v4 take one")
    if D % 8 or quant.head_dim(v, is_value=True) % 8 or (k.dtype == torch.uint8 and k.shape[3] % 5):
        raise InvalidRequest(
            f"layer.k is {_described(k)} and layer.v is {_described(v)}: the head dims of rotated layers are multiples "
            "of 8; K of 5 bits has 5 D / 8 bytes, V of 4 bits Dv / 2"
        )
    if k.dtype == torch.uint8 and k.shape[1] > 1 and k.stride(1) != k.shape[3]:
        raise InvalidRequest(
            f"layer.k is uint8 with strides {k.stride()}: the {k.shape[1]} keys of a head in a frame must be one run, "
            f"so stride 1 must be {k.shape[3]}"
        )
    if k.data_ptr() == v.data_ptr() and k.numel():
        raise InvalidRequest("layer.v lies in layer.k, and K and V of rotated layers are apart; take int8 or fp8")
    if calibration is not None and (
        calibration.dtype != torch.float32 or calibration.shape != (K, 2, D) or not calibration.is_contiguous()
    ):
        raise InvalidRequest(
            f"layer.calibration is {_described(calibration)}; it must be float32 [K={K}, 2, D={D}], contiguous"
        )


def _query_dtype(call: AttentionCall) -> None:
    if call.q.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise InvalidRequest(f"q is {_dtype_of(call.q)}; it must be float32, bfloat16 or float16")
    if call.k.dtype not in quant.QMAX and call.q.dtype not in (call.k.dtype, torch.float64):
        raise InvalidRequest(
            f"q is {_dtype_of(call.q)} but layer.k is {_dtype_of(call.k)}: "
            "convert q (only pools of fp8 and of integers may differ)"
        )


def _enough_rows(call: AttentionCall | GatherSource, sizes: dict[str, int]) -> None:
    if call.rows is None and sizes["A"] < sizes["B"]:
        wanted = f"int32 [A >= B={sizes['B']}, P] (or give batch.rows)"
        raise InvalidRequest(f"batch.block_table is {_described(call.block_table)}; it must be {wanted}")


def per_head(options: AttentionOptions) -> None:
    """Raise InvalidRequest unless sinks and alibi_slopes are float32, of one dim.

    The entry points convert other float dtypes (`AttentionOptions.in_float32`).
    """
    for name, x in (("sinks", options.sinks), ("alibi_slopes", options.alibi_slopes)):
        if x is not None and not (isinstance(x, Tensor) and x.dtype == torch.float32 and x.dim() == 1):
            raise InvalidRequest(f"{name} is {_described(x)}; it must be a float tensor [H]")


def numbers(options: AttentionOptions | AttentionCall) -> None:
    """Raise InvalidRequest unless causal, window, split_tokens, scale and softcap are what attention can use."""
    if isinstance(options.causal, Tensor):
        raise InvalidRequest(
            "causal is a tensor, one entry for each sequence of a batch: give it to the bound call with the batch, "
            "attend(q, batch, causal=...); here causal is True or False"
        )
    if not isinstance(options.causal, bool | np.bool_):
        raise InvalidRequest(
            f"causal is {options.causal!r:.60}; give True or False, or a tensor bool [B] that says it for each sequence"
        )
    if options.right and options.causal:
        raise InvalidRequest(
            f"window shows {options.right} positions after a query, and a causal query sees none of them: "
            "give (left, 0), or causal=False"
        )
    for name, value in (("window", options.window), ("split_tokens", options.split_tokens)):
        if value is not None and (not isinstance(value, Integral) or not 1 <= value < 2**63):
            raise InvalidRequest(f"{name} is {value!r}; it must be an integer of at least 1, or None")
    for name, number in (("scale", options.scale), ("softcap", options.softcap)):
        if not (isinstance(number, Real) or (number is None and name == "scale")):
            raise InvalidRequest(f"{name} is {number!r}; it must be a number")
    if options.scale is not None and not math.isfinite(options.scale):
        raise InvalidRequest(f"scale is {options.scale}; it must be a finite number, or None for D ** -0.5")
    if not 0 <= options.softcap < float("inf"):
        raise InvalidRequest(f"softcap is {options.softcap}; it must be a finite number, 0 for none")


def _in_range(x: Tensor, name: str, limit: int, of_what: str) -> None:
    low, high = x.min().item(), x.max().item()
    if low < 0 or high >= limit:
        raise InvalidRequest(
            f"{name} holds {low} to {high} but there are {limit} {of_what}: 0 to {limit - 1} are allowed"
        )


def table_values(call: AttentionCall) -> None:
    """Raise InvalidRequest if a table names a row, frame or length that does not exist. Synchronises with the device.

    The CPU's kernels follow the same rules in each call (names_what_is_there in csrc/cpu/python).
    """
    lens, starts = call.seq_lens.cpu(), call.cu_seqlens_q.cpu()
    counts, (F, S), P = starts.diff(), call.k.shape[:2], call.block_table.shape[1]
    if starts[0] != 0 or (counts < 0).any() or starts[-1] > call.q.shape[0]:
        raise InvalidRequest(
            f"batch.cu_seqlens_q is {starts.tolist()}; it must rise from 0 to at most T={call.q.shape[0]}"
        )
    read = lens[counts > 0]
    if len(read) and (read.min() < 0 or read.max() > P * S):
        raise InvalidRequest(
            f"batch.seq_lens goes from {read.min()} to {read.max()} but a row of {P} pages of {S} holds 0 to {P * S}"
        )
    causal = torch.tensor(call.causal) if call.causal_of is None else call.causal_of.cpu()[: len(lens)]
    short = (causal & (lens > 0) & (lens < counts)).nonzero().flatten()
    if len(short):  # an empty sequence is allowed: its queries see nothing
        b = int(short[0])
        raise InvalidRequest(
            f"sequence {b} has {int(counts[b])} queries and batch.seq_lens says {int(lens[b])} tokens: seq_lens counts "
            "the new tokens too. For keys of another sequence, give causal=False"
        )
    if len(read) and (counts.max() > call.max_seqlen_q or read.max() > call.max_seqlen_k):
        bounds = f"max_seqlen_q={call.max_seqlen_q}, max_seqlen_k={call.max_seqlen_k}"
        raise InvalidRequest(
            f"the batch holds {counts.max()} queries and {read.max()} tokens in a sequence, "
            f"more than its bounds {bounds}"
        )
    rows = torch.arange(len(lens)) if call.rows is None else call.rows.cpu().long()
    if len(read):
        _in_range(rows[counts > 0], "batch.rows", call.block_table.shape[0], "rows in batch.block_table")
    used = torch.arange(P) < ((read + S - 1) // S)[:, None]
    entries = call.block_table.cpu()[rows[counts > 0]][used]
    _frames(entries, F)


def _gather_values(source: GatherSource) -> None:
    """Raise InvalidRequest if a table names a row, frame or length that does not exist. Synchronises the device."""
    (F, S), (A, P) = source.k.shape[:2], source.block_table.shape
    # numpy, as an operation of torch costs as much as a small gather
    lens, first = source.seq_lens.cpu().numpy().astype(np.int64), source.first.cpu().numpy()
    if not len(lens):
        return
    if lens.min() < 0 or lens.max() > P * S:
        raise InvalidRequest(
            f"batch.seq_lens goes from {lens.min()} to {lens.max()} but a row of {P} pages of {S} holds 0 to {P * S}"
        )
    if source.rows is not None:
        _in_range(source.rows, "batch.rows", A, "rows in batch.block_table")
    begin, end = np.maximum(first, 0) // S, -(-lens // S)
    table = source.block_table[:, : end.max()].cpu().numpy()
    rows = table[: len(lens)] if source.rows is None else table[source.rows.cpu().numpy()]
    pages = np.arange(rows.shape[1])
    _frames(rows[(pages >= begin[:, None]) & (pages < end[:, None])], F)


def _frames(entries: Any, F: int) -> None:
    if len(entries) and (entries.max() >= F or entries.min() < -1):
        raise InvalidRequest(
            f"batch.block_table names frames {entries.min()} to {entries.max()} but the layer has F={F}: "
            f"0 to {F - 1}, or -1 for a hole"
        )


def slot_values(call: WriteCall) -> None:
    """Raise InvalidRequest if a slot or a position is not there. Synchronises with the device."""
    F, S = call.k.shape[:2]
    stored = call.slots[call.slots >= 0]
    if len(stored):
        _in_range(stored, "slots", F * S, f"slots in F={F} frames of S={S}")
    if call.cos is not None and call.positions is not None and len(stored):
        _in_range(call.positions[call.slots >= 0], "positions", call.cos.shape[0], "positions in rope.cos")
    if debug.level() >= 2 and len(_repeated(stored)):
        raise InvalidRequest(
            f"slots names slots {_repeated(stored)[:8]} more than once: two tokens cannot be stored in one place"
        )


def _repeated(x: Tensor) -> list[int]:
    x = x.sort().values
    twice: list[int] = x[1:][x.diff() == 0].tolist()
    return twice
