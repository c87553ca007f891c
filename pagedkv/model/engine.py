"""The engine: a prompt in, text out. One step is schedule -> plan -> forward -> sample -> commit, for whatever mixture of work there is.

    work, batch = scheduler.next_step()         who, how many tokens; frames mapped for all of it
    logits      = decoder.forward(..)           writes and reads KV through batch[layer]
    tokens      = sample(logits, ..)
    cache.commit(batch, ..)                     what was computed is real now, and findable
    deliver(tokens)                             text to whoever listens; the finished leave, the samples of a prompt fork

It knows requests and tokens; pages and frames are the scheduler's and the cache's. What goes wrong before commit aborts the plan; whoever
misses its token after commit has its last logits computed again (`_repair`). So a step that was broken off can be stepped again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from pagedkv.cache import PagedKVCache
from pagedkv.core.warm import warm_up
from pagedkv.errors import InvalidRequest
from pagedkv.model.decoder import Decoder
from pagedkv.model.request import Completion, OnText, Request, StopStrings
from pagedkv.model.sampler import Row, SamplingParams, sample
from pagedkv.model.scheduler import Limits, Scheduler, Sequence, Work
from pagedkv.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.cache import PlannedBatch

BUNDLED: Final = Path(__file__).parent / "bundled"
"""The checkpoint that ships inside the package."""

DEFAULT_TOKENS: Final = 32768
DEFAULT_MEMORY: Final = "4GiB"
"""A pool of nobody's choosing holds this many tokens, unless that takes more than this much memory."""

Prompt = str | Sequences[int]


@dataclass
class Meter:
    """What the steps so far have cost. `slots_mapped` and `slots_wasted` are added up over the steps, after each commit."""

    steps: int = 0
    slots_mapped: int = 0
    slots_wasted: int = 0

    @property
    def waste(self) -> float:
        """Share of allocated slots that held no token, over all steps."""
        return self.slots_wasted / self.slots_mapped if self.slots_mapped else 0.0


