"""A job: prompts for an engine, as plain values that go to another process, and the answers as such values.

folder, loading    the model and options of Engine.load
limits, params     fields of Limits and of SamplingParams
prompts, rounds    token ids; how often all of them are asked
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from pagedkv.distributed import leader
from pagedkv.distributed.follower import follow
from pagedkv.distributed.run import OF_MODEL
from pagedkv.kernels.linear.matrix import Matrix
from pagedkv.model.engine import Engine
from pagedkv.model.scheduler import Limits
from pagedkv.sampling.params import SamplingParams

Job = dict[str, Any]


def job_of(folder: Path, prompts: list[list[int]], **options: Any) -> Job:
    """Return a job. options: limits, params, rounds, num_samples; the others are for Engine.load"""
    own = {name: options.pop(name) for name in ("limits", "params", "rounds", "num_samples") if name in options}
    loading = {"dtype": "float32", "num_frames": 200, **options}
    return {"folder": str(folder), "prompts": prompts, "loading": loading, **own}


def alone(job: Job) -> dict[str, Any]:
    """Answer a job by an engine of one process."""
    limits = Limits(**job.get("limits", {}))
    return answered(Engine.load(job["folder"], limits=limits, **job["loading"]), job)


def led(ranks: Any, job: Job) -> dict[str, Any]:
    """Answer a job on rank 0 of several."""
    limits = Limits(**job.get("limits", {}))
    engine = leader.load(ranks, job["folder"], limits=limits, **job["loading"])
    result = answered(engine, job)
    ranks.stop()
    return {**result, "messages": ranks.messages, "message_bytes": ranks.message_bytes}


def followed(ranks: Any, job: Job) -> None:
    """Follow the same job on another rank."""
    follow(ranks, job["folder"], **{name: job["loading"][name] for name in OF_MODEL if name in job["loading"]})


def answered(engine: Engine, job: Job) -> dict[str, Any]:
    """Return the tokens of all outputs, and what happened on the way."""
    params, each = SamplingParams(**job.get("params", {"max_tokens": 24})), []
    for _ in range(job.get("rounds", 1)):
        each += engine.generate(job["prompts"], params, num_samples=job.get("num_samples", 1))
    outputs = [completion for request in each for completion in request.completions]
    errors = [completion.error for completion in outputs if completion.error]
    engine.cache.check(3)
    return {
        "tokens": [completion.token_ids for completion in outputs],
        "errors": errors,
        "cached": sum(completion.cached_tokens for completion in outputs),
        "copies": engine.cache.stats().copies,
        "steps": engine.stats().steps,
        "preemptions": engine.scheduler.preemptions,
        "weight_bytes": bytes_of(engine.decoder.weights),
        "pool_bytes": engine.cache.storage.bytes.numel(),
    }


def bytes_of(weights: Any) -> int:
    """Return the bytes of all tensors of `Weights`, a tied head once."""
    found: dict[int, int] = {}

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor | Matrix):
            parts = (value.stored, value.scales) if isinstance(value, Matrix) else (value,)
            found.update((part.data_ptr(), part.nbytes) for part in parts)
        elif isinstance(value, tuple):
            for item in value:
                add(item)
        elif value is not None:
            for field in fields(value):
                add(getattr(value, field.name))

    add(weights)
    return sum(found.values())
