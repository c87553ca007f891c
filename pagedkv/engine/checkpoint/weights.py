"""Weights: the tensors of a checkpoint, from safetensors files to the decoder's memory. Knows names and shapes only.

    model.safetensors                       or   model.safetensors.index.json + the shards it names
      model.layers.3.self_attn.q_proj.weight ┐
      model.layers.3.self_attn.k_proj.weight ├─▶  layers[3].qkv  [(H + 2K) D, hidden]
      model.layers.3.self_attn.v_proj.weight ┘
      model.layers.4.linear_attn.in_proj_qkv ┬─▶  layers[4].qkv  [channels + values, hidden]
      model.layers.4.linear_attn.in_proj_z   ┘

Files are mapped, not read: each tensor goes from the page cache straight to its place in the decoder's memory and is
converted on the way. So the peak is one copy of the weights in the dtype computed in. A tensor that the config does not
account for is an error, not a warning: an ignored bias or quantisation scale means wrong text.

On a CPU all tensors lie in one region, on huge pages: clone a tensor before you save or keep it alone.
With `kind`, the matrices of linear layers are quantised part by part, and no dense copy of one is kept. The embedding
stays dense, because it is read by rows; a tied head is a matrix of its own.

A checkpoint is not trusted. The decoder is built twice: first on torch's meta device, which allocates nothing, and then
in memory. So names, shapes and dtypes of config.json and of the files' headers agree before anything is allocated.
"""

from __future__ import annotations

import logging
import math
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from pagedkv.engine.checkpoint import regular_files
from pagedkv.engine.checkpoint.fields import shown
from pagedkv.engine.checkpoint.files import is_plain_name, is_present, listed, read_json
from pagedkv.errors import CheckpointError, InvalidRequest
from pagedkv.kernels import huge_pages
from pagedkv.kernels.linear.matrix import GROUP, KINDS, Matrix, layout

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from pagedkv.engine.checkpoint.config import ModelConfig

_LOG: Final = logging.getLogger(__name__)
INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"

PREFIXES: Final = ("model.", "model.language_model.", "language_model.model.", "")
"""Prefixes of a language model: alone, beside a part that sees (transformers 5, then 4), saved without a head."""

HEADS: Final = ("lm_head.weight", "language_model.lm_head.weight")
"""Names of the output head: alone or by transformers 5, and inside Gemma 3 with vision by transformers 4."""

IGNORED: Final = (r"(^|\.)rotary_emb\w*\.\w*(inv_freq|cos_cached|sin_cached)$", r"(^|\.)position_ids$", r"^mtp\.")
"""Tables that old versions of transformers saved, and that follow from config.json; a head of Qwen3.5 that drafts."""

VISION: Final = r"^(model\.)?(vision_tower|multi_modal_projector|visual)\."
"""The part of a model that sees pictures. A prompt of this decoder has none."""

META: Final = torch.device("meta")
FLOATS: Final = ("F16", "BF16", "F32", "F64")
"""The dtypes that are read, by their names in safetensors."""


class DeltaWeights(NamedTuple):
    """The weights of linear attention beside the large projections. C channels, width W, H value heads of dimension V.

    Shapes: gates [2 H, hidden]: beta, then the step of the decay; conv [C, W]; step_bias float32 [H];
            rate float32 [H]: the factor of the decay, below 0; norm [V]
    """

    gates: Tensor
    conv: Tensor
    step_bias: Tensor
    rate: Tensor
    norm: Tensor


class _Heads(NamedTuple):
    """Rows of a tensor of heads: of each of `heads` heads of `stride` rows, `size` rows from `first` on.

    rotated: see RopeConfig. The checkpoint rotates pairs i and i + rotated / 2, the decoder i and i + size / 2, so the
    rows of the heads get another order. Scores do not depend on it.
    """

    heads: int
    size: int
    stride: int
    first: int = 0
    rotated: int = 0

    def rows(self) -> Tensor:
        """Return the numbers of the rows: int64 [heads * size]."""
        pairs, half = self.rotated // 2, self.size // 2
        turned, rest = torch.arange(self.rotated), torch.arange(self.rotated, self.size)
        order = torch.cat((turned[:pairs], rest[: half - pairs], turned[pairs:], rest[half - pairs :]))
        return (torch.arange(self.heads)[:, None] * self.stride + self.first + order).flatten()


