"""Batching: four requests over a pool that is too small for them, step by step.

Continuous batching admits a request between two steps. The steps, and the frames that each of them leaves mapped, are
the same in each run, so this picture has no clock.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

from pagedkv.model import Engine, Limits, SamplingParams
from pictures.canvas import Canvas

if TYPE_CHECKING:
    from pagedkv.cache import PlannedBatch
    from pagedkv.model.loop.sequence import Chunk
    from pagedkv.model.request import Completion, Request

Facts = dict[str, Any]

RECORDS: Final = (
    "Mira keeps a red lamp in the cellar. Otto is a baker from Ghent. Hugo keeps a black violin in the attic."
)
ARRIVALS: Final = {
    "A": (1, f"{RECORDS} Where is the lamp of Mira?", 1, 20),
    "B": (2, "Yara is a poet from Granada. Where does Yara live?", 1, 12),
    "C": (7, f"{RECORDS} Where is the violin of Hugo?", 3, 14),
    "D": (9, "Kofi is a judge from Bristol. He was born in 1955. When was Kofi born?", 1, 6),
}
"""Request → the step before which it comes, its prompt, its samples, and its tokens of output."""
NUM_FRAMES: Final = 22
LIMITS: Final = Limits(max_batch_tokens=16, prefill_chunk=12, max_sequences=6)


def repeat() -> Facts:
    """Run the requests and return the steps."""
    engine = Engine.load(block_size=4, num_frames=NUM_FRAMES, limits=LIMITS, watermark=0.0)
    names: dict[Request, str] = {}
    steps: list[Facts] = []
    choose = engine.scheduler.next_step

    def row(completion: Completion) -> str:
        name = names[completion.request]
        return f"{name}{completion.index + 1}" if ARRIVALS[name][2] > 1 else name

    def watched() -> tuple[list[Chunk], PlannedBatch | None]:
        ran = {row(sequence.completion) for sequence in engine.scheduler.running}
        chunks, batch = choose()
        now["waiting"] = sorted(row(sequence.completion) for sequence in engine.scheduler.waiting)
        now["preempted"] = sorted(ran & set(now["waiting"]))
        for chunk in chunks:
            name, tokens = row(chunk.sequence.completion), len(chunk.sequence.tokens)
            is_known = tokens > len(chunk.sequence.completion.request.prompt_ids)
            kind = "token" if chunk.remaining == 1 and name in ran else "again" if is_known else "prompt"
            now["computed"][name] = [chunk.num_tokens, kind]
            if name not in ran:
                now["found"][name] = tokens - chunk.remaining
        return chunks, batch

    with patch.object(engine.scheduler, "next_step", watched):
        while engine.has_work or len(names) < len(ARRIVALS):
            for name, (first, prompt, samples, length) in ARRIVALS.items():
                if first == len(steps) + 1:
                    # Hot, so that no two samples have the same tokens: equal pages would become one frame.
                    params = SamplingParams(max_tokens=length, ignore_eos=True, temperature=5.0, seed=5)
                    names[engine.submit(prompt, params, num_samples=samples)] = name
            now: Facts = {"computed": {}, "found": {}}
            engine.step()
            spaces = [sequence.space for sequence in engine.scheduler.running if sequence.space is not None]
            references = Counter(int(frame) for space in spaces for frame in space.pages)
            stats = engine.cache.stats()
            now["frames"] = [sum(count > 1 for count in references.values()), stats.mapped, stats.cached]
            steps.append(now)
    prompts = {name: len(request.prompt_ids) for request, name in names.items()}
    return {"steps": steps, "prompts": prompts, "num_frames": NUM_FRAMES, "preemptions": engine.scheduler.preemptions}


def measure() -> Facts:
    """Return nothing: the picture has no clock."""
    return {}


LEFT, TOP, WIDE, HIGH = 64, 74, 30, 30
ROWS: Final = ("A", "B", "C1", "C2", "C3", "D")


def _notes(facts: Facts) -> list[tuple[int, str]]:
    """Return the steps to look at, from 1 on, and what happens there."""
    steps = facts["steps"]
    fork = next(i for i, now in enumerate(steps) if "C2" in now["computed"])
    lost = next(i for i, now in enumerate(steps) if now["preempted"])
    back = next(i for i, now in enumerate(steps) if now["found"] and i > lost)
    last = next(i for i, now in enumerate(steps) if "D" in now["computed"])
    again = steps[back]["computed"]
    name = min(steps[back]["found"])
    return [
        (2, "B begins between two steps of A. A step has at most 16 tokens, of one prompt at most 12."),
        (
            fork,
            f"C finds {steps[fork - 1]['found']['C1']} of its {facts['prompts']['C']} tokens in pages of A. "
            f"Its three samples then share {steps[fork]['frames'][0]} frames.",
        ),
        (lost + 1, f"No frame is left: {steps[lost]['preempted'][0]}, the last that has some, gives its own back."),
        (
            back + 1,
            f"B has ended. {name} finds {steps[back]['found'][name]} tokens in pages that are still cached, "
            f"and computes {again[name][0]}.",
        ),
        (last + 1, f"Now D fits beside the others. It has waited for {last - ARRIVALS['D'][0] + 1} steps."),
    ]


def draw(facts: Facts) -> str:
    """Return the picture."""
    steps = facts["steps"]
    width = LEFT + WIDE * len(steps) + 20
    canvas = Canvas(
        width, 528,
        f"Four requests, step by step, over a pool of {NUM_FRAMES} frames",
        "Requests join and leave between steps. Prompts are computed in chunks, three samples share the pages of their "
        f"prompt, and {facts['preemptions']} times a sequence is preempted and goes on later. "
        + " ".join(f"Step {at}: {words}" for at, words in _notes(facts)),
    )  # fmt: skip
    canvas.legend(
        LEFT, 22,
        [("prefill", "tokens of a prompt, or computed again"), ("decode", "one new token"), ("found", "tokens found"),
         ("queued dash", "waits"), ("lost", "preempted")],
    )  # fmt: skip
    for number, (at, _) in enumerate(_notes(facts), 1):
        x = LEFT + WIDE * (at - 0.5)
        canvas.text(x, 44, "①②③④⑤"[number - 1], "mid big")
        canvas.path(f"M{x:g} {TOP} V{TOP + 6 * HIGH + 14 + 5 * facts['num_frames']}", "axis thin dash")
    for i in range(len(steps)):
        canvas.text(LEFT + WIDE * (i + 0.5), TOP - 10, str(i + 1), "mid small dim")
    canvas.text(LEFT - 10, TOP - 10, "step", "small dim end")
    for place, name in enumerate(ROWS):
        y = TOP + HIGH * place
        canvas.text(LEFT - 10, y + 18, name, "head end")
        for i, now in enumerate(steps):
            _cell(canvas, (LEFT + WIDE * i, y), name, now)
    _frames(canvas, facts, TOP + HIGH * len(ROWS) + 14)
    for number, (at, words) in enumerate(_notes(facts), 1):
        canvas.text(LEFT, 434 + 20 * (number - 1), f"{'①②③④⑤'[number - 1]}  step {at}", "head")
        canvas.text(LEFT + 84, 434 + 20 * (number - 1), words)
    return canvas.svg()


def _cell(canvas: Canvas, at: tuple[float, float], name: str, now: Facts) -> None:
    """Draw what a step did for one sequence."""
    x, y = at[0] + 1, at[1] + 1
    size = (WIDE - 2.0, HIGH - 4.0)
    if name in now["preempted"]:
        canvas.box(x, y, size, "lost")
        canvas.text(x + size[0] / 2, y + 17, "×", "mid head")
    elif name in now["computed"]:
        count, kind = now["computed"][name]
        found = now["found"].get(name, 0)
        canvas.box(x, y, size, "decode" if kind == "token" else "prefill")
        if found:
            canvas.box(x, y + 14, (size[0], size[1] - 14), "found")
            canvas.text(x + size[0] / 2, y + 23.5, str(found), "mid small")
        canvas.text(x + size[0] / 2, y + (11.5 if found else 17), str(count), "mid small" if found else "mid")
    elif name in now["waiting"] or (name[0] == "C" and name != "C1" and "C1" in now["waiting"]):
        canvas.box(x, y, size, "queued", more="dash")


def _frames(canvas: Canvas, facts: Facts, top: float) -> None:
    """Draw how many frames are shared, mapped by one sequence, cached and free after each step."""
    num_frames, unit = facts["num_frames"], 5
    bottom = top + unit * num_frames
    canvas.text(LEFT - 10, top + 10, f"{num_frames}", "dim small end")
    canvas.text(LEFT - 10, bottom, "0", "dim small end")
    canvas.text(LEFT - 10, (top + bottom) / 2 - 4, "frames", "head end")
    for i, now in enumerate(facts["steps"]):
        shared, mapped, cached = now["frames"]
        y = bottom
        for count, kind in ((shared, "found"), (mapped - shared, "prefill"), (cached, "queued")):
            y -= unit * count
            if count:
                canvas.box(LEFT + WIDE * i + 1, y, (WIDE - 2, unit * count), kind)
    canvas.path(f"M{LEFT} {top} H{LEFT + WIDE * len(facts['steps'])}", "lost-line dash thin")
    canvas.path(f"M{LEFT} {bottom} H{LEFT + WIDE * len(facts['steps'])}", "axis thin")
    canvas.legend(
        LEFT, bottom + 22,
        [("found", "frames of several sequences"), ("prefill", "of one"), ("queued", "cached: prompts find it")],
    )  # fmt: skip


def text(facts: Facts) -> str:
    """Return the picture as text."""
    steps = facts["steps"]
    rows = ["step  " + "".join(f"{i:>3}" for i in range(1, len(steps) + 1))]
    for name in ROWS:
        cells = []
        for now in steps:
            count, kind = now["computed"].get(name, (0, ""))
            waits = "." if name in now["waiting"] else ""
            cells.append(
                "x" if name in now["preempted"] else ("|" if kind == "token" else str(count)) if kind else waits
            )
        rows.append(f"{name:<6}" + "".join(f"{cell:>3}" for cell in cells).rstrip())
    for place, label in enumerate(("shared", "mapped", "cached")):
        rows.append(f"{label:<6}" + "".join(f"{now['frames'][place]:>3}" for now in steps))
    rows += ["", "12 tokens of a prompt, or computed again    | one new token    . waits    x preempted", ""]
    for at, words in _notes(facts):
        rows.append(f"step {at}: {words}")
    return "\n".join(rows) + "\n"
