"""The engine: prompts in, text out. One step is schedule -> plan -> forward -> sample -> commit, for any mix of work.

    chunks, batch = scheduler.next_step()       choose the sequences and their tokens; map frames for all of them
    logits        = decoder.forward(..)         write and read KV through the batch
    tokens        = sample(logits, ..)
    cache.commit(batch, ..)                     the computed KV becomes valid, and its full pages findable
    deliver(tokens)                             send text to the listeners; release finished sequences; fork samples

The engine knows requests and tokens; the scheduler and the cache know pages and frames. An interrupted step can be
stepped again: an error before commit aborts the plan; after commit, `_repair` preempts the sequences that did not get
their token, so that their last logits are recomputed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from pagedkv.cache import PagedKVCache
from pagedkv.core.warm import warm_up
from pagedkv.errors import InvalidRequest
from pagedkv.model.decoder import Decoder
from pagedkv.model.request import Completion, OnText, Request, StopStrings
from pagedkv.model.sampler import SamplingParams, SamplingRow, sample
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

Prompt = str | Sequence[int]
"""Text, or token ids."""


@dataclass
class Meter:
    """Totals over the steps so far. Each step adds, at its end, the slots then mapped and those that hold no token."""

    steps: int = 0
    slots_mapped: int = 0
    slots_wasted: int = 0

    @property
    def waste(self) -> float:
        """Share of the mapped slots that held no token, over all steps: 0.0 to 1.0."""
        return self.slots_wasted / self.slots_mapped if self.slots_mapped else 0.0


class Engine:
    """Continuous batching over one model and one paged cache, in this thread.

    Call `submit` and `step`, or `generate` to do both until all prompts are finished. A pool that runs out of frames
    costs time (sequences are preempted and computed again), never tokens.
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
        self._check_geometry()

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
        """Build an engine for a Hugging Face folder, or for the bundled checkpoint if `folder` is None.

        dtype: the dtype to compute in; None for that of the checkpoint.
        kv_dtype: the dtype of the cache; None for the dtype computed in.
        grouped: give layers with different windows page tables of their own (ModelConfig.specs), so that frames
            behind a window are given back. Useful for the families with mixed windows (Gemma 2 and 3).
        cache_options: options of PagedKVCache (num_frames or memory, kernels, watermark, prefix_cache). Without
            num_frames and memory the pool holds 32768 tokens, but takes at most 4 GiB.
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
        warm_up()  # last, so that bad input is refused without waiting for the compilation
        return cls(decoder, tokenizer, cache, limits=limits)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        num_samples: int = 1,
        on_text: OnText | None = None,
        tenant: bytes = b"",
    ) -> Request:
        """Queue a prompt (text, or token ids) and return its request, whose completions grow as the engine steps.

        Raises: InvalidRequest for an empty prompt, an id outside the vocabulary, or more tokens than the pool or the
            model can hold
        """
        params = params or SamplingParams()
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        self._check_request(prompt, ids, params, num_samples)
        request = Request(ids, params, tenant, on_text)
        request.completions = [Completion(request, index) for index in range(num_samples)]
        self.scheduler.add(self._new_sequence(request.completions[0]))
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
        """Stop `request` at once and give back its frames. Finished completions keep their finish_reason."""
        for sequence in self.scheduler.sequences_of(request):
            self.scheduler.remove(sequence)
        for completion in request.completions:
            completion.finish_reason = completion.finish_reason or "cancelled"

    @property
    def has_work(self) -> bool:
        """Whether any sequence is running or waiting."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def run(self) -> None:
        """Step until no sequence is left. Raises: as `step`."""
        self._refuse_reentry()
        while self.has_work:
            self.step()

    def step(self) -> list[Completion]:
        """Compute one batch: the next chunk of some prompts, the next token of all other running sequences.

        After any exception, step again: no token is lost.
        Returns: the completions that finished in this step.
        Raises: InvalidRequest if a listener calls step; the first error that a listener raised, after all listeners
            were called. A request whose listener raised continues unless it is cancelled.
        """
        self._refuse_reentry()
        self._stepping = True
        try:
            return self._step()
        finally:
            self._stepping = False

    def _step(self) -> list[Completion]:
        """Repair, choose and plan chunks, compute, sample, commit, deliver: the steps of the file head."""
        self._repair()
        chunks, batch = self.scheduler.next_step()
        if batch is None:
            return []
        try:
            token_ids = [token for chunk in chunks for token in chunk.token_ids]
            families = [self._family(chunk.sequence) for chunk in chunks if chunk.is_last]
            tokens = self._sample(families, self._forward(token_ids, chunks, batch))
            self.cache.commit(batch, token_ids)
        except BaseException:
            if not batch.plan.settled:
                self.cache.abort(batch)
            raise
        finished = self._deliver(families, tokens)
        self._measure()
        return finished

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
            self.cache,
            logits_of=torch.tensor(last, dtype=torch.int64, device=device),
            backend=self.cache.backend,
        )

    def _family(self, parent: SequenceState) -> list[SequenceState]:
        """Return the sequences that draw from the logits of `parent`: `parent`, then its samples, not yet forked."""
        return [parent, *(self._new_sequence(c) for c in parent.receivers if c is not parent.completion)]

    def _sample(self, families: list[list[SequenceState]], logits: Tensor) -> list[int]:
        """Draw the next token of each member of each family, in this order. Row n of the logits is that of family n."""
        logits_rows = [n for n, family in enumerate(families) for _ in family]
        if not logits_rows:
            return []
        members = [member for family in families for member in family]
        for member in members:
            # An interrupted step lost a token that was already drawn: draw the same one again, as the seed demands.
            if member.num_drawn != len(member.completion.token_ids):
                member.rewind()
            member.num_drawn += 1
        rows = [SamplingRow(member.completion.request.params, member.generator, member.tokens) for member in members]
        tokens: list[int] = sample(logits[torch.tensor(logits_rows, device=logits.device)], rows).tolist()
        return tokens

    def _deliver(self, families: list[list[SequenceState]], tokens: list[int]) -> list[Completion]:
        """Append its token to each sequence, then notify the listeners. Returns the completions that finished.

        The samples of a family fork before its parent takes its token: the parent may finish and release its frames.
        """
        deliveries: list[tuple[Completion, str]] = []
        next_tokens = iter(tokens)
        try:
            for parent, *children in families:
                parent_token, place = next(next_tokens), len(deliveries)
                for child in children:
                    self.scheduler.fork(parent, child)
                    deliveries.append((child.completion, self._take(child, next(next_tokens))))
                deliveries.insert(place, (parent.completion, self._take(parent, parent_token)))
        finally:
            self._notify(deliveries)
        return [completion for completion, _ in deliveries if completion.finish_reason]

    def _notify(self, deliveries: list[tuple[Completion, str]]) -> None:
        """Call all listeners, even if some of them raise; then raise the first error."""
        errors: list[BaseException] = []
        for completion, text in deliveries:
            on_text = completion.request.on_text
            if on_text and completion.finish_reason != "cancelled" and (text or completion.finish_reason):
                try:
                    on_text(completion, text)
                except BaseException as error:
                    errors.append(error)
        if errors:
            raise errors[0]

    def _take(self, sequence: SequenceState, token: int) -> str:
        """Append one token and return the text that may be shown. A finished sequence leaves the scheduler."""
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
        completion.last_token_at = time.perf_counter()  # no line below can fail
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
        """Preempt the sequences that lost their token when a step was interrupted after its commit.

        Such a sequence is running but has no token left to compute. After the preemption its last logits are computed
        again. All newer sequences are preempted too, which keeps the queues in order. A sample that was forked and got
        no token is removed; its parent forks it again. The stream and the stop strings are rebuilt from the delivered
        tokens. A finished sequence that is still running is removed.
        """
        running = self.scheduler.running
        for sequence in [s for s in running if s.completion.finish_reason]:
            self.scheduler.remove(sequence)
        while any(sequence.remaining == 0 for sequence in running):
            newest = running[-1]
            if newest.remaining == 0 and newest.completion.index and not newest.completion.token_ids:
                self.scheduler.remove(newest)
                continue
            delivered, fresh = newest.completion.token_ids, self._new_sequence(newest.completion)
            for token in delivered:
                fresh.stops.push(fresh.stream.push(token))
            newest.tokens, newest.stream, newest.stops = fresh.tokens + delivered, fresh.stream, fresh.stops
            self.scheduler.preempt(newest)

    def _new_sequence(self, completion: Completion) -> SequenceState:
        params, request = completion.request.params, completion.request
        generator = params.generator(completion.index)
        return SequenceState(
            completion, list(request.prompt_ids), generator, self.tokenizer.stream(), StopStrings(params.stop)
        )

    def _refuse_reentry(self) -> None:
        if self._stepping:
            raise InvalidRequest(
                "a listener called step, run or generate of the engine that is stepping; "
                "a listener may only submit and cancel"
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
        now = self.cache.stats()
        self.meter.steps += 1
        self.meter.slots_mapped += now.slots_mapped
        self.meter.slots_wasted += now.slots_wasted

    def _check_request(self, prompt: Prompt, ids: list[int], params: SamplingParams, num_samples: int) -> None:
        config, spec, frames = self.decoder.config, self.cache.spec, self.cache.num_frames
        if not len(prompt) or not ids:
            raise InvalidRequest("the prompt is empty; give at least one token")
        strange = [token for token in ids if not 0 <= token < config.vocab_size]
        if strange:
            raise InvalidRequest(
                f"token id {strange[0]} is outside the vocabulary of {config.vocab_size} tokens; "
                "encode the prompt with the tokenizer of this model"
            )
        if not 1 <= num_samples <= self.scheduler.limits.max_sequences:
            raise InvalidRequest(f"num_samples is {num_samples}; give 1 to {self.scheduler.limits.max_sequences}")
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
