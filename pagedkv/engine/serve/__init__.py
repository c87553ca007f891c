"""Serving: an engine that many clients read at once, in one process or over HTTP. Knows the Engine and its requests.

    streaming ── AsyncEngine: `async for piece in engine.stream(prompt)`; needs no extra
       ▲
    app ── bodies, answers ──▶ OpenAI's completions and chat, as FastAPI routes      with the extra `serve`
       ▲
    process ── gate, shares ──▶ `pagedkv serve`: uvicorn, signals, limits

May import model, and the collector of prometheus metrics; never cli.
"""

from __future__ import annotations

from pagedkv.engine.serve.streaming import AsyncEngine, Piece, Stream

__all__ = ["AsyncEngine", "Piece", "Stream"]
