"""Decode and prefill of vLLM on a CPU: as it is, and with our parts, which take turns in one engine.

    decode      ms of a step = (a long generation - a short one) / steps; K and V are filled by vLLM's
                DecodeBenchConnector, so no prompt is computed
    prefill     s to the first token of a prompt of random ids

The model is a Llama of 4 layers with 32 heads, 8 KV heads of 128 and random weights in bfloat16, blocks of 128. Its
linear layers are small (1,024 wide), so a step is mostly attention; in a wider model they take more of a step. The
worker computes on all cores. This runs in an environment with vLLM, see `make test-vllm`.
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import truediv
from pathlib import Path
from typing import Any, Final

from pagedkv.bench.clock import Timing, Turns, compare, ratios, switches_below, watched

Row = dict[str, Any]
SHAPES: Final = ((1, 4096), (8, 4096), (1, 16384), (8, 16384))
QUICK: Final = ((1, 4096),)
MUSTS: Final = {(1, 4096): 1.1, (8, 4096): 1.9, (8, 16384): 2.4}
"""(sequences, context): how many times as fast a decode step must be."""
SHORT, LONG = 4, 36  # tokens of a generation
BLOCK: Final = 128
CONFIG: Final = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2048,
    "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 1024,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "tie_word_embeddings": True,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def measure(shapes: tuple[tuple[int, int], ...], turns: int, report: Callable[[Row], None]) -> None:
    """Measure all shapes, and hand each row to `report`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "toggle"
        path.write_bytes(b"\0" * mmap.PAGESIZE)
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        os.environ.update(
            PAGEDKV_VLLM="1", PAGEDKV_BENCH_TOGGLE=str(path), VLLM_LOGGING_LEVEL="WARNING", VLLM_NO_USAGE_STATS="1"
        )
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "3")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, sorted(os.sched_getaffinity(0)))))
        from pagedkv.bench.vllm.toggle import flag

        chosen = flag(path)
        with _engine(folder, dummy=True) as engine:
            for shape in shapes:
                _report_decode(engine, chosen, shape, turns, report)
        with _engine(folder, dummy=False) as engine:
            for context in sorted({context for _, context in shapes}):
                _report_prefill(engine, chosen, context, turns, report)


@contextmanager
def _engine(folder: str, *, dummy: bool) -> Iterator[Any]:
    """Start an engine, and end its processes: without `shutdown` they stay, and keep their memory."""
    from vllm import LLM

    connector = {"kv_transfer_config": {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"}} if dummy else {}
    engine = LLM(
        model=folder, load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True,
        max_model_len=SHAPES[-1][1] + 128, max_num_seqs=8, block_size=BLOCK, enable_prefix_caching=False,
        num_gpu_blocks_override=8 * (SHAPES[-1][1] // BLOCK + 2) + 1, max_num_batched_tokens=SHAPES[-1][1] + 128,
        worker_extension_cls="pagedkv.bench.vllm.toggle.Extension", attention_backend="CUSTOM", **connector,
    )  # fmt: skip
    try:
        yield engine
    finally:
        engine.llm_engine.engine_core.shutdown()


def seconds_of(engine: Any, prompts: list[list[int]], tokens: int) -> float:
    """Return the seconds in which an engine generates `tokens` tokens for each prompt."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    return time.perf_counter() - began


def prompts_of(batch: int, context: int, turn: int) -> list[list[int]]:
    """Return `batch` prompts of ids below 1,003, other ones in each turn."""
    return [[3 + (turn * 31 + row * 7 + at) % 1000 for at in range(context)] for row in range(batch)]


def _in_turns(chosen: mmap.mmap, turns: int, run: Callable[[int], float]) -> dict[str, Timing]:
    """Return the timings of all variants; their order is drawn anew in each turn. The first turn does not count."""
    from pagedkv.bench.vllm.toggle import VARIANTS

    measured = Turns(VARIANTS, turns, "vllm")
    for turn, order in enumerate(measured):
        for name in order:
            chosen[0] = VARIANTS.index(name)
            figure, _, is_clean = watched(partial(run, turn), switches_below)  # the engine is another process
            measured.add(name, figure, is_clean)
    return measured.timings()


def _report_decode(
    engine: Any, chosen: mmap.mmap, shape: tuple[int, int], turns: int, report: Callable[[Row], None]
) -> None:
    batch, context = shape

    def step(turn: int) -> float:
        prompts = prompts_of(batch, context - LONG, turn)
        return (seconds_of(engine, prompts, LONG) - seconds_of(engine, prompts, SHORT)) / (LONG - SHORT) * 1e3

    _report("decode", shape, "ms a step", _in_turns(chosen, turns, step), report, MUSTS.get(shape))


def _report_prefill(engine: Any, chosen: mmap.mmap, context: int, turns: int, report: Callable[[Row], None]) -> None:
    times = _in_turns(chosen, turns, lambda turn: seconds_of(engine, prompts_of(1, context, turn), 1))
    _report("prefill", (1, context), "s", times, report, 1.0)


def _report(
    case: str,
    shape: tuple[int, int],
    unit: str,
    times: dict[str, Timing],
    report: Callable[[Row], None],
    must: float | None,
) -> None:
    theirs = times["vLLM"]
    for name, timing in times.items():
        row: Row = {"case": case, "batch": shape[0], "context": shape[1], "variant": name, "unit": unit}
        row |= timing.fields(lambda figure: figure)
        row |= {"times_as_fast": compare(theirs, timing, truediv), "ratios": ratios(theirs, timing, truediv)}
        report(row | {"must": must if name == "pagedkv" else None})
