"""nano-vllm in a process of its own: reads a job from stdin, and writes the tokens of its prompts to stdout.

job: {"sources": folder, "model": folder, "prompts": lists of ids, "max_tokens": int, "rounds": int, "kv_bytes": int}
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import nano_vllm


def main() -> None:
    job: dict[str, Any] = json.load(sys.stdin)
    engine = nano_vllm.load(
        Path(job["sources"]), Path(job["model"]), job["kv_bytes"], max_model_len=1024, max_num_batched_tokens=1024
    )
    from nanovllm import SamplingParams  # type: ignore[import-not-found]

    blocks, preempted = engine.scheduler.block_manager, []
    preempt = engine.scheduler.preempt
    engine.scheduler.preempt = lambda sequence: (preempted.append(sequence.seq_id), preempt(sequence))
    sampling = SamplingParams(temperature=1e-6, max_tokens=job["max_tokens"], ignore_eos=True)
    rounds = [engine.generate(job["prompts"], sampling, use_tqdm=False) for _ in range(job["rounds"])]
    tokens = [[result["token_ids"] for result in results] for results in rounds]
    json.dump({"tokens": tokens, "blocks": len(blocks.blocks), "preempted": len(preempted)}, sys.stdout)


if __name__ == "__main__":
    main()
