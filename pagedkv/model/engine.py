"""The engine: prompts in, text out. One step is schedule -> plan -> forward -> sample -> commit, for any mix of work.

    chunks, batch = scheduler.next_step()       choose the sequences and their tokens; map frames for all of them
    logits        = decoder.forward(..)         write and read KV through the batch
    tokens        = sample(logits, ..)
    cache.commit(batch, ..)                     the computed KV becomes valid, and its full pages findable
    deliver(tokens)                             send text to the listeners; release finished sequences; fork samples

The engine knows requests and tokens; the scheduler and the cache know pages and frames.

**Interrupts.** A step may be interrupted at any instruction, and stepped again. The requests and the tokens that their
completions have are the truth; appending a token is what gives it to a completion. Everything else is made from them:
after a step that did not end, `_restart` gives all frames back, queues a new sequence for each unfinished completion,
and computes its text again. Most of its KV is found in the prefix cache.

**Failures.** A request whose logits are not finite, whose listener raises or whose deadline passed ends alone, with
finish_reason "error".

**Threads.** Any thread may submit and cancel at any time: `submit` appends to an inbox that the next step empties, and
`cancel` marks completions that the next step removes. One thread at a time may step.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap
from operator import call
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from pagedkv.cache import PagedKVCache
from pagedkv.core.arguments import real, tenant_name, token_row, whole
from pagedkv.core.thread_guard import ThreadGuard, exclusive
from pagedkv.core.warm import warm_up_step
from pagedkv.errors import ConcurrentUse, InvalidRequest, QueueFull
from pagedkv.model.decoder import Decoder
from pagedkv.model.request import Completion, OnText, Request, StopStrings
from pagedkv.model.sampler import BadLogits, SamplingParams, SamplingRow, sample
from pagedkv.model.scheduler import Chunk, Limits, Scheduler, SequenceState
from pagedkv.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.cache import PlannedBatch

BUNDLED: Final = Path(__file__).parent / "bundled"
"""The checkpoint that ships inside the package."""

DEFAULT_TOKENS: Final = 32768
DEFAULT_MEMORY: Final = "4GiB"
"""The size of a pool for which the caller gives no size: DEFAULT_TOKENS tokens, but at most DEFAULT_MEMORY."""

MEASURED: Final = 8
"""Of so many steps one is measured for `Meter`: the figures take as long as all else that a small step does."""

Prompt = str | Sequence[int]
"""Text, or token ids."""


@dataclass
class Meter:
    """Totals so far. One step in MEASURED adds, at its end, the slots then mapped and those that hold no token."""

    steps: int = 0
    slots_mapped: int = 0
    slots_wasted: int = 0

    @property
    def waste(self) -> float:
        """Share of the mapped slots that held no token, over the measured steps: 0.0 to 1.0."""
        return self.slots_wasted / self.slots_mapped if self.slots_mapped else 0.0


def _rows_of(logits: Tensor, numbers: list[int]) -> Tensor:
    """Return rows of the logits; the logits themselves if that is all of them, in order."""
    if numbers == list(range(len(logits))):
        return logits
    return logits[torch.tensor(numbers, device=logits.device)]


class Engine(ThreadGuard):
    """Continuous batching over one model and one paged cache.

    Call `submit` and `step`, or `generate` to do both until all prompts are finished. A pool that runs out of frames
    costs time (sequences are preempted and computed again), never tokens. Any thread may submit and cancel; one thread
    at a time steps.
    """

    def __init__(
        self, decoder: Decoder, tokenizer: Tokenizer, cache: PagedKVCache, *, limits: Limits | None = None
    ) -> None:
        self.decoder: Decoder = decoder
        self.tokenizer: Tokenizer = tokenizer
        self.cache: PagedKVCache = cache
        self.scheduler: Scheduler = Scheduler(cache, limits or Limits())
        self.meter: Meter = Meter()
        self._inbox: deque[Request] = deque()
        self._requests: dict[Request, None] = {}  # those taken from the inbox and not yet reported, in order
        self._is_whole, self._was_interrupted = True, False
        self._begin_guard(strict=False)
        self._check_geometry()
        self._layers = decoder.bind(cache)

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
        grouped: bool = False,
        limits: Limits | None = None,
        **cache_options: Any,
    ) -> Engine:
        """Build an engine for a Hugging Face folder, or for the bundled checkpoint if `folder` is None.

        dtype: the dtype to compute in; None for that of the checkpoint.
        weights: "int8" or "int4" for linear layers of integers, a scale for each 64 columns; None for `dtype`.
        kv_dtype: the dtype of the cache; None for the dtype computed in.
        grouped: give layers with different windows page tables of their own (ModelConfig.specs), so that frames
            behind a window are given back. Useful for the families with mixed windows (Gemma 2 and 3).
        cache_options: options of PagedKVCache (num_frames or memory, kernels, watermark, prefix_cache). Without
            num_frames and memory the pool holds 32768 tokens, but takes at most 4 GiB.
        Raises: CheckpointError, InvalidRequest, KernelUnavailable
        """
        path = Path(folder) if folder is not None else BUNDLED
        decoder = Decoder.load(path, dtype=dtype, device=device, weights=weights)
        tokenizer = Tokenizer.load(path)
        name = str(decoder.dtype).removeprefix("torch.")
        config = decoder.config
        specs = config.specs(block_size=block_size, kv_dtype=kv_dtype, dtype=name)
        if not grouped:
            specs = (config.spec(block_size=block_size, kv_dtype=kv_dtype, dtype=name),)
        if cache_options.get("num_frames") is None and cache_options.get("memory") is None:
            largest = max(specs, key=lambda spec: spec.frame_bytes)
            cache_options["num_frames"] = min(
                len(specs) * largest.pages(DEFAULT_TOKENS), largest.frames_in(DEFAULT_MEMORY)
            )
        cache_options.setdefault("watermark", 0.01)
        cache = PagedKVCache(
            specs, layer_groups=config.layer_groups() if grouped else None, device=device, **cache_options
        )
        warm_up_step()  # last, so that bad input is refused without waiting for the compilation
        return cls(decoder, tokenizer, cache, limits=limits)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        num_samples: int = 1,
        on_text: OnText | None = None,
        tenant: bytes = b"",
        timeout: float | None = None,
    ) -> Request:
        """Queue a prompt (text, or token ids) and return its request, whose completions grow as the engine steps.

        timeout: seconds from now after which the request ends, with what it has and finish_reason "error".
        Any thread may call this, also while another one steps.
        Raises: InvalidRequest for an empty prompt, an id outside the vocabulary, an argument of a wrong type, or more
            tokens than the pool or the model can hold; QueueFull if Limits.max_waiting requests wait already
        """
        params = SamplingParams() if params is None else params
        ids = self._prompt_ids(prompt)
        num_samples = whole(num_samples, "num_samples", 1, self.scheduler.limits.max_sequences + 1)
        self._check_request(ids, params)
        if on_text is not None and not callable(on_text):
            raise InvalidRequest(f"on_text is {on_text!r}; give a function of (completion, text), or None")
        now = time.perf_counter()
        deadline = None if timeout is None else now + real(timeout, "timeout")
        if deadline is not None and deadline <= now:
            raise InvalidRequest(f"timeout is {timeout} s: the request would end before it begins; give more than 0")
        waiting, most = len(self._inbox) + len(self.scheduler.waiting), self.scheduler.limits.max_waiting
        if most is not None and waiting >= most:
            raise QueueFull(waiting, most)
        request = Request(ids, params, tenant_name(tenant), on_text, submitted_at=now, deadline=deadline)
        request.completions = [Completion(request, index) for index in range(num_samples)]
        self._inbox.append(request)
        return request

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[Request]:
        """Submit all prompts, step until all are finished, and return their requests in the same order.

        options: those of `submit`, the same for each prompt. Raises: as `submit` and `step`; all prompts are cancelled.
        """
        each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise InvalidRequest(
                f"there are {len(prompts)} prompts and {len(each)} params; give one for all prompts, or one for each"
            )
        requests: list[Request] = []
        try:
            for prompt, prompt_params in zip(prompts, each, strict=True):
                requests.append(self.submit(prompt, prompt_params, **options))
            self.run()
        except BaseException:
            for request in requests:
                self.cancel(request)
            raise
        return requests

    def cancel(self, request: Request) -> None:
        """End `request`: its completions that run are "cancelled", and get no further token.

        Its frames are given back at once, or by the step that is under way or the next one. Any thread may call this.
        """
        for completion in request.completions:
            completion.end("cancelled")
            completion.is_reported |= completion.finish_reason == "cancelled"
        try:
            self._take_in()
        except ConcurrentUse:  # a step is under way, or another thread owns the cache
            return

    @property
    def has_work(self) -> bool:
        """Whether any sequence is running or waiting."""
        return bool(self._inbox or self.scheduler.running or self.scheduler.waiting) or not self._is_whole

    def run(self) -> None:
        """Step until no sequence is left. Raises: as `step`."""
        while self.has_work:
            self.step()

    def step(self) -> list[Completion]:
        """Compute one batch: the next chunk of some prompts, the next token of all other running sequences.

        After any exception, step again: no token is lost.
        Returns: the completions that finished, and whose listeners know that, since the last step that returned.
        Raises: InvalidRequest if a listener calls step; ConcurrentUse if another thread is stepping; any error of the
            model. An error that concerns one request ends that request and is not raised.
        """
        try:
            return self._step()
        except ConcurrentUse:
            if [threading.get_ident()] in self._calls.values() and self._is_under_way():
                raise InvalidRequest(
                    "a listener called step, run or generate of the engine that is stepping; "
                    "a listener may only submit and cancel"
                ) from None
            raise

    @exclusive
    def _step(self) -> list[Completion]:
        """Take in what is new, choose and plan chunks, compute, sample, commit, deliver: the steps of the file head."""
        self.cache.hand_over()
        if not self._is_whole:
            self._restart()
        self._is_whole = False
        self._take_in_now()
        chunks, batch = self.scheduler.next_step()
        if batch is not None:
            self._compute(chunks, batch)
        finished = self._report()
        self._measure()
        self._is_whole = True
        return finished

    def _compute(self, chunks: list[Chunk], batch: PlannedBatch) -> None:
        """Run the model over the batch, commit it, and give each sequence its next token."""
        try:
            token_ids = [token for chunk in chunks for token in chunk.token_ids]
            families = [self._family(chunk.sequence) for chunk in chunks if chunk.is_last]
            tokens = self._sample(families, self._forward(token_ids, chunks, batch))
            if -1 in tokens:  # no prompt may find the KV of a request without usable logits
                kept = [chunk for chunk in chunks if not chunk.sequence.completion.error]
                counts = [0 if chunk.sequence.completion.error else chunk.num_tokens for chunk in chunks]
                self.cache.commit(batch, [token for chunk in kept for token in chunk.token_ids], counts)
            else:
                self.cache.commit(batch, token_ids)
        except BaseException:
            if not batch.plan.settled:
                self.cache.abort(batch)
            raise
        self._deliver(families, tokens)

    @exclusive
    def _take_in(self) -> None:
        self.cache.hand_over()
        if not self._is_whole:
            self._restart()
        self._is_whole = False
        self._take_in_now()
        self._is_whole = True

    def _take_in_now(self) -> None:
        """Queue what was submitted, end what is over its time, and give back the frames of what has ended."""
        if self._was_interrupted:  # a traceback may have kept handles alive until now
            self.cache.recover()
        while self._inbox:
            request = self._inbox[0]
            if request not in self._requests:
                self._requests[request] = None
                self.scheduler.add(self._new_sequence(request.completions[0]))
            self._inbox.popleft()
        now = time.perf_counter()
        for request in list(self._requests):
            if all(completion.is_reported for completion in request.completions):
                del self._requests[request]
            elif request.deadline is not None and now > request.deadline:
                late = f"the request was not finished {request.deadline - request.submitted_at:g} s after it came"
                for completion in request.completions:
                    completion.end("error", late)
        self._remove_ended()

    def _remove_ended(self) -> None:
        for sequence in [s for s in (*self.scheduler.running, *self.scheduler.waiting) if s.completion.finish_reason]:
            self.scheduler.remove(sequence)

    def _forward(self, token_ids: list[int], chunks: list[Chunk], batch: PlannedBatch) -> Tensor:
        """Compute the logits after each sequence's last token, for the sequences that this step completes.

        Shapes: returns float32 [N, V], in the order of the chunks that are their sequence's last
        """
        ends = batch.plan.cu_seqlens_q[1:].tolist()
        last = [end - 1 for end, chunk in zip(ends, chunks, strict=True) if chunk.is_last]
        device = self.decoder.device
        return self.decoder.forward(
            torch.tensor(token_ids, device=device),
            batch,
            self._layers,
            logits_of=torch.tensor(last, dtype=torch.int64, device=device),
            backend=self.cache.kernel.name,
        )

    def _family(self, parent: SequenceState) -> list[SequenceState]:
        """Return the sequences that draw from the logits of `parent`: `parent`, then its samples, not yet forked."""
        return [parent, *(self._new_sequence(c) for c in parent.receivers if c is not parent.completion)]

    def _sample(self, families: list[list[SequenceState]], logits: Tensor) -> list[int]:
        """Draw the next token of each member of each family, in this order. Row n of the logits is that of family n.

        A member whose logits are no numbers ends, and gets -1.
        """
        members = [(member, n) for n, family in enumerate(families) for member in family]
        tokens = [-1] * len(members)
        drawing = list(range(len(members)))
        while drawing:
            rows = [self._sampling_row(members[i][0]) for i in drawing]
            try:
                drawn = sample(_rows_of(logits, [members[i][1] for i in drawing]), rows)
            except BadLogits as error:
                for row in error.rows:
                    members[drawing[row]][0].completion.end("error", str(error))
                drawing = [i for row, i in enumerate(drawing) if row not in error.rows]
                continue
            for i, token in zip(drawing, drawn.tolist(), strict=True):
                members[i][0].num_drawn += 1
                tokens[i] = token
            break
        return tokens

    def _sampling_row(self, member: SequenceState) -> SamplingRow:
        # An interrupted step lost a token that was already drawn: draw the same one again, as the seed demands.
        if member.num_drawn != len(member.completion.token_ids):
            member.rewind()
        return SamplingRow(member.completion.request.params, member.generator, member.tokens)

    def _deliver(self, families: list[list[SequenceState]], tokens: list[int]) -> None:
        """Append its token to each sequence.

        The samples of a family fork before its parent takes its token: the parent may finish and release its frames.
        """
        next_tokens = iter(tokens)
        for parent, *children in families:
            parent_token = next(next_tokens)
            for child in children:
                token = next(next_tokens)
                if not child.completion.finish_reason:
                    self.scheduler.fork(parent, child)
                    self._take(child, token)
            if not parent.completion.finish_reason:
                self._take(parent, parent_token)
        self._remove_ended()

    def _take(self, sequence: SequenceState, token: int) -> None:
        """Give one token to a completion, and show its text. A finished sequence leaves the scheduler later."""
        completion = sequence.completion
        completion.token_ids.append(token)  # from here on the completion has it, whatever is interrupted
        text, reason = self._read(sequence, token)
        completion.text += text
        completion.last_token_at = time.perf_counter()
        if len(completion.token_ids) == 1:
            completion.first_token_at = completion.last_token_at
        if reason:
            completion.end(reason)

    def _read(self, sequence: SequenceState, token: int) -> tuple[str, str]:
        """Append a token to a sequence; return the text that may be shown, and the reason if the text ends with it."""
        params = sequence.completion.request.params
        sequence.tokens.append(token)
        length = len(sequence.tokens) - len(sequence.completion.request.prompt_ids)
        ended = token in params.stop_ids or (token in self.tokenizer.eos_ids and not params.ignore_eos)
        text, stopped = ("", False) if ended else sequence.stops.push(sequence.stream.push(token))
        reason = "stop" if ended or stopped else ""
        if length >= params.max_tokens or len(sequence.tokens) >= self.decoder.config.max_position_embeddings:
            reason = reason or "length"
        if reason and not stopped:
            rest, stopped = sequence.stops.push(sequence.stream.finish())
            text += rest if stopped else rest + sequence.stops.finish()
        return text, reason

    def _report(self) -> list[Completion]:
        """Call the listeners of all requests that have new text or ended, and forget those that are finished.

        A cancelled completion counts as reported. Returns: the completions that finished
        """
        finished: list[Completion] = []
        for request in list(self._requests):
            for completion in request.completions:
                text, is_end = completion.text[completion.num_sent :], bool(completion.finish_reason)
                if completion.is_reported or not (text or is_end):
                    continue
                if request.on_text:
                    self._tell(request.on_text, completion, text, is_end=is_end)
                completion.num_sent, completion.is_reported = len(completion.text), bool(completion.finish_reason)
                if completion.is_reported and completion.finish_reason != "cancelled":
                    finished.append(completion)
            if all(completion.is_reported for completion in request.completions):
                del self._requests[request]
        self._remove_ended()  # a listener may have cancelled
        return finished

    def _tell(self, on_text: OnText, completion: Completion, text: str, *, is_end: bool) -> None:
        """Call a listener, and note what it got, so that an interrupt repeats no piece. If it raises, its request ends.

        The notes and the call are made by one call of C functions: only an interrupt inside of the listener loses a
        piece, which the listener may have taken.
        """
        sent = completion.num_sent + len(text)
        calls = (setattr, completion, "num_sent", sent), (on_text, completion, text)
        try:
            deque(starmap(call, (*calls, (setattr, completion, "is_reported", is_end))), maxlen=0)
        except Exception as error:
            try:
                reason = f"the listener raised {type(error).__name__}: {error}"
            except Exception:  # the error has no words
                reason = f"the listener raised {type(error).__name__}"
            for one in completion.request.completions:
                one.end("error", reason)

    def _restart(self) -> None:
        """Begin anew from the requests and the tokens they have, after a step that did not end."""
        self._was_interrupted = True
        sequences: list[SequenceState] = []
        for request in self._requests:
            first = request.completions[0]
            for completion in request.completions:
                sequence, text = self._new_sequence(completion), ""
                for token in completion.token_ids:
                    more, reason = self._read(sequence, token)
                    text += more
                    if reason:
                        completion.end(reason)
                completion.text = text
                if completion.token_ids and not completion.first_token_at:
                    completion.first_token_at = completion.last_token_at = time.perf_counter()
                # without a token, the first sample computes the prompt of all
                waits_for_first = completion.index and not (
                    completion.token_ids or first.token_ids or first.finish_reason
                )
                if not completion.finish_reason and not waits_for_first:
                    sequences.append(sequence)
        self.scheduler.restart(sequences)

    def _new_sequence(self, completion: Completion) -> SequenceState:
        params, request = completion.request.params, completion.request
        generator = params.generator(completion.index)
        return SequenceState(
            completion, list(request.prompt_ids), generator, self.tokenizer.stream(), StopStrings(params.stop)
        )

    def _check_geometry(self) -> None:
        """Raise InvalidRequest if the cache was not made for the keys and values of this decoder."""
        decoder, cache = self.decoder, self.cache
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
        for name, need, have in facts:
            if need != have:
                raise InvalidRequest(
                    f"the cache was made for {name} {have}, the decoder has {need}; build the cache from "
                    "decoder.config.spec() or decoder.config.specs()"
                )

    def _measure(self) -> None:
        if self.meter.steps % MEASURED == 0:
            now = self.cache.stats()
            self.meter.slots_mapped += now.slots_mapped
            self.meter.slots_wasted += now.slots_wasted
        self.meter.steps += 1

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt, which may be text."""
        if isinstance(prompt, str):
            ids: list[int] = self.tokenizer.encode(prompt)
        elif isinstance(prompt, bytes | bytearray) or (isinstance(prompt, Sequence) and bool in map(type, prompt)):
            raise InvalidRequest(f"the prompt is {type(prompt).__name__}; give text (str), or a list of token ids")
        else:
            ids = token_row(prompt).tolist()
        if not ids:
            raise InvalidRequest("the prompt is empty; give at least one token")
        return ids

    def _check_request(self, ids: list[int], params: SamplingParams) -> None:
        config, spec, frames = self.decoder.config, self.cache.spec, self.cache.num_frames
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"params is {params!r}; give SamplingParams, or None for greedy decoding")
        strange = [token for token in ids if not 0 <= token < config.vocab_size]
        if strange:
            raise InvalidRequest(
                f"token id {strange[0]} is outside the vocabulary of {config.vocab_size} tokens; "
                "encode the prompt with the tokenizer of this model"
            )
        if len(ids) >= config.max_position_embeddings:
            raise InvalidRequest(
                f"the prompt has {len(ids)} tokens, the model ends at {config.max_position_embeddings} "
                "(one is left for the output); shorten the prompt"
            )
        # The KV of the last token is never computed.
        longest = min(len(ids) + params.max_tokens, config.max_position_embeddings) - 1
        if (needed := self.cache.frames_for(longest, self.scheduler.limits.max_batch_tokens)) > frames:
            raise InvalidRequest(
                f"the prompt of {len(ids)} tokens and up to {params.max_tokens} new ones take {needed} frames of "
                f"{spec.block_size} tokens, the pool has {frames}; raise num_frames or memory, or lower max_tokens"
            )
