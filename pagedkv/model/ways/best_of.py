"""Best of n: draw `best_of` samples of a prompt, and return those that the model finds likeliest.

    prompt ──fork──▶ a  b  c  d        candidates: samples that share the frames of the prompt
    score            -0.4 -1.2 -0.3 -2.0   the mean log-probability of a candidate's tokens
    returned         c  a              the num_samples best, the best first

(This is `best_of` of OpenAI's completions.) The log-probabilities are those of the model's own distribution, before
temperature and all else that edits logits. The mean of a candidate's tokens does not favour short ones, as a sum would.

A candidate is a plain sample: it has the tokens that sample number i of the same seed has without `best_of`. Its text
reaches a listener after the choice only, since any candidate may win until all of them have ended.

`choose` reads tokens and log-probabilities, which an interrupted step does not lose, and its changes are one call.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from pagedkv.core.recovery import assign_together
from pagedkv.errors import InvalidRequest

if TYPE_CHECKING:
    from pagedkv.model.request import Completion, Request
    from pagedkv.sampling.params import SamplingParams


def candidates(params: SamplingParams, num_samples: int, most: int) -> tuple[SamplingParams, int]:
    """Return the parameters and the number of candidates of which `num_samples` are returned.

    The parameters ask for the log-probability of each token, if there is a choice.
    most: the sequences that may run at once. Raises: InvalidRequest
    """
    best_of = num_samples if params.best_of is None else params.best_of
    if not num_samples <= best_of <= most:
        raise InvalidRequest(
            f"num_samples is {num_samples}, best_of {best_of}, and {most} sequences may run at once (Limits."
            "max_sequences); give num_samples <= best_of <= max_sequences"
        )
    scored = best_of > num_samples and params.logprobs is None
    return replace(params, logprobs=0) if scored else params, best_of


def score(completion: Completion) -> float:
    """Return the mean log-probability of the tokens; -inf for a completion that was cancelled or has an error."""
    if completion.finish_reason in ("cancelled", "error") or not completion.token_ids:
        return -inf
    return sum(of_token.logprob for of_token in completion.logprobs) / len(completion.token_ids)


def choose(request: Request) -> None:
    """Leave the best of its completions in a request all of whose candidates have ended. Of equals, the first.

    Modifies: request.completions, num_dropped_tokens; index, score and end of those that stay: they end with the choice
    """
    scores = {completion: score(completion) for completion in request.completions}
    chosen = sorted(scores, key=lambda completion: -scores[completion])[: request.num_returned]
    numbered = ((completion, "index", index) for index, completion in enumerate(chosen))
    scored = ((completion, "score", scores[completion]) for completion in chosen)
    last = max(completion.finished_at for completion in request.completions)
    ended = ((completion, "finished_at", last) for completion in chosen)
    dropped = sum(len(completion.token_ids) for completion in request.completions if completion not in chosen)
    own = (request, "completions", chosen), (request, "num_dropped_tokens", dropped)
    assign_together([*own, *numbered, *scored, *ended])
