"""Two traces of requests, each drawn from a seed. A prompt is a list of messages, as a client sends it turn by turn.

    agent    one agent of 200 turns, and 30 sub-agents of a few turns that share its system prompt only
    chat     60 users who talk at once; their system prompt is the same

Clients change what they sent before. The chat template leaves the reasoning out as soon as the user writes again. A
client cuts the result of an old tool call short, puts a reminder at the end of a prompt and takes it back, returns to
an earlier turn, and begins again with a summary if the prompt is too long.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

START: Final = 0
"""The first token of each message, and of nothing else."""
SPREAD: Final = 0.9
SHORTEST: Final = 8
TOO_LONG: Final = 96_000
"""Tokens of a prompt that the next turn replaces by a summary."""
_ROOM: Final = 1 << 13  # token ids for each content; no message is longer
_PRIME, _FACTOR = 2**31 - 1, 2_654_435_761


class Message(NamedTuple):
    """Tokens of one content. A message of the same content with fewer tokens is the beginning of the longer one."""

    content: int
    tokens: int
    role: str = ""


class Request(NamedTuple):
    """A prompt, and the output that follows it."""

    session: int
    prompt: tuple[Message, ...]
    output: tuple[Message, ...]


@dataclass(frozen=True)
class Kind:
    """A kind of trace, which has a long session of `main` turns first, if not 0.

    others: the further sessions; each has at least turns[0] turns, and fewer than turns[1].
    scale:  a factor for the mean length of messages, of which none has more than `longest` tokens.
    tools:  the share of answers that call a tool.
    """

    main: int
    others: int
    turns: tuple[int, int]
    system: int
    scale: float
    longest: int
    tools: float


KINDS: Final = {
    "agent": Kind(200, 30, (2, 6), system=6000, scale=1.0, longest=6000, tools=0.75),
    "chat": Kind(0, 60, (2, 9), system=400, scale=0.5, longest=600, tools=0.0),
}


def length(messages: Iterable[Message]) -> int:
    """Return the tokens of messages."""
    return sum(message.tokens for message in messages)


def token_ids(messages: Iterable[Message]) -> npt.NDArray[np.int32]:
    """Return the token ids of messages, int32 [T]. Two contents have no id in common but START."""
    return np.concatenate([_ids(message.content, message.tokens) for message in messages])


@lru_cache(maxsize=1 << 13)
def _ids(content: int, tokens: int) -> npt.NDArray[np.int32]:
    numbers = content * _ROOM + np.arange(tokens, dtype=np.int64)  # below _PRIME, so that products differ modulo it
    ids = (numbers * _FACTOR % _PRIME).astype(np.int32)
    ids[0] = START
    return ids


def requests(kind: Kind, seed: int) -> list[Request]:
    """Return the requests of a trace in the order in which they arrive."""
    rng = random.Random(seed)
    turns = ([kind.main] if kind.main else []) + [rng.randrange(*kind.turns) for _ in range(kind.others)]
    first, *rest = [session for session, number in enumerate(turns) for _ in range(number)]
    rng.shuffle(rest)
    client = _Client(kind, rng)
    talks = [_Talk(client, [client.system, client.message("user", 300)]) for _ in turns]
    return [talks[session].request(session) for session in [first, *rest]]


class _Client:
    """New messages: contents count up, and lengths are log-normal."""

    def __init__(self, kind: Kind, rng: random.Random) -> None:
        self.kind, self.rng, self._contents = kind, rng, count(1)
        self.system = self.exact("system", kind.system)
        self.turn_of_model = self.exact("generation prompt", 3)

    def exact(self, role: str, tokens: int) -> Message:
        return Message(next(self._contents), tokens, role)

    def message(self, role: str, mean: int) -> Message:
        tokens = int(self.rng.lognormvariate(0, SPREAD) * mean * self.kind.scale)
        return self.exact(role, min(self.kind.longest, max(SHORTEST, tokens)))


@dataclass
class _Talk:
    """One session. sent: the messages before each turn, to which the client may return."""

    client: _Client
    messages: list[Message]
    sent: list[list[Message]] = field(default_factory=list)

    def request(self, session: int) -> Request:
        client, rng = self.client, self.client.rng
        if length(self.messages) > TOO_LONG:
            self.messages = [client.system, client.message("user", 2000)]
        if self.sent and rng.random() < 0.03:
            self.messages = [*rng.choice(self.sent[-8:]), client.message("user", 200)]
        reminder = [client.exact("reminder", 60)] if rng.random() < 0.2 else []
        prompt = (*self.messages, *reminder, client.turn_of_model)
        output = client.message("reasoning", 250), client.message("answer", 120)
        self.sent.append(self.messages)
        self.messages = self._next([*self.messages, client.turn_of_model, *output])
        return Request(session, prompt, output)

    def _next(self, messages: list[Message]) -> list[Message]:
        """Return the messages after an answer: the result of a tool follows, or a message of the user."""
        client, rng = self.client, self.client.rng
        if rng.random() >= client.kind.tools:
            return [message for message in messages if message.role != "reasoning"] + [client.message("user", 150)]
        result = client.message("tool", 700)
        old = [i for i, message in enumerate(messages) if message.role == "tool"]
        if rng.random() < 0.12 and old:
            cut = max(SHORTEST, int(messages[old[-1]].tokens * rng.random()))
            messages[old[-1]] = messages[old[-1]]._replace(tokens=cut)
        return [*messages, result]
