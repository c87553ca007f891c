"""The contract of a call's tensors: a table of dtypes and sizes for each operation.

checks.py says in words which tensor of a call breaks the table. The C++ extension has the same table (`of_extension`)
and answers a bound call with yes or no. Values, and rules that join several tensors (H is a multiple of K), are in
checks.py; csrc/cpu/python has the same rules beside each call.

A size is a letter of the contract. The first tensor with a letter sets it, unless the layer has set it (K, D, Dv).
">=B" is any size from B on, and "B+1" one more than B.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from pagedkv.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable


class Rule(NamedTuple):
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
_TABLES: Final = (
    Rule("seq_lens", "int32", "B", "batch.seq_lens", has_rows=True),
    Rule("rows", "int32", "B", "batch.rows", is_optional=True),
    Rule("block_table", "int32", "A P", "batch.block_table", has_rows=True),
)

ATTENTION: Final = (
    Rule("q", _FLOATS, "T H D", has_rows=True),
    *_TABLES,
    Rule("cu_seqlens_q", "int32", "B+1", "batch.cu_seqlens_q", has_rows=True),
    Rule("sinks", "float32", "H", is_optional=True),
    Rule("alibi_slopes", "float32", "H", is_optional=True),
    Rule("causal_of", "bool", ">=B", "causal", is_optional=True, about=": which sequences are causal?"),
    Rule(
        "tree_mask",
        "bool",
        "T >=max_seqlen_q",
        is_optional=True,
        about=": may t see the j-th new token of its sequence?",
    ),
    Rule("out", "", "T H Dv", is_optional=True, has_rows=True, is_written=True),
    Rule("lse", "float32", "T H"),
)
WRITE: Final = (
    Rule("k_new", _STORED, "T K D", "k", has_rows=True, about=": the store quantises floats itself"),
    Rule("v_new", _STORED, "T K Dv", "v", has_rows=True, about=": the store quantises floats itself"),
    Rule("slots", "int64", "T"),
    Rule("positions", "int64", "T", is_optional=True, about=": to turn keys"),
)
LAYER: Final = (
    Rule("k", _POOL, "F S K D", "layer.k", has_rows=True),
    Rule("v", "", "F S K Dv", "layer.v", has_rows=True, about=": K and V of one layer"),
)
GATHERED, GATHERED_PADDED = (
    (
        Rule("k_out", _RESULT, f"{rows} K D", "out's k", has_rows=True, is_written=True),
        Rule(
            "v_out",
            "",
            f"{rows} K Dv",
            "out's v",
            has_rows=True,
            is_written=True,
            about=": k and v have the same rows and dtype",
        ),
    )
    for rows in ("N", "B L")
)
GATHER: Final = (*_TABLES, Rule("first", "int32", "B", has_rows=True, about=", or an int"))
MERGE: Final = (
    Rule("out_a", _FLOATS, "T H Dv", about=": as paged_attention returns it"),
    Rule("lse_a", "float32", "T H", about=": a natural logarithm"),
    Rule("out_b", "", "T H Dv", about=": the two states must match"),
    Rule("lse_b", "float32", "T H", about=": a natural logarithm"),
)


def keep(rules: Iterable[Rule], tensors: dict[str, Any], **sizes: int) -> dict[str, int]:
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
            raise InvalidRequest(f"{name} is {described(x)}; it must be {text}{rule.about}")
        first = first or dtype_of(x)
        if rule.has_rows and x.stride(-1) != 1:
            has_rows(**{name: x})
        if rule.is_written and not x.is_contiguous():
            no_overlap(**{name: x})
    return sizes


@cache
def _dtypes(names: str) -> dict[torch.dtype, str]:
    return {getattr(torch, name): name for name in names.split()}


@cache
def _sizes(dims: str) -> tuple[tuple[str, bool], ...]:
    return tuple((size.lstrip(">="), size.startswith(">=")) for size in dims.split())


def has_rows(**tensors: Tensor) -> None:
    """Raise InvalidRequest unless the last dim of each tensor is contiguous."""
    for name, x in tensors.items():
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise InvalidRequest(
                f"{name} has strides {x.stride()}; its last dim must be contiguous (stride 1): pass {name}.contiguous()"
            )


def no_overlap(**tensors: Tensor) -> None:
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


def dtype_of(x: Tensor) -> str:
    """Return torch's name of the dtype of `x`."""
    return str(x.dtype).removeprefix("torch.")


def described(x: object) -> str:
    """Return the dtype and the shape of a tensor, or what else was given."""
    return f"{dtype_of(x)} {list(x.shape)}" if isinstance(x, Tensor) else f"{x!r:.60}"


def of_extension(rules: Iterable[Rule], *fields: str) -> list[tuple[Any, ...]]:
    """Return the rules as the extension takes them, each with the place of its tensor among `fields`."""
    return [
        (fields.index(rule.field), rule.dtypes.split(), rule.sizes.split(), *rule[4:7])
        for rule in rules
        if rule.field in fields
    ]
