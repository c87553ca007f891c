"""Speculation: milliseconds of a token of the plain way and with drafts, if a given share of the drafts comes true.

The model is the random one of `models.py`; the context is 2,048 tokens. A drafter without cost makes DRAFTS drafts a
step. Each draft is right with the chance that a row names, if the drafts before it are right. The right drafts are
chosen by lot, so that the same steps can be timed for any share: logits are computed and drawn from as always.

Run it by `python -m pagedkv.bench.generate.speculation`: a minute, 4 GiB. Variants take turns of STEPS steps. It prints
the table of docs/explanation/speculation.md and appends a row for each share to bench/results/generate.jsonl.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pagedkv.bench import record
from pagedkv.bench.generate import models
from pagedkv.model.loop.draws import Drawn, Guess
from pagedkv.model.ways.speculation import Speculation

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.checkpoint.config import ModelConfig
    from pagedkv.model.engine import Engine
    from pagedkv.model.loop.sequence import Chunk, SequenceState

DRAFTS: Final = 4
SHARES: Final = (0.3, 0.6, 0.9)
MUSTS: Final = {0.6: 1.0, 0.9: 1.0}
"""share: the most that a token may take, as a part of its time in the plain way."""
CONTEXT: Final = 2048
STEPS: Final = 40
TURNS: Final = 4
_DICE: Final = random.Random(1)


class Repeat:
    """A drafter that guesses the last token again and again."""

    num_tokens: int = DRAFTS
    vocab_size: int | None = None

    def propose(self, sequences: list[SequenceState], most: list[int]) -> list[list[int]]:
        """Return drafts."""
        return [sequence.tokens[-1:] * count for sequence, count in zip(sequences, most, strict=True)]

    def forget(self, sequence: SequenceState) -> None:
        """Do nothing."""

    def recover(self) -> None:
        """Do nothing."""


class Forced(Speculation):
    """A speculation that accepts each draft with a chance of `share`, whatever the logits say."""

    def __init__(self, share: float, config: ModelConfig) -> None:
        super().__init__(Repeat(), config)
        self._share = share

    def verify(
        self, chunks: list[Chunk], families: list[list[SequenceState]], drawn: list[Drawn], logits: Tensor
    ) -> dict[SequenceState, list[Guess]]:
        """Return drafts by lot."""
        super().verify(chunks, families, drawn, logits)
        return {chunk.sequence: self._lot(chunk) for chunk in chunks}

    def _lot(self, chunk: Chunk) -> list[Guess]:
        accepted = 0
        while accepted < len(chunk.drafts) and _DICE.random() < self._share:
            accepted += 1
        return [Guess(draft, Drawn(token)) for draft, token in enumerate(chunk.drafts[:accepted])]


def timed(engine: Engine, speculation: Speculation | None, context: int) -> tuple[float, float]:
    """Return the seconds of a token and of a step."""
    requests = models.filled(engine, 1, context)
    engine.speculation = engine.scheduler.speculation = speculation
    try:
        engine.step()
        before, began = len(requests[0].completions[0].token_ids), time.perf_counter()
        for _ in range(STEPS):
            engine.step()
        seconds, after = time.perf_counter() - began, len(requests[0].completions[0].token_ids)
    finally:
        engine.speculation = engine.scheduler.speculation = None
    models.emptied(engine, requests)
    return seconds / (after - before), seconds / STEPS


def measured(config: dict[str, Any] = models.CONFIG, context: int = CONTEXT) -> list[dict[str, Any]]:
    """Return a row for the plain way and for each share of drafts that come true."""
    with tempfile.TemporaryDirectory() as name:
        models.write_checkpoint(Path(name), config)
        engine = models.engine_of(Path(name), 2 * context)
    found: dict[float, list[tuple[float, float]]] = {share: [] for share in (0.0, *SHARES)}  # 0.0: without drafts
    for _ in range(TURNS):
        for share, taken in found.items():
            taken.append(timed(engine, Forced(share, engine.decoder.config) if share else None, context))
    plain = [token for token, _ in found[0.0]]
    return [_row(share, context, taken, plain) for share, taken in found.items()]


def _row(share: float, context: int, taken: list[tuple[float, float]], plain: list[float]) -> dict[str, Any]:
    tokens, steps = ([1e3 * seconds for seconds in column] for column in zip(*taken, strict=True))
    axes = {"batch": 1, "context": context, "drafts": DRAFTS if share else 0, "share": share}
    row = {"bench": "generate", "case": "speculation"} | axes | {"variant": "pagedkv", "unit": "ms a token"}
    row |= {"median": statistics.median(tokens), "best": min(tokens), "worst": max(tokens)}
    ratios = [token / (1e3 * other) for token, other in zip(tokens, plain, strict=True)]
    return row | {"ratios": ratios, "step_ms": statistics.median(steps), "must": MUSTS.get(share)}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as the manual has them."""
    lines = ["| drafts that come true | ms a token | ms a step | against plain |", "|---|---|---|---|"]
    for row in rows:
        share = f"{row['share']:.0%}".replace("%", " %") if row["share"] else "(no drafts)"
        gain = 1 / statistics.median(row["ratios"])
        lines.append(f"| {share} | {row['median']:.1f} | {row['step_ms']:.1f} | {gain:.2f} × |")
    return "\n".join(lines)


def main() -> None:
    """Measure, keep the rows, and print the table."""
    rows, about = measured(), record.provenance()
    record.append([row | about for row in rows], None, "generate")
    print(table(rows))


if __name__ == "__main__":
    main()
