"""The promise of docs/reference/stability.md: stable signatures and options, the layout of a frame, names in tiers.

`python -m tests.test_stability` writes tests/stable.txt anew. A line that changes or goes is a change which the page
says how to announce; a new line is not.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

import pagedkv
from pagedkv import KVSpec, PagedKVCache
from pagedkv.cli.app import app
from pagedkv.tiers.tier_names import FORMAT, Namer, fingerprint

FILE = Path(__file__).with_name("stable.txt")
MODULES = {
    "pagedkv": pagedkv.__all__,
    "pagedkv.core": ["FramePool", "MemoryManager", "Receipt"],
    "pagedkv.engine": ["Completion", "Engine", "Limits", "Request", "SamplingParams"],
    "pagedkv.errors": None,
    "pagedkv.integrations.torch_varlen": ["activate"],
    "pagedkv.integrations.transformers": ["paged_batching", "patch", "unpatch"],
    "pagedkv.tiers": ["DiskTier", "HostTier", "ObjectTier", "RedisTier", "Tier"],
}
"""Stable names; None: all of the module that are its own."""

SPECS = [
    KVSpec(2, 2, 64, dtype="bfloat16"),
    KVSpec(2, 2, 64, dtype="float32", block_size=24, head_dim_v=32),
    KVSpec(1, 4, 128, dtype="bfloat16", kv_dtype="int8"),
    KVSpec(1, 4, 128, dtype="bfloat16", kv_dtype="k5v4"),
]


def signature(target: Any) -> str:
    """Return the parameters of a function with their defaults. Types may become wider, so they are left out."""
    if inspect.isclass(target) and issubclass(target, Exception) and "__init__" not in vars(target):
        return f"({', '.join(base.__name__ for base in target.__bases__)})"
    plain = inspect.signature(target)
    parameters = [one.replace(annotation=inspect.Parameter.empty) for one in plain.parameters.values()]
    text = str(plain.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def members(name: str, kind: type) -> Iterator[str]:
    """Return a line for each public member of a class that our package defines."""
    for member in sorted(set(dir(kind))):
        owner = next((base for base in kind.__mro__ if member in vars(base)), object)
        if member.startswith("_") or not owner.__module__.startswith("pagedkv"):
            continue
        found = inspect.getattr_static(kind, member)
        target = getattr(found, "__func__", found)
        yield f"{name}.{member}{signature(target) if inspect.isfunction(target) else ''}"


def lines() -> Iterator[str]:
    """Return the lines of the file."""
    for module, names in MODULES.items():
        home = importlib.import_module(module)
        own = [name for name, found in vars(home).items() if getattr(found, "__module__", "") == module]
        for name in sorted(own if names is None else names):
            found = getattr(home, name)
            yield f"{module}.{name}{signature(found)}"
            if inspect.isclass(found):
                yield from members(f"{module}.{name}", found)
    for spec in SPECS:
        cache = PagedKVCache(spec, num_frames=1)
        fields = ("k", "v", "k_scale", "v_scale")
        parts = [getattr(cache[layer], field) for layer in range(len(cache)) for field in fields]
        begin = parts[0].data_ptr()
        places = [(one.data_ptr() - begin, *one.shape[1:], *one.stride()[1:]) for one in parts if one is not None]
        yield f"frame of format {FORMAT}: {spec}: {spec.frame_bytes} bytes, {places}"
        facts = fingerprint([spec], [0] * spec.num_layers, spec.frame_bytes, model="m")
        yield f"page in tiers of format {FORMAT}: {spec}: {Namer(facts, 1).key(bytes(32), b'tenant', 0).name.hex()}"

    commands: dict[str, Any] = vars(typer.main.get_command(app))["commands"]
    for name, command in commands.items():
        for parameter in command.params if name != "bench" else ():
            yield f"pagedkv {name} {'/'.join([*parameter.opts, *parameter.secondary_opts])}"


def test_what_is_promised_is_there() -> None:
    gone = set(FILE.read_text().splitlines()) - set(lines())
    assert not gone, "stable lines changed or went; docs/reference/stability.md says what that asks for"


def test_what_is_new_is_written_down() -> None:
    new = set(lines()) - set(FILE.read_text().splitlines())
    assert not new, "write tests/stable.txt anew: python -m tests.test_stability"


@pytest.mark.parametrize("module", MODULES)
def test_the_page_names_each_stable_module(module: str) -> None:
    page = FILE.parents[1] / "docs/reference/stability.md"
    assert f"`{module}`" in page.read_text()


if __name__ == "__main__":
    FILE.write_text("\n".join(lines()) + "\n")
