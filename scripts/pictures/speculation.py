"""Speculation: the demo's answer, pass by pass, with the drafts that were kept and those that were rolled back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from pagedkv.checkpoint.records import DEMO_PROMPT
from pagedkv.model import Engine
from pictures.canvas import Canvas

if TYPE_CHECKING:
    from pagedkv.cache import PlannedBatch
    from pagedkv.model.loop.sequence import Chunk

Facts = dict[str, Any]


def repeat() -> Facts:
    """Answer the demo's question by prompt lookup and return the passes behind the prompt."""
    engine = Engine.load(speculate="prompt-lookup")
    request = engine.submit(DEMO_PROMPT)
    completion, choose = request.completions[0], engine.scheduler.next_step
    passes: list[Facts] = []

    def words(tokens: list[int] | tuple[int, ...]) -> list[str]:
        return [str(engine.tokenizer.raw.id_to_token(token)) for token in tokens]

    def watched() -> tuple[list[Chunk], PlannedBatch | None]:
        chunks, batch = choose()
        if chunks and chunks[0].is_last:
            drafts = list(chunks[0].drafts)
            slots = [] if batch is None else batch.plan.slots.tolist()
            passes.append({"drafts": words(drafts), "slots": slots[-1 - len(drafts) :]})
        return chunks, batch

    with patch.object(engine.scheduler, "next_step", watched):
        while not request.finished:
            before = len(completion.token_ids)
            engine.step()
            if len(passes) and "got" not in passes[-1]:
                passes[-1]["got"] = words(completion.token_ids[before:])
    guesses = engine.speculation
    assert guesses is not None
    return {
        "passes": passes,
        "prompt": len(request.prompt_ids),
        "num_drafts": guesses.num_drafts,
        "num_accepted": guesses.num_accepted,
        "tokens_per_pass": round(guesses.tokens_per_pass, 2),
    }


def measure() -> Facts:
    """Return nothing: the picture has no clock."""
    return {}


LEFT, TOP, WIDE = 170, 78, 62


def draw(facts: Facts) -> str:
    """Return the picture: for each pass a line of drafts, and a line of the tokens that it gave."""
    passes, begins = facts["passes"], _begins(facts)
    total = sum(len(one["got"]) for one in passes)
    most = max(begin + len(one["drafts"]) + 1 for begin, one in zip(begins, passes, strict=True))
    kept, lost = facts["num_accepted"], facts["num_drafts"] - facts["num_accepted"]
    height = TOP + sum(_height(one) for one in passes)
    canvas = Canvas(
        LEFT + WIDE * most + 20, height + 34,
        "An answer, pass by pass, with drafts of prompt lookup",
        f"{total} tokens come from {len(passes)} passes. {kept} drafts are kept, {lost} are rolled back. "
        + " ".join(_sentence(i, one) for i, one in enumerate(passes, 1)),
    )  # fmt: skip
    canvas.legend(
        20, 24,
        [("decode thick", "drawn by the model"), ("decode", "draft that the model drew, too: kept"),
         ("lost dash", "draft that it did not draw: rolled back")],
    )  # fmt: skip
    canvas.text(20, TOP - 18, "pass", "head")
    canvas.text(LEFT + 3, TOP - 18, "tokens of the output", "head")
    y = TOP
    for number, (one, begin) in enumerate(zip(passes, begins, strict=True), 1):
        _pass(canvas, (y, begin), number, one)
        y += _height(one)
    canvas.text(
        20, height + 16,
        f"{total} tokens from {len(passes)} passes. {kept} of {kept + lost} drafts came true: "
        f"{facts['tokens_per_pass']} tokens a pass.",
        "head",
    )  # fmt: skip
    return canvas.svg()


def _height(one: Facts) -> int:
    return 70 if one["drafts"] else 40


def _pass(canvas: Canvas, at: tuple[float, int], number: int, one: Facts) -> None:
    """Draw one pass. at: y, and the place of its first token in the output"""
    y, begin = at
    kept = len(one["got"]) - 1
    canvas.text(20, y + 17, str(number), "head")
    canvas.text(46, y + 17, f"{kept + 1} token{'s' * bool(kept)}")
    if one["drafts"]:
        canvas.text(46, y + 45, f"{len(one['drafts'])} drafts, {kept} kept", "dim")
    elif number == 1:
        canvas.text(110, y + 17, "(prompt)", "dim")
    for place, word in enumerate(one["drafts"]):
        x, is_kept = LEFT + WIDE * (begin + place), place < kept
        canvas.box(x + 3, y + 28, (WIDE - 6, 24), "decode" if is_kept else "lost", more="" if is_kept else "dash")
        small = " small" if len(word) > 6 else ""
        canvas.text(x + WIDE / 2, y + 44, word, ("mid" if is_kept else "mid gone") + small)
    for place, word in enumerate(one["got"]):
        x = LEFT + WIDE * (begin + place)
        canvas.box(x + 3, y, (WIDE - 6, 24), "decode", more="thick" if place == kept else "")
        canvas.text(x + WIDE / 2, y + 16, word, "mid head")


def _begins(facts: Facts) -> list[int]:
    """Return the place in the output of the first token of each pass."""
    lengths = [len(one["got"]) for one in facts["passes"]]
    return [sum(lengths[:i]) for i in range(len(lengths))]


def _sentence(number: int, one: Facts) -> str:
    kept = len(one["got"]) - 1
    guessed = f"drafts {' '.join(one['drafts'])}; {kept} kept" if one["drafts"] else "no drafts"
    return f"Pass {number}: {guessed}; output {' '.join(one['got'])}."


def text(facts: Facts) -> str:
    """Return the picture as text."""
    guesses = [" ".join(one["drafts"]) or "-" for one in facts["passes"]]
    wide = max(map(len, guesses))
    rows = [f"pass   {'drafts':<{wide}}   kept   tokens of the output"]
    for i, (one, words) in enumerate(zip(facts["passes"], guesses, strict=True), 1):
        rows.append(f"{i:>4}   {words:<{wide}}   {len(one['got']) - 1:>4}   {' '.join(one['got'])}")
    return "\n".join(rows) + "\n"
