"""Speed and memory of `model.generate`: DynamicCache, StaticCache, pages, pages of int8. They take turns.

"pages, F.linear" leaves the linear layers to torch, so that it differs from the caches of the host by its cache alone.

    decode      STEPS tokens after a context whose K and V are random; generate() runs as a user calls it
    prefill     the first token of a prompt of random ids, in a pool that holds the prompts of two turns and is full:
                each prompt evicts an older one, and no page of memory is touched for the first time
    memory      peak of a process that decodes, less its size before the cache was made; each in a process of its own
    batch       generate_batch() of eight prompts, by the host's attention and inside of paged_batching()

The model is a Llama of 100 million parameters in bfloat16 with random weights (768 wide, 12 layers, 12 heads, 4 KV
heads of 64). A figure is the median over turns. The ratio of two variants is the median of the ratios in one turn.

Where torch is slow in bfloat16 (processors without AVX-512) a long prompt takes it minutes. There the model has
SLOW_LAYERS, and its rows say so and promise nothing. The batch has shorter prompts, and `prefill` has DynamicCache only
for prompts of up to MOST_OF_SLOW tokens.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from operator import truediv
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers.generation import ContinuousBatchingConfig

from pagedkv import write_kv
from pagedkv.bench.clock import Timing, Turns, compare, on_this_cpu, ratios, track, watched
from pagedkv.bench.record import shallow
from pagedkv.integrations.transformers import PagedCache, Pool, paged_batching, patch
from pagedkv.integrations.transformers.batching import NEEDED
from pagedkv.integrations.transformers.geometry import CACHE, HOST
from pagedkv.kernels.linear.cpu import is_slow_in_torch

STEPS: Final = 48
PLAIN: Final = "pages, F.linear"
VARIANTS: Final = ("DynamicCache", "StaticCache", "pages", "pages int8", PLAIN)
SHAPES: Final = ((8, 8192), (1, 8192), (8, 2048), (1, 2048))
"""(sequences, tokens of context)."""
QUICK: Final = ((1, 2048),)
PROMPTS: Final = {(1, 128): 16, (8, 128): 4}
"""Short prompts, measured beside those of the contexts of one sequence: shape -> calls in a turn."""
MOST_OF_SLOW: Final = 128
"""Tokens, of all prompts of a call, up to which DynamicCache takes turns where torch is slow in bfloat16."""
LAYERS, SLOW_LAYERS = 12, 4
"""Layers of the model, and those where torch is slow in bfloat16."""
SLOW_PROMPT: Final = "torch multiplies bfloat16 without oneDNN here, many times as slowly as elsewhere"
SLOW_CALLS: Final = 2
"""The most calls in a turn there."""
BATCH: Final = (8, 512)
"""Prompts of generate_batch(), and the tokens of each."""
SLOW_BATCH: Final = (4, 32)
"""The same where torch is slow in bfloat16."""
BATCH_STEPS: Final = 32
MUSTS: Final = {
    ("decode", (8, 8192), "StaticCache"): 1.8,
    ("decode", (8, 8192), "DynamicCache"): 8.0,
    ("decode", (1, 8192), "StaticCache"): 1.5,
    ("decode", (1, 2048), "StaticCache"): 1.05,
    **{("prefill", shape, "DynamicCache"): 1.0 for shape in (*PROMPTS, (1, 2048), (1, 8192))},
}
"""(case, shape, variant): how many times as fast pages must be."""
SPARE_SHARE, SPARE_MIB = 0.03, 64
"""The peak with pages is at most that of StaticCache, and this share of K and V, and so many MiB."""

Row = dict[str, Any]
Taken = tuple[float, bool]
"""Seconds, and whether they were clean."""


def kv_bytes(batch: int, context: int) -> int:
    """Return the bytes of K and V at the end of a turn. Several caches and what fills them take four times as much."""
    return 2 * num_layers() * 4 * 64 * 2 * batch * (context + STEPS)


def is_slow() -> bool:
    """Return whether torch is slow in bfloat16 on this processor."""
    return is_slow_in_torch(torch.bfloat16)


def num_layers() -> int:
    """Return the layers of the model on this processor."""
    return SLOW_LAYERS if is_slow() else LAYERS


def model_of(seed: int = 0) -> Any:
    """Return the model of all cases."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=32_000, hidden_size=768, intermediate_size=2048, num_hidden_layers=num_layers(),
        num_attention_heads=12, num_key_value_heads=4, max_position_embeddings=32_768, eos_token_id=None,
        tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()


