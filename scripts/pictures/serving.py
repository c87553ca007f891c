"""Serving: ten clients of one server over loopback, from the moment they ask to their last token.

The server is that of `pagedkv serve --max-sequences 4`, in this process, so that the steps of its engine can be read.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from unittest.mock import patch

from pagedkv.checkpoint.records import document
from pagedkv.model import Engine, Limits
from pictures.canvas import Canvas

if TYPE_CHECKING:
    from pagedkv.cache import PlannedBatch
    from pagedkv.model.loop.sequence import Chunk
    from pagedkv.model.request import Request

Facts = dict[str, Any]


class Client(NamedTuple):
    """at_ms: when it asks. page: which of the documents it asks about. leaves: after so many pieces, or None."""

    at_ms: int
    page: int
    question: int
    max_tokens: int
    leaves: int | None = None


CLIENTS: Final = (
    Client(0, 0, 0, 90), Client(60, 1, 0, 110), Client(150, 0, 1, 60), Client(220, 2, 0, 120), Client(260, 0, 2, 70),
    Client(300, 1, 1, 2000, leaves=30), Client(330, 0, 3, 60), Client(360, 2, 1, 60), Client(400, 3, 0, 50),
    Client(430, 0, 4, 40),
)  # fmt: skip
PAGES: Final = (900, 1100, 700, 1300)
"""Tokens of the documents."""
MAX_SEQUENCES: Final = 4


@contextmanager
def _served(engine: Engine) -> Iterator[str]:
    """Serve an engine from a thread. Yields: its address"""
    import uvicorn

    from pagedkv.serve.app import Routes, Service
    from pagedkv.serve.streaming import AsyncEngine

    sock = socket.create_server(("127.0.0.1", 0))
    servers: list[uvicorn.Server] = []

    async def serve() -> None:
        async with AsyncEngine(engine) as served:
            config = uvicorn.Config(Routes(Service(served, "bundled")).app, lifespan="off", log_config=None)
            servers.append(uvicorn.Server(config))
            await servers[0].serve(sockets=[sock])

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    while not servers or not servers[0].started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}/v1/completions"
    finally:
        servers[0].should_exit = True
        thread.join()


def _ask(url: str, prompt: str, client: Client, began: float) -> None:
    """Ask at the client's time and read the pieces."""
    time.sleep(max(0.0, began + client.at_ms / 1000 - time.perf_counter()))
    body = {"prompt": prompt, "max_tokens": client.max_tokens, "stream": True, "ignore_eos": True, "temperature": 0}
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        for number, _ in enumerate(line for line in answer if line.startswith(b"data:")):
            if number == client.leaves:
                return


