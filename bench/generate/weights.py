"""Weights of integers beside bfloat16: the time of a decode step, bytes, logits, and recall of the bundled checkpoint.

    step      ms of one `Engine.step` that gives each sequence a token; the random model of `models.py`
    bytes     of all weights, the embedding of bfloat16 included
    error     RMS of the logits' difference / RMS of the logits with bfloat16, for one prompt
    recall    questions of 100 that the bundled checkpoint answers right

Run it by `python -m pagedkv.bench.generate.weights`: five minutes, 6 GiB. The kinds take turns; a time is the median
over turns of the median of the steps of a turn. It prints all figures and appends a row for each to
bench/results/generate.jsonl.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import torch

from pagedkv.bench import record
from pagedkv.bench.generate import models
from pagedkv.bench.generate.runner import STEPS, timed_step
from pagedkv.cache import PagedKVCache
from pagedkv.checkpoint import BUNDLED, records
from pagedkv.checkpoint.tokenizer import Tokenizer
from pagedkv.model.decoder import Decoder
from pagedkv.model.engine import Engine
from pagedkv.sampling.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

KINDS: Final = (None, "int8", "int4")
SHAPES: Final = ((1, 128), (8, 128))
TURNS: Final = 5
PROMPT: Final = 256
"""Tokens of the prompt whose logits are compared."""


def measured(
    config: dict[str, Any] = models.CONFIG, shapes: Sequence[tuple[int, int]] = SHAPES
) -> list[dict[str, Any]]:
    """Return the rows of all kinds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models.write_checkpoint(folder, config)
        engine = models.engine_of(folder, max(batch * (context + 2_000) for batch, context in shapes))
        decoders = {kind: Decoder.load(folder, weights=kind) for kind in KINDS}
    rows = [_row("bytes", "random", kind, num_bytes(decoder) / 1e6, "MB") for kind, decoder in decoders.items()]
    for batch, context in shapes:
        taken = decode(engine, decoders, (batch, context))
        for kind, seconds in taken.items():
            row = _row("step", "random", kind, 1e3 * statistics.median(seconds), "ms", batch=batch, context=context)
            row["ratios"] = [one / plain for one, plain in zip(seconds, taken[None], strict=True)]
            rows.append(row)
    rows += errors("random", decoders, torch.randint(3, config["vocab_size"], (PROMPT,)).tolist())
    bundled = {kind: Decoder.load(BUNDLED, weights=kind) for kind in KINDS}
    page = records.document(1000, seed=50_000)
    rows += errors("bundled", bundled, Tokenizer.load(BUNDLED).encode(page.prompt(page.questions[0]))[-PROMPT:])
    return rows + [_row("recall", "bundled", kind, recall(kind), "answers right, of 100") for kind in KINDS]


def _row(case: str, model: str, kind: str | None, figure: float, unit: str, **axes: int) -> dict[str, Any]:
    found = {"bench": "generate", "case": f"weights, {case}", "model": model, "weights": kind or "bfloat16"} | axes
    return found | {"variant": "pagedkv", "unit": unit, "median": figure}


def main() -> None:
    """Measure, keep the rows, and print all figures."""
    rows, about = measured(), record.provenance()
    record.append([row | about for row in rows], None, "generate")
    for row in rows:
        shape = f"{row['batch']} x {row['context']}" if "batch" in row else ""
        print(f"{row['case']:16} {row['model']:7} {shape:7} {row['weights']:8} {row['median']:9.2f} {row['unit']}")


def num_bytes(decoder: Decoder) -> int:
    """Return the bytes of all weights of a decoder; a tied head of floats counts once."""
    weights = decoder.weights
    parts = [weights.embedding, weights.norm, *(() if weights.head is weights.embedding else (weights.head,))]
    parts += [part for layer in weights.layers for part in vars(layer).values() if part is not None]
    return sum(part.nbytes for part in parts)


def decode(
    engine: Engine, decoders: dict[str | None, Decoder], shape: tuple[int, int]
) -> dict[str | None, list[float]]:
    """Return the seconds of a step for each kind in each turn, after a turn that does not count."""
    times: dict[str | None, list[float]] = {kind: [] for kind in decoders}
    requests = models.filled(engine, *shape)
    for _ in range(TURNS + 1):
        for kind, seconds in times.items():
            with patch.object(engine.forward, "decoder", decoders[kind]):
                seconds.append(statistics.median(timed_step(engine) for _ in range(STEPS)))
    models.emptied(engine, requests)
    return {kind: seconds[1:] for kind, seconds in times.items()}


def errors(name: str, decoders: dict[str | None, Decoder], ids: list[int]) -> list[dict[str, Any]]:
    """Return how far the logits of a prompt are from those with bfloat16, and how often both like one token best."""
    logits = {kind: logits_of(decoder, ids) for kind, decoder in decoders.items()}
    plain, rows = logits.pop(None), list[dict[str, Any]]()
    for kind, found in logits.items():
        error = float((found - plain).square().mean().sqrt() / plain.square().mean().sqrt())
        same = float((found.argmax(-1) == plain.argmax(-1)).float().mean())
        rows.append(_row("error", name, kind, 100 * error, "% of the logits"))
        rows.append(_row("same token", name, kind, 100 * same, "% of the tokens"))
    return rows


def logits_of(decoder: Decoder, ids: list[int]) -> Tensor:
    """Return the logits after each token of a prompt."""
    cache = PagedKVCache(decoder.config.spec(block_size=16, dtype="bfloat16"), num_frames=len(ids) // 16 + 2)
    space = cache.open(ids)
    batch = cache.plan([space], [len(ids)])
    logits = decoder.forward(torch.tensor(ids), batch, cache)
    cache.commit(batch, ids)
    space.release()
    return logits


def recall(kind: str | None) -> int:
    """Return how many of 100 questions the bundled checkpoint answers right."""
    engine, questions = Engine.load(weights=kind), models.recall_questions()
    made = engine.generate([text for text, _ in questions], SamplingParams(max_tokens=24))
    return sum(request.completions[0].text == answer for request, (_, answer) in zip(made, questions, strict=True))


if __name__ == "__main__":
    main()
