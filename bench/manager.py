"""What the memory manager costs, all cases in one run: python -m bench.manager [--rounds N]

Every figure is the median over rounds that go through all cases in turn, so that a slow moment of the machine hits all alike. Managers that
people use today are measured beside it where they can be imported; where not, that is said. Rows go to bench/results/manager.jsonl.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from pagedkv.core import MemoryManager
from pagedkv.core.state import I32

BLOCK = 16
RESULTS = Path(__file__).parent / "results" / "manager.jsonl"
PEERS = {"vllm": "vLLM BlockPool", "sglang": "SGLang RadixCache", "nanovllm": "nano-vllm BlockManager"}


@dataclass(frozen=True)
class Case:
    """`run` does `work` units and returns the seconds that they took; `limit` is what issue and README promise, in `unit`."""

    name: str
    unit: str
    limit: float
    work: int
    run: Callable[[], float]


@dataclass(frozen=True)
class Figure:
    name: str
    unit: str
    median: float
    best: float
    limit: float
    rounds: int
    machine: str
    when: str


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def prompt(seed: int, pages: int) -> I32:
    return np.random.default_rng(seed).integers(0, 30_000, pages * BLOCK + 1).astype(np.int32)


def decode(batch: int, num_frames: int, context: int = 1) -> Callable[[], float]:
    """plan + commit of a step in which each of `batch` sequences of staggered lengths grows by one token; prefix cache on."""
    mm = MemoryManager(num_frames, BLOCK)
    spaces = [mm.open() for _ in range(batch)]
    for i, space in enumerate(spaces):
        ids = prompt(i, -(-context // BLOCK) + 1)[: context + i % BLOCK]
        mm.commit(mm.plan([space], [len(ids)]), ids)
    asids, ones = np.array([space.asid for space in spaces], np.int32), np.ones(batch, np.int64)
    ids = np.arange(batch, dtype=np.int32)

    def run() -> float:
        if len(spaces[0]) > context + 256:  # else the pool would fill up
            for i, space in enumerate(spaces):
                space.truncate(context + i % BLOCK)
            mm.evict(mm.num_frames)
            mm.commit(mm.plan(asids, ones), ids)  # the shared tails are copied once
        return timed(lambda: mm.commit(mm.plan(asids, ones), ids))

    return run


def allocate_and_release(batch: int, num_frames: int) -> Callable[[], float]:
    """plan and abort of `batch` frames: slots and positions of all their tokens are made, too."""
    mm = MemoryManager(num_frames, 1)
    space = mm.open()
    return lambda: timed(lambda: mm.abort(mm.plan([space], [batch])))


def match(pages: int, num_frames: int) -> Callable[[], float]:
    """open() of prompts that are wholly known, in a pool full of others."""
    mm = full_pool(num_frames, pages)
    prompts = [prompt(seed, pages) for seed in range(num_frames // pages)]
    turn = iter(range(10**9))

    def run() -> float:
        ids = prompts[next(turn) * 7919 % len(prompts)]
        opened = []
        seconds = timed(lambda: opened.append(mm.open(ids)))
        assert len(opened[0]) == pages * BLOCK
        opened[0].release()
        return seconds

    return run


def publish(pages: int, num_frames: int) -> Callable[[], float]:
    """commit of a whole new prompt; each page takes the place of one that was evicted when it was planned."""
    mm = full_pool(num_frames, pages)
    turn = iter(range(num_frames, 10**9))

    def run() -> float:
        ids = prompt(next(turn), pages)[:-1]
        space = mm.open()
        plan = mm.plan([space], [len(ids)])
        seconds = timed(lambda: mm.commit(plan, ids))
        space.release()
        return seconds

    return run


def full_pool(num_frames: int, pages: int) -> MemoryManager:
    """A pool whose frames all hold published pages of prompts 0, 1, 2, ..."""
    mm = MemoryManager(num_frames, BLOCK)
    for seed in range(num_frames // pages):
        space = mm.open()
        mm.commit(mm.plan([space], [pages * BLOCK]), prompt(seed, pages)[:-1])
        space.release()
    return mm


def fork(pages: int) -> Callable[[], float]:
    mm = MemoryManager(2 * pages, BLOCK)
    parent = mm.open()
    mm.commit(mm.plan([parent], [pages * BLOCK]), prompt(0, pages)[:-1])

    def run() -> float:
        children = []
        seconds = timed(lambda: children.append(parent.fork()))
        children[0].release()
        return seconds

    return run


def cases() -> list[Case]:
    return [
        Case("decode step, 256 sequences", "us", 30, 1, decode(256, 20_000)),
        Case("decode step, 1024 sequences", "us", 80, 1, decode(1024, 40_000)),
        Case("the same, pool of 1e6 frames", "us", 80, 1, decode(1024, 1_000_000)),
        Case("the same, context of 500 tokens", "us", 80, 1, decode(1024, 100_000, context=500)),
        Case("allocate + release a frame, by 1000", "ns", 30, 1000, allocate_and_release(1000, 100_000)),
        Case("match a page, pool of 1e5 frames", "ns", 100, 250, match(250, 100_000)),
        Case("commit and publish a page, 1e5 frames", "ns", 150, 250, publish(250, 100_000)),
        Case("fork 4096 pages", "us", 20, 1, fork(4096)),
        Case("create 1e6 frames", "ms", 100, 1, lambda: timed(lambda: MemoryManager(1_000_000, BLOCK))),
    ]


def measure(rounds: int) -> list[Figure]:
    scale = {"ns": 1e9, "us": 1e6, "ms": 1e3}
    every = cases()
    seconds: dict[str, list[float]] = {case.name: [] for case in every}
    for round_ in range(rounds):
        for case in every:
            if case.unit != "ms" or round_ < 5:
                seconds[case.name].append(case.run() / case.work * scale[case.unit])
    machine, when = (
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs",
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )
    return [
        Figure(
            c.name, c.unit, statistics.median(seconds[c.name][1:]), min(seconds[c.name]), c.limit, len(seconds[c.name]) - 1, machine, when
        )
        for c in every
    ]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=200)
    figures = measure(options.parse_args().rounds)
    RESULTS.parent.mkdir(exist_ok=True)
    with open(RESULTS, "a", encoding="utf-8") as results:
        for figure in figures:
            results.write(json.dumps(asdict(figure)) + "\n")
            word = "" if figure.median <= figure.limit else "   OVER"
            print(f"{figure.name:40} {figure.median:8.1f} {figure.unit}   best {figure.best:8.1f}   limit {figure.limit:5.0f}{word}")
    for module, name in PEERS.items():
        there = importlib.util.find_spec(module) is not None
        print(f"{name:40} {'is here, and has no adapter yet' if there else 'not installed: not measured'}")


if __name__ == "__main__":
    main()
