"""`pagedkv fit`: the memory that KV takes, and what fits. `pagedkv.engine.checkpoint.fit` does the arithmetic.

the geometry    of a config.json, or of numbers on the command line
two tables      KV of a token, a frame and a context; what GPUs hold                            or one JSON object
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from pagedkv.cli.options import Fitting, Geometry, Stored, amount, naming_options
from pagedkv.cli.report import grid
from pagedkv.engine.checkpoint import hub
from pagedkv.engine.checkpoint.config import ModelConfig
from pagedkv.engine.checkpoint.files import read_json
from pagedkv.engine.checkpoint.fit import (
    WEIGHT_BITS,
    Footprint,
    counts_of_gpus,
    footprint_of_config,
    footprint_of_numbers,
)
from pagedkv.errors import CheckpointError, InvalidRequest
from pagedkv.spec import STEP_TOKENS, KVSpec, parse_bytes

CAPTION: Final = (
    "weights and frames are those of each GPU\n"
    "tokens/s of B sequences: at most B x bandwidth / (weights + B x KV of the context)"
)
BUNDLED: Final = Path(hub.__file__).parent / "bundled"
DEFAULT_CONTEXT: Final = 8192
"""Tokens, if neither the user nor a config gives a context."""
DEFAULT_DTYPE: Final = "float16"
_NUMBERS: Final = "give a config with --model, or the numbers --layers, --kv-heads and --head-dim"


@dataclass(frozen=True)
class _Model:
    """A model: `footprint(gpus)`, and the facts about it that the tables show. weights: a name, or bytes."""

    fitting: Fitting
    numbers: dict[str, Any]
    stored: Stored
    weights: str | int | None
    config: ModelConfig | None
    name: str

    def footprint(self, gpus: int) -> Footprint:
        """Return the memory that it takes on each of some GPUs."""
        of, chunk = self.stored, self.stored.prefill_chunk
        stored: dict[str, Any] = {"kv_dtype": of.kv_dtype, "block_size": of.block_size}
        if self.config is not None:
            specs = self.config.specs(dtype=of.dtype, **stored)
            found = footprint_of_config(self.config, specs, gpus, self.weights)
        else:
            assert not isinstance(self.weights, str)
            spec = KVSpec(dtype=of.dtype or DEFAULT_DTYPE, **self.numbers, **stored)
            found = footprint_of_numbers(spec, self.weights or 0, gpus)
        return replace(found, at_once=min(chunk or STEP_TOKENS, STEP_TOKENS))

    @property
    def knows_weights(self) -> bool:
        """Whether the bytes of the weights were given, or are known from a config."""
        return self.config is not None or self.weights is not None

    @property
    def longest(self) -> int | None:
        """The number of positions of the model, if it is known."""
        return None if self.config is None else self.config.max_position_embeddings

    @property
    def context(self) -> int:
        """The context asked for; without one, the longest of the model. Raises: InvalidRequest for a longer one"""
        asked = self.fitting.context
        if asked is None:
            return self.longest or DEFAULT_CONTEXT
        if self.longest is not None and asked > self.longest:
            raise InvalidRequest(f"--context is {asked:,}; the model ends at {self.longest:,} tokens")
        return asked


def run(fitting: Fitting, geometry: Geometry, stored: Stored) -> None:
    """Print all figures, as tables or as one JSON object.

    Raises: InvalidRequest for a bad number; CheckpointError for a config that cannot be read or is not understood
    """
    if fitting.bandwidth is not None and fitting.memory is None:
        raise InvalidRequest("--bandwidth needs --memory; give both, as of one GPU")
    with naming_options():
        model = _model(fitting, geometry, stored)
        found = _figures(model)
    if fitting.as_json:
        print(json.dumps(found))
    else:
        _print(found, model.footprint(1))


def _model(fitting: Fitting, geometry: Geometry, stored: Stored) -> _Model:
    size, numbers = _weights(fitting.weights), geometry.of_spec()
    if not numbers:
        path = BUNDLED if fitting.model is None else hub.find(fitting.model)
        name = fitting.model or "the bundled checkpoint"
        return _Model(fitting, numbers, stored, size, _config(path, size), name)
    if fitting.model is not None:
        raise InvalidRequest("--model and numbers such as --layers both give a geometry; give one of them")
    needed = {"--layers": "num_layers", "--kv-heads": "num_kv_heads", "--head-dim": "head_dim"}
    if missing := [option for option, name in needed.items() if name not in numbers]:
        raise InvalidRequest(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; {_NUMBERS}")
    if isinstance(size, str):
        raise InvalidRequest(f"--weights {size} needs a config; with numbers give their bytes, such as 140GB")
    return _Model(fitting, numbers, stored, size, None, "numbers")


def _weights(text: str | None) -> str | int | None:
    """Return the name of a kind of weights, or their bytes."""
    if text is None or text in WEIGHT_BITS:
        return text
    try:
        return parse_bytes(text)
    except InvalidRequest:
        raise InvalidRequest(
            f"--weights is {text!r}; give {', '.join(WEIGHT_BITS)}, or the bytes of all weights, such as 140GB"
        ) from None


def _config(path: Path, weights: str | int | None) -> ModelConfig:
    """Read the config of a folder, or a config.json. Of quantised weights the size must be given.

    Raises: CheckpointError, which says how to go on without a config
    """
    if not path.exists():
        raise CheckpointError(f"there is no file or folder '{path}'; {_NUMBERS}")
    file = path / "config.json" if path.is_dir() else path
    values = read_json(file)
    if "quantization_config" in values:
        if not isinstance(weights, int):
            raise CheckpointError(
                f"{file}: the weights are quantised (quantization_config); give their bytes, such as --weights 40GB"
            )
        del values["quantization_config"]
    try:
        return ModelConfig.from_dict(values, where=str(file))
    except CheckpointError as error:
        raise CheckpointError(f"{error}; or give numbers: --layers, --kv-heads and --head-dim") from None


def _figures(model: _Model) -> dict[str, Any]:
    """Return all figures; the keys are those of the JSON object."""
    context, whole, given = model.context, model.footprint(1), model.fitting
    memory = None if given.memory is None else amount("--memory", given.memory)
    heads = whole.specs[0].num_kv_heads
    counts = counts_of_gpus(given.gpus, heads, None if model.config is None else model.config.num_heads)
    return {
        "model": model.name,
        "num_layers": sum(spec.num_layers for spec in whole.specs),
        "num_kv_heads": heads,
        "head_dim": whole.specs[0].head_dim,
        "kv_dtype": whole.specs[0].stored_dtype,
        "windows": [[spec.window, spec.num_layers] for spec in whole.specs],
        "block_size": whole.block_size,
        "bytes_per_token": whole.bytes_per_token,
        "frame_bytes": whole.frame_bytes,
        "weight_bytes": whole.weight_bytes if model.knows_weights else None,
        "memory_bytes": memory,
        "context": context,
        "context_frames": whole.frames(context),
        "context_bytes": whole.frames(context) * whole.frame_bytes,
        "gpus": [_row(model.footprint(gpus), model, memory, context) for gpus in counts if memory is not None],
    }


def _row(footprint: Footprint, model: _Model, memory: int, context: int) -> dict[str, Any]:
    """Return the figures of a number of GPUs. Bytes and frames are those of one GPU; every GPU has as many frames."""
    num_frames, bandwidth = footprint.num_frames(memory), model.fitting.bandwidth
    limits = footprint.longest_context(num_frames), model.longest
    sequences = footprint.sequences(num_frames, context)
    speeds: list[float | None] = [None, None]
    if bandwidth is not None and (speed := _bandwidth(bandwidth)) and sequences:
        speeds = [round(footprint.tokens_per_s(speed, context, n), 3) for n in (1, sequences)]
    return {
        "gpus": footprint.gpus,
        "weight_bytes": footprint.weight_bytes if model.knows_weights else None,
        "bytes_per_token": footprint.bytes_per_token,
        "frame_bytes": footprint.frame_bytes,
        "num_frames": num_frames,
        "longest_context": min((limit for limit in limits if limit is not None), default=None),
        "sequences": sequences,
        "tokens_per_s_of_one": speeds[0],
        "tokens_per_s_of_all": speeds[1],
    }


def _bandwidth(text: str) -> int:
    bandwidth = amount("--bandwidth", text.strip().removesuffix("/s"))
    if bandwidth < 1:
        raise InvalidRequest(f"--bandwidth is {text!r}; give the bytes of a second, such as 3.35TB/s")
    return bandwidth


def _size(num_bytes: float) -> str:
    """Format bytes for a person, in powers of 1000 as in the data sheets of GPUs."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.3g} TB" if num_bytes < 999.5 else f"{num_bytes:,.0f} TB"