class Engine:
    """Continuous batching over one model and one paged cache, in this thread.

    `submit` and `step`, or `generate` for the whole of it. Frames that run out cost time (preemption), never tokens.
    """

    def __init__(
        self, decoder: Decoder, tokenizer: Tokenizer, cache: PagedKVCache, *, limits: Limits | None = None
    ) -> None:
        self.decoder: Decoder = decoder
        self.tokenizer: Tokenizer = tokenizer
        self.cache: PagedKVCache = cache
        self.scheduler: Scheduler = Scheduler(cache, limits or Limits())
        self.meter: Meter = Meter()
        self._stepping = False
        self._demand_same_geometry()

    @classmethod
    def load(
        cls,
        folder: Path | str | None = None,
        *,
        dtype: str | None = None,
        device: str = "cpu",
        block_size: int = 16,
        kv_dtype: str | None = None,
        grouped: bool = False,
        limits: Limits | None = None,
        **cache_options: Any,
    ) -> Engine:
        """An engine for a Hugging Face folder; None for the bundled checkpoint.

        dtype: what is computed in; None for what the checkpoint was saved in. kv_dtype: what is cached, if not the same.
        grouped: whether layers with different windows get page tables of their own (ModelConfig.specs), so that frames behind a window are
        given back; for the hybrids among the families (Gemma 2 and 3).
        cache_options: those of PagedKVCache (num_frames or memory, kernels, watermark, prefix_cache). Without a size the pool holds
        32768 tokens, or 4 GiB.
        Raises: CheckpointError, InvalidRequest, KernelUnavailable
        """
        path = Path(folder) if folder is not None else BUNDLED
        decoder = Decoder.load(path, dtype=dtype, device=device)
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
        warm_up()  # last: bad input is refused without waiting for it
        return cls(decoder, tokenizer, cache, limits=limits)

    # -- asking ------------------------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        num_samples: int = 1,
        on_text: OnText | None = None,
        tenant: bytes = b"",
    ) -> Request:
        """Queue a prompt (text, or token ids). Its completions fill up as the engine steps.

        Raises: InvalidRequest for an empty prompt, an id outside the vocabulary, or more tokens than the pool or the model can hold
        """
        params = params or SamplingParams()
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        self._check(prompt, ids, params, num_samples)
        request = Request(ids, params, tenant, on_text)
        request.completions = [Completion(request, index) for index in range(num_samples)]
        self.scheduler.add(self._sequence(request.completions[0]))
        return request

    def generate(
        self,
        prompts: Sequences[Prompt],
        params: SamplingParams | Sequences[SamplingParams] | None = None,
        **options: Any,
    ) -> list[Request]:
        """Submit all prompts, run until they are finished, and return the requests in the same order. `options`: those of `submit`."""
        each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise InvalidRequest(
                f"there are {len(prompts)} prompts and {len(each)} params; give one of them for all, or one for each"
            )
        requests: list[Request] = []
        try:
            for prompt, wanted in zip(prompts, each, strict=True):
                requests.append(self.submit(prompt, wanted, **options))
            self.run()
        except BaseException:
            for request in requests:
                self.cancel(request)
            raise
        return requests

    def cancel(self, request: Request) -> None:
        """Stop at once, whatever it is doing; its frames are given back. Completions that are finished already stay so."""
        for sequence in self.scheduler.of(request):
            self.scheduler.remove(sequence)
        for completion in request.completions:
            completion.finish_reason = completion.finish_reason or "cancelled"

    # -- working -----------------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def run(self) -> None:
        """Step until nothing is left to do. Raises: as `step`."""
        self._demand_idle()
        while self.has_work:
            self.step()

    def step(self) -> list[Completion]:
        """Compute one batch: some prompts' next chunks, everybody else's next token. Returns the completions that finished.

        Raises: InvalidRequest if a listener calls it; whatever a listener raised (the first, if several do), once all of them were told.
                A request whose listener raised goes on: cancel it, or step again.
        """
        self._demand_idle()
        self._stepping = True
        try:
            return self._step()
        finally:
            self._stepping = False

    def _step(self) -> list[Completion]:
        self._repair()
        work, batch = self.scheduler.next_step()
        if batch is None:
            return []
        try:
            emitting = [sequence for sequence, count in work if count == sequence.remaining]
            token_ids = [token for s, count in work for token in s.tokens[len(s.tokens) - s.remaining :][:count]]
            families = [self._family(sequence) for sequence in emitting]
            tokens = self._sample(families, self._forward(token_ids, work, batch))
            self.cache.commit(batch, token_ids)
        except BaseException:
            if not batch.plan.settled:
                self.cache.abort(batch)
            raise
        finished = self._deliver(families, tokens)
        self._measure()
        return finished

    def _forward(self, token_ids: list[int], work: Work, batch: PlannedBatch) -> Tensor:
        """Logits float32 [N, V] after the last token of each sequence whose known tokens are all computed by this step."""
        ends = batch.plan.cu_seqlens_q[1:].tolist()
        last = [end - 1 for end, (sequence, count) in zip(ends, work, strict=True) if count == sequence.remaining]
        device = self.decoder.device
        return self.decoder.forward(
            torch.tensor(token_ids, device=device),
            batch,
            self.cache,
            logits_of=torch.tensor(last, dtype=torch.int64, device=device),
            backend=self.cache.backend,
        )

    def _family(self, parent: Sequence) -> list[Sequence]:
        """Who takes a token from the logits of `parent`: itself, and the samples that are born of it, which have no space yet."""
        return [parent, *(self._sequence(head) for head in parent.heads if head is not parent.completion)]

    def _sample(self, families: list[list[Sequence]], logits: Tensor) -> list[int]:
        """The next token of each member of each family, in this order. Row n of the logits is that of family n."""
        which = [n for n, family in enumerate(families) for _ in family]
        if not which:
            return []
        members = [member for family in families for member in family]
        for member in members:
            if member.drawn != len(
                member.completion.token_ids
            ):  # a draw that nobody got: the seed decides all the same
                member.rewind()
            member.drawn += 1
        rows = [Row(member.completion.request.params, member.generator, member.tokens) for member in members]
        tokens: list[int] = sample(logits[torch.tensor(which, device=logits.device)], rows).tolist()
        return tokens

    def _deliver(self, families: list[list[Sequence]], tokens: list[int]) -> list[Completion]:
        """Every sequence takes its token before anybody is told. Samples fork and take; their parent, which may end there, is last."""
        told: list[tuple[Completion, str]] = []
        new = iter(tokens)
        try:
            for family in families:
                first, place, parent = next(new), len(told), family[0]
                for child in family[1:]:
                    self.scheduler.fork(parent, child)
                    told.append((child.completion, self._take(child, next(new))))
                told.insert(place, (parent.completion, self._take(parent, first)))
        finally:
            self._tell(told)
        return [completion for completion, _ in told if completion.finish_reason]

    def _tell(self, told: list[tuple[Completion, str]]) -> None:
        """Call all listeners, whatever one of them raises; then raise the first error."""
        errors: list[BaseException] = []
        for completion, text in told:
            on_text = completion.request.on_text
            if on_text and completion.finish_reason != "cancelled" and (text or completion.finish_reason):
                try:
                    on_text(completion, text)
                except BaseException as error:
                    errors.append(error)
        if errors:
            raise errors[0]

    def _take(self, sequence: Sequence, token: int) -> str:
        """Append one token; returns the text that may be shown. A sequence that is finished leaves the scheduler."""
        completion, params = sequence.completion, sequence.completion.request.params
        length = len(completion.token_ids) + 1
        ended = token in params.stop_ids or (token in self.tokenizer.eos_ids and not params.ignore_eos)
        text, stopped = ("", False) if ended else sequence.stops.push(sequence.stream.push(token))
        reason = "stop" if ended or stopped else ""
        if length >= params.max_tokens or len(sequence.tokens) + 1 >= self.decoder.config.max_position_embeddings:
            reason = reason or "length"
        if reason and not stopped:
            rest, stopped = sequence.stops.push(sequence.stream.finish())
            text += rest if stopped else rest + sequence.stops.finish()
        completion.last_token_at = time.perf_counter()  # from here on nothing can fail
        if length == 1:
            completion.first_token_at = completion.last_token_at
        completion.text += text
        completion.token_ids.append(token)
        sequence.tokens.append(token)
        completion.finish_reason = reason
        if reason:
            self.scheduler.remove(sequence)
        return text

    def _repair(self) -> None:
        """Whoever has no token to compute lost that of its last logits, when a step was broken off after its commit.

        It gives way and comes back, as if preempted, and so do all that are newer: the queues stay in order. A sample that was forked
        and took no token is unborn again. What a token that nobody got left in stream and stop strings is undone.
        """
        running = self.scheduler.running
        for sequence in [s for s in running if s.completion.finish_reason]:
            self.scheduler.remove(sequence)
        while any(sequence.remaining == 0 for sequence in running):
            torn = running[-1]
            if torn.remaining == 0 and torn.completion.index and not torn.completion.token_ids:
                self.scheduler.remove(torn)
                continue
            taken, fresh = torn.completion.token_ids, self._sequence(torn.completion)
            for token in taken:
                fresh.stops.push(fresh.stream.push(token))
            torn.tokens, torn.stream, torn.stops = fresh.tokens + taken, fresh.stream, fresh.stops
            self.scheduler.preempt(torn)

    # -- inside ------------------------------------------------------------------------------------------------------------------

    def _sequence(self, completion: Completion) -> Sequence:
        params, request = completion.request.params, completion.request
        generator = params.generator(completion.index)
        return Sequence(
            completion, list(request.prompt_ids), generator, self.tokenizer.stream(), StopStrings(params.stop)
        )

    def _demand_idle(self) -> None:
        if self._stepping:
            raise InvalidRequest(
                "a listener called step, run or generate of the engine that calls it; it may submit and cancel, no more"
            )

    def _demand_same_geometry(self) -> None:
        """Raises: InvalidRequest if the cache was not made for keys and values of this decoder"""
        decoder, cache = self.decoder, self.cache
        name = str(decoder.dtype).removeprefix("torch.")
        wanted = decoder.config.spec(block_size=cache.spec.block_size, dtype=name)
        facts = [("num_layers", wanted.num_layers, len(cache)), ("device", decoder.device.type, cache.device.type)]
        for spec in cache.specs:
            facts += [
                ("num_kv_heads", wanted.num_kv_heads, spec.num_kv_heads),
                ("head_dim", wanted.head_dim, spec.head_dim),
                ("head_dim_v", wanted.value_dim, spec.value_dim),
                ("dtype", wanted.dtype, spec.dtype),
            ]
        for layer, sees in enumerate(decoder.config.windows) if len(cache) == wanted.num_layers else ():
            kept = cache.specs[cache.layer_groups[layer]].window
            facts.append(
                (f"window of layer {layer}", sees, sees if kept is None or (sees or kept + 1) <= kept else kept)
            )
        for what, need, have in facts:
            if need != have:
                raise InvalidRequest(
                    f"the cache was made for {what} {have}, the decoder has {need}; make its KVSpec by decoder.config.spec(), or by specs()"
                )

    def _measure(self) -> None:
        now = self.cache.stats()
        self.meter.steps += 1
        self.meter.slots_mapped += now.slots_mapped
        self.meter.slots_wasted += now.slots_wasted

    def _check(self, prompt: Prompt, ids: list[int], params: SamplingParams, num_samples: int) -> None:
        config, spec, frames = self.decoder.config, self.cache.spec, self.cache.num_frames
        if not len(prompt) or not ids:
            raise InvalidRequest("the prompt is empty; give at least one token")
        strange = [token for token in ids if not 0 <= token < config.vocab_size]
        if strange:
            raise InvalidRequest(
                f"token id {strange[0]} is outside the vocabulary of {config.vocab_size}; is it another model's tokenizer?"
            )
        if not 1 <= num_samples <= self.scheduler.limits.max_sequences:
            raise InvalidRequest(f"num_samples is {num_samples}; give 1 to {self.scheduler.limits.max_sequences}")
        if len(ids) >= config.max_position_embeddings:
            raise InvalidRequest(
                f"the prompt has {len(ids)} tokens, the model ends at {config.max_position_embeddings}; shorten the prompt"
            )
        longest = min(len(ids) + params.max_tokens, config.max_position_embeddings) - 1  # the last token is never read
        if (taken := self.cache.frames_for(longest, self.scheduler.limits.max_batch_tokens)) > frames:
            raise InvalidRequest(
                f"the prompt of {len(ids)} tokens and up to {params.max_tokens} new ones take {taken} frames of "
                f"{spec.block_size} tokens, the pool has {frames}; raise num_frames or memory, or lower max_tokens"
            )
