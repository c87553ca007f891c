"""The engine: prompts in, text out. One step is schedule -> plan -> forward -> sample -> commit, for any mix of work.

    chunks, batch = scheduler.next_step()       choose the sequences and their tokens; map frames for all of them
    logits        = forward(..)                 write and read KV through the batch
    outcome       = outcome_of(.., logits)      draw a token for each sequence; verify drafts; let beams go on
    cache.commit(batch, ..)                     the computed KV becomes valid, and its full pages findable
    outcome.deliver(delivery, scheduler)        fork samples; give each sequence its tokens; release what has ended
    delivery.report(requests)                   send text to the listeners

The engine knows requests and tokens; the scheduler and the cache know pages and frames.

**Interrupts.** A step may be interrupted at any instruction, and stepped again. The requests, the tokens that their
completions have and the states of beam searches are the truth; appending a token is what gives it to a completion.
Everything else is made from them: after a step that did not end, `_restart` gives all frames back, queues a new
sequence for each unfinished completion, and computes its text again. Most of its KV is found in the prefix cache.

**Failures.** A request whose logits are not finite, whose listener, processor or drafts raise, or whose deadline passed
ends alone, with finish_reason "error".

**Threads.** Any thread may submit and cancel at any time: `submit` appends to an inbox that the next step empties, and
`cancel` marks completions that the next step removes. One thread at a time may step, and others never make it fail.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from pagedkv import __version__
from pagedkv.cache import PagedKVCache
from pagedkv.core import Places
from pagedkv.core.arguments import real, salt_row, tenant_name, token_row, whole
from pagedkv.core.thread_guard import ThreadGuard, exclusive
from pagedkv.core.warm import begin_warm_up, warm_up_step
from pagedkv.engine.checkpoint import BUNDLED
from pagedkv.engine.checkpoint.files import weights_digest
from pagedkv.engine.checkpoint.tokenizer import Tokenizer
from pagedkv.engine.drafts.drafters import drafter_of
from pagedkv.engine.drafts.speculation import Drafter, Speculation
from pagedkv.engine.model.decoder import Decoder
from pagedkv.engine.model.kv_quality import _settled_kind
from pagedkv.engine.model.pool import new_cache
from pagedkv.engine.model.runner import ModelRunner, runner_of
from pagedkv.engine.model.streaming import endless
from pagedkv.engine.requests.beams import BeamSearch, search_of
from pagedkv.engine.requests.limits import Limits
from pagedkv.engine.requests.request import Completion, OnText, Request
from pagedkv.engine.requests.scores import Scores
from pagedkv.engine.requests.sequence import Chunk, SequenceState
from pagedkv.engine.sampling.grammar import Grammars
from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.engine.step.delivery import Delivery
from pagedkv.engine.step.events import StepEvent
from pagedkv.engine.step.fetches import tiers_for
from pagedkv.engine.step.meter import EngineStats, Meter
from pagedkv.engine.step.outcome import outcome_of
from pagedkv.engine.step.scheduler import Scheduler
from pagedkv.errors import ConcurrentUse, InvalidRequest, PagedKVError, QueueFull
from pagedkv.kv_gate import Gate
from pagedkv.tiers.tier import CLOSING, Tier

if TYPE_CHECKING:
    from pagedkv.cache import PlannedBatch
    from pagedkv.engine.checkpoint.config import ModelConfig

_MESSAGE: Final = "<|im_start|>"
"""The token that begins a message of a chat. A model with recurrent states keeps one there."""

Prompt = str | Sequence[int]
"""Text, or token ids."""


class Engine(ThreadGuard):
    """Continuous batching over one model and one paged cache.

    Call `submit` and `step`, or `generate` to do both until all prompts are finished. A pool that runs out of frames
    costs time (sequences are preempted and computed again), never tokens. Any thread may submit and cancel; one thread
    at a time steps. A `with` block closes the engine at its end.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        cache: PagedKVCache,
        *,
        limits: Limits | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """drafter: the source of drafts; None for none."""
        _check_geometry(decoder, cache)
        self.decoder: Decoder = decoder
        self.tokenizer: Tokenizer = tokenizer
        self.cache: PagedKVCache = cache
        self.forward: ModelRunner = runner_of(decoder, cache)
        self.meter: Meter = Meter()
        self.delivery: Delivery = Delivery(tokenizer, decoder.config.max_position_embeddings, self.meter)
        self.speculation: Speculation | None = None
        if drafter is not None:
            self.speculation = Speculation(drafter, decoder.config)
        self.scheduler: Scheduler = Scheduler(
            cache, _limits_of(limits), self.forward.plan, speculation=self.speculation
        )
        self.events: list[StepEvent] | None = None  # set it to [] for a record of the steps (events.py)
        self._grammars = Grammars(tokenizer)
        self._inbox: deque[Request] = deque()
        self._submitting = threading.RLock()  # a signal handler may submit, too
        # Held while `cancel` gives frames back, and for the moment in which a step begins: the step waits for `cancel`.
        self._turn, self._is_stepping = threading.RLock(), False
        self._requests: dict[Request, None] = {}  # those taken from the inbox and not yet reported, in order
        self._scoring: set[Request] = set()  # those whose prompts may have tokens without a log-probability
        self._is_whole, self._was_interrupted = True, False
        self._begin_guard(strict=False)

    @classmethod
    def load(
        cls,
        folder: Path | str | None = None,
        *,
        dtype: str | None = None,
        weights: str | None = None,
        device: str = "cpu",
        block_size: int = 16,
        kv_dtype: str | None = None,
        kv_text: str | None = None,
        grouped: bool = True,
        speculate: Drafter | Path | str | None = None,
        state_memory: str | int | None = None,
        context: int | None = None,
        window: int | None = None,
        sinks: int = 0,
        limits: Limits | None = None,
        tiers: Sequence[Tier | str] = (),
        **cache_options: Any,
    ) -> Engine:
        """Build an engine for a Hugging Face folder, or for the bundled checkpoint if `folder` is None.

        dtype: the dtype to compute in; None for that of the checkpoint.
        weights: "int8" or "int4" for linear layers of integers, a scale for each 64 columns; None for `dtype`.
        kv_dtype: the kind of the cache; None for the dtype computed in. "auto" or "auto:BOUND" measures the kinds and
            takes the smallest one with a KL divergence under the bound (pagedkv/kv_gate.py): a minute, once a model.
        kv_text: a text to measure on, like those that the model will read; None for that of the package.
        grouped: give layers with different windows page tables of their own (ModelConfig.specs), so that frames
            behind a window are given back. A model without windows has one group in any case.
        speculate: "prompt-lookup", "draft" (that of the bundled checkpoint), the folder of a draft model, or a drafter:
            decode speculatively.
        state_memory: memory beside the pool for recurrent states: "2GiB", "5%" of the pool's bytes, or their number.
            None for three states for each sequence that may run and 64 to keep, but at most 4 GiB.
        context: the most tokens of prompt and output; None for all positions. It chooses the frequencies of longrope.
        window, sinks: let each token see the last `window` tokens and the first `sinks` ones only, so that a text of
            any length takes constant memory: see model/streaming.py.
        tiers: memory under the pool, the fastest first: "host:16GiB", "disk:200GiB:FOLDER", or objects. Prompts that
            wait are fetched from there while others compute. `close` stores what waits for a disk or a shared store.
        cache_options: options of PagedKVCache, such as num_frames or memory, kernels, state_tiers (as tiers). Without
            num_frames and memory the pool holds 32768 tokens, but takes at most 4 GiB.
        Raises: CheckpointError, InvalidRequest, KernelUnavailable
        """
        path, gate = Path(folder) if folder is not None else BUNDLED, Gate.of(kv_dtype, kv_text)
        decoder = _within(context, Decoder.load(path, dtype=dtype, device=device, weights=weights))
        tokenizer, digest = Tokenizer.load(path), functools.cache(lambda: weights_digest(path))
        if gate is not None:
            identity = f"{__version__} {weights} {decoder.config.rope_set}{digest()}"
            kv_dtype, cache_options["calibration"] = _settled_kind(gate, decoder, tokenizer.encode, kv_text, identity)
        decoder = Decoder(endless(decoder.config, window, sinks), decoder.weights)
        own = {"state_memory": state_memory, "at_once": _limits_of(limits).max_sequences}
        cache_options = {"watermark": 0.01, **cache_options, **own}
        if decoder.config.linear and (start := tokenizer.raw.token_to_id(_MESSAGE)) is not None:
            cache_options.setdefault("places", Places((start,)))
        drafter = drafter_of(speculate, device=device, block_size=block_size)
        of_kv = f"{decoder.dtype} {weights} {window} {sinks} {decoder.config.rope_set}"
        with tiers_for(cache_options, tiers, lambda: of_kv + digest()):
            cache = new_cache(decoder, block_size=block_size, kv_dtype=kv_dtype, grouped=grouped, **cache_options)
        if not begin_warm_up():  # else steps run uncompiled until another process has compiled what they call
            warm_up_step()  # last, so that bad input is refused without waiting
        return cls(decoder, tokenizer, cache, limits=limits, drafter=drafter)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        num_samples: int = 1,
        on_text: OnText | None = None,
        tenant: bytes = b"",
        salt: bytes = b"",
        timeout: float | None = None,
        priority: int = 0,
        retain_s: float = 0.0,
    ) -> Request:
        """Queue a prompt (text, or token ids) and return its request, whose completions grow as the engine steps.

        priority: requests with a lower number go first, and preempt others.
        salt: prompts with another salt, or another tenant, share no pages. Quotas count by tenant alone.
        timeout: seconds from now after which the request ends, with what it has and finish_reason "error".
        retain_s: seconds after the end for which the pages of prompt and output are retained, as far as the share
            `hints` of the cache allows. The next request of an agent finds them then. A step that lacks frames takes
            them.
        Any thread may call this, also while another one steps.
        Raises: InvalidRequest for an empty prompt, an id outside the vocabulary, an argument of a wrong type, or more
            tokens than the pool or the model can hold; QueueFull if Limits.max_waiting requests wait already
        """
        params = SamplingParams() if params is None else params
        ids = _prompt_ids(prompt, self.tokenizer)
        num_samples = whole(num_samples, "num_samples", 1)
        _check_request(ids, params, self.decoder.config, self.cache, self.scheduler.limits)
        if num_samples > (most := self.scheduler.limits.max_sequences):
            raise InvalidRequest(
                f"num_samples is {num_samples}, and {most} sequences may run at once; lower it, or raise "
                "Limits.max_sequences"
            )
        if on_text is not None and not callable(on_text):
            raise InvalidRequest(f"on_text is {on_text!r}; give a function of (completion, text), or None")
        now = time.perf_counter()
        deadline = _deadline_of(timeout, now)
        request = Request(ids, params, tenant_name(tenant), on_text, submitted_at=now, deadline=deadline)
        request.grammar = self._grammars.compiled(params)
        request.retain_s = real(retain_s, "retain_s")
        request.priority = whole(priority, "priority", -(2**31), 2**31)
        salt_row(salt)
        request.salt = salt
        if params.num_beams > 1:
            most = min(params.max_tokens, self.decoder.config.max_position_embeddings - len(ids))
            request.search = BeamSearch(params, self.tokenizer.eos_ids, most)
            _check_search(request, num_samples, self.decoder.config, self.cache, self.scheduler.limits)
        request.completions = [Completion(request, index) for index in range(num_samples)]
        with self._submitting:
            self._check_queue()
            self._inbox.append(request)
        return request

    def _check_queue(self) -> None:
        """Raise QueueFull if as many requests wait for their first step as may."""
        most = self.scheduler.limits.max_waiting
        if most is not None:
            # Copies, as another thread may step meanwhile; a request may be in both queues for a moment.
            new = (s.completion for s in list(self.scheduler.waiting))
            waiting = {*list(self._inbox), *(c.request for c in new if not c.admitted_at)}
            if len(waiting) >= most:
                raise QueueFull(len(waiting), most)

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None, **options: Any
    ) -> list[Request]:
        """Submit all prompts, step until all are finished, and return their requests in the same order.

        options: options of `submit`, the same for each prompt.
        Raises: as `submit` and `step`; all prompts are cancelled.
        """
        requests: list[Request] = []
        try:
            for prompt, prompt_params in _params_of_each(prompts, params):
                requests.append(self.submit(prompt, prompt_params, **options))
            self.run()
        except BaseException:
            for request in requests:
                self.cancel(request)
            raise
        return requests

    def score(self, prompts: Sequence[Prompt], **options: Any) -> list[list[float | None]]:
        """Return the log-probability of each token of each prompt after those before it; None for the first one.

        A prompt is computed whole, in chunks as any other, and its pages can be found afterwards. The likeliest tokens
        at each place: `generate` with SamplingParams(max_tokens=0, prompt_logprobs=N), and Request.prompt_logprobs.
        options: as of `generate`. Raises: as `generate`; PagedKVError if a prompt ended before it was scored
        """
        requests = self.generate(prompts, SamplingParams(max_tokens=0, prompt_logprobs=0), **options)
        for number, request in enumerate(requests):
            if not request.is_scored:
                ended = request.completions[0]
                raise PagedKVError(f"prompt {number} was not scored: {ended.error or ended.finish_reason}")
        return [[told and told.logprob for told in request.prompt_logprobs] for request in requests]

    def cancel(self, request: Request) -> None:
        """End `request`: its completions that run are "cancelled". A step under way may still give them a last token.

        Its frames are given back at once, or by the step that is under way or the next one. Any thread may call this.
        """
        for completion in request.completions:
            completion.end("cancelled")
            if completion.finish_reason == "cancelled":
                completion.is_reported = True
        with self._turn, suppress(ConcurrentUse):  # raised if another thread owns the cache
            if not self._is_stepping:
                self._take_in()

    def close(self, timeout: float = CLOSING) -> bool:
        """Store what waits for a tier on disk, and close the tiers. Without tiers there is nothing to close.

        timeout: about the most seconds that this takes; what was not stored then is lost, and is computed again. An
            engine that was closed still answers, without tiers.
        Returns: whether all was stored and no tier hangs
        """
        return self.cache.tiers.close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stats(self) -> EngineStats:
        """Return counts of sequences, totals of tokens and steps, and percentiles of latencies. Any thread may call."""
        return self.meter.stats(waiting=len(self._inbox) + len(self.scheduler.waiting), scheduler=self.scheduler)

    @property
    def has_work(self) -> bool:
        """Whether any sequence is running or waiting, or a listener was not told of an end."""
        return bool(self._inbox or self._requests) or not self._is_whole

    def run(self) -> None:
        """Step until no sequence is left. Raises: as `step`."""
        while self.has_work:
            self.step()

    def step(self) -> list[Completion]:
        """Compute one batch: the next chunk of some prompts, the next token of all other running sequences.

        After any exception, step again: no token is lost.
        Returns: the completions that finished, and whose listeners know that, since the last step that returned.
        Raises: InvalidRequest if a listener calls step; ConcurrentUse if another thread is stepping; any error of the
            model. An Exception of a request only ends it.
        """
        try:
            with self._turn:
                self._is_stepping = True
            self._step()
        except ConcurrentUse:
            if [threading.get_ident()] in self._calls.values() and self._is_under_way():
                raise InvalidRequest(
                    "a listener called step, run or generate of the engine that is stepping; "
                    "a listener may only submit and cancel"
                ) from None
            raise
        finally:
            self._is_stepping = False
        finished, self.delivery.finished = self.delivery.finished, []
        return finished

    @exclusive
    def _step(self) -> None:
        """Take in what is new, choose and plan chunks, compute, sample, commit, deliver: the steps of the file head."""
        began = time.perf_counter()
        self._take_in_now()
        chunks, batch = self.scheduler.next_step()
        if batch is not None:
            self._compute(chunks, batch)
        self.delivery.report(self._requests)
        self._remove_ended()  # a listener may have cancelled
        self.meter.measure(self.cache, began, sum(chunk.num_tokens for chunk in chunks))
        if self.events is not None:
            self.events.append(StepEvent.of(began, chunks))
        self._is_whole = True

    def _compute(self, chunks: list[Chunk], batch: PlannedBatch) -> None:
        """Run the model over the batch, commit it, and give each sequence its next tokens."""
        guesses, searching = self.speculation, bool(self.scheduler.searching)
        try:
            token_ids = [token for chunk in chunks for token in chunk.token_ids]
            ends = batch.plan.cu_seqlens_q[1:].tolist()
            scores = Scores.of(chunks, ends, self.decoder.config.vocab_size) if self._scoring else None
            logits = self.forward(
                token_ids, batch, Speculation.rows(ends, chunks), None if scores is None else scores.read
            )
            families = [self._family(chunk.sequence) for chunk in chunks if chunk.is_last]
            outcome = outcome_of(chunks, families, logits, speculation=guesses, is_searching=searching)
            if outcome.more or searching or any(chunk.sequence.completion.finish_reason for chunk in chunks):
                kept = outcome.kept(chunks)
                self.cache.commit(batch, [token for part in kept for token in part], list(map(len, kept)))
            else:
                self.cache.commit(batch, token_ids)
        except BaseException:
            if not batch.plan.settled:
                self.cache.abort(batch)
            raise
        if scores is not None:
            scores.deliver()
            self._scoring = {request for request in self._scoring if not request.finished}
        outcome.deliver(self.delivery, self.scheduler)
        self._remove_ended()

    @exclusive
    def _take_in(self) -> None:
        self._take_in_now()
        self._is_whole = True

    def _take_in_now(self) -> None:
        """Restart after a step that did not end. Queue what came, end what is over its time, free what has ended."""
        self.cache.hand_over()
        if not self._is_whole:
            self._restart()
        self._is_whole = False
        if self._was_interrupted:
            self.cache.recover()
            held = sum(s.space is not None for s in (*self.scheduler.running, *self.scheduler.waiting))
            held += self.cache.tiers.num_fetches + self.cache.tiers.num_holds
            # A traceback may keep handles alive: then the next step recovers again.
            self._was_interrupted = self.cache.has_plans or self.cache.stats().spaces != held
        for _ in range(len(self._inbox)):  # not while there are any: a thread may submit faster than they are taken in
            request = self._inbox[0]
            if request not in self._requests:
                if request.params.prompt_logprobs is not None:
                    self._scoring.add(request)
                self._requests[request] = None
                self.meter.queue(request)
                self.scheduler.add(self.delivery.begin(request.completions[0]))
            self._inbox.popleft()
        now = time.perf_counter()
        for request in list(self._requests):
            if self.delivery.drop_reported(self._requests, request) or request.deadline is None:
                continue
            if now > request.deadline:
                late = f"the request was not finished {request.deadline - request.submitted_at:g} s after it came"
                request.fail(late)
        self._remove_ended()

    def _remove_ended(self) -> None:
        for sequence in [s for s in (*self.scheduler.running, *self.scheduler.waiting) if s.completion.finish_reason]:
            self.scheduler.remove(sequence)

    def _family(self, parent: SequenceState) -> list[SequenceState]:
        """Return the sequences that draw from the logits of `parent`: `parent`, then its samples, not yet forked."""
        if not parent.completion.request.params.max_tokens:
            return []
        others = [completion for completion in parent.receivers if completion is not parent.completion]
        return [parent, *map(self.delivery.begin, others)]

    def _restart(self) -> None:
        """Begin anew from the requests and the tokens they have, after a step that did not end."""
        self._was_interrupted = True
        if self.speculation is not None:
            self.speculation.drafter.recover()
        self.scheduler.restart(self.delivery.begin_again(self._requests))


