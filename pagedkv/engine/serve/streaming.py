"""AsyncEngine: a thread that steps an Engine, and streams of text for the tasks of one event loop. Knows no HTTP.

app.py and gate.py notice that a client is gone, and close its stream.

    a task                                         the stepping thread
    stream.begin ── Engine.submit, in a worker ──▶ inbox
    async for piece ◀── mailbox ◀── wake ───────── Engine.step ─▶ listener: mailbox.note
    stream.close ── order ───────────────────────▶ Engine.cancel: the frames are given back before the next step

The thread is the only one that steps and cancels. It wakes the event loop once a step, and waits for no reader: a
mailbox holds how far each completion is, and the reader cuts its piece from the completion's text. So a slow reader
gets fewer and longer pieces, and costs no memory beside the completion.

A stream that is closed, or dropped by `break`, cancels its requests. Orders travel in a SimpleQueue, whose `put` may
run inside a finaliser.

A step that raises is repeated, as Engine.step allows. After MOST_FAILURES in a row the engine stops, and so do all
streams.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pagedkv.errors import EngineStopped, InvalidRequest, described

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pagedkv.engine.requests.request import Completion, Request
    from pagedkv.engine.sampling.params import SamplingParams
    from pagedkv.engine.step.engine import Engine, Prompt

CLOSE_SECONDS: Final = 30
"""The time that a step under way has to end when the engine is closed."""

IDLE_SECONDS: Final = 0.1
"""The time between two calls of `after_step` while there is no work."""

MOST_FAILURES: Final = 3
"""Steps in a row that may raise."""

_log: Final = logging.getLogger("pagedkv.engine.serve")


class Piece(NamedTuple):
    """The next piece of one completion.

    prompt:        number of the prompt, for a stream of several
    text:          new text; "" at the end, or if only the finish_reason is new
    num_tokens:    tokens of `completion` up to here: its later ones belong to later pieces
    finish_reason: "" until the last piece of the completion
    """

    completion: Completion
    prompt: int
    text: str
    num_tokens: int
    finish_reason: str


class _News(NamedTuple):
    """The progress of a completion: characters and tokens that may be read."""

    prompt: int
    num_characters: int
    num_tokens: int
    finish_reason: str


@dataclass(eq=False)
class _Mailbox:
    """The state of a stream that both threads know. news: of completions that the reader has not looked at since."""

    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    news: dict[Completion, _News] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    is_closed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, completion: Completion, news: _News) -> None:
        """Replace the news of a completion. The stepping thread calls this."""
        with self._lock:
            self.news[completion] = news

    def take(self) -> tuple[Completion, _News] | None:
        """Return the news that have waited for the longest, or None. The reader calls this."""
        with self._lock:
            completion = next(iter(self.news), None)
            return None if completion is None else (completion, self.news.pop(completion))


class AsyncEngine:
    """An Engine whose texts are read by `async for`, by many tasks of one event loop at once.

        async with AsyncEngine(Engine.load()) as engine:
            async for piece in engine.stream("Where is the lamp of Mira?"):
                print(piece.text, end="")

    A thread steps the engine from `start` (or `async with`) to `aclose`: no other may step or cancel meanwhile.

    after_step: called by this thread after each step, and a few times a second while there is no work. It may not wait.
    """

    def __init__(self, engine: Engine, *, after_step: Callable[[], object] | None = None) -> None:
        self.engine: Engine = engine
        self._after_step = after_step
        self.stopped: EngineStopped | None = None
        """The reason why no stream is served any more; None while streams are."""
        self._orders: SimpleQueue[_Mailbox | None] = SimpleQueue()  # a mailbox to cancel, or None to look around
        self._open: set[_Mailbox] = set()
        self._woken: set[_Mailbox] = set()  # those with news of the step under way
        self._is_closing = False
        self._last_words = "the engine was closed while the text was made"
        self._hangs = False
        self._busy_since: float | None = None  # begin of the step or the order under way
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> AsyncEngine:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def start(self) -> None:
        """Start the thread that steps. Call it in the event loop whose tasks read. Raises: InvalidRequest if it runs"""
        if self._thread is not None:
            raise InvalidRequest("this AsyncEngine was started before; make another one over the same engine")
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="pagedkv-step", daemon=True)
        self._thread.start()

    async def aclose(self, reason: str | None = None) -> None:
        """End the thread after the step under way. Requests that run are cancelled; their streams raise EngineStopped.

        The Engine belongs to the caller again, unless that step takes longer than CLOSE_SECONDS.
        reason: the text of EngineStopped
        """
        self._last_words = reason or self._last_words
        self._is_closing = True
        self._orders.put(None)
        if self._thread is None or self._hangs:
            return
        end = time.monotonic() + CLOSE_SECONDS
        while self._thread.is_alive() and time.monotonic() < end:  # all worker threads may be busy with prompts
            await asyncio.sleep(0.01)
        if self._thread.is_alive():
            self._hangs = True
            self.stopped = EngineStopped(self._last_words)
            _arrive(self._open)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Stream:
        """Return the pieces of one prompt as they are made; nothing is submitted before the first is asked for.

        options: options of `Engine.submit` but on_text. Raises: as `Stream.begin`, when the first piece is asked for
        """
        return Stream(self, [prompt], params, options)

    def stream_all(self, prompts: Sequence[Prompt], params: SamplingParams | None = None, **options: Any) -> Stream:
        """Return the pieces of several prompts as they are made, mixed; `Piece.prompt` is the number of the prompt."""
        return Stream(self, list(prompts), params, options)

    @property
    def busy_s(self) -> float:
        """Seconds since the step under way began; 0.0 between steps. A number that grows is a step that hangs."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def _require_running(self) -> None:
        """Raise EngineStopped unless the thread runs."""
        if self.stopped is not None:
            raise EngineStopped(str(self.stopped))
        if self._thread is None:
            raise EngineStopped("this AsyncEngine was not started; use `async with AsyncEngine(engine) as ...`")

    def _submit(self, box: _Mailbox, prompts: Iterable[Prompt], params: Any, options: dict[str, Any]) -> None:
        """Submit all prompts of a stream, or none: text is encoded here, in a worker thread."""
        try:
            for number, prompt in enumerate(prompts):
                hear = partial(self._hear, box, number)
                box.requests.append(self.engine.submit(prompt, params, on_text=hear, **options))
        except BaseException:
            box.is_closed = True
            raise
        finally:  # the stream may have been closed meanwhile
            self._orders.put(box if box.is_closed else None)

    # --- the stepping thread ---

    def _run(self) -> None:
        """Step while there is work, and wait for orders while there is none."""
        failures = 0
        while failures < MOST_FAILURES:
            try:
                if not self._follow_orders():
                    break
                self._busy_since = time.monotonic()
                if self.engine.has_work:
                    self.engine.step()
                failures = 0
            except BaseException as error:  # libraries in Rust panic with one of their own
                failures += 1
                _log.exception("a step failed, for the %s. time in a row", failures)
                last = f"the engine failed {failures} times in a row: {described(error)}; restart it"
            self._busy_since = None
            self._wake(self._woken)
            self._look_back()
        self.stopped = EngineStopped(last if failures else self._last_words)
        for box in list(self._open):
            with suppress(Exception):
                self._cancel(box)
        self._wake(self._open)

    def _look_back(self) -> None:
        """Call `after_step`. An error there costs no request."""
        if self._after_step is not None:
            try:
                self._after_step()
            except Exception:
                _log.exception("after a step")

    def _follow_orders(self) -> bool:
        """Take all orders; wait for the first if there is no work. Returns: whether to go on."""
        wait = not self.engine.has_work
        while not self._is_closing:
            try:
                box = self._orders.get(block=wait, timeout=None if self._after_step is None else IDLE_SECONDS)
            except Empty:
                return True
            wait, self._busy_since = False, time.monotonic()
            if box is not None:
                self._cancel(box)
        return False

    def _cancel(self, box: _Mailbox) -> None:
        for request in list(box.requests):
            self.engine.cancel(request)  # marks its completions first, whatever it raises then

    def _hear(self, box: _Mailbox, prompt: int, completion: Completion, _: str) -> None:
        """Note that a completion has more text or ended: the listener of every request."""
        news = _News(prompt, completion.num_sent, len(completion.token_ids), completion.finish_reason)
        box.note(completion, news)
        self._woken.add(box)

    def _wake(self, boxes: set[_Mailbox]) -> None:
        """Let the readers of `boxes` look into them. Modifies: boxes of the step, which are none afterwards"""
        assert self._loop is not None
        woken, self._woken = set(boxes), set()
        if woken:
            try:
                self._loop.call_soon_threadsafe(_arrive, woken)
            except RuntimeError:  # the loop was closed: nothing reads any more
                self._is_closing = True