class _Part(NamedTuple):
    """A tensor of the checkpoint with `rows` rows, or the rows `picked` of it."""

    name: str
    rows: int
    picked: _Heads | None = None

    @property
    def height(self) -> int:
        """The rows that are taken."""
        return self.rows if self.picked is None else self.picked.heads * self.picked.size


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One decoder layer. Linear weights are [out, in], as `torch.nn.functional.linear` takes them.

    A tensor that the family does not have is None. qkv, out, gate_up and down may be integers with scales. With an
    output gate, its rows are the last of qkv. In a linear layer, qkv are the channels of the convolution and the
    output gate, and `delta` is given. Heads are rotated in another order of dimensions, see `_Heads`.
    Shapes: qkv [(H + 2K) D, hidden], out [hidden, H D], gate_up [2 intermediate, hidden], down [hidden, intermediate],
            biases [rows], norms [hidden], q_norm and k_norm [D]
    """

    attention_norm: Tensor
    qkv: Tensor | Matrix
    qkv_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    out: Tensor | Matrix
    out_bias: Tensor | None = None
    attention_out_norm: Tensor | None = None
    mlp_norm: Tensor
    gate_up: Tensor | Matrix
    gate_up_bias: Tensor | None
    down: Tensor | Matrix
    down_bias: Tensor | None
    mlp_out_norm: Tensor | None
    delta: DeltaWeights | None = None


@dataclass(frozen=True)
class Weights:
    """All weights of a decoder: `embedding` and `head` [V, hidden] (one tensor if tied and dense), `norm` [hidden]."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor | Matrix


def load_weights(
    folder: Path, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, kind: str | None = None
) -> Weights:
    """Load the weights of `folder` for the decoder that `config` describes.

    kind: "int8" or "int4" for the matrices of the linear layers; None for `dtype`. The head of int4 has int8.
    Raises: CheckpointError if a file or tensor is missing, damaged, of another shape, or unknown to the config, or if
        the weights are larger than the memory of this machine; InvalidRequest for an unknown kind, or one whose groups
        of columns do not fit the matrices
    """
    if kind is not None and kind not in KINDS:
        raise InvalidRequest(f"weights is {kind!r}; it must be None or one of {', '.join(KINDS)}")
    source = _Source(folder, dtype, kind)
    _weights(source, config)
    source.refuse_leftovers()
    source.place(device)
    if kind == "int4":
        _LOG.warning(
            "int4 weights change what a model says: KL 0.40 and 0.57 on models of 135M and 270M parameters, where int8 "
            "costs 0.003; take weights='int8' unless memory is short"
        )
    return _weights(source, config)


def _weights(source: _Source, config: ModelConfig) -> Weights:
    """Read all weights. A source on the meta device checks them and reads none."""
    embedding = source.matrix([_Part("embed_tokens.weight", config.vocab_size)], config.hidden_size)
    linear = config.linear.layers if config.linear else ()
    return Weights(
        embedding=embedding,
        layers=tuple((_linear_layer if i in linear else _layer)(source, config, i) for i in range(config.num_layers)),
        norm=_norm(source, config, _Part("norm.weight", config.hidden_size)),
        head=_head(source, config, embedding),
    )


def _head(source: _Source, config: ModelConfig, embedding: Tensor) -> Tensor | Matrix:
    """Read the output head, or return `embedding` if the two are tied and dense."""
    is_tied = config.tie_embeddings and source.head not in source.file_of
    # A checkpoint may save a tied head too. A saved head that differs was trained: transformers uses it as well.
    if config.tie_embeddings and not is_tied and source.device != META:
        is_tied = source.holds(source.head, embedding)
    if is_tied and source.kind is None:
        return embedding
    name = "embed_tokens.weight" if is_tied else source.head
    return source.linear([_Part(name, config.vocab_size)], config.hidden_size, source.kind and "int8")


