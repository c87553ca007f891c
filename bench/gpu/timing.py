"""Times on a GPU: captured graphs, variants in turn, the rows of a stage and the facts about the machine in each row.

A figure is the median over replays of one CUDA graph. A replay is timed behind another one, so that its launch hides.
This file knows no kernel and no cell.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch

from pagedkv.bench import record
from pagedkv.errors import InvalidRequest
from pagedkv.kernels import registry

Name = TypeVar("Name", bound=Hashable)
Step = Callable[[], object]
"""A function that launches one call; a graph holds several, each made for its own page tables."""


Rows = list[dict[str, Any]]


def options_of(doc: str | None, module: str) -> argparse.ArgumentParser:
    """Return the parser of a stage, with the option that all stages have. doc: of the module."""
    parser = argparse.ArgumentParser(prog=f"pagedkv.bench.gpu.{module}", description=(doc or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="a folder for rows")
    return parser


def keep(rows: Iterable[dict[str, Any]], out: Path | None, name: str) -> None:
    """Append rows to FOLDER/gpu-NAME.jsonl; without a folder keep none."""
    if out is not None:
        record.append(rows, out / f"gpu-{name}.jsonl", f"gpu-{name}")


def served(device: str = "cuda") -> list[str]:
    """Return the names of the backends that run on a GPU, but for the reference, whether they object here or not."""
    return [kernel.name for kernel in registry.KERNELS if kernel.where and device in kernel.where]


def require_gpu() -> None:
    """Raise InvalidRequest if torch finds no GPU."""
    if not torch.cuda.is_available():
        raise InvalidRequest("torch finds no GPU on this machine; run this where there is one")


def provenance() -> dict[str, Any]:
    """Return record.provenance with the GPU, its processors and its CUDA or ROCm version."""
    properties = torch.cuda.get_device_properties(0)
    about = {
        "gpu": properties.name,
        "processors": properties.multi_processor_count,
        "cuda": torch.version.cuda or torch.version.hip,
    }
    return record.provenance() | about


def captured(step: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Return a graph of one step and the tensor that it fills; the step ran before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result


def graph_of(steps: list[Step]) -> torch.cuda.CUDAGraph:
    """Capture all steps in one CUDA graph, after one warm-up run of each."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for step in steps:
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step()
    return graph


def in_turn(variants: dict[Name, list[Step]], repetitions: int) -> tuple[dict[Name, float], dict[Name, str]]:
    """Time the variants in turn, one replay after the other.

    Returns the median microseconds of a call of each variant; and for each variant that failed, the reason.
    """
    graphs: dict[Name, torch.cuda.CUDAGraph] = {}
    refused: dict[Name, str] = {}
    for name, steps in variants.items():
        try:
            graphs[name] = graph_of(steps)
        except Exception as why:
            refused[name] = error_line(why)
    times: dict[Name, list[float]] = {name: [] for name in graphs}
    for turn in range(repetitions + 2):
        for name, graph in graphs.items():
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()  # keeps the device busy while the host launches the timed replay
            began.record()
            graph.replay()
            ended.record()
            torch.cuda.synchronize()
            if turn >= 2:
                times[name].append(began.elapsed_time(ended) * 1e3 / len(variants[name]))
    return {name: statistics.median(some) for name, some in times.items()}, refused


def error_line(why: Exception) -> str:
    """Return the first line of an error, and the first line of each of its notes (a compiler's message)."""
    texts = [f"{type(why).__name__}: {why}", *getattr(why, "__notes__", ())]
    return "; ".join(text.strip().splitlines()[0][:300] for text in texts if text.strip())
