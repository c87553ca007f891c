"""The time to the first token of a prompt by the place where its prefix lies, from nowhere to a disk.

The model is that of `bench generate`. One engine has no tiers, the other has both; a prompt is fetched as it is for any
request. Before a repetition the prefix is taken from every place that is faster than the one that is timed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from operator import truediv
from pathlib import Path
from typing import Any, Final

import torch

from pagedkv.bench.clock import Step, compare, in_turn, ratios
from pagedkv.bench.generate.models import CONFIG, of_model, write_checkpoint
from pagedkv.engine.checkpoint import BUNDLED
from pagedkv.engine.checkpoint.tokenizer import Tokenizer
from pagedkv.engine.model.decoder import Decoder
from pagedkv.engine.model.pool import new_cache
from pagedkv.engine.requests.limits import Limits
from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.engine.step.engine import Engine
from pagedkv.tiers.disk import DiskTier
from pagedkv.tiers.host import HostTier
from pagedkv.tiers.tier import Tier

Row = dict[str, Any]
COMPUTED: Final = "computed"
POOL, HOST, DISK = (f"pagedkv, {place}" for place in ("pool", "host", "disk"))
MUSTS: Final = {HOST: 0.1, DISK: 0.3}
"""place: the most time, as a share of that to compute the prompt."""
CONTEXT: Final = 4096
LEAST: Final = 2 << 30
"""Bytes of a tier: these, or two prompts."""
BLOCK: Final = 16


def rows(
    folder: Path | None, repetitions: int, context: int = CONTEXT, config: dict[str, Any] = CONFIG
) -> Iterator[Row]:
    """Yield a row for each place."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        checkpoint = Path(own) / "model"
        checkpoint.mkdir()
        write_checkpoint(checkpoint, config)
        decoder = Decoder.load(checkpoint)
        size = max(LEAST, 2 * context * decoder.config.spec(block_size=BLOCK, dtype="bfloat16").bytes_per_token)
        host, disk = HostTier(size), DiskTier(Path(own) / "tier", size)
        plain, tiered = _engine(decoder, context), _engine(decoder, context, [host, disk])
        ids = torch.randint(3, config["vocab_size"], (context,)).tolist()
        _first_token(tiered, ids, 0)
        timings = in_turn(_steps(plain, tiered, host, ids), repetitions)
        tiered.cache.tiers.close()
    for place, timing in timings.items():
        row: Row = {"case": "first token", "context": context, "variant": place, "unit": "s"}
        row |= timing.fields(lambda seconds: seconds)
        if place != COMPUTED:
            row["of_computing"] = compare(timing, timings[COMPUTED], truediv)
            row |= {"ratios": ratios(timing, timings[COMPUTED], truediv), "must": MUSTS.get(place)}
        yield of_model(config, row)


def _engine(decoder: Decoder, context: int, tiers: list[Tier] | None = None) -> Engine:
    cache = new_cache(
        decoder, block_size=BLOCK, num_frames=context // BLOCK + 64, watermark=0.0, tiers=tiers or [], model="m"
    )
    limits = Limits(max_batch_tokens=context, max_sequences=8)
    return Engine(decoder, Tokenizer.load(BUNDLED), cache, limits=limits)


def _first_token(engine: Engine, ids: list[int], known: int) -> None:
    [request] = engine.generate([ids], SamplingParams(max_tokens=1, ignore_eos=True))
    found = request.completions[0].cached_tokens
    assert found == known, f"{found} tokens of the prompt were found, not {known}"


def _steps(plain: Engine, tiered: Engine, host: HostTier, ids: list[int]) -> dict[str, Step]:
    """Return a step for each place: it leaves the prefix there, and times a first token."""
    known = (len(ids) - 1) // BLOCK * BLOCK

    def computed() -> Callable[[], object]:
        plain.cache.evict(plain.cache.num_frames)
        return lambda: _first_token(plain, ids, 0)

    def in_pool() -> Callable[[], object]:
        if plain.cache.lookup(ids) < known:
            _first_token(plain, ids, 0)
        return lambda: _first_token(plain, ids, known)

    def in_host() -> Callable[[], object]:
        tiered.cache.tiers.flush()
        tiered.cache.evict(tiered.cache.num_frames)
        return lambda: _first_token(tiered, ids, known)

    def on_disk() -> Callable[[], object]:
        tiered.cache.tiers.flush()
        host.forget()
        tiered.cache.evict(tiered.cache.num_frames)
        return lambda: _first_token(tiered, ids, known)

    return {COMPUTED: computed, POOL: in_pool, HOST: in_host, DISK: on_disk}