def _layer(source: _Source, config: ModelConfig, index: int) -> LayerWeights:
    """Read one decoder layer with attention."""
    at, c = f"layers.{index}", config
    rotated = c.ropes[index - sum(layer < index for layer in c.linear.layers) if c.linear else index].rotated
    parts = _qkv_parts(config, f"{at}.self_attn", rotated)
    out = [(f"{at}.self_attn.o_proj", c.hidden_size)]

    def norm(name: str, *, present: bool) -> Tensor | None:
        """Read a norm of this layer, or return None if the family does not have it."""
        part = _Part(f"{at}.{name}.weight", c.hidden_size)
        if "self_attn" in name:
            picked = _Heads(1, c.head_dim, c.head_dim, rotated=rotated) if rotated else None
            part = part._replace(rows=c.head_dim, picked=picked)
        return _norm(source, config, part) if present else None

    return LayerWeights(
        attention_norm=_norm(source, config, _Part(f"{at}.input_layernorm.weight", c.hidden_size)),
        qkv=source.linear([part._replace(name=f"{part.name}.weight") for part in parts], c.hidden_size, source.kind),
        qkv_bias=source.matrix([part._replace(name=f"{part.name}.bias") for part in parts]) if c.qkv_bias else None,
        q_norm=norm("self_attn.q_norm", present=c.qk_norm),
        k_norm=norm("self_attn.k_norm", present=c.qk_norm),
        out=_weight(source, out, c.num_heads * c.head_dim),
        out_bias=_bias(source, out, present=c.output_bias),
        attention_out_norm=norm("post_attention_layernorm", present=c.sandwich_norms),
        **_mlp(source, config, at),
    )


def _qkv_parts(config: ModelConfig, at: str, rotated: int) -> list[_Part]:
    """Return the parts of qkv, without the ends of their names.

    In a checkpoint with output gates, each head of q_proj has D rows of q, then D rows of its gate.
    """
    c, size = config, config.head_dim
    num_q, num_k, stride = c.num_heads, c.num_kv_heads, (1 + c.output_gate) * size
    q, k = _Heads(num_q, size, stride, rotated=rotated), _Heads(num_k, size, size, rotated=rotated)
    parts = [
        _Part(f"{at}.q_proj", num_q * stride, q if rotated or c.output_gate else None),
        _Part(f"{at}.k_proj", num_k * size, k if rotated else None),
        _Part(f"{at}.v_proj", num_k * size),
    ]
    if c.output_gate:
        parts.append(parts[0]._replace(picked=_Heads(num_q, size, stride, first=size)))
    return parts


def _linear_layer(source: _Source, config: ModelConfig, index: int) -> LayerWeights:
    """Read one decoder layer with linear attention. Its small matrices stay dense: they set how fast it forgets."""
    at, c = f"layers.{index}.linear_attn", config
    assert c.linear is not None
    linear, heads = c.linear, c.linear.num_value_heads
    inputs = [(f"{at}.in_proj_qkv", linear.channels), (f"{at}.in_proj_z", linear.value_rows)]
    gates = [_Part(f"{at}.in_proj_{name}.weight", heads) for name in "ba"]
    conv = source.matrix([_Part(f"{at}.conv1d.weight", linear.channels)], (1, linear.conv_width))
    # float32, as the state is: these numbers are raised to a power of the number of tokens
    step_bias, rate = (
        source.matrix([_Part(f"{at}.{name}", heads)], dtype=torch.float32) for name in ("dt_bias", "A_log")
    )
    return LayerWeights(
        attention_norm=_norm(source, config, _Part(f"layers.{index}.input_layernorm.weight", c.hidden_size)),
        qkv=_weight(source, inputs, c.hidden_size),
        out=_weight(source, [(f"{at}.out_proj", c.hidden_size)], linear.value_rows),
        delta=DeltaWeights(
            gates=source.matrix(gates, c.hidden_size),
            conv=conv.view(linear.channels, linear.conv_width),
            step_bias=step_bias,
            rate=rate.exp_().neg_(),
            norm=source.matrix([_Part(f"{at}.norm.weight", linear.value_dim)]),
        ),
        **_mlp(source, config, f"layers.{index}"),
    )


def _mlp(source: _Source, config: ModelConfig, at: str) -> dict[str, Any]:
    """Read the MLP of the layer `at`, and its norms."""
    c = config
    gate_up = [(f"{at}.mlp.{name}_proj", c.intermediate_size) for name in ("gate", "up")]
    down = [(f"{at}.mlp.down_proj", c.hidden_size)]
    # In a sandwich, `post_attention_layernorm` follows attention; in the other families it comes before the MLP.
    before, behind = "post_attention_layernorm", None
    if c.sandwich_norms:
        before, behind = "pre_feedforward_layernorm", _Part(f"{at}.post_feedforward_layernorm.weight", c.hidden_size)
    return {
        "mlp_norm": _norm(source, config, _Part(f"{at}.{before}.weight", c.hidden_size)),
        "gate_up": _weight(source, gate_up, c.hidden_size),
        "gate_up_bias": _bias(source, gate_up, present=c.mlp_bias),
        "down": _weight(source, down, c.intermediate_size),
        "down_bias": _bias(source, down, present=c.mlp_bias),
        "mlp_out_norm": behind and _norm(source, config, behind),
    }


