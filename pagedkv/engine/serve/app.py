"""The routes of a server in the form of OpenAI's API: /v1/completions, /v1/chat/completions, /v1/models; and its state.

    body ─▶ read ─▶ prompts, params ─▶ AsyncEngine.stream_all ─▶ pieces ─▶ server-sent events, or one answer
            400     in a worker thread    400, 429, 503            │
                                                                   └── the client went away: the stream is closed

Every error has the form of OpenAI, {"error": {"message", "type", "param", "code"}}.
"""

from __future__ import annotations

import asyncio
import re
import time
from bisect import bisect_left
from collections.abc import AsyncIterator
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, generate_latest
from starlette.exceptions import HTTPException

from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.engine.serve import answers, bodies
from pagedkv.engine.serve.bodies import BadBody, Body, ChatBody, CompletionBody, _cut, read
from pagedkv.engine.serve.gate import GONE, RETRY_SECONDS
from pagedkv.engine.serve.shares import Place
from pagedkv.engine.serve.streaming import AsyncEngine, Stream
from pagedkv.engine.step.engine import Engine
from pagedkv.errors import CheckpointError, EngineStopped, InvalidRequest, PagedKVError, QueueFull
from pagedkv.integrations import prometheus

MOST_LOGPROBS: Final = 2**22
"""Log-probabilities of one answer: each takes about 100 bytes until the answer is sent."""


_RECEIPT: Final = "X-Cache-Receipt"
"""The header that says how much of a prompt the cache knew, and why no more."""

_HEAD_SECONDS: Final = 10.0
"""Seconds for which the header of a stream waits for the first piece."""


@dataclass(frozen=True)
class Service:
    """A model under a name.

    max_prompt: tokens of a prompt; None for those that fit. retain_s: seconds for which a client may let its pages be
    retained, at most. step_s: seconds that a step may take on a sound server.
    """

    engine: AsyncEngine
    name: str
    max_prompt: int | None = None
    step_s: float = 300.0
    retain_s: float = 3600.0


