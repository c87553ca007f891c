"""Several ranks give the tokens of one process, in float32, whatever the engine does with its frames."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from . import jobs
from .conftest import same
from .processes import Group
from .threads import on_threads

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3")
WAYS: dict[str, dict[str, Any]] = {
    "the prefix cache": {"rounds": 2, "limits": {"prefill_chunk": 16}},
    "forks": {"num_samples": 3, "params": {"max_tokens": 24, "temperature": 1.0, "seed": 5}},
    "best of n": {"params": {"max_tokens": 12, "temperature": 1.0, "seed": 5, "best_of": 4}},
    "beams": {"params": {"max_tokens": 12, "num_beams": 3}, "num_samples": 2},
    "a tiny pool": {"num_frames": 9},
    "prompt lookup": {"speculate": "prompt-lookup"},
    "a draft model": {"speculate": "itself"},
    "int8 weights": {"weights": "int8"},
    "int4 weights": {"weights": "int4"},
    "int8 KV": {"kv_dtype": "int8"},
    "fp8 KV": {"kv_dtype": "fp8_e4m3"},
    "sinks": {"window": 24, "sinks": 4},
    "one token at a time": {"limits": {"max_batch_tokens": 7}, "block_size": 1, "num_frames": 300},
}
FELT: dict[str, Callable[[dict[str, Any]], object]] = {
    "the prefix cache": lambda result: result["cached"],
    "forks": lambda result: result["copies"],
    "beams": lambda result: result["copies"],
    "a tiny pool": lambda result: result["preemptions"],
}
"""Figures of a result that show that the way was taken."""

QUICK = ("the prefix cache", "forks", "beams", "a tiny pool", "int8 KV")
EACH = [pytest.param(way, marks=() if way in QUICK else pytest.mark.slow) for way in WAYS]


def by_threads(size: int, job: jobs.Job) -> dict[str, Any]:
    return on_threads(size, lambda ranks: jobs.led(ranks, job), lambda ranks: jobs.followed(ranks, job))


def way_of(name: str, folder: Callable[..., Path], prompts: list[list[int]]) -> jobs.Job:
    """Return a job that goes one of WAYS."""
    is_wide = "weights" in WAYS[name]  # groups of 64 columns on each rank
    made = folder("llama", **({"hidden_size": 128, "intermediate_size": 256, "head_dim": 32} if is_wide else {}))
    options = {**WAYS[name]}
    if options.get("speculate") == "itself":
        options["speculate"] = str(made)
    return jobs.job_of(made, prompts, **options)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_gives_the_tokens_of_one_process(
    name: str, folder: Callable[..., Path], prompts: list[list[int]]
) -> None:
    job = jobs.job_of(folder(name), prompts)
    same(by_threads(2, job), jobs.alone(job))


def test_ranks_may_have_one_kv_head_each(folder: Callable[..., Path], prompts: list[list[int]]) -> None:
    job = jobs.job_of(folder("qwen2", num_key_value_heads=2), prompts)
    same(by_threads(2, job), jobs.alone(job))


@pytest.mark.parametrize("way", EACH)
def test_each_way_through_the_pool_gives_the_tokens_of_one_process(
    way: str, folder: Callable[..., Path], prompts: list[list[int]]
) -> None:
    job = way_of(way, folder, prompts)
    result = by_threads(2, job)
    same(result, jobs.alone(job))
    assert FELT.get(way, bool)(result)


def test_four_ranks_give_the_tokens_of_one_process(folder: Callable[..., Path], prompts: list[list[int]]) -> None:
    job = jobs.job_of(folder("gemma3"), prompts)
    same(by_threads(4, job), jobs.alone(job))


def test_two_processes_give_the_tokens_of_one(
    folder: Callable[..., Path], prompts: list[list[int]], group: Callable[[int], Group]
) -> None:
    job = jobs.job_of(folder("llama"), prompts)
    same(group(2).answer(job), jobs.alone(job))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_processes_give_the_tokens_of_one_for_each_family(
    name: str, size: int, folder: Callable[..., Path], prompts: list[list[int]], group: Callable[[int], Group]
) -> None:
    job = jobs.job_of(folder(name), prompts)
    same(group(size).answer(job), jobs.alone(job))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_processes_give_the_tokens_of_one_on_each_way(
    way: str, folder: Callable[..., Path], prompts: list[list[int]], group: Callable[[int], Group]
) -> None:
    job = way_of(way, folder, prompts)
    same(group(2).answer(job), jobs.alone(job))
