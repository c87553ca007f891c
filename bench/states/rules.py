"""Rules of other engines: at which positions of a request a state is kept. Integers over lists of messages, LRU.

`Prefixes` is a tree of messages. A position on a path through it names a prefix exactly:

    node of the messages before ──(content, tokens)──▶ node        Place: (node, content, position)

Two messages of one content share the tokens of the shorter one; any two messages share their first token, START. So a
place within a message does not name its length, and the place behind a first token has no content (NONE).

The rules are those of vLLM 0.33 (mode "align"), SGLang (`extra_buffer`), llama.cpp, and OpenVINO and lmdeploy, as read
in their sources. A rule sees the request and the place where it resumes, and no later request.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from pagedkv.bench.states.trace import Message, Request, length

PAGE: Final = 16
"""Tokens in a page of ours. The least that a request can compute is counted in these pages for all rules."""
NONE: Final = 0
_SGLANG_CHUNK = _LLAMA_EVERY = 8192
_LLAMA_BATCH, _LLAMA_UBATCH = 2048, 512

Place = tuple[int, int, int]


class Span(NamedTuple):
    """A message on a path: tokens first to last - 1 of the sequence, behind `node`."""

    node: int
    content: int
    first: int
    last: int

    def place(self, position: int) -> Place:
        return self.node, NONE if position == self.first + 1 else self.content, position


class Prefixes:
    """The sequences that were added, as a tree of messages."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, Message], int] = {}
        self._longest: dict[tuple[int, int], int] = {}  # (node, content) → tokens; (node, NONE) → 1

    def known(self, messages: Sequence[Message]) -> int:
        """Return the tokens that `messages` have in common with some sequence at most."""
        node, known = 0, 0
        for message in messages:
            longest = self._longest.get((node, message.content)) or self._longest.get((node, NONE), 0)
            known += min(longest, message.tokens)
            if (node, message) not in self._next:
                break
            node = self._next[node, message]
        return known

    def add(self, messages: Sequence[Message]) -> list[Span]:
        """Add a sequence, and return its path."""
        node, first, path = 0, 0, []
        for message in messages:
            path.append(Span(node, message.content, first, first + message.tokens))
            self._longest[node, NONE] = 1
            before = self._longest.get((node, message.content), 0)
            self._longest[node, message.content] = max(before, message.tokens)
            node = self._next.setdefault((node, message), len(self._next) + 1)
            first += message.tokens
        return path


class Held:
    """The states that are held, the least recently used first. limit: how many at most; 0 for any number."""

    def __init__(self, limit: int) -> None:
        self._limit, self.made = limit, 0
        self.states: dict[Place, None] = {}
        self._positions: dict[tuple[int, int], set[int]] = defaultdict(set)

    def find(self, path: Sequence[Span], most: int) -> Place | None:
        """Return the last state on a path after at most `most` tokens."""
        for span in reversed(path):
            for content in (span.content, NONE):
                positions = self._positions.get((span.node, content), ())
                if found := [position for position in positions if position <= min(span.last, most)]:
                    return span.node, content, max(found)
        return None

    def use(self, place: Place) -> None:
        """Let a state be the most recently used one."""
        self.states[place] = self.states.pop(place)

    def keep(self, place: Place) -> None:
        """Keep a state that is not held yet, and give up the one that was not used for the longest time."""
        if place in self.states:
            return
        self.states[place] = None
        self._positions[place[:2]].add(place[2])
        self.made += 1
        if self._limit and len(self.states) > self._limit:
            self._remove(next(iter(self.states)))

    def forget_behind(self, start: int, path: Sequence[Span]) -> None:
        """Give up the states behind `start` that are not on a path."""
        on_path = {(span.node, content): span for span in path for content in (span.content, NONE)}
        for place in [place for place in self.states if place[2] > start]:
            span = on_path.get(place[:2])
            if span is None or place[2] > span.last:
                self._remove(place)

    def _remove(self, place: Place) -> None:
        del self.states[place]
        self._positions[place[:2]].discard(place[2])


class Turn(NamedTuple):
    """A request as a rule sees it, in tokens.

    start: the position where it resumes. branch: the end of the longest known prefix, if it lies behind, else 0
    """

    start: int
    prompt: int
    end: int
    branch: int
    last_message: int