def filled(variant: str, model: Any, pools: dict[str, Pool], batch: int, context: int) -> Any:
    """Return a cache that holds `context` columns of random K and V."""
    shape = (batch, context, model.config.num_key_value_heads, model.config.head_dim)
    k, v = (torch.randn(shape, dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))  # as a model makes them
    layers = range(model.config.num_hidden_layers)
    if variant in pools:
        cache = PagedCache(model.config, pool=pools[variant])
        cache.begin(None, (batch, context), None, attends=True)
        step, kv = cache.holdings.step, pools[variant].kv
        assert step is not None
        for layer in layers:
            write_kv(*(x.transpose(1, 2).flatten(0, 1) for x in (k, v)), kv[layer], step.batch[layer])
            cache.note_stored(layer)
        cache.end(is_done=True)
        assert cache.get_seq_length() == context  # else generate() computes the context
        return cache
    if variant == "StaticCache":
        cache = transformers.StaticCache(config=model.config, max_cache_len=context + STEPS + 1)
    else:
        cache = transformers.DynamicCache(config=model.config)
    for layer in layers:
        cache.update(k, v, layer)
    return cache


def decode(variant: str, model: Any, pools: dict[str, Pool], shape: tuple[int, int]) -> Taken:
    """Return the seconds in which generate() makes STEPS tokens."""
    with served(variant, model, pools):
        return decode_from(filled(variant, model, pools, *shape), model, shape)


def decode_from(cache: Any, model: Any, shape: tuple[int, int]) -> float:
    """Return the seconds in which generate() makes STEPS tokens after those of the cache."""
    batch, context = shape
    ids = torch.randint(0, 32_000, (batch, context + 1))
    given = {"attention_mask": torch.ones_like(ids), CACHE: cache, "max_new_tokens": STEPS}
    found, seconds, is_clean = watched(lambda: model.generate(input_ids=ids, do_sample=False, **given))
    assert found.shape[1] == context + 1 + STEPS
    if isinstance(cache, PagedCache):
        cache.close()
    return seconds, is_clean


def first_token(variant: str, model: Any, pools: dict[str, Pool], *prompts: torch.Tensor) -> Taken:
    """Return the seconds to the first token of a prompt, the mean over `prompts`."""
    options: dict[str, Any] = {"max_new_tokens": 1, "do_sample": False, "attention_mask": torch.ones_like(prompts[0])}

    def run() -> None:
        for ids in prompts:
            cache = {} if variant in pools else {CACHE: transformers.DynamicCache(config=model.config)}
            model.generate(input_ids=ids, **options, **cache)

    with served(variant, model, pools):
        seconds, is_clean = on_this_cpu(run)
    return seconds / len(prompts), is_clean


@contextmanager
def pools_of(model: Any) -> Iterator[dict[str, Pool]]:
    """Yield the pools of the variants with pages."""
    whole, small = Pool.for_model(model), Pool.for_model(model, kv_dtype="int8")
    try:
        yield {"pages": whole, "pages int8": small, PLAIN: whole}
    finally:
        small.close()
        whole.close()


@contextmanager
def served(variant: str, model: Any, pools: dict[str, Pool]) -> Iterator[None]:
    """Patch the model meanwhile, if the variant has pages."""
    handle = patch(model, pool=pools[variant], fast_linears=variant != PLAIN) if variant in pools else None
    try:
        yield
    finally:
        if handle is not None:
            handle.unpatch()


def measure(shapes: Sequence[tuple[int, int]], turns: int, report: Callable[[Row], None]) -> None:
    """Measure all cases, and hand each row to `report` as soon as it is complete."""

    def report_of_model(row: Row) -> None:
        report(shallow(row, num_layers()) if is_slow() else row)

    model = model_of()
    with pools_of(model) as pools, torch.no_grad():
        for shape in shapes:
            decode("pages", model, pools, (1, 64))  # compile
            times = in_turns(VARIANTS, turns, lambda variant, shape=shape: decode(variant, model, pools, shape))
            report_times(
                report_of_model,
                "decode",
                shape,
                times,
                lambda seconds, shape=shape: shape[0] * STEPS / seconds,
                "tokens/s",
            )
        for shape in (*PROMPTS, *sorted(shape for shape in shapes if shape[0] == 1)):
            report_prefill(report_of_model, model, shape, turns)
    if HOST >= NEEDED:
        report_batch(report_of_model, model, turns)
    report_memory(report_of_model, shapes[0])


def in_turns(variants: Iterable[str], turns: int, run: Callable[[str], Taken]) -> dict[str, Timing]:
    """Return the timing of each variant, after one turn that does not count."""
    measured = Turns(variants, turns, "transformers")
    for order in measured:
        for variant in order:
            measured.add(variant, *run(variant))
    return measured.timings()


