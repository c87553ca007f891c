"""`python scripts/compare_checkouts.py OLD NEW`: how many times as long a step of the engine takes in NEW as in OLD.

    OLD, NEW   checkouts, each with an extension of its own: python setup.py build_ext --inplace
    turn       the median of some decode steps of the same sequences, in one checkout
    ratio      a turn of NEW over the turn of OLD beside it; the figure is the median of all ratios
    interval   a bootstrap: pairs of processes, and turns of each pair, are drawn again with replacement; 95 of 100
               medians lie within it

The engine is the plain one: greedy requests, no tiers, no drafts, no events. A process of each checkout lives through
many turns. The two take turns, in an order by lot, and the one that waits sleeps on a pipe. So a machine that is slower
in one minute than in the next slows both sides of a pair. Two processes of the same checkout may differ by a percent,
as their memory lies elsewhere: so there are several pairs of processes. Compare a checkout with itself to see how far
the figures can be trusted. The exit status is 1 if a ratio is surely above 1 + TOLERANCE.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np

DRAWS: Final = 2000
REMEDY: Final = "run `python setup.py build_ext --inplace` in both checkouts"


def started(checkout: Path, model: str) -> subprocess.Popen[str]:
    """Start a process that steps an engine of one checkout. It ends when its stdin is closed."""
    command = [sys.executable, "-P", str(Path(__file__).resolve()), "--worker", model]
    env = os.environ | {"PYTHONPATH": str(checkout.resolve())}
    return subprocess.Popen(
        command, cwd=checkout, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=1
    )


def answer(process: subprocess.Popen[str], *sizes: int) -> Any:
    """Return the next line of a process. sizes: sequences, tokens of context and steps of a turn that it is to take"""
    assert process.stdin is not None
    assert process.stdout is not None
    if sizes:
        print(json.dumps(sizes), file=process.stdin)
    line = process.stdout.readline()
    if not line:
        sys.exit(f"a process ended: {process.args!r}; its words are above")
    return json.loads(line)


def work(model: str) -> None:
    """Answer each line of sizes on stdin with the seconds of a turn, by the engine of the checkout on PYTHONPATH."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries may print
    loop: Any = importlib.import_module("pagedkv.model.engine")
    if not Path(loop.__file__).is_relative_to(Path.cwd()):
        sys.exit(f"{Path.cwd()} is no checkout: its pagedkv is {loop.__file__}")
    engine = loop.Engine.load(model or None)
    print(json.dumps(engine.cache.kernel.name), file=answers)
    params = loop.SamplingParams(max_tokens=1000, ignore_eos=True)
    for line in sys.stdin:
        sequences, context, steps = json.loads(line)
        prompts = [[3 + (place * 7 + number) % 500 for place in range(context)] for number in range(sequences)]
        requests = [engine.submit(prompt, params) for prompt in prompts]  # after the first turn from the prefix cache
        while not all(request.completions[0].token_ids for request in requests):
            engine.step()
        engine.step()
        seconds = []
        for _ in range(steps):
            began = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - began)
        for request in requests:
            engine.cancel(request)
        engine.step()
        print(json.dumps(statistics.median(seconds)), file=answers)


def interval(ratios: list[list[float]]) -> tuple[float, float]:
    """Return the ends of the interval of the median of ratios. ratios: by pair of processes"""
    lots, medians = np.random.default_rng(0), []
    for _ in range(DRAWS):
        pairs = lots.integers(len(ratios), size=len(ratios))
        medians.append(np.median(np.concatenate([lots.choice(ratios[pair], len(ratios[pair])) for pair in pairs])))
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(low), float(high)


def compare(asked: argparse.Namespace) -> dict[int, list[list[tuple[float, float]]]]:
    """Return the seconds of each turn of both, by number of sequences and pair of processes."""
    lots = random.Random(0)
    found: dict[int, list[list[tuple[float, float]]]] = {number: [] for number in asked.sequences}
    for pair in range(asked.processes):
        print(f"pair {pair + 1} of {asked.processes}", file=sys.stderr, flush=True)
        with ExitStack() as stack:
            sides = [stack.enter_context(started(checkout, asked.model)) for checkout in asked.checkouts]
            kernels = [answer(side) for side in sides]
            if kernels[0] != kernels[1]:
                old, new = asked.checkouts
                sys.exit(f"the kernels differ: {old} has {kernels[0]}, {new} has {kernels[1]}; {REMEDY}")
            for number in asked.sequences:
                turns = []
                for _ in range(1 + asked.turns):
                    sizes = number, asked.context, asked.steps
                    taken = {side: answer(side, *sizes) for side in lots.sample(sides, 2)}
                    turns.append((taken[sides[0]], taken[sides[1]]))
                found[number].append(turns[1:])  # the first one does not count
    return found


def main() -> None:
    """Compare, and print a line for each number of sequences."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkouts", type=Path, nargs=2, metavar="CHECKOUT", help="OLD, then NEW")
    parser.add_argument("--model", default="", help="a Hugging Face folder; by default the bundled checkpoint")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--context", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=10, help="steps of a turn")
    parser.add_argument("--turns", type=int, default=20, help="turns of a pair of processes")
    parser.add_argument("--processes", type=int, default=5, help="pairs of processes")
    parser.add_argument("--tolerance", type=float, default=0.01)
    asked = parser.parse_args()
    is_slower = False
    for number, pairs in compare(asked).items():
        old, new = (1e3 * statistics.median(times) for times in zip(*chain(*pairs), strict=True))
        ratios = [[new_time / old_time for old_time, new_time in turns] for turns in pairs]
        middle, (low, high) = statistics.median(chain(*ratios)), interval(ratios)
        each = " ".join(f"{statistics.median(of_pair):.3f}" for of_pair in ratios)
        print(
            f"{number:3} sequences: {old:.3f} -> {new:.3f} ms, x {middle:.4f} ({low:.4f} to {high:.4f}; pairs: {each})"
        )
        is_slower |= low > 1 + asked.tolerance
    sys.exit(int(is_slower))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2])
    else:
        main()
