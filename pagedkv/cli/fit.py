"""`pagedkv fit`: the memory that KV takes, and what fits. `pagedkv.engine.checkpoint.fit` does the arithmetic.

the geometry    of a config.json, or of numbers on the command line
the memory      of this machine and as fast as measured, or that of the command line
a table         KV of a token, a frame and a context; what fits, and its speed                  or one JSON object
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from rich.console import Console

from pagedkv.cli import machine
from pagedkv.cli.options import Fitting, Geometry, Stored, amount, naming_options
from pagedkv.cli.report import grid, size
from pagedkv.engine.checkpoint import BUNDLED, hub
from pagedkv.engine.checkpoint.config import ModelConfig
from pagedkv.engine.checkpoint.files import read_json
from pagedkv.engine.checkpoint.fit import STATES, WEIGHT_BITS, Footprint, footprint_of_config, footprint_of_numbers
from pagedkv.errors import CheckpointError, InvalidRequest
from pagedkv.spec import STEP_TOKENS, KVSpec, parse_bytes

_READ_BYTES: Final = 1 << 29
"""Bytes that are read, at most, to measure: more than caches hold."""
_LEAST_BYTES: Final = 1 << 20
"""With less nothing is measured."""
_size: Final = partial(size, base=1000)
_DEFAULT_CONTEXT: Final = 8192
"""Tokens, if neither the user nor a config gives a context."""
_DEFAULT_DTYPE: Final = "float16"
_NUMBERS: Final = "give a config with --model, or the numbers --layers, --kv-heads and --head-dim"


class _Model(NamedTuple):
    """A model. longest: the number of its positions, if it is known. knows_weights: whether their bytes are known."""

    name: str
    footprint: Footprint
    longest: int | None
    knows_weights: bool


def run(fitting: Fitting, geometry: Geometry, stored: Stored) -> None:
    """Print all figures, as a table or as one JSON object.

    Raises: InvalidRequest for a bad number; CheckpointError for a config that cannot be read or is not understood
    """
    with naming_options():
        model = _model(fitting, geometry, stored)
        found = _figures(model, fitting)
    if fitting.as_json:
        print(json.dumps(found))
    else:
        Console(highlight=False).print(grid(_table(found, model.footprint.specs, is_here=fitting.memory is None)))


def _model(fitting: Fitting, geometry: Geometry, stored: Stored) -> _Model:
    weights, numbers = _weights(fitting.weights), geometry.of_spec()
    kept: dict[str, Any] = {"kv_dtype": stored.kv_dtype, "block_size": stored.block_size}
    if not numbers:
        path = BUNDLED
        if (name := fitting.model) is not None:
            path = hub.find(name, hub.CONFIG) or hub.fetch(name, hub.CONFIG)
        config = _config(path, weights)
        whole = footprint_of_config(config, config.specs(dtype=stored.dtype, **kept), weights)
        model = _Model(name or "the bundled checkpoint", whole, config.max_position_embeddings, True)
    else:
        _require_numbers(fitting, numbers, weights)
        assert not isinstance(weights, str)
        whole = footprint_of_numbers(KVSpec(dtype=stored.dtype or _DEFAULT_DTYPE, **numbers, **kept), weights or 0)
        model = _Model("numbers", whole, None, weights is not None)
    return model._replace(footprint=replace(whole, at_once=min(stored.prefill_chunk or STEP_TOKENS, STEP_TOKENS)))


def _require_numbers(fitting: Fitting, numbers: dict[str, Any], weights: str | int | None) -> None:
    if fitting.model is not None:
        raise InvalidRequest("--model and numbers such as --layers both give a geometry; give one of them")
    needed = {"--layers": "num_layers", "--kv-heads": "num_kv_heads", "--head-dim": "head_dim"}
    if missing := [option for option, name in needed.items() if name not in numbers]:
        raise InvalidRequest(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; {_NUMBERS}")
    if isinstance(weights, str):
        raise InvalidRequest(f"--weights {weights} needs a config; with numbers give their bytes, such as 140GB")


def _weights(text: str | None) -> str | int | None:
    """Return the name of a kind of weights, or their bytes. Raises: InvalidRequest"""
    if text is None or text in WEIGHT_BITS:
        return text
    try:
        return parse_bytes(text)
    except InvalidRequest:
        kinds = ", ".join(WEIGHT_BITS)
        raise InvalidRequest(f"--weights is {text!r}; give {kinds}, or a number of bytes such as 8GiB") from None


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


def _figures(model: _Model, given: Fitting) -> dict[str, Any]:
    """Return all figures; the keys are those of the JSON object. Raises: InvalidRequest"""
    whole, first, longest = model.footprint, model.footprint.specs[0], model.longest
    context = given.context or longest or _DEFAULT_CONTEXT
    if longest is not None and context > longest:
        raise InvalidRequest(f"--context is {context:,}; the model ends at {longest:,} tokens")
    memory, speed = _memory(given)
    num_frames = whole.num_frames(memory)
    limits = [limit for limit in (whole.longest_context(num_frames), longest) if limit is not None]
    sequences = whole.sequences(num_frames, context)
    speeds = [round(whole.tokens_per_s(speed, context, n), 3) if n and speed else None for n in (1, sequences)]
    return {
        "model": model.name,
        "num_layers": sum(spec.num_layers for spec in whole.specs),
        "num_kv_heads": first.num_kv_heads,
        "head_dim": first.head_dim,
        "kv_dtype": first.stored_dtype,
        "windows": [[spec.window, spec.num_layers] for spec in whole.specs],
        "block_size": first.block_size,
        "bytes_per_token": whole.bytes_per_token,
        "frame_bytes": whole.frame_bytes,
        "state_bytes": whole.state_bytes,
        "weight_bytes": whole.weight_bytes if model.knows_weights else None,
        "memory_bytes": memory,
        "memory_bytes_per_s": speed,
        "context": context,
        "context_frames": whole.frames(context),
        "context_bytes": whole.frames(context) * whole.frame_bytes,
        "num_frames": num_frames,
        "longest_context": min(limits, default=None),
        "sequences": sequences,
        "tokens_per_s_of_one": speeds[0] if sequences else None,
        "tokens_per_s_of_all": speeds[1],
    }


def _memory(given: Fitting) -> tuple[int, int | None]:
    """Return the bytes of memory and those that it gives in a second: as given, or those of this machine."""
    speed = None
    if given.bandwidth is not None:
        speed = amount("--bandwidth", given.bandwidth.strip().removesuffix("/s"))
        if speed < 1:
            raise InvalidRequest(f"--bandwidth is {given.bandwidth!r}; give the bytes of a second, such as 3.35TB/s")
    if given.memory is not None:
        return amount("--memory", given.memory), speed
    return machine.memory()[0], speed or _bandwidth()


def _bandwidth() -> int | None:
    """Measure how many bytes a second all cores together read from memory: the best of three passes.

    Returns: None if there is no memory to read
    """
    import numpy as np

    size = min(_READ_BYTES, machine.memory()[0] // 4)
    if size < _LEAST_BYTES:
        return None
    parts = np.array_split(np.ones(size // 8, np.int64), machine.cores())
    seconds = []
    with ThreadPoolExecutor(len(parts)) as pool:
        for _ in range(3):
            began = time.perf_counter()
            list(pool.map(np.max, parts))
            seconds.append(time.perf_counter() - began)
    return int(size / min(seconds))


def _table(found: dict[str, Any], specs: tuple[KVSpec, ...], *, is_here: bool) -> dict[str, str]:
    """Return the figures as a person reads them. is_here: the memory is that of this machine"""
    spec, context, sequences = specs[0], f"{found['context']:,} tokens", found["sequences"]
    values = "values in keys" if spec.value_in_key else f"K of {spec.head_dim}, V of {spec.value_dim}"
    facts = {
        "model": found["model"],
        "KV": f"{found['num_layers']:,} layers, {spec.num_kv_heads:,} KV heads, {values}, {spec.stored_dtype}",
    }
    if windows := [f"{spec.num_layers:,} of window {spec.window:,}" for spec in specs if spec.window]:
        full = [f"{spec.num_layers:,} of no window" for spec in specs if not spec.window]
        facts["layer groups"] = ", ".join([*full, *windows])
    facts["a token"] = f"{_size(found['bytes_per_token'])} ({found['bytes_per_token']:,} bytes)"
    facts["a frame"] = f"{_size(found['frame_bytes'])}, {found['block_size']:,} tokens"
    if found["state_bytes"]:
        facts["a state"] = f"{_size(found['state_bytes'])}, {STATES} of them for each sequence"
    facts[context] = f"{_size(found['context_bytes'])} in {found['context_frames']:,} frames"
    weights, longest = found["weight_bytes"], found["longest_context"]
    facts["weights"] = "unknown, counted as none; give --weights SIZE" if weights is None else _size(weights)
    speed = found["memory_bytes_per_s"]
    memory = _size(found["memory_bytes"]) + (" free on this machine" if is_here else "")
    facts["memory"] = memory if speed is None else f"{memory}, read at {_size(speed)}/s"
    facts["longest context"] = "no limit" if longest is None else f"{longest:,} tokens"
    if weights is not None and weights >= found["memory_bytes"]:
        facts["longest context"] = "none: the weights alone fill the memory; give more --memory"
    facts["at once"] = f"{sequences:,} sequences of {context}, in {found['num_frames']:,} frames"
    if not sequences:
        return facts
    if speed is None:
        return facts | {"speed": "unknown; give --bandwidth SIZE, such as 1TB/s"}
    one, every = (f"{found[f'tokens_per_s_of_{which}']:,.1f}" for which in ("one", "all"))
    return facts | {"speed": f"at most {one} tokens/s of one sequence, {every} of {sequences:,}"}