def _arrive(boxes: set[_Mailbox]) -> None:
    for box in boxes:
        box.arrived.set()


class Stream:
    """The pieces of one or several prompts, in the order in which they are made; read it with `async for`, once.

    Close it (`close`, `aclose`, `async with`) to cancel what is not finished; a stream that is dropped does the same.
    """

    def __init__(
        self, owner: AsyncEngine, prompts: list[Prompt], params: SamplingParams | None, options: dict[str, Any]
    ) -> None:
        self._owner, self._box = owner, _Mailbox()
        self._job: tuple[Any, ...] | None = (self._box, prompts, params, options)
        self._num_read: dict[Completion, int] = {}
        self._num_left = -1  # completions whose end was not read; unknown before `begin`
        self._drop = weakref.finalize(self, _close, owner, self._box)

    @property
    def requests(self) -> list[Request]:
        """The requests, one for each prompt; [] before `begin`. Their completions have the figures of usage."""
        return self._box.requests

    async def begin(self) -> None:
        """Submit the prompts, unless that was done. The first piece that is asked for does so, too.

        Raises: as `Engine.submit` (InvalidRequest, QueueFull), and then nothing was submitted; EngineStopped
        """
        if self._job is None:
            return
        self._owner._require_running()
        job, self._job = self._job, None
        self._owner._open.add(self._box)
        try:
            await asyncio.to_thread(self._owner._submit, *job)
        except BaseException:
            self.close()
            raise
        self._num_left = sum(len(request.completions) for request in self.requests)

    async def wait(self, timeout: float) -> None:
        """Wait until there is something to read, at most `timeout` seconds. Call it before the first piece is read."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._box.arrived.wait(), timeout)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Piece:
        await self.begin()
        while (piece := self._take()) is None:
            if self._box.is_closed or not self._num_left:
                self._owner._open.discard(self._box)
                self._drop.detach()
                raise StopAsyncIteration
            if self._owner.stopped is not None:
                self.close()
            self._owner._require_running()
            self._box.arrived.clear()
            await self._box.arrived.wait()
        self._num_left -= bool(piece.finish_reason)
        return piece

    def _take(self) -> Piece | None:
        """Return all that is new of one completion; None if no completion has news."""
        if (found := self._box.take()) is None:
            return None
        completion, news = found
        text = completion.text[self._num_read.get(completion, 0) : news.num_characters]
        self._num_read[completion] = news.num_characters
        return Piece(completion, news.prompt, text, news.num_tokens, news.finish_reason)

    def close(self) -> None:
        """Cancel what is not finished, and give its frames back, at once or behind the step that is under way."""
        self._drop()

    async def aclose(self) -> None:
        """Close the stream, as `close` does."""
        self.close()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


def _close(owner: AsyncEngine, box: _Mailbox) -> None:
    box.is_closed = True
    owner._open.discard(box)
    owner._orders.put(box)
