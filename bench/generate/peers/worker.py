"""Time prompts and decode steps of another engine in that engine's own environment: `python worker.py STEPS.py`.

Each line of stdin is a request in JSON; each line of stdout is its answer:

    {"do": "load", "folder": ..., ...}
                                   ->  {"about": {...}}     load the checkpoint as LoadRequest says; `about` are fields
                                                            of the rows
    {"do": "open", "batch": 8, "context": 2048, "steps": 54}
                                   ->  {}                   fill the caches of sequences; 54 steps will follow in all
    {"do": "run", "steps": 8}      ->  {"steps": [...]}     seconds and involuntary context switches of each step; on a
                                                            busy machine fewer steps, once LONGEST seconds are over
    {"do": "prefill", "length": 2048}
                                   ->  {"taken": ...}       the same of a prompt until its first token, for one sequence
    {"do": "close"}                ->  {}                   end the sequences

    {"why_not": "..."}                                      the answer to a request that failed

STEPS.py has the class Engine with `open(batch, context, steps)`, `begin()` before each run, `step()`, `close()` and
`about`. This file must not import pagedkv, which the engine's environment lacks. The output of the engine goes to
stderr.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LONGEST = 20.0
PAUSE = 0.01
"""Seconds before the answer to a run: the engine's threads, which may spin for a while, are asleep then."""


@dataclass(frozen=True)
class LoadRequest:
    """The request to load a checkpoint.

    isa:       "avx2" where the engine may not use AVX-512.
    kv:        the dtype of K and V.
    tokens:    the most tokens that all sequences together will have; `sequences`, the most sequences.
    """

    folder: Path
    isa: str
    weights: str
    kv: str
    threads: int
    tokens: int
    sequences: int


class Worker:
    """The engine, and answers to requests."""

    def __init__(self, steps: Path) -> None:
        self.steps, self.engine = steps, None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request."""
        do = request.pop("do")
        try:
            return dict(getattr(self, do)(**request) or {})
        except Exception as why:  # any error of the engine is the answer
            text = str(why).strip().splitlines() or [""]
            return {"why_not": f"{type(why).__name__}: {text[0]}"}

    def load(self, folder: str, **rest: Any) -> dict[str, Any]:
        """Load the checkpoint in `folder`."""
        spec = importlib.util.spec_from_file_location(self.steps.stem, self.steps)
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.steps.stem] = module
        spec.loader.exec_module(module)
        self.engine = module.Engine(LoadRequest(Path(folder), **rest))
        return {"about": self.engine.about}

    def open(self, batch: int, context: int, steps: int) -> None:
        """Fill the caches of `batch` sequences."""
        self.engine.open(batch, context, steps)

    def run(self, steps: int) -> dict[str, Any]:
        """Time steps, after one that does not count."""
        self.engine.begin()
        self.engine.step()
        taken = []
        for _ in range(steps):
            taken.append(_timed(self.engine.step))
            if sum(seconds for seconds, _ in taken) > LONGEST:
                break
        time.sleep(PAUSE)
        return {"steps": taken}

    def prefill(self, length: int) -> dict[str, Any]:
        """Time a prompt."""
        taken = _timed(lambda: self.engine.open(1, length, 1))
        self.engine.close()
        return {"taken": taken}

    def close(self) -> None:
        """End the sequences."""
        self.engine.close()


def _timed(run: Callable[[], object]) -> tuple[float, int]:
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw, time.perf_counter()
    run()
    seconds = time.perf_counter() - began
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - before


def main() -> None:
    """Answer the requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker(Path(sys.argv[1]))
    for line in sys.stdin:
        print(json.dumps(worker.answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