def _run() -> Facts:
    """Serve all clients and return the life of each request, in milliseconds."""
    documents = [document(tokens, seed=seed) for seed, tokens in enumerate(PAGES)]
    prompts = [documents[c.page].prompt(documents[c.page].questions[c.question]) for c in CLIENTS]
    engine = Engine.load(limits=Limits(max_sequences=MAX_SEQUENCES))
    engine.generate(["Otto lives in Ghent."])  # compile and warm
    steps: list[tuple[float, float, list[tuple[Request, int, bool]]]] = []
    choose, compute = engine.scheduler.next_step, engine._compute

    def chosen() -> tuple[list[Chunk], PlannedBatch | None]:
        chunks, batch = choose()
        of_each = [(c.sequence.completion.request, c.num_tokens, c.remaining > 1) for c in chunks]
        steps.append((time.perf_counter(), 0.0, of_each))
        return chunks, batch

    def computed(chunks: list[Chunk], batch: PlannedBatch) -> None:
        compute(chunks, batch)
        steps[-1] = (steps[-1][0], time.perf_counter(), steps[-1][2])

    with (
        patch.object(engine.scheduler, "next_step", chosen),
        patch.object(engine, "_compute", computed),
        _served(engine) as url,
    ):
        began = time.perf_counter()
        threads = [
            threading.Thread(target=_ask, args=(url, *pair, began)) for pair in zip(prompts, CLIENTS, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        while engine.scheduler.running:
            time.sleep(0.01)
    order = [engine.tokenizer.encode(prompt) for prompt in prompts]
    return _lives(steps, began, order)


def _lives(
    steps: list[tuple[float, float, list[tuple[Request, int, bool]]]], began: float, order: list[list[int]]
) -> Facts:
    """Return the lives of the requests. order: the prompts of the clients"""
    requests = sorted(
        {r: None for _, _, of_each in steps for r, _, _ in of_each}, key=lambda r: order.index(r.prompt_ids)
    )
    lives = []
    for request in requests:
        mine = [
            (round((b - began) * 1000, 1), round((e - began) * 1000, 1), count, is_prompt)
            for b, e, of_each in steps
            for r, count, is_prompt in of_each
            if r is request
        ]
        done = request.completions[0]
        lives.append({
            "asked": round((request.submitted_at - began) * 1000, 1), "prompt": len(request.prompt_ids),
            "found": done.cached_tokens, "tokens": len(done.token_ids), "end": done.finish_reason,
            "prefill": [step[:3] for step in mine if step[3]], "decode": [step[:2] for step in mine if not step[3]],
        })  # fmt: skip
    return {"lives": lives}


def repeat() -> Facts:
    """Serve all clients and return what is the same in each run."""
    lives = _run()["lives"]
    return {
        "max_sequences": MAX_SEQUENCES,
        "clients": [{"prompt": life["prompt"], "end": life["end"]} for life in lives],
    }


def measure() -> Facts:
    """Serve all clients and return the times of a run."""
    return _run()


LEFT, TOP, HIGH, SPAN = 150, 62, 30, 700


def draw(facts: Facts) -> str:
    """Return the picture."""
    lives = facts["measured"]["lives"]
    last = max(life["decode"][-1][1] for life in lives)
    scale = SPAN / last
    canvas = Canvas(
        LEFT + SPAN + 60, TOP + HIGH * len(lives) + 80,
        f"Ten clients of a server that runs {facts['max_sequences']} sequences at once",
        "Each request waits, computes its prompt, and decodes. "
        + " ".join(_sentence(i, life) for i, life in enumerate(lives, 1)),
    )  # fmt: skip
    canvas.legend(
        20, 24, [("queued dash", "waits"), ("found", "tokens of the prompt found"), ("prefill", "computes the prompt"),
                 ("decode", "decodes: a token a step"), ("lost", "the client went away")],
    )  # fmt: skip
    bottom = TOP + HIGH * len(lives)
    for at in range(0, int(last) + 1, 100 if last < 1500 else 250):
        canvas.path(f"M{LEFT + at * scale:g} {TOP - 8} V{bottom}", "queued-line thin")
        canvas.text(LEFT + at * scale, bottom + 18, f"{at}", "mid small dim")
    canvas.text(LEFT + SPAN / 2, bottom + 38, "milliseconds", "mid dim")
    number, pause = _longest_step(lives)
    words = f"The step with the prompt of client {number} takes {pause:.0f} ms: so long all readers wait."
    canvas.text(20, bottom + 66, words)
    canvas.text(20, TOP - 10, "client", "dim")
    canvas.text(LEFT - 14, TOP - 10, "prompt", "dim end")
    canvas.text(LEFT + SPAN + 50, TOP - 10, "output", "dim end")
    for i, life in enumerate(lives):
        _life(canvas, TOP + HIGH * i, i + 1, life, scale)
    return canvas.svg()


def _longest_step(lives: list[Facts]) -> tuple[int, float]:
    """Return the client whose prompt made others wait for the longest time, and the ms."""
    steps = [(end - begin, number) for number, life in enumerate(lives, 1) for begin, end, _ in life["prefill"]]
    pause, number = max(steps[1:])
    return number, pause


def _life(canvas: Canvas, y: float, number: int, life: Facts, scale: float) -> None:
    def at(ms: float) -> float:
        return LEFT + ms * scale

    canvas.text(20, y + 17, str(number), "head")
    canvas.text(LEFT - 14, y + 17, f"{life['prompt']:,}", "end")
    first = life["prefill"][0][0]
    canvas.box(at(life["asked"]), y + 6, (max(1.0, at(first) - at(life["asked"])), 12), "queued", more="dash")
    for begin, end, _ in life["prefill"]:
        canvas.box(at(begin), y + 2, (at(end) - at(begin), 20), "prefill")
    begin, end = life["decode"][0][0], life["decode"][-1][1]
    canvas.box(at(begin), y + 2, (at(end) - at(begin), 20), "decode")
    for _, step_end in life["decode"]:
        canvas.path(f"M{at(step_end):.1f} {y + 16} v5", "decode-line thin")
    if life["found"]:
        share = 20 * life["found"] / life["prompt"]
        width = at(life["prefill"][-1][1]) - at(first)
        canvas.box(at(first), y + 22 - share, (width, share), "found")
    if life["end"] == "cancelled":
        canvas.box(at(end) - 3, y, (6, 24), "lost")
    canvas.text(at(end) + 8, y + 17, f"{life['tokens']}", "small dim")


def _sentence(number: int, life: Facts) -> str:
    first = life["prefill"][-1][1] - life["asked"]
    ends = "its client goes away" if life["end"] == "cancelled" else f"it has {life['tokens']} tokens"
    return (
        f"Request {number}, {life['prompt']} tokens of which {life['found']} are found: first token after "
        f"{first:.0f} ms, {ends} at {life['decode'][-1][1]:.0f} ms."
    )


def text(facts: Facts) -> str:
    """Return the picture as text."""
    rows = ["client   prompt   found    asks   waits   prefill   decodes       ends   tokens   (ms)"]
    for i, life in enumerate(facts["measured"]["lives"], 1):
        first, computed, end = life["prefill"][0][0], life["prefill"][-1][1], life["decode"][-1][1]
        away = "   left" if life["end"] == "cancelled" else ""
        rows.append(
            f"{i:>6}{life['prompt']:>9,}{life['found']:>8}{life['asked']:>8.0f}{first - life['asked']:>8.0f}"
            f"{computed - first:>10.0f}{end - computed:>10.0f}{end:>11.0f}{life['tokens']:>9}{away}"
        )
    return "\n".join(rows) + "\n"