def _print(found: dict[str, Any], whole: Footprint) -> None:
    """Print the figures as tables."""
    console = Console(highlight=False)
    console.print(grid(_facts(found, whole)))
    if found["gpus"]:
        console.print(_table_of_gpus(found))


def _facts(found: dict[str, Any], whole: Footprint) -> dict[str, str]:
    spec = whole.specs[0]
    values = "values in keys" if spec.value_in_key else f"K of {spec.head_dim}, V of {spec.value_dim}"
    facts = {
        "model": found["model"],
        "KV": f"{found['num_layers']:,} layers, {spec.num_kv_heads:,} KV heads, {values}, {spec.stored_dtype}",
    }
    windows = [f"{spec.num_layers:,} of window {spec.window:,}" for spec in whole.specs if spec.window]
    if windows:
        full = [f"{spec.num_layers:,} of no window" for spec in whole.specs if not spec.window]
        facts["layer groups"] = ", ".join([*full, *windows])
    facts["a token"] = f"{_size(found['bytes_per_token'])} ({found['bytes_per_token']:,} bytes)"
    facts["a frame"] = f"{_size(found['frame_bytes'])}, {found['block_size']:,} tokens"
    facts[f"{found['context']:,} tokens"] = f"{_size(found['context_bytes'])} in {found['context_frames']:,} frames"
    weights, memory = found["weight_bytes"], found["memory_bytes"]
    facts["weights"] = "unknown, counted as none; give --weights SIZE" if weights is None else _size(weights)
    if memory is None:
        return facts | {"what fits": "give --memory SIZE, the memory of a GPU, and --bandwidth SIZE for its speed"}
    return facts | {"memory": f"{_size(memory)} of a GPU"}  # "24" is 24 bytes: to be seen


def _table_of_gpus(found: dict[str, Any]) -> Table:
    table = Table(caption=CAPTION, caption_justify="left")
    sequences = f"sequences of {found['context']:,}"
    heads = "GPUs", "weights", "frames", "longest context", sequences, "tokens/s of one", "tokens/s of all"
    for name in heads:
        table.add_column(name, justify="right")
    for row in found["gpus"]:
        weights = "-" if row["weight_bytes"] is None else _size(row["weight_bytes"])
        longest = "no limit" if row["longest_context"] is None else f"{row['longest_context']:,}"
        speeds = (row["tokens_per_s_of_one"], row["tokens_per_s_of_all"])
        told = ("-" if speed is None else f"{speed:,.1f}" for speed in speeds)
        counts = weights, f"{row['num_frames']:,}", longest, f"{row['sequences']:,}"
        table.add_row(f"{row['gpus']:,}", *counts, *told)
    return table
