"""A decode step of vLLM on a GPU with one attention backend: `python -m pagedkv.bench.gpu.vllm_step --backend CUSTOM`.

The model has the shape of Qwen3-0.6B and random weights in bfloat16; whole decode steps are captured. CUSTOM is ours.

    ms_a_step    (a long generation - a short one) / steps; prompts come from the prefix cache, so none is computed
    prompt_s     s to the first tokens of all sequences, of which none was cached: the better of two runs
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, Final

from pagedkv.bench.gpu.timing import keep, options_of, provenance, require_gpu
from pagedkv.bench.vllm.runner import prompts_of, seconds_of

SHAPES: Final = ((32, 4096), (8, 4096), (1, 8192))
SHORT, LONG = 8, 136  # tokens of a generation; both are generated in each turn
CONFIG: Final = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32768,
    "max_position_embeddings": 16384, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip


def engine(folder: str, backend: str) -> Any:
    """Start an engine in this process."""
    from vllm import LLM

    Path(folder, "config.json").write_text(json.dumps(CONFIG))
    captured = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8, 32]}
    return LLM(
        model=folder, load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, seed=0, max_num_seqs=32,
        max_model_len=9216, max_num_batched_tokens=16384, block_size=16, gpu_memory_utilization=0.6,
        enable_prefix_caching=True, attention_backend=backend, compilation_config=captured,
    )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Print and keep the figures of a backend."""
    parser = options_of(__doc__, "vllm_step")
    parser.add_argument("--backend", required=True, help="CUSTOM, FLASH_ATTN or TRITON_ATTN")
    given = parser.parse_args(argv)
    require_gpu()
    about, folder = provenance(), tempfile.TemporaryDirectory()
    llm = engine(folder.name, given.backend)
    for number, (batch, context) in enumerate(SHAPES):
        # No two shapes have a prompt in common. The first prompts also wait for compilers.
        warm, prompts = (prompts_of(batch, context, 2 * number + again) for again in (0, 1))
        first = min(seconds_of(llm, each, 1) for each in (warm, prompts))
        turns = [seconds_of(llm, prompts, LONG) - seconds_of(llm, prompts, SHORT) for _ in range(3)]
        figures = {"ms_a_step": round(median(turns) / (LONG - SHORT) * 1e3, 3), "prompt_s": round(first, 3)}
        keep([{"case": f"{batch} x {context:,}", "who": given.backend} | figures | about], given.out, "vllm")
        print(f"= {batch} x {context:,}, {given.backend}: {figures}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
