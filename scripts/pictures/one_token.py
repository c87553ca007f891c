"""One token, end to end: a decode step of the bundled checkpoint, with its page table, slots, frames and times.

The pool is tiny: 12 frames of 4 tokens. A first question about the same records has left pages behind, so the second
one finds four of them. The picture follows the third token of the answer, for which the step maps a new frame.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

from pagedkv.model import Engine, SamplingParams
from pagedkv.model import engine as engine_module
from pagedkv.model.decoder import BoundLayer, BoundLayers
from pagedkv.model.loop.outcome import outcome_of
from pagedkv.model.loop.runner import ModelRunner
from pictures.canvas import Canvas

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagedkv.model.request import Request

Facts = dict[str, Any]

RECORDS: Final = "Mira keeps a red lamp in the cellar. Otto lives in Ghent."
FIRST: Final = f"{RECORDS} Where does Otto live?"
SECOND: Final = f"{RECORDS} Where is the lamp of Mira?"
FOLLOWED: Final = 2
"""The place in the output of the token whose step is drawn."""
STAGES: Final = ("schedule", "plan", "write_kv", "attention", "layers", "sample", "commit", "deliver")
"""The parts of a step. layers: all of the forward pass but the writes and the attention."""


def _engine() -> Engine:
    return Engine.load(block_size=4, num_frames=12)


def _word(engine: Engine, token: int) -> str:
    return str(engine.tokenizer.raw.id_to_token(token))


def _until(engine: Engine, request: Request, num_output: int) -> None:
    while len(request.completions[0].token_ids) < num_output:
        engine.step()


def repeat() -> Facts:
    """Run the step and return what is the same in each run."""
    engine = _engine()
    params = SamplingParams(max_tokens=16)
    first = engine.submit(FIRST, params)
    left: list[int] = []
    while not first.finished:
        left = [] if not engine.scheduler.running else _pages(engine)
        tokens = [*first.prompt_ids, *first.completions[0].token_ids]
        engine.step()
    contents = {frame: tokens[4 * page : 4 * page + 4] for page, frame in enumerate(left)}
    second = engine.submit(SECOND, params)
    _until(engine, second, FOLLOWED + 1)
    before = _pages(engine)
    planned: dict[str, Any] = {}
    plan = engine.scheduler._plan

    def watched(spaces: Any, counts: Any) -> Any:
        batch = plan(spaces, counts)
        planned.update(
            slots=batch.plan.slots.tolist(), positions=batch.plan.positions.tolist(),
            seq_lens=batch.plan.seq_lens.tolist(), copies=batch.plan.copies.tolist(), pages=_pages(engine),
        )  # fmt: skip
        return batch

    with patch.object(engine.scheduler, "_plan", watched):
        engine.step()
    output = second.completions[0].token_ids
    tokens = [*second.prompt_ids, *output[: FOLLOWED + 1]]
    contents |= {frame: tokens[4 * page : 4 * page + 4] for page, frame in enumerate(planned["pages"])}
    spec = engine.cache.spec
    return {
        "tokens": [_word(engine, token) for token in tokens],
        "drawn": _word(engine, output[FOLLOWED + 1]),
        "found": second.completions[0].cached_tokens,
        "pages_before": before,
        **planned,
        "frames": {str(frame): [_word(engine, token) for token in held] for frame, held in sorted(contents.items())},
        "num_frames": 12,
        "block_size": 4,
        "frame_bytes": spec.frame_bytes,
        "bytes_per_token": spec.bytes_per_token,
        "num_layers": spec.num_layers,
    }


def _pages(engine: Engine) -> list[int]:
    space = engine.scheduler.running[0].space
    assert space is not None
    return [int(frame) for frame in space.pages]


def measure() -> Facts:
    """Time the parts of decode steps. Returns: microseconds of each, medians of 300 steps"""
    engine = Engine.load()
    request = engine.submit(SECOND, SamplingParams(max_tokens=400, ignore_eos=True))
    _until(engine, request, 50)
    spent: dict[str, list[float]] = {stage: [] for stage in ("step", "next", "plan", "forward", *STAGES[2:])}

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*given: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*given, **options)
            finally:
                now[name] = now.get(name, 0.0) + time.perf_counter() - began

        return wrapper

    layers = engine.forward.layers
    engine.forward.layers = BoundLayers(
        BoundLayer(timed("write_kv", at.store), timed("attention", at.attend))  # type: ignore[arg-type]
        for at in layers
    )
    with (
        patch.object(engine.scheduler, "_plan", timed("plan", engine.scheduler._plan)),
        patch.object(engine.scheduler, "next_step", timed("next", engine.scheduler.next_step)),
        patch.object(ModelRunner, "__call__", timed("forward", ModelRunner.__call__)),
        patch.object(engine_module, "outcome_of", timed("sample", outcome_of)),
        patch.object(engine.cache, "commit", timed("commit", engine.cache.commit)),
    ):
        for _ in range(300):
            now: dict[str, float] = {}
            timed("step", engine.step)()
            now["layers"] = now["forward"] - now["write_kv"] - now["attention"]
            now["deliver"] = now["step"] - now["next"] - now["forward"] - now["sample"] - now["commit"]
            for name, value in now.items():
                spent[name].append(value)
    median = {name: statistics.median(values) * 1e6 for name, values in spent.items()}
    median["schedule"] = median["next"] - median["plan"]
    return {"step": round(median["step"]), **{stage: round(median[stage]) for stage in STAGES}}


def _stations(facts: Facts) -> list[tuple[str, str, list[str]]]:
    """Return, of each call of the step: its name, its stage, and what it did."""
    slot, length = facts["slots"][0], facts["seq_lens"][0]
    page, frame = len(facts["pages"]) - 1, facts["pages"][-1]
    reads = length * facts["bytes_per_token"]
    return [
        ("schedule", "schedule", ["1 sequence runs,", "1 token of it", "is to be computed"]),
        ("plan", "plan", [f"page {page} → frame {frame},", f"slot {frame} × 4 + 0 = {slot},", "no copies"]),
        (
            "write_kv",
            "write_kv",
            [f"{facts['num_layers']} layers, slot {slot}:", f"{facts['bytes_per_token']:,} bytes", "of K and V"],
        ),
        ("attention", "attention", [f"{facts['num_layers']} layers,", f"{length} tokens,", f"{reads:,} bytes"]),
        ("sample", "sample", ["660 logits,", "the likeliest:", f"“{facts['drawn']}”"]),
        ("commit", "commit", [f"length {length - 1} → {length},", "no page is full,", "none is published"]),
    ]


def draw(facts: Facts) -> str:
    """Return the picture."""
    canvas = Canvas(
        920, 500,
        "One decode step of the bundled checkpoint",
        f"The token “{facts['tokens'][-1]}” at position {facts['positions'][0]} gets page {len(facts['pages']) - 1}, "
        f"which the plan maps to frame {facts['pages'][-1]}: slot {facts['slots'][0]}. Attention reads "
        f"{facts['seq_lens'][0]} tokens through the page table {facts['pages']}, and “{facts['drawn']}” is drawn.",
    )  # fmt: skip
    _sequence(canvas, facts)
    _pool(canvas, facts)
    _calls(canvas, facts)
    return canvas.svg()


def _kind(facts: Facts, position: int) -> str:
    if position >= facts["seq_lens"][0] - 1:
        return "decode"
    return "found" if position < facts["found"] else "prefill"


def _page(canvas: Canvas, at: tuple[float, float], words: list[str], kinds: list[str]) -> None:
    """Draw four slots from a point on: those with words in their colours, the others as free."""
    for offset in range(4):
        x, is_known = at[0] + 50 * offset, offset < len(words)
        canvas.box(x, at[1], (50, 26), kinds[offset] if is_known else "free", more="" if is_known else "dash")
        if is_known:
            canvas.text(x + 25, at[1] + 17, words[offset], "mid small" if len(words[offset]) > 6 else "mid")


def _sequence(canvas: Canvas, facts: Facts) -> None:
    """Draw the tokens of the sequence page by page, and its page table beside them."""
    canvas.text(20, 28, "the sequence", "head")
    canvas.text(244, 28, "page table", "head")
    for page, frame in enumerate(facts["pages"]):
        y = 42 + 34 * page
        kinds = [_kind(facts, 4 * page + offset) for offset in range(4)]
        _page(canvas, (20, y), facts["tokens"][4 * page : 4 * page + 4], kinds)
        canvas.text(240, y + 17, str(page), "dim end")
        is_new = frame not in facts["pages_before"]
        canvas.box(250, y, (54, 26), "decode" if is_new else "plain", more="thick" if is_new else "")
        canvas.text(277, y + 17, str(frame), "mid head")


def _pool(canvas: Canvas, facts: Facts) -> None:
    """Draw the frames of the pool, two in a row, and an arrow to the new one."""
    left = 396
    canvas.text(left, 28, "the pool", "head")
    size = f"{facts['num_frames']} frames of 4 slots; each has {facts['frame_bytes']:,} bytes, K and V of all layers"
    canvas.text(left + 64, 28, size, "dim")
    pages = {frame: page for page, frame in enumerate(facts["pages"])}
    for frame in range(facts["num_frames"]):
        x, y = left + (frame % 2) * 256, 42 + (frame // 2) * 40
        canvas.text(x + 16, y + 17, str(frame), "head end")
        page = pages.get(frame)
        kinds = ["queued" if page is None else _kind(facts, 4 * page + offset) for offset in range(4)]
        _page(canvas, (x + 24, y), facts["frames"].get(str(frame), []), kinds)
    page, frame = len(facts["pages"]) - 1, facts["pages"][-1]
    y, to = 42 + 34 * page + 13, 42 + (frame // 2) * 40 + 13
    canvas.path(f"M304 {y} C 350 {y}, 350 {to}, {left + 2} {to}", "decode-line arrow")
    kinds = ["found found", "prefill computed", "decode this step", "queued cached", "free free"]
    more = {"decode": " thick", "free": " dash"}
    pairs = [kind.split(" ", 1) for kind in kinds]
    canvas.legend(left + 24, 300, [(kind + more.get(kind, ""), words) for kind, words in pairs])


def _calls(canvas: Canvas, facts: Facts) -> None:
    """Draw the calls of the step from left to right, and the share of the time that each takes."""
    times, top = facts["measured"], 330
    canvas.path(f"M20 {top} H900", "axis thin")
    canvas.text(20, top + 24, f"one step: {times['step']:,} µs", "head")
    x = 20.0
    order = ("schedule", "plan", "write_kv", "attention", "layers", "sample", "commit", "deliver")
    total = sum(times[stage] for stage in order)
    centres: dict[str, float] = {}
    kinds = {"schedule": "queued", "plan": "queued", "write_kv": "decode", "attention": "decode", "layers": "prefill"}
    for stage in order:
        width = 880 * times[stage] / total
        canvas.box(x, top + 34, (width, 18), kinds.get(stage, "queued"))
        centres[stage] = x + width / 2
        if stage == "layers":
            canvas.text(centres[stage], top + 47, "matrices, norms, rotation, logits", "mid small")
        x += width
    for i, (name, stage, lines) in enumerate(_stations(facts)):
        left = 20 + 148 * i
        canvas.path(f"M{centres[stage]:g} {top + 53} L{left + 4:g} {top + 76}", "axis thin")
        canvas.text(left, top + 92, name, "code head")
        canvas.text(left, top + 108, f"{times[stage]:,} µs", "dim")
        for line, words in enumerate(lines):
            canvas.text(left, top + 128 + 16 * line, words)


def text(facts: Facts) -> str:
    """Return the picture as text."""
    rows = ["sequence                      page table   frames"]
    for page, frame in enumerate(facts["pages"]):
        words = " ".join(facts["tokens"][4 * page : 4 * page + 4])
        where = "found" if 4 * page + 4 <= facts["found"] else "computed"
        where = where if frame in facts["pages_before"] else "new: mapped by this step"
        rows.append(f"  {words:<27} {page} → {frame:<7}  {where}")
    times = facts["measured"]
    rows += ["", f"one step: {times['step']:,} µs"]
    for name, stage, lines in _stations(facts):
        rows.append(f"  {name:<10} {times[stage]:>4} µs   {' '.join(lines)}")
    rows.append(
        f"  {'the rest':<10} {times['layers']:>4} µs   matrices, norms, rotation and logits of the forward pass"
    )
    rows.append(f"  {'deliver':<10} {times['deliver']:>4} µs   the token becomes text")
    return "\n".join(rows) + "\n"
