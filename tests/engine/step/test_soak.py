"""A soak: all ways of decoding at once, on a pool that holds a few, with tenants, priorities, cancels and deadlines.

Some requests follow a grammar. Drafts are those of prompt lookup or of a draft model; one model has windows, behind
which frames are given back, and one has recurrent states, of which there are few.

Each request that ends by itself has the output that it has alone, and no frame is in use at the end.
"""

from __future__ import annotations

import importlib.util
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pytest

from pagedkv.cache import PagedKVCache
from pagedkv.engine.drafts.draft_model import DraftModel
from pagedkv.engine.drafts.prompt_lookup import PromptLookup
from pagedkv.engine.model.pool import new_cache
from pagedkv.engine.requests.limits import Limits
from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.engine.step.engine import Engine
from tests.engine.conftest import Checkpoint, Checkpoints, prompt_of
from tests.engine.sampling.test_grammar import byte_tokenizer
from tests.engine.step.test_engine import idle

if TYPE_CHECKING:
    from pagedkv.engine.drafts.speculation import Drafter
    from pagedkv.engine.requests.request import Request


STOPS: Final = list(range(0, 97, 13))
WAYS: Final[dict[str, tuple[SamplingParams, int]]] = {
    "greedy": (SamplingParams(max_tokens=25), 1),
    "ends early": (SamplingParams(max_tokens=25, stop_ids=STOPS, logprobs=2), 1),
    "sampled": (SamplingParams(max_tokens=20, temperature=1.0, seed=1, frequency_penalty=0.5), 1),
    "samples": (SamplingParams(max_tokens=15, temperature=1.0, seed=2, top_k=20), 3),
    "beams": (SamplingParams(max_tokens=12, num_beams=3), 2),
}
if importlib.util.find_spec("llguidance"):
    WAYS["grammar"] = (SamplingParams(max_tokens=20, temperature=1.5, seed=5, regex="[a-z]{3,9}(-[0-9]+){2}!"), 2)
"""By name, the parameters of a request and the number of its outputs."""
LENGTHS: Final = (3, 20, 40, 41, 60)


@dataclass
class Asked:
    """A request of the soak. cancel_at: the step before which it is cancelled; None for never."""

    request: Request
    way: str
    length: int
    cancel_at: int | None


def run(engine: Engine, count: int, dice: random.Random) -> list[Asked]:
    """Submit `count` requests in bursts while the engine steps, cancel some, and step until all have ended."""
    asked, step = list[Asked](), 0
    while len(asked) < count or engine.has_work:
        if len(asked) < count and len(engine.scheduler.waiting) < 12:
            for _ in range(min(dice.randint(1, 6), count - len(asked))):
                way, length = dice.choice(list(WAYS)), dice.choice(LENGTHS)
                tenant = dice.choice((b"", b"", b"wide", b"narrow"))
                if way == "beams" and engine.cache.states and engine.cache.states_of(tenant) < 6:
                    way = next(iter(WAYS))  # three beams of it would be refused
                params, num_samples = WAYS[way]
                options: dict[str, Any] = {"priority": dice.choice((0, 0, 0, -1, 2)), "num_samples": num_samples}
                options["tenant"] = tenant
                options["timeout"] = 1e-9 if dice.random() < 0.02 else None
                cancel_at = step + dice.randint(0, 30) if dice.random() < 0.15 else None
                request = engine.submit(prompt_of(length), params, **options)
                asked.append(Asked(request, way, length, cancel_at))
        for one in asked:
            if one.cancel_at == step and not one.request.finished:
                engine.cancel(one.request)
        engine.step()
        step += 1
    return asked


def drafter_of(kind: str, checkpoint: Checkpoint) -> Drafter:
    if kind == "draft model":
        decoder = checkpoint.decoder()
        return DraftModel(decoder, PagedKVCache(decoder.config.spec(), num_frames=12), num_tokens=3)
    return PromptLookup(shortest=1, num_tokens=4)


def build(checkpoint: Checkpoint, *, num_frames: int = 400, prefix_cache: bool = True, **options: Any) -> Engine:
    decoder = checkpoint.decoder()
    states = (None, options.pop("states", 64))[decoder.config.linear is not None]
    cache = new_cache(
        decoder, block_size=16, kv_dtype=None, grouped=True, num_frames=num_frames, prefix_cache=prefix_cache,
        watermark=0.05, state_memory=states,
    )  # fmt: skip
    return Engine(decoder, byte_tokenizer(), cache, **options)


@pytest.mark.parametrize("count", [30, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "kind", "prefix_cache"),
    [
        ("llama", "prompt lookup", True),
        pytest.param("llama", "draft model", False, marks=pytest.mark.slow),
        pytest.param("mistral", "prompt lookup", True, marks=pytest.mark.slow),
        ("qwen3_5", "prompt lookup", True),
        pytest.param("qwen3_5", "prompt lookup", False, marks=pytest.mark.slow),
    ],
    ids=["lookup", "draft model", "windows", "states", "states alone"],
)
def test_mixed_requests_end_as_alone_and_leave_nothing(
    name: str, kind: str, prefix_cache: bool, count: int, checkpoint: Checkpoints
) -> None:
    drafter = drafter_of(kind, checkpoint(name))
    limits = Limits(max_batch_tokens=64, max_sequences=10, prefill_chunk=24)
    options: dict[str, Any] = {"num_frames": 24, "prefix_cache": prefix_cache, "limits": limits}
    if name == "qwen3_5":
        options["states"] = 11
    engine = build(checkpoint(name), drafter=drafter, **options)
    engine.cache.set_quota(b"wide", hard=16, soft=10)
    engine.cache.set_quota(b"narrow", hard=5)
    asked = run(engine, count, random.Random(11))

    alone: dict[tuple[str, int], list[list[int]]] = {}
    reasons = dict.fromkeys(("whole", "cancelled", "error"), 0)
    for one in asked:
        completions = one.request.completions
        if any(c.finish_reason in ("cancelled", "error") for c in completions):
            reasons["cancelled" if one.cancel_at is not None else "error"] += 1
            assert one.cancel_at is not None or one.request.deadline is not None or one.request.tenant == b"narrow"
            continue
        if (one.way, one.length) not in alone:
            params, num_samples = WAYS[one.way]
            found = build(checkpoint(name)).generate([prompt_of(one.length)], params, num_samples=num_samples)
            alone[one.way, one.length] = [c.token_ids for c in found[0].completions]
        assert [c.token_ids for c in completions] == alone[one.way, one.length], (one.way, one.length)
        reasons["whole"] += 1
    assert reasons["whole"] > 0.6 * count
    assert reasons["cancelled"] > 0
    assert reasons["error"] > 0
    assert engine.scheduler.preemptions > 0.01 * count
    assert engine.speculation.num_accepted > 0
    assert idle(engine)
    engine.cache.forget()
    assert engine.cache.stats().free == engine.cache.num_frames
    if isinstance(drafter, DraftModel):
        drafter.cache.check(3)
        assert drafter.cache.stats().mapped == 0
