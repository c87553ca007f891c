"""The parts of a decode step: which of its operations take how long, by a clock around each."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from unittest.mock import patch

from pagedkv.bench.clock import on_this_cpu, watched
from pagedkv.bench.generate import models
from pagedkv.kernels import linear
from pagedkv.kernels.bound import BoundAttention, BoundWrite
from pagedkv.model.decoder import BoundLayer, BoundLayers
from pagedkv.model.engine import Engine

FORWARD = "forward pass"
OPERATIONS = ("norm_linear", "norm_rotate", "linear_add", "norm_gate_up", "logits")


class _Clock:
    """Seconds spent in calls, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `function` and adds its time to `name`."""

        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.seconds[name] += time.perf_counter() - began

        return timed


class _Timed:
    """Linear operations with a clock around each."""

    def __init__(self, operations: linear.Operations, clock: _Clock) -> None:
        for name in OPERATIONS:
            setattr(self, name, clock.around(name, getattr(operations, name)))


def _clocked(call: BoundLayer, clock: _Clock) -> BoundLayer:
    store, attend = clock.around("write_kv", call.store), clock.around("paged_attention", call.attend)
    return BoundLayer(cast(BoundWrite, store), cast(BoundAttention, attend))


@contextmanager
def _timed(engine: Engine) -> Iterator[_Clock]:
    clock, choose = _Clock(), linear.choose
    with ExitStack() as stack:
        stack.enter_context(
            patch.object(engine.forward, "layers", BoundLayers(_clocked(call, clock) for call in engine.forward.layers))
        )
        stack.enter_context(patch.object(linear, "choose", lambda *given: _Timed(choose(*given), clock)))
        forward = clock.around(FORWARD, engine.decoder.forward)
        stack.enter_context(patch.object(engine.decoder, "forward", forward))
        yield clock


def parts(engine: Engine, batch: int, context: int, steps: int) -> tuple[dict[str, float], bool]:
    """Return the seconds of a step by its parts, the median over `steps` steps of each, and whether they were clean.

    The parts after the operations are what is left of the forward pass, and of the step.
    """
    requests = models.filled(engine, batch, context)
    engine.step()
    found: dict[str, list[float]] = defaultdict(list)

    def take_apart() -> bool:
        """Time one step; return whether it was clean."""
        with _timed(engine) as clock:
            whole, is_clean = on_this_cpu(engine.step)
        inside = {name: seconds for name, seconds in clock.seconds.items() if name != FORWARD}
        for name, seconds in inside.items():
            found[name].append(seconds)
        found["rest of the forward pass"].append(clock.seconds[FORWARD] - sum(inside.values()))
        found["schedule, plan, sample, commit, deliver"].append(whole - clock.seconds[FORWARD])
        return is_clean

    cleans, _, is_clean = watched(lambda: [take_apart() for _ in range(steps)])
    models.emptied(engine, requests)
    return {name: statistics.median(seconds) for name, seconds in found.items()}, is_clean or 2 * sum(cleans) >= steps
