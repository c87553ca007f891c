"""Decode steps of OpenVINO GenAI: each is one `step` of its continuous batching, over paged attention.

optimum-intel converts the checkpoint, in a process of its own, to weights of float16, its nearest format. OpenVINO is
told the dtype of K and V, and its own choice of arithmetic: bfloat16 where the processor has it, else float32 with K
and V of float16. A converted model of float16 asks for K and V of float16; one of fewer bits gets u8.
A context of random tokens is computed for each sequence; no prefix is shared. Each step makes it longer, so that it
begins half of all steps below the length that was asked for.
This file must not import pagedkv, which the environment of OpenVINO lacks.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

BLOCK = 32
"""Tokens of a block of OpenVINO's cache on a CPU."""
CHUNK = 2048
"""Tokens of context that are computed at once."""
SLACK = 256
"""Tokens that a sequence may get while the contexts of the others are computed."""


class Engine:
    """The pipeline, and the requests of the open sequences."""

    def __init__(self, load: Any) -> None:
        config = json.loads((load.folder / "config.json").read_text(encoding="utf-8"))
        self.vocabulary, self.handles, self.requests = config["vocab_size"], [], 0
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens, scheduler.max_num_seqs = CHUNK, load.sequences
        scheduler.enable_prefix_caching, scheduler.dynamic_split_fuse = False, True
        scheduler.num_kv_blocks = load.tokens // BLOCK + 2 * load.sequences
        has_bf16 = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        precision, kv = ("bf16", load.kv) if has_bf16 else ("f32", load.kv.replace("bf16", "f16"))
        properties = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": kv}
        properties["INFERENCE_NUM_THREADS"] = load.threads
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(converted(load.folder)), scheduler, "CPU", properties
        )
        self.about = {"version": f"openvino-genai {version('openvino-genai')}", "weights": "f16", "kv": kv}
        self.about["precision"] = precision

    def open(self, batch: int, context: int, steps: int) -> None:
        """Compute a context of random tokens for each sequence."""
        lots = np.random.default_rng(0)
        config = openvino_genai.GenerationConfig(max_new_tokens=steps + SLACK, ignore_eos=True, do_sample=False)
        length = max(context - steps // 2, 1)
        for _ in range(batch):
            ids = lots.integers(3, self.vocabulary, (1, length), dtype=np.int64)
            self.handles.append(self.pipeline.add_request(self.requests, openvino.Tensor(ids), config))
            self.requests += 1
        waiting = set(range(batch))
        while waiting:
            self.pipeline.step()
            waiting -= {i for i in waiting if self.handles[i].can_read()}

    def begin(self) -> None:
        """Go on where the run before ended."""

    def step(self) -> None:
        """Give each sequence a token."""
        self.pipeline.step()

    def close(self) -> None:
        """Cancel the requests, and let the pipeline drop them."""
        for handle in self.handles:
            handle.cancel()
        self.handles = []
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()


def converted(folder: Path) -> Path:
    """Return the folder of the checkpoint as OpenVINO reads it, converted if it is not there yet."""
    out = folder / "openvino"
    if not out.exists():
        part = folder / "openvino.part"
        shutil.rmtree(part, ignore_errors=True)
        words = ["export", "openvino", "--model", str(folder), "--task", "text-generation-with-past"]
        command = [sys.executable, "-m", "optimum.commands.optimum_cli", *words, "--weight-format", "fp16", str(part)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no message"]
            raise RuntimeError(f"optimum-intel could not convert the checkpoint: {lines[-1]}")
        part.rename(out)
    return out
