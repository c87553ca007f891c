"""Prefill and decode: the time of a step by the tokens in it, and what a long prompt does to those who read.

Measured on random weights of the shape of Qwen3-0.6B (bench/generate/models.py), because the bundled checkpoint is so
small that a step of it takes as long for 1 token as for 16.
"""

from __future__ import annotations

import math
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

from pagedkv.bench.generate import models, runner
from pagedkv.model import Engine, Limits, SamplingParams
from pictures.canvas import Canvas

if TYPE_CHECKING:
    from pagedkv.cache import PlannedBatch
    from pagedkv.model.loop.sequence import Chunk

Facts = dict[str, Any]

SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Tokens in a step."""
READERS: Final = 4
"""Sequences that decode while a prompt arrives."""
PROMPT: Final = 768
CHUNKS: Final = (None, 128)
ARRIVALS: Final = ("whole", "chunked")
"""The names of the arrivals of the prompt, one for each of CHUNKS."""
FOREVER: Final = SamplingParams(max_tokens=400, ignore_eos=True)


def _weights() -> tuple[int, int]:
    """Return the bytes of all matrices of the model, and the multiplications and additions for one token."""
    c = models.CONFIG
    wide, heads = c["hidden_size"], c["num_attention_heads"] + 2 * c["num_key_value_heads"]
    of_layer = wide * c["head_dim"] * (heads + c["num_attention_heads"]) + 3 * wide * c["intermediate_size"]
    numbers = c["num_hidden_layers"] * of_layer
    head = c["vocab_size"] * wide
    return 2 * (numbers + head), 2 * numbers


def _arrival(engine: Engine, vocabulary: int, chunk: int | None) -> list[list[float]]:
    """Let a prompt arrive beside the readers.

    Returns: tokens of the prompt, tokens of readers and seconds, for each step up to the prompt's first token
    """
    engine.scheduler.limits = Limits(max_batch_tokens=4096, prefill_chunk=chunk)
    choose = engine.scheduler.next_step
    steps: list[list[float]] = []

    def watched() -> tuple[list[Chunk], PlannedBatch | None]:
        chunks, batch = choose()
        counts = [one.num_tokens for one in chunks if one.remaining > 1]
        steps.append([sum(counts), len(chunks) - len(counts)])
        return chunks, batch

    lots = random.Random(1)
    prompt = [lots.randrange(3, vocabulary) for _ in range(PROMPT)]
    with patch.object(engine.scheduler, "next_step", watched):
        for _ in range(3):
            _timed(engine, steps)
        asked = engine.submit(prompt, FOREVER)
        while not asked.completions[0].token_ids:
            _timed(engine, steps)
        for _ in range(3):
            _timed(engine, steps)
    engine.cancel(asked)
    engine.step()
    engine.cache.forget()
    return steps


def _timed(engine: Engine, steps: list[list[float]]) -> None:
    began = time.perf_counter()
    engine.step()
    steps[-1].append(time.perf_counter() - began)


def repeat() -> Facts:
    """Let the prompt arrive at the bundled checkpoint: its steps have the same tokens as those of any model."""
    num_bytes, operations = _weights()
    found: Facts = {"weight_bytes": num_bytes, "operations_per_token": operations, "prompt": PROMPT, "readers": READERS}
    engine = Engine.load(num_frames=400)
    lots = random.Random(0)
    readers = [engine.submit([lots.randrange(3, 600) for _ in range(40)], FOREVER) for _ in range(READERS)]
    while not all(request.completions[0].token_ids for request in readers):
        engine.step()
    for name, chunk in zip(ARRIVALS, CHUNKS, strict=True):
        steps = _arrival(engine, 600, chunk)
        found[name] = [[int(step[0]), int(step[1])] for step in steps]
    return found


def measure() -> Facts:
    """Time steps of 1 to 512 tokens, and the arrival of a prompt, on the shape of Qwen3-0.6B."""
    with tempfile.TemporaryDirectory() as name:
        models.write_checkpoint(Path(name), models.CONFIG)
        engine = models.engine_of(Path(name), 8192)
    vocabulary = int(models.CONFIG["vocab_size"])
    tensors = runner.matrices(engine)
    speed, product = [runner.read_speed(tensors)], [runner.product_speed(256)]
    steps: Facts = {}
    for size in SIZES:
        taken = []
        for _ in range(3 if size > 64 else 5):
            request = engine.submit([random.randrange(3, vocabulary) for _ in range(size)], FOREVER)
            taken.append(runner.timed_step(engine))
            engine.cancel(request)
            engine.step()
            engine.cache.forget()
        steps[str(size)] = round(1e3 * statistics.median(taken[1:]), 1)
    readers = models.filled(engine, READERS, 512, FOREVER)
    for _ in range(3):
        engine.step()
    arrivals = {
        name: [round(1e3 * step[2], 1) for step in _arrival(engine, vocabulary, chunk)]
        for name, chunk in zip(ARRIVALS, CHUNKS, strict=True)
    }
    models.emptied(engine, readers)
    speed.append(runner.read_speed(tensors))
    product.append(runner.product_speed(256))
    return {
        "gb_per_s": round(statistics.mean(speed) / 1e9, 1),
        "gflop_per_s": round(statistics.mean(product) / 1e9),
        "step_ms": steps,
        **arrivals,
    }


WIDTH: Final = 900


def draw(facts: Facts) -> str:
    """Return the picture."""
    times = facts["measured"]
    slowest = {name: max(times[name]) for name in ("whole", "chunked")}
    canvas = Canvas(
        WIDTH, 640,
        "The time of a step, and a prompt that arrives beside sequences that decode",
        f"A step of 1 token takes {times['step_ms']['1']} ms, one of 512 tokens {times['step_ms']['512']} ms. "
        f"A prompt of {facts['prompt']} tokens computed at once stops the others for {slowest['whole']:.0f} ms; "
        f"in chunks of {CHUNKS[1]} tokens for at most {slowest['chunked']:.0f} ms.",
    )  # fmt: skip
    _steps(canvas, facts)
    _arrivals(canvas, facts)
    return canvas.svg()


def _bounds(facts: Facts) -> tuple[float, float]:
    """Return the ms in which memory gives all weights, and the ms of the arithmetic of one token."""
    times = facts["measured"]
    return facts["weight_bytes"] / times["gb_per_s"] / 1e6, facts["operations_per_token"] / times["gflop_per_s"] / 1e6


def _steps(canvas: Canvas, facts: Facts) -> None:
    """Draw the time of a step against the tokens in it, both logarithmic, with two bounds."""
    left, top, wide, high = 84, 52, 470, 250
    steps = {int(size): ms for size, ms in facts["measured"]["step_ms"].items()}
    memory, arithmetic = _bounds(facts)
    low, most = math.log10(10), math.log10(max(3000.0, 1.3 * max(steps.values())))

    def x(tokens: float) -> float:
        return left + wide * math.log2(tokens) / math.log2(SIZES[-1])

    def y(ms: float) -> float:
        return top + high * (1 - (math.log10(ms) - low) / (most - low))

    canvas.text(20, 24, "a step by the tokens in it", "big")
    canvas.text(left - 50, top - 12, "ms of a step", "dim")
    for ms in (10, 30, 100, 300, 1000, 3000):
        if math.log10(ms) <= most:
            canvas.path(f"M{left} {y(ms):g} h{wide}", "queued-line thin")
            canvas.text(left - 10, y(ms) + 4, f"{ms:,}", "end dim")
    for size in SIZES:
        canvas.text(x(size), top + high + 18, str(size), "mid dim")
    canvas.text(left + wide / 2, top + high + 38, "new tokens in the step", "mid dim")
    crossing = memory / arithmetic
    canvas.path(f"M{left} {y(memory):g} H{x(SIZES[-1]):g}", "decode-line dash")
    start = max(1.0, 10 / arithmetic)
    canvas.path(f"M{x(start):g} {y(arithmetic * start):g} L{x(512):g} {y(arithmetic * 512):g}", "prefill-line dash")
    canvas.path("M" + " L".join(f"{x(size):g} {y(ms):g}" for size, ms in steps.items()), "axis")
    for size, ms in steps.items():
        canvas.dot(x(size), y(ms), "decode" if size < crossing else "prefill", 4.5)
    notes = left + wide + 36
    for i, (kind, words) in enumerate((
        ("", "measured"),
        ("decode", f"memory gives {facts['weight_bytes'] / 1e6:,.0f} MB of weights"),
        ("", f"at {facts['measured']['gb_per_s']:g} GB/s: {memory:.1f} ms, for any number"),
        ("", "of tokens"),
        ("prefill", f"{facts['operations_per_token'] / 1e6:,.0f} million operations a token"),
        ("", f"at {facts['measured']['gflop_per_s']:,} GFLOP/s: {arithmetic:.2f} ms a token"),
        ("", ""),
        ("", f"One token: {steps[1]:.0f} ms."),
        ("", f"512 tokens: {steps[512]:,.0f} ms, {steps[512] / 512:.1f} ms each."),
    )):  # fmt: skip
        line = top + 24 + 22 * i
        if i == 0:
            canvas.path(f"M{notes} {line - 4} h24", "axis")
            canvas.dot(notes + 12, line - 4, "decode", 4.5)
        elif kind:
            canvas.path(f"M{notes} {line - 4} h24", f"{kind}-line dash")
        canvas.text(notes + 32, line, words, "head" if i > 6 else "")


def _arrivals(canvas: Canvas, facts: Facts) -> None:
    """Draw the steps around the arrival of a prompt, computed at once and in chunks."""
    left, top = 84, 400
    times = facts["measured"]
    longest = max(sum(times["whole"]), sum(times["chunked"]))
    scale = (WIDTH - left - 30) / longest
    canvas.path(f"M20 {top - 46} H{WIDTH - 20}", "queued-line thin")
    canvas.text(
        20, top - 20, f"{facts['readers']} sequences decode, and a prompt of {facts['prompt']} tokens arrives", "big"
    )
    for row, (name, lines) in enumerate((("whole", ["at once"]), ("chunked", ["chunks", f"of {CHUNKS[1]}"]))):
        y = top + 34 + 92 * row
        for i, words in enumerate(lines):
            canvas.text(left - 10, y + 18 + 16 * i, words, "end head")
        x = float(left)
        pause = max(times[name])
        for (prompt, _), ms in zip(facts[name], times[name], strict=True):
            width = ms * scale
            canvas.box(x, y, (width, 30), "prefill" if prompt else "decode")
            if prompt:
                canvas.text(x + width / 2, y + 19, f"{prompt}", "mid small")
            x += width
            canvas.path(f"M{x:.1f} {y + 34} v9", "decode-line thick")
        first = sum(ms for (prompt, _), ms in zip(facts[name], times[name], strict=True) if prompt)
        pauses = f"The longest pause of a reader: {pause:,.0f} ms."
        canvas.text(left, y + 60, f"{pauses} The prompt's first token: after {first:,.0f} ms.", "dim")
    canvas.legend(
        left, top + 18,
        [("prefill", "a step with tokens of the prompt, and one a reader"), ("decode", "a step of readers alone")],
    )  # fmt: skip
    canvas.text(left, top + 34 + 92 * 2 + 2, f"the longer row: {longest:,.0f} ms", "dim small")


def text(facts: Facts) -> str:
    """Return the picture as text."""
    times = facts["measured"]
    memory, arithmetic = _bounds(facts)
    rows = ["tokens in a step   ms of the step   ms a token"]
    rows += [f"{size:>16}{ms:>17,.1f}{ms / int(size):>13.2f}" for size, ms in times["step_ms"].items()]
    rows += [
        "",
        f"memory gives {facts['weight_bytes'] / 1e6:,.0f} MB of weights at {times['gb_per_s']:g} GB/s: {memory:.1f} ms",
    ]
    rows += [
        f"{facts['operations_per_token'] / 1e6:,.0f} million operations a token at {times['gflop_per_s']:,} GFLOP/s: "
        f"{arithmetic:.2f} ms",
        "",
        f"{facts['readers']} sequences decode, and a prompt of {facts['prompt']} tokens arrives: ms of each step,",
        "steps with tokens of the prompt stand between bars",
    ]
    for name, words in (("whole", "at once"), ("chunked", f"in chunks of {CHUNKS[1]}")):
        parts: list[str] = []
        for i, ((prompt, _), ms) in enumerate(zip(facts[name], times[name], strict=True)):
            parts += ["|"] * (i > 0 and bool(prompt) != bool(facts[name][i - 1][0])) + [f"{ms:,.0f}"]
        rows.append(f"{words:<17}{'  '.join(parts)}")
    return "\n".join(rows) + "\n"
