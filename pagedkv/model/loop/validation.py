"""Validation: the user's own function accepts a finished output, or rejects it, and then the output is made again.

    prompt │ output ── ended ──▶ validator ── True ─────▶ finished
       ▲                             │ a reason
       │                             ▼
       └─ pages kept ─── retry, with the next seed ─── no retries left ──▶ finish_reason "error"

A retry keeps the pages of the prompt: the space is cut back to all tokens of the prompt but the last, whose logits give
the first token. Listeners get no text before the output is accepted.

An exception of the validator ends its request. `step` raises one that is no Exception, such as SystemExit, when all
others have their tokens. Only a KeyboardInterrupt breaks the step off and ends no request.

This file knows completions. `Completion.rejections` and the tokens are the truth about retries: one assignment moves an
output from the tokens to the rejections, and more than `max_retries` of them end the completion. After an interrupt
inside a validator the same output is judged again; after one behind it, none is.
"""

from __future__ import annotations

import reprlib
from dataclasses import replace
from typing import TYPE_CHECKING

from pagedkv.core.recovery import assign_together
from pagedkv.errors import described
from pagedkv.model.request import Rejection

if TYPE_CHECKING:
    from pagedkv.model.request import Completion


def ends(completion: Completion, reason: str, exits: list[BaseException]) -> bool:
    """End a completion with `reason`, or reject its output, so that it begins anew. Returns: whether it has ended

    A request whose validator raises, or returns anything but True, False or a text, ends with an error.
    exits: gets what the validator raises if that is no Exception
    """
    params = completion.request.params
    if params.validator is None or completion.finish_reason:
        completion.end(reason)
        return True
    if len(completion.rejections) > params.max_retries:  # an interrupt came before the end
        return _exhausted(completion)
    try:
        tokens, logprobs = [*completion.token_ids], [*completion.logprobs]
        verdict = params.validator(replace(completion, finish_reason=reason, token_ids=tokens, logprobs=logprobs))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if not isinstance(error, Exception):
            exits.append(error)
        completion.request.fail(f"the validator raised {described(error)}")
        return True
    if verdict is True:
        completion.end(reason)
    elif verdict is not False and not (isinstance(verdict, str) and verdict):
        given = f"the validator returned {reprlib.repr(verdict)}"
        completion.request.fail(f"{given}; return True to accept, or the reason (a text) or False to reject")
    elif not completion.finish_reason:  # it may have been cancelled meanwhile
        return _reject(completion, verdict or "no reason was given")
    return True


def _reject(completion: Completion, reason: str) -> bool:
    """Reject the output. Returns: whether that was the last try"""
    rejections = [*completion.rejections, Rejection(reason, completion.text, completion.token_ids)]
    if len(rejections) > completion.request.params.max_retries:
        completion.rejections = rejections
        return _exhausted(completion)
    values = {"rejections": rejections, "token_ids": [], "logprobs": [], "text": ""}
    assign_together((completion, name, value) for name, value in values.items())
    return False


def _exhausted(completion: Completion) -> bool:
    rejections = completion.rejections
    tries = f"all {len(rejections)} outputs" if len(rejections) > 1 else "the output"
    completion.end("error", f"the validator rejected {tries}; the last one: {rejections[-1].reason}")
    return True
