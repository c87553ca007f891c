"""The table of a backend: `python -m pagedkv.conformance my_module [--only TEXT] [--json FILE]`.

The module has three functions, which get tensors on the CPU (docs/how-to/test-your-kernels.md):

    paged_attention(q, layer, batch, **options)   returns out, or (out, lse); an option without an argument is refused
    write_kv(k, v, layer, slots)                  stores at the slots; a negative slot is skipped
    refuses(case)                                 the reason why the backend cannot serve a case, "" if it can
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import inspect
import json
import math
import shlex
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagedkv.conformance.cases import Case, _Built, _computed, _features, _ratios, _used_slots
from pagedkv.errors import KernelUnavailable
from pagedkv.kernels import ops

_COUNTS = ("right", "wrong", "reads unused", "refused")


class _Fault(Exception):
    """A call did what the contract forbids; the message says what."""


def _function(backend: Any, name: str) -> Any:
    function = getattr(backend, name, None)
    if function is None:
        raise NotImplementedError(f"the module has no function {name}")
    return function


def _memory(built: _Built) -> dict[str, Tensor]:
    """Return all bytes of the memory that holds each tensor of a call, the gaps between its elements included."""
    names = ("k", "v", "k_scale", "v_scale")
    tensors = {"q": built.q, **{f"layer.{name}": getattr(built.layer, name) for name in names}}
    given = {name: x.untyped_storage() for name, x in tensors.items() if x is not None}
    return {name: torch.empty(0, dtype=torch.uint8).set_(storage) for name, storage in given.items()}


def _differing(memory: dict[str, Tensor], right: dict[str, Tensor]) -> str:
    return " and ".join(name for name, x in memory.items() if not torch.equal(x, right[name]))


def _attend(backend: Any, case: Case, built: _Built) -> float:
    """Return the error of attention over the allowed error."""
    attend, unset = _function(backend, "paged_attention"), {"window": None, "softcap": 0.0, "causal": True}
    options = {name: x for name, x in built.options.items() if name not in unset or x != unset[name]}
    with suppress(ValueError):  # a compiled function may have no signature
        taken = inspect.signature(attend).parameters
        if not any(x.kind is x.VAR_KEYWORD for x in taken.values()) and (missing := options.keys() - taken.keys()):
            raise NotImplementedError(f"paged_attention has no argument {' and no '.join(sorted(missing))}")
    right, plain = (_computed(built, dtype) for dtype in (torch.float64, built.q.dtype))
    before = {name: x.clone() for name, x in _memory(built).items()}
    found = attend(built.q, built.layer, built.batch, **options)
    if changed := _differing(_memory(built), before):
        raise _Fault(f"paged_attention changed {changed}")
    out, lse = found if isinstance(found, tuple) else (found, torch.from_numpy(right[1]))
    (T, H, _), Dv = built.q.shape, right[0].shape[2]
    for name, x, shape in (("out", out, [T, H, Dv]), ("lse", lse, [T, H])):
        if list(x.shape) != shape:
            raise _Fault(f"{name} is {list(x.shape)}; it must be {shape}")
    if out.dtype != built.q.dtype:
        raise _Fault(f"out is {out.dtype}; it must be {built.q.dtype}, the dtype of q")
    return max(math.inf if math.isnan(x) else x for x in _ratios(case, (out, lse), right, plain).values())


def _cleaned(built: _Built) -> _Built:
    """Return the call with zeros in unused memory, and frames of the pool in padded table entries."""
    F, S = built.layer.k.shape[:2]
    unused = torch.ones(F * S + 1, dtype=torch.bool)
    unused[_used_slots(built.batch, S)] = False
    for x in (built.layer.k, built.layer.v, built.layer.k_scale, built.layer.v_scale):
        if x is not None and x.dim():
            (x.view(torch.uint8) if x.itemsize == 1 else x)[unused[:-1].view(F, S)] = 0
    table = built.batch.block_table.clamp(max=F - 1)
    return built._replace(q=built.q.nan_to_num(), batch=replace(built.batch, block_table=table))


def _write(backend: Any, case: Case) -> float:
    """Return 0.0 if each byte of the pool is what the reference stores, or was there before. Raise _Fault if not."""
    store, built, other = _function(backend, "write_kv"), case.build(), case.build()
    k, v = (torch.randn(len(built.q), case.heads[1], dim).to(built.q.dtype) for dim in case.dims)
    ops.write_kv(k, v, built.layer, built.batch, backend="reference")
    store(k, v, other.layer, other.batch.slots)
    if wrong := _differing(_memory(other), _memory(built)):
        raise _Fault(f"the memory of {wrong} is not what the reference leaves")
    return 0.0


def _judged(backend: Any, case: Case, is_write: bool) -> tuple[str, float, str]:
    """Return one of _COUNTS, the error over the allowed error, and the reason of what is not right."""
    try:
        if reason := getattr(backend, "refuses", lambda _: "")(case):
            return "refused", 0.0, str(reason)
        raised = ""
        try:
            error = _write(backend, case) if is_write else _attend(backend, case, case.build())
        except NotImplementedError:
            raise
        except (IndexError, RuntimeError) as why:  # perhaps of an absurd frame number in a padded table entry
            error, raised = math.inf, f"{type(why).__name__}: {why}"
        if error > 1 and not is_write and (clean := _attend(backend, case, _cleaned(case.build()))) <= 1:
            return "reads unused", clean, f"right with zeros in unused memory, wrong with {raised or 'NaN'}"
        return "right" if error <= 1 else "wrong", error, raised or f"the error is {error:.3g} times the allowed one"
    except (NotImplementedError, KernelUnavailable) as why:
        return "refused", 0.0, str(why) or type(why).__name__
    except _Fault as why:
        return "wrong", math.inf, str(why)
    except Exception as why:
        return "wrong", math.inf, f"{type(why).__name__}: {why}"


def _finite(x: Any) -> Any:
    """Return rows for JSON, which has no infinite numbers."""
    if isinstance(x, dict):
        return {name: _finite(value) for name, value in x.items()}
    if isinstance(x, list | tuple):
        return [_finite(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def _main(argv: list[str] | None = None) -> int:
    """Print the table of a module. Return 1 if a case is wrong."""
    parser = argparse.ArgumentParser("python -m pagedkv.conformance", description="Judge the kernels of a module.")
    parser.add_argument("module", help="the name of a module with paged_attention, write_kv and refuses")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases that have this text in `row: case`")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to a file")
    given = parser.parse_args(argv)
    notes: dict[tuple[str, str], tuple[str, str]] = {}
    try:
        backend, rows = importlib.import_module(given.module), []
        if given.json:
            given.json.touch()
    except (ImportError, OSError) as problem:
        parser.error(str(problem))
    try:
        start = Case(**{"q_lens": (1, 4, 3, 5), "kv_lens": (40, 4, 70, 33)} | getattr(backend, "START", {}))
    except TypeError as problem:
        parser.error(f"START of {given.module}: {problem}")
    if not hasattr(backend, "paged_attention") and not hasattr(backend, "write_kv"):
        parser.error(f"{given.module} has neither paged_attention nor write_kv")
    grid = {
        name: {f"{name}: {case.changes(start) or 'default'}": case for case in cases}
        for name, cases in _features(start).items()
    }
    is_one = any(given.only in cases for cases in grid.values())
    print(f"{'':22}" + "".join(f"{name:>14}" for name in (*_COUNTS, "error")))
    for name, cases in grid.items():
        chosen = [x for x in cases.items() if (given.only == x[0] if is_one else given.only in x[0])]
        if not chosen:
            continue
        print(f"{name:22}", end="", flush=True)  # a kernel may end the process
        found = [(text, *_judged(backend, case, name.startswith("write"))) for text, case in chosen]
        row: dict[str, Any] = {each: sum(verdict == each for _, verdict, *_ in found) for each in _COUNTS}
        row["error"] = max(error for *_, error, _ in found)
        print("".join(f"{row[each]:14}" for each in _COUNTS) + f"{row['error']:14.2f}", flush=True)
        rows.append({"row": name, **row, "not right": [each for each in found if each[1] != "right"]})
        for text, verdict, _, why in rows[-1]["not right"]:
            notes.setdefault((verdict, name if verdict == "wrong" else why), (text, why))
    for (verdict, _), (text, why) in notes.items():
        print(f"{verdict}: {why}\n  python -m pagedkv.conformance {given.module} \\\n    --only {shlex.quote(text)}")
    if not rows:
        parser.error(f"no case has {given.only!r} in `row: case`")
    if given.json:
        given.json.write_text(json.dumps(_finite(rows), indent=1) + "\n")
    return int(any(row["wrong"] + row["reads unused"] for row in rows))


if __name__ == "__main__":
    faulthandler.enable()
    raise SystemExit(_main())
