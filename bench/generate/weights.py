"""Weights of integers beside bfloat16: the time of a decode step, bytes, logits, and recall of the bundled checkpoint.

    decode    ms of one `Engine.step` that gives each sequence a token; the random model of `model.py`
    bytes     of all weights, the embedding of bfloat16 included
    error     RMS of the logits' difference / RMS of the logits with bfloat16, for one prompt
    recall    questions of 100 that the bundled checkpoint answers right

Run it by `python -m pagedkv.bench.generate.weights`: five minutes, 6 GiB. The kinds take turns; a time is the median
over turns of the median of the steps of a turn.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from pagedkv.bench.generate import model as models
from pagedkv.bench.generate.runner import STEPS, timed_step
from pagedkv.cache import PagedKVCache
from pagedkv.checkpoint import BUNDLED, records
from pagedkv.checkpoint.tokenizer import Tokenizer
from pagedkv.model.decoder import Decoder
from pagedkv.model.engine import Engine
from pagedkv.sampling.params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

KINDS: Final = (None, "int8", "int4")
SHAPES: Final = ((1, 128), (8, 128))
TURNS: Final = 5
PROMPT: Final = 256
"""Tokens of the prompt whose logits are compared."""


def main() -> None:
    """Measure and print all figures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models.write_checkpoint(folder, models.CONFIG)
        engine = models.engine_of(folder, 16_384)
        decoders = {kind: Decoder.load(folder, weights=kind) for kind in KINDS}
    for kind, decoder in decoders.items():
        print(f"bytes   random   {kind or 'bfloat16':9} {num_bytes(decoder) / 1e6:8.0f} MB")
    for shape in SHAPES:
        for kind, seconds in decode(engine, decoders, shape).items():
            print(
                f"decode  {shape[0]} x {shape[1]:4} {kind or 'bfloat16':9} {1e3 * statistics.median(seconds):8.1f} ms"
            )
    report_errors("random", decoders, torch.randint(3, models.CONFIG["vocab_size"], (PROMPT,)).tolist())
    bundled = {kind: Decoder.load(BUNDLED, weights=kind) for kind in KINDS}
    page = records.document(1000, seed=50_000)
    ids = Tokenizer.load(BUNDLED).encode(page.prompt(page.questions[0]))
    report_errors("bundled", bundled, ids[-PROMPT:])
    for kind in KINDS:
        print(f"recall  bundled  {kind or 'bfloat16':9} {recall(kind):8} of 100")


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
            engine.decoder = decoders[kind]
            seconds.append(statistics.median(timed_step(engine) for _ in range(STEPS)))
    models.emptied(engine, requests)
    return {kind: seconds[1:] for kind, seconds in times.items()}


def report_errors(name: str, decoders: dict[str | None, Decoder], ids: list[int]) -> None:
    """Print how far the logits of a prompt are from those with bfloat16."""
    logits = {kind: logits_of(decoder, ids) for kind, decoder in decoders.items()}
    plain = logits.pop(None)
    for kind, found in logits.items():
        error = float((found - plain).square().mean().sqrt() / plain.square().mean().sqrt())
        same = float((found.argmax(-1) == plain.argmax(-1)).float().mean())
        print(f"error   {name:8} {kind:9} {error:8.2%}, the likeliest token is the same for {same:.1%}")


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