def _weight(source: _Source, parts: list[tuple[str, int]], columns: int) -> Tensor | Matrix:
    """Read stacked linear weights [rows, columns]."""
    return source.linear([_Part(f"{name}.weight", rows) for name, rows in parts], columns, source.kind)


def _bias(source: _Source, parts: list[tuple[str, int]], *, present: bool) -> Tensor | None:
    """Read stacked biases [rows], or return None if the family does not have them."""
    return source.matrix([_Part(f"{name}.bias", rows) for name, rows in parts]) if present else None


def _norm(source: _Source, config: ModelConfig, part: _Part) -> Tensor:
    """Read the weight of a norm. If stored as an offset w, return 1 + w in float32: bfloat16 would lose most of w."""
    weight = source.matrix([part])
    return 1.0 + weight.float() if config.unit_offset_norms else weight


class _Source:
    """The tensors of a folder by name, in one file or many. It records which were read, to refuse leftovers.

    device: the device of the tensors that it makes. META, which allocates nothing, until `place` sets another one.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, kind: str | None) -> None:
        self.folder, self.dtype, self.kind, self.device = folder, dtype, kind, META
        self.files: dict[str, Any] = {}
        self.file_of: dict[str, str] = {}
        for file in _files(folder):
            self.files[file] = _opened(folder, file)
            self.file_of |= dict.fromkeys(self.files[file].keys(), file)
        found = (prefix for prefix in PREFIXES if f"{prefix}embed_tokens.weight" in self.file_of)
        self.prefix = next(found, PREFIXES[0])
        self.head = next((name for name in HEADS if name in self.file_of), HEADS[0])
        self.names_read: set[str] = set()
        self.num_bytes = 0
        self.region: Tensor | None = None  # on a CPU: uint8, where the next tensor begins

    def place(self, device: torch.device) -> None:
        """Make tensors on `device` from now on. Raises: CheckpointError if this machine's memory is too small."""
        memory = _memory_bytes() if device.type == "cpu" else None
        if memory is not None and self.num_bytes > memory:
            raise CheckpointError(
                f"the weights of {self.folder} take {self.num_bytes:,} bytes in "
                f"{self.kind or str(self.dtype).split('.')[1]}, and "
                f"this machine has {memory:,} bytes of memory; give a smaller model or a smaller dtype"
            )
        self.device = device
        if device.type == "cpu":
            try:
                self.region = huge_pages.allocate(max(1, self.num_bytes))
            except OSError as error:
                raise CheckpointError(
                    f"the weights of {self.folder} take {self.num_bytes:,} bytes, and the system refused them: {error}"
                ) from None

    def holds(self, name: str, tensor: Tensor) -> bool:
        """Return whether the rows of the checkpoint's tensor `name`, in the dtype computed in, equal `tensor`."""
        return torch.equal(self._read(name).to(tensor.device, self.dtype), tensor)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor. On a CPU it lies behind the last one, on a line of its own."""
        if self.device == META or self.region is None:
            made = torch.empty(shape, dtype=dtype, device=self.device)
            self.num_bytes += _whole_lines(made.nbytes)
            return made
        num_bytes = math.prod(shape) * dtype.itemsize
        taken, self.region = self.region[:num_bytes], self.region[_whole_lines(num_bytes) :]
        return taken.view(dtype).view(shape)

    def matrix(
        self, parts: Sequence[_Part], columns: int | tuple[int, ...] = (), dtype: torch.dtype | None = None
    ) -> Tensor:
        """Read tensors and stack them along their rows: [sum of rows, *columns]. dtype: None for that computed in."""
        tail = (columns,) if isinstance(columns, int) else columns
        names = [self._checked(part.name, (part.rows, *tail)) for part in parts]
        heights = [part.height for part in parts]
        stacked = self._empty((sum(heights), *tail), dtype or self.dtype)
        if self.device == META:
            return stacked
        for name, part, place in zip(names, parts, stacked.split_with_sizes(heights), strict=True):
            place.copy_(self._read(name, part))
        return stacked

    def linear(self, parts: Sequence[_Part], columns: int, kind: str | None) -> Tensor | Matrix:
        """Read the stacked weights of a linear layer [sum of rows, columns], quantised if `kind` is given."""
        if kind is None:
            return self.matrix(parts, columns)
        names = [self._checked(part.name, (part.rows, columns)) for part in parts]
        if columns % GROUP:
            raise InvalidRequest(
                f"weights={self.kind!r} needs matrices of a multiple of {GROUP} columns, and {names[0]} has "
                f"{columns}; load this model without it"
            )
        height = sum(part.height for part in parts)
        made = Matrix(*(self._empty(shape, dtype) for shape, dtype in layout(height, columns, kind)))
        row = 0
        for name, part in zip(names, parts, strict=True):
            if self.device != META:
                made.store(row, self._read(name, part).to(self.device))
            row += part.height
        return made

    def _read(self, name: str, part: _Part | None = None) -> Tensor:
        """Read a tensor by its full name, or the rows of it that `part` picks."""
        found: Tensor = self.files[self.file_of[name]].get_tensor(name)
        return found if part is None or part.picked is None else found[part.picked.rows()]

    def _checked(self, name: str, shape: tuple[int, ...]) -> str:
        """Return the full name of a tensor. Raises: CheckpointError if it is absent, or of a wrong shape or dtype"""
        name = name if name == self.head else self.prefix + name
        if name not in self.file_of:
            raise CheckpointError(
                f"{self.folder} has no tensor {name} {list(shape)}; config.json and safetensors are not of one model"
            )
        header = self.files[self.file_of[name]].get_slice(name)
        if tuple(header.get_shape()) != shape:
            raise CheckpointError(
                f"{self.folder}: tensor {name} is {shown(header.get_shape())} and config.json asks for {list(shape)}; "
                "config.json and safetensors are not of one model"
            )
        if header.get_dtype() not in FLOATS:
            raise CheckpointError(
                f"{self.folder}: tensor {name} is {header.get_dtype()}; give a float32, bfloat16 or float16 checkpoint"
            )
        self.names_read.add(name)
        return name

    def refuse_leftovers(self) -> None:
        """Raise CheckpointError if the folder holds tensors that the decoder did not read, other than IGNORED."""
        ignored = (*IGNORED, VISION) if "language_model" in self.prefix else IGNORED
        unread = sorted(self.file_of.keys() - self.names_read)
        unread = [name for name in unread if not any(re.search(part, name) for part in ignored)]
        if unread:
            raise CheckpointError(
                f"{self.folder} holds {len(unread)} tensors that config.json does not account for "
                f"({', '.join(name[:80] for name in unread[:3])}); the weights are quantised or adapted, or belong to "
                "another model. Give a plain checkpoint"
            )


def _whole_lines(num_bytes: int) -> int:
    """Return `num_bytes`, rounded up to lines of 64 bytes."""
    return -(-num_bytes // 64) * 64


def _opened(folder: Path, file: str) -> Any:
    """Map a safetensors file. Raises: CheckpointError if it is missing, is not a regular file, or is damaged"""
    try:
        regular_files.require(folder / file)
        return safe_open(folder / file, framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {file}, which its {INDEX} names; fetch the missing file") from None
    except (SafetensorError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"{folder / file} is no whole safetensors file ({reason}); it is truncated, or a git-lfs pointer. "
            "Fetch it again"
        ) from None
    except RuntimeError as error:  # torch maps the file
        raise CheckpointError(
            f"{folder / file} cannot be mapped into memory ({error}); give a checkpoint that is smaller than the memory"
        ) from None


def _memory_bytes() -> int | None:
    """Return the physical memory of this machine; None if the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _files(folder: Path) -> list[str]:
    """Return the names of the safetensors files of a folder. Raises: CheckpointError if there are none"""
    if is_present(folder, INDEX):
        named = read_json(folder / INDEX).get("weight_map")
        if not isinstance(named, dict) or not named or not all(isinstance(file, str) for file in named.values()):
            raise CheckpointError(
                f"{folder / INDEX} has no weight_map from tensors to files; it is damaged. Fetch it again"
            )
        files = sorted(set(named.values()))
        if outside := [file for file in files if not is_plain_name(file)]:
            raise CheckpointError(
                f"{folder / INDEX} names the file {shown(outside[0])}; a shard must be a file of the same folder. "
                "Fetch the index again"
            )
        return files
    if is_present(folder, SINGLE):
        return [SINGLE]
    raise CheckpointError(
        f"{folder} has neither {SINGLE} nor {INDEX}, only: {listed(folder)}. Give a checkpoint in safetensors format"
    )
