"""The rules of a request for the logits of its next token: bias, penalties, a function of its own, and masks.

Rules see one row of logits z, and the tokens of prompt and output so far. They apply in this order:

    bias         z_i + bias_i             for each i of logit_bias
    repetition   z_i / r if z_i > 0 else z_i * r      for each i in prompt or output (Keskar et al., CTRL, 2019)
    frequency    z_i - f * c_i            c_i: how often i is in the output. OpenAI's API reference has the formulas of
    presence     z_i - p if c_i > 0       frequency_penalty f and presence_penalty p
    processor    the request's own function of (tokens, z)
    masks        z_i = -inf               unless i is in allowed_ids; unless the grammar allows i;
                                          if i ends the text and the output has fewer than min_tokens

vLLM's sampler and transformers' `generate` agree that bias comes before repetition, and penalties before temperature.
They differ about processors: vLLM runs them before the penalties, transformers after; here they run after. Both mask
first. Masks commute with bias and penalties, because -inf stays -inf; here they come last, so that no processor lifts
one. Where a grammar allows only tokens that end the text, min_tokens does not hold, as in vLLM.

Counts and the grammar's state are a cache of the tokens: `apply` first follows the tokens that are new. So rules go on
after a preemption, and those of a sequence that is made again after an interrupt are the same.

A step costs O(V) for a copy of the row and the masks, and O(distinct tokens) for penalties. A request without options
has no rules and costs nothing.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pagedkv.errors import InvalidRequest, described

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from pagedkv.engine.sampling.grammar import Grammar
    from pagedkv.engine.sampling.params import LogitsProcessor, SamplingParams


class _Counts:
    """The distinct tokens of one sequence, and how often each is in its output.

    num_prompt: the first tokens of the list, which are no output.
    """

    def __init__(self, num_prompt: int, vocab_size: int) -> None:
        self._num_prompt = num_prompt
        self._slots: dict[int, int] = {}
        self._ids = np.empty(vocab_size, np.int64)  # memory that is not written is not taken
        self._times = np.zeros(vocab_size, np.float32)
        self._num_followed = 0

    def follow(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Count the new tokens. Returns: distinct ids int64 [N], and counts in the output float32 [N]."""
        self.truncate(len(tokens))
        for at in range(self._num_followed, len(tokens)):
            slot = self._slots.setdefault(tokens[at], len(self._slots))
            self._ids[slot] = tokens[at]
            self._times[slot] += at >= self._num_prompt
        self._num_followed = len(tokens)
        count = len(self._slots)
        return torch.from_numpy(self._ids[:count]), torch.from_numpy(self._times[:count])

    def truncate(self, length: int) -> None:
        """Count anew at the next call, if the tokens behind the first `length` were counted."""
        if length < self._num_followed:
            self._slots, self._num_followed = {}, 0
            self._times[:] = 0