def _prompt_ids(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of a prompt, which may be text. Raises: InvalidRequest"""
    if isinstance(prompt, str):
        ids: list[int] = tokenizer.encode(prompt)
    elif isinstance(prompt, bytes | bytearray | memoryview) or (
        isinstance(prompt, Sequence) and not {bool, np.bool_}.isdisjoint(map(type, prompt))
    ):
        raise InvalidRequest(f"the prompt is {type(prompt).__name__}; give text (str), or a list of token ids")
    else:
        ids = token_row(prompt).tolist()
    if not ids:
        raise InvalidRequest("the prompt is empty; give at least one token")
    return ids


def _params_of_each(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[tuple[Prompt, SamplingParams | None]]:
    """Return each prompt with its parameters.

    Raises: InvalidRequest for one text in place of a list, or for another number of parameters
    """
    if isinstance(prompts, str | bytes):
        raise InvalidRequest("generate takes a list of prompts, and one text was given; give [text]")
    each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
    if len(each) != len(prompts):
        raise InvalidRequest(
            f"there are {len(prompts)} prompts and {len(each)} params; give one for all prompts, or one for each"
        )
    return list(zip(prompts, each, strict=True))


def _within(context: int | None, decoder: Decoder) -> Decoder:
    """Return a decoder for sequences of up to `context` tokens. Raises: InvalidRequest"""
    return decoder if context is None else Decoder(decoder.config.within(context), decoder.weights)


def _limits_of(limits: Limits | None) -> Limits:
    """Return the limits of an engine. Raises: InvalidRequest for another object"""
    if limits is not None and not isinstance(limits, Limits):
        raise InvalidRequest(f"limits is {limits!r}; give Limits, such as Limits(max_sequences=8), or None")
    return limits or Limits()


def _check_request(
    ids: list[int], params: SamplingParams, config: ModelConfig, cache: PagedKVCache, limits: Limits
) -> None:
    """Raise InvalidRequest if the model or the pool cannot hold the prompt and its output."""
    spec, frames = cache.spec, cache.num_frames
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(f"params is {params!r}; give SamplingParams, or None for greedy decoding")
    strange = [token for token in ids if not 0 <= token < config.vocab_size]
    if strange:
        raise InvalidRequest(
            f"token id {strange[0]} is outside the vocabulary of {config.vocab_size} tokens; "
            "encode the prompt with the tokenizer of this model"
        )
    for name, named in (("logit_bias", params.logit_bias), ("allowed_ids", params.allowed_ids or ())):
        if strange := [token for token in named if token >= config.vocab_size]:
            raise InvalidRequest(
                f"{name} has token id {strange[0]}, outside the vocabulary of {config.vocab_size} tokens; leave it out"
            )
    if len(ids) + bool(params.max_tokens) > config.max_position_embeddings:
        raise InvalidRequest(
            f"the prompt has {len(ids)} tokens, the model ends at {config.max_position_embeddings} "
            "(one is left for the output); shorten the prompt"
        )
    # The KV of the last token is never computed.
    longest = max(len(ids), min(len(ids) + params.max_tokens, config.max_position_embeddings) - 1)
    if (needed := cache.frames_for(longest, limits.chunk)) > frames:
        raise InvalidRequest(
            f"the prompt of {len(ids)} tokens and up to {params.max_tokens} new ones take {needed} frames of "
            f"{spec.block_size} tokens, the pool has {frames}; raise num_frames or memory, or lower max_tokens"
        )


def _deadline_of(timeout: float | None, now: float) -> float | None:
    """Return the time at which a request ends, or None. Raises: InvalidRequest if that is not after `now`"""
    deadline = None if timeout is None else now + real(timeout, "timeout")
    if deadline is not None and deadline <= now:
        raise InvalidRequest(f"timeout is {timeout} s: the request would end before it begins; give more than 0")
    return deadline


def _check_search(request: Request, num_samples: int, config: ModelConfig, cache: PagedKVCache, limits: Limits) -> None:
    """Raise InvalidRequest if the vocabulary, the pool or a step cannot have all beams of a request.

    One sequence of the request passed `_check_request`.
    """
    search = search_of(request)
    assert search is not None
    beams, most = request.params.num_beams, min(limits.max_sequences, limits.max_batch_tokens)
    if num_samples > beams:
        raise InvalidRequest(f"num_samples is {num_samples}, num_beams {beams}; a search gives up to num_beams outputs")
    if beams > most:
        raise InvalidRequest(
            f"num_beams is {beams}, a step takes {most} sequences; raise max_sequences and max_batch_tokens of Limits"
        )
    if (num_others := config.vocab_size - len(search.ends)) < beams:
        raise InvalidRequest(
            f"num_beams is {beams}, but only {num_others} of the {config.vocab_size} tokens in the vocabulary do not "
            f"end an output; lower num_beams"
        )
    prompt, at_once = len(request.prompt_ids), limits.chunk
    if cache.states is not None and 2 * beams > (num_states := cache.states_of(request.tenant)):
        raise InvalidRequest(
            f"{beams} beams take two recurrent states each, and this tenant may have {num_states}; raise state_memory, "
            "or lower num_beams"
        )
    # Beams share the whole pages of the prompt, unless a window gives them back.
    shared = prompt // cache.spec.block_size if cache.specs == (cache.spec,) and cache.spec.window is None else 0
    needed = shared + beams * (cache.frames_for(prompt + request.params.max_tokens - 1, at_once) - shared)
    if needed > cache.num_frames:
        raise InvalidRequest(
            f"{beams} beams of {prompt} tokens and up to {request.params.max_tokens} new ones take {needed} frames, "
            f"the pool has {cache.num_frames}; raise num_frames or memory, or lower num_beams or max_tokens"
        )


def _check_geometry(decoder: Decoder, cache: PagedKVCache) -> None:
    """Raise InvalidRequest if the cache was not made for the keys and values of `decoder`."""
    dtype = str(decoder.dtype).removeprefix("torch.")
    wanted = decoder.config.spec(block_size=cache.spec.block_size, dtype=dtype)
    facts = [("num_layers", wanted.num_layers, len(cache)), ("device", decoder.device.type, cache.device.type)]
    for spec in cache.specs:
        facts += [
            ("num_kv_heads", wanted.num_kv_heads, spec.num_kv_heads),
            ("head_dim", wanted.head_dim, spec.head_dim),
            ("head_dim_v", wanted.value_dim, spec.value_dim),
            ("dtype", wanted.dtype, spec.dtype),
        ]
    for layer, needed in enumerate(decoder.config.windows) if len(cache) == wanted.num_layers else ():
        kept = cache.specs[cache.layer_groups[layer]].window
        suffices = kept is None or (needed is not None and needed <= kept)
        facts.append((f"window of layer {layer}", needed, needed if suffices else kept))
        if kept is not None:
            facts.append(("sinks", decoder.config.sinks, cache.specs[cache.layer_groups[layer]].sinks))
    states = None if cache.state_storage is None else cache.state_storage.spec
    if states != (needed_states := decoder.config.state_spec(dtype)):
        raise InvalidRequest(
            f"the cache {'was made without recurrent states' if states is None else 'has other recurrent states'}, the "
            f"decoder has {0 if needed_states is None else len(needed_states.layers)} layers with them; build it with "
            "states=decoder.config.state_spec()"
        )
    for name, need, have in facts:
        if need != have:
            raise InvalidRequest(
                f"the cache was made for {name} {have}, the decoder has {need}; build the cache from "
                "decoder.config.spec() or decoder.config.specs()"
            )
