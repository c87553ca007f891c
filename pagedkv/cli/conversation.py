"""A conversation at a terminal: `pagedkv generate --chat` without a prompt.

    > Where is the lamp?                     a line from the user; readline edits it, if Python has it
    Mira keeps a red lamp in the cellar.     the reply to stdout, as it is made
    12 tokens computed, 288 found, ...       to stderr, dim

Each turn submits the whole history again. Its pages are in the prefix cache, so the engine computes only the message,
and those tokens before it that lie in a page that is not full.

Ctrl-C ends a reply and not the process: a flag is set, and the step under way goes on to its end. The part that was
made stays in the history. A second Ctrl-C in the same step ends the process. At the prompt Ctrl-C drops the line, and
Ctrl-D ends the conversation.
"""

from __future__ import annotations

import re
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from pagedkv.cli.complaints import complain
from pagedkv.cli.generate import Job, load
from pagedkv.cli.options import naming_options
from pagedkv.engine.checkpoint.demo import DEMO_PROMPT
from pagedkv.engine.requests.request import Completion, Request
from pagedkv.engine.step.engine import Engine
from pagedkv.errors import CheckpointError, InvalidRequest

with suppress(ImportError):
    import readline as readline  # input() edits lines by it, and keeps a history

PROMPT: Final = "> "
RESET: Final = "/reset"
HELP: Final = f"{RESET} forgets the conversation, Ctrl-C ends a reply, Ctrl-D ends the conversation"

DEMO_PAGE, _, DEMO_QUESTION = DEMO_PROMPT.rpartition("\n")
"""The system message of the bundled checkpoint, if the user gives none: it answers questions about records."""


class _CtrlC:
    """The handler of SIGINT during a conversation: an exception at the prompt, else a flag; the second time, as before.

    Numba's functions must not be interrupted, so no exception is raised in a step.
    """

    def __init__(self) -> None:
        self.came: bool = False
        self.is_at_prompt: bool = False
        self._before: Any = signal.SIG_DFL

    def __enter__(self) -> _CtrlC:
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_at_prompt:
            self.is_at_prompt = False  # the next one may come while this one is handled
            raise KeyboardInterrupt
        if self.came and callable(self._before):
            self._before(number, frame)
        self.came = True


def hold(job: Job) -> int:
    """Hold a conversation until the user ends it.

    Raises: PagedKVError before the first prompt, as for a checkpoint without a chat template
    """
    if job.output.as_json or job.output.num_samples > 1:
        raise InvalidRequest("a conversation has one reply and no --json; give a prompt, or a .jsonl")
    engine = load(job.loading, job.screen)
    talk = _Conversation(engine, job)
    talk.begin()
    with engine, _CtrlC() as ctrl_c:
        while (line := _line(ctrl_c, job.screen)) is not None:
            if line == RESET:
                talk.reset()
                talk.say("the conversation is empty")
            elif re.fullmatch(r"/\w*", line):
                talk.say(HELP)
            elif line:
                talk.turn(line, ctrl_c)
    return 0


def _line(ctrl_c: _CtrlC, screen: Console) -> str | None:
    """Return the next line of the user, stripped; "" for one that was dropped, None at the end."""
    try:
        ctrl_c.is_at_prompt = True
        if sys.stdout.isatty():
            return input(PROMPT).strip()
        print(PROMPT, end="", file=sys.stderr, flush=True)  # stdout has the replies only
        return input().strip()
    except KeyboardInterrupt:
        screen.print()
        return ""
    except UnicodeDecodeError as error:
        complain(f"the line is not text: {error.reason}; type it again")
        return ""
    except (EOFError, OSError):  # the terminal may have gone
        screen.print()
        return None
    finally:
        ctrl_c.is_at_prompt = ctrl_c.came = False


class _Conversation:
    """The messages so far, and the engine that answers them."""

    def __init__(self, engine: Engine, job: Job) -> None:
        self._engine, self._job = engine, job
        is_bundled = job.loading.model is None and job.templating.system is None
        self._page: str | None = DEMO_PAGE if is_bundled else None
        self._messages: list[dict[str, Any]] = []
        self.reset()

    def begin(self) -> None:
        """Show the page of the bundled checkpoint and the help. Raises: PagedKVError if the template is not usable"""
        self._job.token_ids([*self._messages, {"role": "user", "content": "?"}], self._engine)
        if self._page:
            self.say(f"{self._page}\n\nAsk about this page, such as: {DEMO_QUESTION}")
        self.say(HELP)

    def say(self, text: str) -> None:
        """Print a dim text to the terminal."""
        self._job.screen.print(Text(text, style="dim"))

    def reset(self) -> None:
        """Forget all messages but that of the system."""
        self._messages = [{"role": "system", "content": self._page}] if self._page else []

    def turn(self, text: str, ctrl_c: _CtrlC) -> None:
        """Answer a message. If that fails, the history is as before."""
        asked = [*self._messages, {"role": "user", "content": text}]
        try:
            with naming_options():
                ids = self._job.token_ids(asked, self._engine)
                request = self._engine.submit(
                    ids, self._job.params, on_text=lambda _, new: print(new, end="", flush=True)
                )
        except (InvalidRequest, CheckpointError) as error:
            return complain(f"{error}; {RESET} forgets the conversation")
        while not request.finished:
            if ctrl_c.came:
                self._engine.cancel(request)
            else:
                self._engine.step()
        (reply,) = request.completions
        print(end="\n" if reply.text and not reply.text.endswith("\n") else "", flush=True)
        if reply.error:
            return complain(reply.error)
        self._messages = [*asked, {"role": "assistant", "content": reply.text}]
        self.say(_account(request, reply))


def _account(request: Request, reply: Completion) -> str:
    """Return the number of tokens of a turn, and why its reply ended if the model did not end it."""
    if not reply.admitted_at:
        return "stopped"
    computed, written = len(request.prompt_ids) - reply.cached_tokens, len(reply.token_ids)
    limit = "at its --max-tokens" if written == request.params.max_tokens else "the context is full"
    why = {"cancelled": "; stopped", "length": f"; {limit}"}.get(reply.finish_reason, "")
    return f"{computed:,} tokens computed, {reply.cached_tokens:,} found, {written:,} written{why}"