class Routes:
    """The handlers over one service. `app` is the ASGI application.

    is_draining: set by the process when it will end.
    """

    def __init__(self, service: Service) -> None:
        self._service, self._engine = service, service.engine.engine
        self._texts = answers.TokenTexts(self._engine.tokenizer)
        self._registry = CollectorRegistry()
        prometheus.register_engine(self._engine, registry=self._registry)
        meaning = "Answers under /v1 by status, refusals too; 499: the client went away before."
        self._answers = Counter("pagedkv_answers", meaning, ["status"], registry=self._registry)
        self.is_draining: bool = False
        self._began = int(time.time())
        self._reading = Lock()  # a reader holds the interpreter: the event loop waits for one of them, not for all
        app = FastAPI(title="pagedkv", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
        app.add_api_route("/v1/completions", self.completions, methods=["POST"])
        app.add_api_route("/v1/chat/completions", self.chat, methods=["POST"])
        app.add_api_route("/tokenize", self.tokenize, methods=["POST"])
        app.add_api_route("/detokenize", self.detokenize, methods=["POST"])
        for path, handler in (
            ("/v1/models", self.models),
            ("/v1/models/{name:path}", self.model),
            ("/health", self.health),
            ("/metrics", self.scrape),
        ):
            app.add_api_route(path, handler, methods=["GET", "HEAD"])
        app.add_exception_handler(PagedKVError, self._refusal)
        app.add_exception_handler(HTTPException, self._refusal)
        app.add_exception_handler(Exception, self._refusal)
        self.app: Any = app

    # --- what can be asked ---

    async def completions(self, request: Request) -> Response:
        """Answer POST /v1/completions."""
        return await self._answered(request, CompletionBody)

    async def chat(self, request: Request) -> Response:
        """Answer POST /v1/chat/completions."""
        return await self._answered(request, ChatBody)

    async def tokenize(self, request: Request) -> Response:
        """Answer POST /tokenize: the token ids of a prompt or of messages, however many they are."""
        return JSONResponse(await asyncio.to_thread(self._tokens, await request.body()))

    async def detokenize(self, request: Request) -> Response:
        """Answer POST /detokenize: the text of token ids, special tokens included."""
        return JSONResponse(await asyncio.to_thread(self._text, await request.body()))

    async def models(self) -> Response:
        """Answer GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def model(self, name: str) -> Response:
        """Answer GET /v1/models/NAME."""
        self._check_model(name)
        return JSONResponse(self._described())

    async def health(self) -> Response:
        """Answer GET /health: 200 while requests are taken and steps end."""
        if self._service.engine.stopped is not None:
            raise self._service.engine.stopped
        if (busy_s := self._service.engine.busy_s) > self._service.step_s:
            body = {"status": "hung", "reason": f"a step began {busy_s:.0f} s ago and has not ended"}
            return JSONResponse(body, 503)
        if self.is_draining:
            return JSONResponse({"status": "draining", "reason": "the server ends and takes no new request"}, 503)
        return JSONResponse({"status": "ok"})

    async def scrape(self) -> Response:
        """Answer GET /metrics."""
        text = generate_latest(self._registry)  # the figures of the engine are read now
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    def count(self, status: int) -> None:
        """Count an answer under /v1."""
        self._answers.labels(str(status)).inc()

    # --- how it is answered ---

    async def _answered(self, request: Request, kind: type[Body]) -> Response:
        place: Place | None = getattr(request.state, "place", None)
        most = self._engine.scheduler.limits.max_sequences if place is None else place.most_outputs
        body, prompts, params = await asyncio.to_thread(self._prepared, kind, await request.body(), most)
        options: dict[str, Any] = {"num_samples": body.n or 1, "priority": body.priority or 0}
        options["retain_s"] = min(body.retain_s, self._service.retain_s)
        options["tenant"] = getattr(request.state, "tenant", b"")  # without a gate all are one tenant
        options["salt"] = (body.cache_salt or "").encode()
        if place is not None:
            turn = asyncio.ensure_future(place.begin(len(prompts) * (body.n or 1), options["priority"]))
            if not await _ended(turn, request):
                return Response(status_code=GONE)
            options["priority"] = turn.result()
        stream = self._service.engine.stream_all(prompts, params, **options)
        await stream.begin()
        answer = answers.Answer(
            self._service.name, isinstance(body, ChatBody), body.n or 1, params.logprobs is not None, self._texts,
            explains=bool(body.explain_cache),
            is_echo=isinstance(body, CompletionBody) and bool(body.echo),
        )  # fmt: skip
        if body.stream:
            asked = body.stream_options
            first = asyncio.ensure_future(stream.wait(_HEAD_SECONDS))  # the header tells what the first piece knows
            if not await _ended(first, request):
                stream.close()
                return Response(status_code=GONE)
            has_last = bool(asked and asked.include_usage) or answer.explains
            return _EventStream(stream, self._told(stream, answer, with_usage=has_last))
        return await self._whole(request, stream, answer)

    def _prepared(self, kind: type[Body], data: bytes, most: int) -> tuple[Body, list[list[int]], SamplingParams]:
        """Return a body of up to `most` outputs, its prompts and parameters. Raises: InvalidRequest, CheckpointError"""
        with self._reading:
            body = read(kind, data)
        self._check_model(body.model)
        fit = _most_tokens(self._engine, 0) - 1  # one is left for the output
        prompts = body.prompts(self._engine.tokenizer, min(fit, self._service.max_prompt or fit))
        longest = max(map(len, prompts))
        limits, num_outputs = self._engine.scheduler.limits, len(prompts) * (body.n or 1)
        if num_outputs > most:
            raise InvalidRequest(
                f"the body asks for {num_outputs} outputs, this server computes {most} at once for a client; "
                "send fewer prompts, or a smaller n"
            )
        if limits.max_waiting is not None and len(prompts) > limits.max_waiting:
            raise InvalidRequest(
                f"the body has {len(prompts)} prompts, {limits.max_waiting} may wait on this server; send fewer"
            )
        params = body.params(_most_tokens(self._engine, longest))
        entries = 0 if params.logprobs is None else num_outputs * params.max_tokens * (params.logprobs + 1)
        if params.prompt_logprobs is not None:
            entries += sum(map(len, prompts)) * (body.n or 1) * (params.prompt_logprobs + 1)
        if entries > MOST_LOGPROBS:
            raise InvalidRequest(
                f"the body asks for up to {entries:,} log-probabilities, the limit is {MOST_LOGPROBS:,}; "
                "lower max_tokens, or ask for fewer alternatives or outputs"
            )
        return body, prompts, params

    def _tokens(self, data: bytes) -> dict[str, Any]:
        with self._reading:
            body = read(bodies._TokenizeBody, data)
        self._check_model(body.model)
        ids = body.token_ids(self._engine.tokenizer)
        longest = self._engine.decoder.config.max_position_embeddings
        return {"count": len(ids), "max_model_len": longest, "tokens": ids}

    def _text(self, data: bytes) -> dict[str, Any]:
        with self._reading:
            body = read(bodies._DetokenizeBody, data)
        self._check_model(body.model)
        return {"prompt": self._engine.tokenizer.decode(body.tokens, skip_special_tokens=False)}

    async def _whole(self, request: Request, stream: Stream, answer: answers.Answer) -> Response:
        """Wait for the end of all completions, or of the client."""
        async with stream:
            finished = asyncio.ensure_future(_exhausted(stream))
            if not await _ended(finished, request):
                return Response(status_code=GONE)
            finished.result()
        if errors := [c.error for one in stream.requests for c in one.completions if c.error]:
            return self._error(500, errors[0], "server_error")
        body = await asyncio.to_thread(lambda: JSONResponse(answer.whole(stream.requests)).body)
        return Response(body, media_type="application/json", headers={_RECEIPT: answers.receipts(stream.requests)[1]})

    async def _told(self, stream: Stream, answer: answers.Answer, *, with_usage: bool) -> AsyncIterator[bytes]:
        """Yield the server-sent events of a stream. An error is the last event: the status was sent before."""
        try:
            async for piece in stream:
                yield answers.event(answer.chunk(piece))
                if piece.completion.error and piece.finish_reason:
                    yield answers.event(answers.error(piece.completion.error, "server_error"))
                    return
            if with_usage:
                yield answers.event(answer.last(stream.requests))
            yield b"data: [DONE]\n\n"
        except EngineStopped as error:
            yield answers.event(answers.error(str(error), "server_error"))
        finally:
            stream.close()

    def _described(self) -> dict[str, Any]:
        longest = self._engine.decoder.config.max_position_embeddings
        own = {"created": self._began, "owned_by": "pagedkv", "max_model_len": longest}
        return {"id": self._service.name, "object": "model", **own}

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._service.name):
            raise _NoModel(f"the model {_cut(name)!r} is not served here; the model is {self._service.name!r}")

    async def _refusal(self, _: Request, error: Exception) -> Response:
        """Return an exception of a handler as an answer."""
        if isinstance(error, QueueFull):
            answer = self._error(429, str(error), "rate_limit_error", code="rate_limit_exceeded")
            answer.headers["Retry-After"] = str(RETRY_SECONDS)
            return answer
        if isinstance(error, _NoModel):
            return self._error(404, str(error), "invalid_request_error", param="model", code="model_not_found")
        if isinstance(error, InvalidRequest | CheckpointError):
            return self._error(400, str(error), "invalid_request_error", param=_param(error))
        if isinstance(error, EngineStopped):
            return self._error(503, str(error), "server_error")
        if isinstance(error, HTTPException):
            answer = self._error(error.status_code, f"{error.detail}: no such route or method", "invalid_request_error")
            answer.headers.update(error.headers or {})  # Allow
            return answer
        return self._error(500, "the server failed; its log has the reason", "server_error")

    def _error(self, status: int, message: str, kind: str, **named: str | None) -> Response:
        return JSONResponse(answers.error(message, kind, **named), status)


class _NoModel(InvalidRequest):
    pass


class _EventStream(StreamingResponse):
    """Server-sent events. However the answer ends, its stream is closed."""

    def __init__(self, stream: Stream, events: AsyncIterator[bytes]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # nginx would hold pieces back
        headers[_RECEIPT] = answers.receipts(stream.requests)[1]
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._stream = stream

    async def __call__(self, *asgi: Any) -> None:
        try:
            await super().__call__(*asgi)
        finally:
            self._stream.close()


async def _exhausted(stream: Stream) -> None:
    async for _ in stream:
        pass


async def _ended(work: asyncio.Future[Any], request: Request) -> bool:
    """Wait for the end of some work, or of the client, and end the work then. Returns: whether the work ended first"""
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        return work.done()
    finally:
        work.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    """Return when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _param(error: Exception) -> str | None:
    """Return the field that an error is about; those of SamplingParams begin with it."""
    if isinstance(error, BadBody):
        return error.param
    found = re.match(r"(\w+) is ", str(error))
    return found[1] if found and found[1] in SamplingParams.__dataclass_fields__ else None


def _most_tokens(engine: Engine, num_prompt: int) -> int:
    """Return the most tokens that model and pool hold behind a prompt, at least 1: `Engine.submit` has the words."""
    cache, at_once = engine.cache, engine.scheduler.limits.chunk
    most = engine.decoder.config.max_position_embeddings - num_prompt

    def exceeds(num_output: int) -> bool:
        return cache.frames_for(num_prompt + num_output - 1, at_once) > cache.num_frames

    return max(1, bisect_left(range(1, max(1, most) + 1), True, key=exceeds))