def report_times(
    report: Callable[[Row], None],
    case: str,
    shape: tuple[int, int],
    times: dict[str, Timing],
    figure: Callable[[float], float],
    unit: str,
) -> None:
    """Report a row for each variant: its median, and how many times as fast as it pages are."""
    for variant, timing in times.items():
        row = {"case": case, "batch": shape[0], "context": shape[1], "variant": variant, "unit": unit}
        row |= timing.fields(figure)
        row["pages_over_this"] = compare(timing, times["pages"], truediv)
        row |= {"ratios": ratios(timing, times["pages"], truediv), "must": MUSTS.get((case, shape, variant))}
        report(row)


def report_prefill(report: Callable[[Row], None], model: Any, shape: tuple[int, int], turns: int) -> None:
    """Report the time to the first token of prompts that the pool does not know."""
    calls, hosts = PROMPTS.get(shape, 1), ("DynamicCache",)
    if is_slow():
        calls = min(calls, SLOW_CALLS)
        if shape[0] * shape[1] > MOST_OF_SLOW:
            row = {"case": "prefill", "batch": shape[0], "context": shape[1], "variant": "DynamicCache", "unit": "s"}
            report(row | {"median": None, "why_not": SLOW_PROMPT})
            hosts = ()
    with closing(Pool.for_model(model, memory=2 * calls * kv_bytes(*shape))) as pool:

        def fresh(variant: str) -> Taken:
            prompts = (torch.randint(0, 32_000, shape) for _ in range(calls))
            return first_token(variant, model, {"pages": pool}, *prompts)

        fresh("pages")  # with the turn that does not count, it touches the whole pool
        times = in_turns((*hosts, "pages"), turns, fresh)
    report_times(report, "prefill", shape, times, lambda seconds: seconds, "s")


def report_batch(report: Callable[[Row], None], model: Any, turns: int) -> None:
    """Report the new tokens per second of generate_batch(), prompts included."""
    config = transformers.GenerationConfig(max_new_tokens=BATCH_STEPS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(page_size=32, num_blocks=256, max_batch_tokens=2048)
    # Without psutil it complains in each call of limits that nothing here sets.
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)

    shape = SLOW_BATCH if is_slow() else BATCH

    def run(variant: str) -> Taken:
        ids = torch.randint(0, 32_000, shape).tolist()
        with paged_batching(model) if variant == "pages" else nullcontext():
            found, seconds, is_clean = watched(
                lambda: model.generate_batch(
                    ids, generation_config=config, continuous_batching_config=batching, progress_bar=False
                )
            )
        assert sum(len(output.generated_tokens) for output in found.values()) == shape[0] * BATCH_STEPS
        return seconds, is_clean

    times = in_turns(("generate_batch", "pages"), turns, run)
    report_times(report, "batch", shape, times, lambda seconds: shape[0] * BATCH_STEPS / seconds, "tokens/s")


def memory(variant: str, shape: tuple[int, int]) -> float:
    """Return the MiB by which the peak of a new process grows when it decodes STEPS tokens."""
    command = [sys.executable, str(Path(__file__)), variant, *map(str, shape)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(run.stdout.splitlines()[-1]))


def report_memory(report: Callable[[Row], None], shape: tuple[int, int]) -> None:
    """Report the peak of each variant, beside the bytes of K and V."""
    held = kv_bytes(*shape) / 2**20
    peaks = {name: memory(name, shape) for name in track([name for name in VARIANTS if name != PLAIN], "memory")}
    static = peaks["StaticCache"]
    for variant, peak in peaks.items():
        row = {"case": "memory", "batch": shape[0], "context": shape[1], "variant": variant, "unit": "MiB"}
        row |= {"median": peak, "kv": held, "over_static": peak / static}
        is_ours = variant == "pages"
        report(row | {"must": (static + SPARE_SHARE * held + SPARE_MIB) / static if is_ours else None})


def _peak_mib() -> float:
    """Return the largest resident size that this process has had. MiB."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def _new_peak() -> float:
    """Let the peak begin anew, at the present size; return it. MiB."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return _peak_mib()


def _measure_memory(variant: str, batch: int, context: int) -> None:
    model = model_of()
    with pools_of(model) as pools, torch.no_grad():
        for warm in (variant,) if is_slow() else VARIANTS:
            decode(warm, model, pools, (batch, 64))
        with served(variant, model, pools):
            before = _new_peak()
            cache = filled(variant, model, pools, batch, context)
            _new_peak()  # that of the tensors which filled the cache is no part of decoding
            decode_from(cache, model, (batch, context))
            print(json.dumps(_peak_mib() - before))


if __name__ == "__main__":
    _measure_memory(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
