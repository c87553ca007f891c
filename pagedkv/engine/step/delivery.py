"""Delivery: a token becomes text, and text reaches the listeners. Knows completions; no cache, no logits.

    token ─▶ take ─▶ completion.token_ids, completion.text ─▶ report ─▶ on_text(completion, piece)

The tokens of a completion are the truth. After an interrupt `read_again` repeats for each of them what `take` did.
"""

from __future__ import annotations

import time
from collections import deque
from itertools import starmap
from operator import call
from typing import TYPE_CHECKING, Any

from pagedkv.engine.requests.beams import make_trunk, search_of
from pagedkv.engine.requests.request import StopStrings
from pagedkv.engine.requests.sequence import SequenceState
from pagedkv.engine.sampling.logits import LogitsRules
from pagedkv.errors import described

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pagedkv.engine.checkpoint.tokenizer import Tokenizer
    from pagedkv.engine.requests.beams import Beams
    from pagedkv.engine.requests.draws import Drawn
    from pagedkv.engine.requests.request import Completion, Request
    from pagedkv.engine.step.meter import Meter


class Delivery:
    """The way of tokens to completions and of text to listeners.

    max_tokens: the most tokens of prompt and output: the positions of the model
    meter:      counts tokens and ended requests
    finished:   completions whose listeners were told of the end, in order. The caller that takes them assigns a new
                list.
    """

    def __init__(self, tokenizer: Tokenizer, max_tokens: int, meter: Meter) -> None:
        self.finished: list[Completion] = []
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._meter = meter

    def begin(self, completion: Completion) -> SequenceState:
        """Return a new sequence for a completion, without the tokens that it has."""
        request, params, tokens = completion.request, completion.request.params, list(completion.request.prompt_ids)
        grammar = request.grammar and request.grammar.start(len(tokens))
        ends = (*params.stop_ids, *(() if params.ignore_eos else self._tokenizer.eos_ids)) if params.min_tokens else ()
        rules = LogitsRules.of(params, tokens, len(tokens), ends=ends, grammar=grammar)
        generator, stops = completion.generator(), StopStrings(params.stop, are_shown=params.include_stop)
        stream = self._tokenizer.stream(tokens, skip_special_tokens=params.skip_special_tokens)
        return SequenceState(completion, tokens, generator, stream, stops, rules)

    def take(self, sequence: SequenceState, drawn: Drawn, now: float) -> None:
        """Give one token to a completion, and show its text. A finished sequence leaves the scheduler later.

        now: seconds of time.perf_counter(), the same for all tokens of a step
        """
        completion, token = sequence.completion, drawn.token
        if drawn.logprobs is not None:
            completion.logprobs.append(drawn.logprobs)
        completion.token_ids.append(token)  # from here on the completion has it, whatever is interrupted
        text, reason = self.read(sequence, token)
        completion.text += text
        self._meter.take(completion, now)
        if reason:
            completion.end(reason)

    def read(self, sequence: SequenceState, token: int) -> tuple[str, str]:
        """Append a token to a sequence; return the text that may be shown, and the reason if the text ends with it."""
        params = sequence.completion.request.params
        sequence.tokens.append(token)
        ended = token in params.stop_ids or (token in self._tokenizer.eos_ids and not params.ignore_eos)
        text, stopped = "" if ended and not params.include_stop else sequence.stream.push(token), False
        num_output = sequence.num_output
        if num_output > params.min_tokens:  # a stop string that begins before is none
            text, stopped = sequence.stops.push(text)
        is_complete = sequence.rules is not None and sequence.rules.is_complete
        reason = "stop" if ended or stopped or is_complete else ""
        if num_output >= params.max_tokens or len(sequence.tokens) >= self._max_tokens:
            reason = reason or "length"
        if reason and not stopped:
            rest, stopped = sequence.stops.push(sequence.stream.finish())
            text += rest if stopped else rest + sequence.stops.finish()
        return text, reason

    def read_again(self, completion: Completion) -> SequenceState:
        """Make the text of a completion from its tokens, and return a new sequence with these."""
        sequence, text, reason = self.begin(completion), "", ""
        for token in completion.token_ids:
            more, reason = self.read(sequence, token)
            text += more
        completion.text = text
        del completion.logprobs[len(completion.token_ids) :]  # that of a token that was not given
        if completion.token_ids and not completion.first_token_at:
            completion.first_token_at = completion.last_token_at = time.perf_counter()
        if reason:
            completion.end(reason)
        return sequence

    def begin_again(self, requests: Iterable[Request]) -> list[SequenceState]:
        """Return new sequences for all completions that have not ended, from the tokens that they have."""
        sequences: list[SequenceState] = []
        for request in requests:
            first, search = request.completions[0], search_of(request)
            if search is not None and search.state.is_done:
                self.finish_search(request, search.state)
            elif search is not None and not request.finished:
                sequences.append(make_trunk(self.begin(first)))
            for completion in request.completions if search is None else ():
                sequence = self.read_again(completion)
                # without a token, the first sample computes the prompt of all
                waits_for_first = completion.index and not (
                    completion.token_ids or first.token_ids or first.finish_reason
                )
                if not completion.finish_reason and not waits_for_first:
                    sequences.append(sequence)
        return sequences

    def finish_search(self, request: Request, state: Beams) -> None:
        """Give the best ended beams to the completions."""
        for completion, beam in zip(request.completions, state.ended, strict=False):
            completion.token_ids[:] = beam.tokens
            completion.score = beam.score
            self.read_again(completion)

    def report(self, requests: dict[Request, None]) -> None:
        """Call the listeners of all requests that have new text or ended, and remove those that are finished.

        A cancelled completion counts as reported, and is not in `finished`. Modifies: requests, finished
        """
        for request in list(requests):
            for completion in request.completions:
                text, is_end = completion.text[completion.num_sent :], bool(completion.finish_reason)
                if not completion.is_reported and (text or is_end):
                    self._tell(completion, text, is_end=is_end)
            self.drop_reported(requests, request)

    def drop_reported(self, requests: dict[Request, None], request: Request) -> bool:
        """Remove a request whose completions are all reported. Modifies: requests. Returns: whether it is removed"""
        for completion in request.completions:  # `all` with a generator takes three times as long, twice in each step
            if not completion.is_reported:
                return False
        del requests[request]
        self._meter.ended(request)
        return True

    def _tell(self, completion: Completion, text: str, *, is_end: bool) -> None:
        """Call the listener and note what it knows; an interrupt repeats no call. If it raises, its request ends.

        The notes and the call are made by one call of C functions: only an interrupt inside of the listener loses a
        piece, which the listener may have taken.
        """
        on_text, sent = completion.request.on_text, completion.num_sent + len(text)
        if not (on_text or is_end):
            completion.num_sent = sent
            return
        calls: list[tuple[Any, ...]] = [(setattr, completion, "num_sent", sent)]
        end: list[tuple[Any, ...]] = [(setattr, completion, "is_reported", True)]
        if completion.finish_reason != "cancelled":
            end.append((self.finished.append, completion))
        if on_text:
            calls.append((on_text, completion, text))
        told: list[bool] = []
        calls = [*calls, *end] if is_end else calls
        try:
            deque(starmap(call, [*calls, (told.append, True)]), maxlen=0)
            if not told:  # a StopIteration ends the deque without a word
                raise StopIteration
        except Exception as error:
            completion.request.fail(f"the listener raised {described(error)}")
            if not completion.is_reported:  # the listener may have cancelled
                deque(starmap(call, end), maxlen=0)
        except BaseException:  # an interrupt, or the listener's own SystemExit: it is told of the end once more
            if is_end and completion.was_told and not completion.is_reported:
                deque(starmap(call, end), maxlen=0)
            completion.was_told = is_end
            raise