class LogitsRules:
    """The rules of one sequence. tokens: its list of prompt and output, which grows as the engine steps.

    num_prompt: tokens of the prompt. ends: tokens that end the text. grammar: one that no other sequence uses.
    """

    def __init__(
        self,
        params: SamplingParams,
        tokens: list[int],
        num_prompt: int,
        *,
        ends: Iterable[int] = (),
        grammar: Grammar | None = None,
    ) -> None:
        self._params = params
        self._tokens = tokens
        self._num_prompt = num_prompt
        self._grammar = grammar
        self._counts: _Counts | None = None
        self._ends = torch.tensor(sorted(end for end in ends if end >= 0), dtype=torch.int64)
        self._allowed = None if params.allowed_ids is None else torch.tensor(params.allowed_ids, dtype=torch.int64)
        self._biased = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        self._bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)

    @classmethod
    def of(cls, params: SamplingParams, tokens: list[int], num_prompt: int, **options: Any) -> LogitsRules | None:
        """Return the rules that `params` ask for; None if they ask for none. Arguments: those of the class."""
        p = params
        penalises = p.repetition_penalty != 1 or p.frequency_penalty or p.presence_penalty
        edits = p.logit_bias or p.allowed_ids is not None or p.logits_processor or p.min_tokens
        has_rules = penalises or edits or options.get("grammar")
        return cls(params, tokens, num_prompt, **options) if has_rules else None

    def apply(self, logits: Tensor) -> Tensor:
        """Return the logits to draw from, a new tensor.

        Shapes: logits float32 [V], on any device; returns float32 [V] there
        Raises: InvalidRequest if the processor fails, or returns no logits; or if the grammar's library gives up
        """
        z, p = logits.clone(), self._params
        if len(self._biased):
            z[self._biased.to(z.device)] += self._bias.to(z.device)
        if p.repetition_penalty != 1 or p.frequency_penalty or p.presence_penalty:
            self._penalise(z)
        if p.logits_processor:
            z = _processed(p.logits_processor, self._tokens, z)
        self._mask(z)
        return z

    def _penalise(self, z: Tensor) -> None:
        """Apply the penalties, in place."""
        self._counts = self._counts or _Counts(self._num_prompt, len(z))
        ids, times = (found.to(z.device) for found in self._counts.follow(self._tokens))
        p, seen = self._params, z[ids]
        seen = torch.where(seen > 0, seen / p.repetition_penalty, seen * p.repetition_penalty)
        z[ids] = seen - p.frequency_penalty * times - p.presence_penalty * (times > 0)

    def _mask(self, z: Tensor) -> None:
        """Apply the masks, in place."""
        if self._allowed is not None:
            ids = self._allowed.to(z.device)
            kept = z[ids]
            z.fill_(-torch.inf)[ids] = kept
        if self._grammar:
            allowed = self._grammar.follow(self._tokens).allowed(len(z))
            z.masked_fill_(~allowed.to(z.device), -torch.inf)
        if len(self._tokens) - self._num_prompt < self._params.min_tokens and len(self._ends):
            ends = self._ends[self._ends < len(z)].to(z.device)
            kept = z[ends]
            z[ends] = -torch.inf
            if self._grammar and z.max() == -torch.inf:
                z[ends] = kept

    def fork(self, tokens: list[int]) -> LogitsRules:
        """Return the same rules for another sequence. tokens: its list, now equal to that of this one."""
        twin = copy(self)
        twin._tokens, twin._counts, twin._grammar = tokens, None, self._grammar and self._grammar.fork()
        return twin

    def truncate(self, length: int) -> None:
        """Forget what is known about tokens behind the first `length`: they are others now, or gone.

        A list that became shorter needs no call: the next `apply` notes it, unless as many other tokens followed.
        """
        if self._counts:
            self._counts.truncate(length)
        if self._grammar:
            self._grammar.truncate(length)

    @property
    def is_complete(self) -> bool:
        """Whether the output is a whole text of the grammar that no token can continue."""
        return self._grammar is not None and self._grammar.follow(self._tokens).is_complete


def _processed(processor: LogitsProcessor, tokens: list[int], z: Tensor) -> Tensor:
    """Return what a request's own function makes of a row. Raises: InvalidRequest"""
    shape, device = z.shape, z.device  # it may change those of z, which it may edit
    try:
        given = processor(list(tokens), z)
    except (KeyboardInterrupt, SystemExit):  # as of a signal
        raise
    except BaseException as error:
        raise InvalidRequest(f"the logits processor raised {described(error)}") from error
    if not isinstance(given, torch.Tensor):
        raise InvalidRequest(f"the logits processor returned {type(given).__name__}; it must return a tensor of logits")
    is_usable = given.is_floating_point() and given.layout is torch.strided
    if given.shape != shape or not is_usable or given.device != device:
        kind = "" if given.layout is torch.strided else f"{str(given.layout).removeprefix('torch.')} "
        raise InvalidRequest(
            f"the logits processor returned {kind}{str(given.dtype).removeprefix('torch.')} {list(given.shape)} on "
            f"{given.device}; it must return float32 {list(shape)} on {device}"
        )
    return given.detach().to(torch.float32, copy=given is not z)