@dataclass(frozen=True)
class Rule:
    """A rule. grid: positions at which it finds states. slot: states of each session, which shares none, if not 0.

    is_limited: whether it is replayed with the limits, too. llama.cpp has a limit of its own. A state every 128 tokens
    is not: one prompt makes more states than a limit holds, and LRU keeps the last of them.
    """

    name: str
    places: Callable[[Turn], Iterable[int]]
    grid: int
    slot: int = 0
    is_limited: bool = True


@dataclass
class Tally:
    """Sums over requests; `held` is the largest number of states at once. See the head of the package."""

    requests: int = 0
    tokens: int = 0
    possible: int = 0
    computed: int = 0
    made: int = 0
    held: int = 0

    def count(self, tokens: int, possible: int, computed: int) -> None:
        """Add a request."""
        self.requests, self.tokens = self.requests + 1, self.tokens + tokens
        self.possible, self.computed = self.possible + possible, self.computed + computed

    def add(self, other: Tally) -> None:
        """Add another trace."""
        self.count(other.tokens, other.possible, other.computed)
        self.requests += other.requests - 1
        self.made, self.held = self.made + other.made, max(self.held, other.held)


def down(tokens: int, grid: int) -> int:
    """Return the last multiple of `grid` up to `tokens`."""
    return tokens // grid * grid


def known_pages(prefixes: Prefixes, prompt: Sequence[Message]) -> int:
    """Return the tokens of the known whole pages of a prompt, of which one token at least is computed."""
    return down(min(prefixes.known(prompt), length(prompt) - 1), PAGE)


def play(requests: Iterable[Request], rule: Rule, limit: int = 0) -> Tally:
    """Serve the requests of a trace one after the other. limit: states at most; 0 for any number."""
    prefixes, tally, caches = Prefixes(), Tally(), dict[int, Held]()
    for session, prompt, output in requests:
        tokens, possible = length(prompt), known_pages(prefixes, prompt)
        path = prefixes.add(prompt + output)
        held = caches.setdefault(session if rule.slot else 0, Held(rule.slot or limit))
        place = held.find(path, tokens - 1)
        start = place[2] if place else 0
        if rule.slot:
            held.forget_behind(start, path)
        elif place:
            held.use(place)
        branch = possible if possible > start + rule.grid else 0
        turn = Turn(start, tokens, tokens + length(output), branch, tokens - prompt[-1].tokens)
        for position in sorted({position for position in rule.places(turn) if start < position <= turn.end}):
            held.keep(next(span for span in path if position <= span.last).place(position))
        tally.count(tokens, possible, tokens - start)
        tally.held = max(tally.held, sum(len(held.states) for held in caches.values()))
    tally.made = sum(held.made for held in caches.values())
    return tally


def _vllm(block: int) -> Rule:
    """The last whole block of the prompt, and a branch point when it is seen for the second time."""
    name = f"vLLM 0.33, blocks of {block}"
    return Rule(name, lambda turn: (down(turn.prompt - 1, block), down(turn.branch, block)), block)


def _sglang(turn: Turn) -> Iterator[int]:
    """The end of each chunk of the prompt; the branch point in place of the prompt's end; every 256 of the output."""
    for chunk in range(turn.start + _SGLANG_CHUNK, turn.prompt + 1, _SGLANG_CHUNK):
        yield down(chunk, 64)
    tail, cut = down(turn.prompt, 64), down(turn.branch, 64)
    yield cut if turn.start < cut < tail else tail
    if down(turn.end, 256) > turn.prompt:
        yield down(turn.end, 256)


def _llama(turn: Turn) -> Iterator[int]:
    """Two near the prompt's end, the start of the last message, and every 8,192 tokens."""
    yield from (turn.prompt - 4, turn.prompt - 4 - _LLAMA_UBATCH, turn.last_message)
    yield from range(down(turn.start, _LLAMA_BATCH) + _LLAMA_EVERY, turn.prompt, _LLAMA_EVERY)


RULES: Final = (
    *map(_vllm, (528, 1600, 2144)),
    Rule("vLLM 0.33, match unit 32", lambda turn: (down(turn.prompt - 1, 32), *_vllm(1600).places(turn)), 32),
    Rule("SGLang, extra_buffer", _sglang, 64),
    Rule("llama.cpp, 32 a slot", _llama, 1, slot=32, is_limited=False),
    Rule("every 128", lambda turn: range(128, turn.end + 1, 128), 128, is_limited=False),
)
"""OpenVINO and lmdeploy keep a state every 128 tokens. The match unit of vLLM adds a state near the prompt's end."""
