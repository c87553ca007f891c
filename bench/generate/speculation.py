"""Speculation: milliseconds of a token of the plain way and with drafts, if a given share of the drafts comes true.

The model is the random one of `model.py`; the context is 2,048 tokens. A drafter that costs nothing gives DRAFTS drafts
a step. Each of them is right with the chance that a row names, if those before it are right. The right ones are chosen
by lot, so that the same steps can be timed for any share: logits are computed and drawn from as always.

Run it by `python -m pagedkv.bench.generate.speculation`: a minute, 4 GiB. Variants take turns of STEPS steps.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pagedkv.bench.generate import model as models
from pagedkv.model.loop.draws import Drawn, Guess
from pagedkv.model.ways.speculation import Speculation

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.checkpoint.config import ModelConfig
    from pagedkv.model.engine import Engine
    from pagedkv.model.loop.sequence import Chunk, SequenceState

DRAFTS: Final = 4
SHARES: Final = (0.3, 0.6, 0.9)
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


def timed(engine: Engine, speculation: Speculation | None) -> tuple[float, float]:
    """Return the seconds of a token and of a step."""
    requests = models.filled(engine, 1, CONTEXT)
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


def main() -> None:
    """Measure and print all figures."""
    with tempfile.TemporaryDirectory() as name:
        models.write_checkpoint(Path(name), models.CONFIG)
        engine = models.engine_of(Path(name), 2 * CONTEXT)
    found: dict[float | None, list[tuple[float, float]]] = {share: [] for share in (None, *SHARES)}
    for _ in range(TURNS):
        for share, taken in found.items():
            taken.append(timed(engine, None if share is None else Forced(share, engine.decoder.config)))
    plain = statistics.median(seconds for seconds, _ in found[None])
    for share, taken in found.items():
        token, step = (statistics.median(column) for column in zip(*taken, strict=True))
        variant = "plain" if share is None else f"{share:.0%} true"
        print(f"{variant:9} {1e3 * token:7.1f} ms a token  {1e3 * step:7.1f} ms a step  {plain / token:5.2f} x")


if __name__ == "__main__":
    main()
