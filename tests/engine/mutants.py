"""Seeded faults of pagedkv/engine, mistakes that its history mended; tests/mutants.py says how to run this table."""

from __future__ import annotations

from tests.mutants import Fault

FOLDER = "pagedkv/engine"
FAULTS = (
    Fault(
        "a draw that an interrupt lost is repeated: the generator goes on",
        "requests/draws.py", "        member.rewind()\n", "        pass\n",
        "step/test_trust.py -k interrupted_anywhere",
    ),
    Fault(
        "each sample has its own generator: all have that of the first",
        "requests/request.py", "params.generator(self.index)", "params.generator()",
        "step/test_engine.py -k one_generator",
    ),
    Fault(
        "no prompt finds the KV of a request that ended: it is published",
        "step/outcome.py", "            if chunk.sequence.completion.finish_reason:\n", "            if False:\n",
        "step/test_trust.py -k usable_logits",
    ),
    Fault(
        "the first end of a completion holds: the last one does",
        "requests/request.py", "self._ends[0]", "self._ends[-1]", "step/test_trust.py -k signal_handler",
    ),
    Fault(
        "a listener that is always interrupted does not stop its engine: it is told for ever",
        "step/delivery.py", "            if is_end and completion.was_told and", "            if False and",
        "step/test_trust.py -k told_of_its_end_twice",
    ),
    Fault(
        "the KV that others compute is waited for only if that pays: always",
        "step/scheduler.py", "            if saved[leader] >= WORTH:\n", "            if True:\n",
        "step/test_scheduler.py",
    ),
    Fault(
        "a preempted sequence waits before those that came later: behind them",
        "step/scheduler.py", "_place(self.waiting, sequence, is_older=True)", "_place(self.waiting, sequence)",
        "step/test_scheduler.py -k came_later",
    ),
    Fault(
        "drafts preempt no sequence: they are not dropped first",
        "step/scheduler.py", "                if any(chunk.drafts for chunk in chunks):",
        "                if False:",
        "drafts/test_speculation.py -k preempt_no",
    ),
    Fault(
        "the state behind the certain tokens is saved: that behind the drafts alone",
        "step/scheduler.py", ", certain=[chunk.num_tokens - len(chunk.drafts) for chunk in chunks])", ")",
        "step/test_recurrent.py -k fifth",
    ),
    Fault(
        "a step computes from the last state on: from the last page on",
        "requests/sequence.py", "self.space.ready if", "len(self.space) if", "step/test_recurrent.py -k tier",
    ),
    Fault(
        "prompts of a crowd wait for the state of their common prefix: for its pages alone",
        "step/scheduler.py", "self._awaited_state(sequence) if", "None if", "step/test_recurrent.py -k crowd",
    ),
    Fault(
        "a part of each head is rotated: its pairs stay where the checkpoint has them",
        "checkpoint/weights.py", "        pairs, half = self.rotated // 2, self.size // 2\n",
        "        pairs, half = self.size // 2, self.size // 2\n", "model/test_delta_layers.py -k logits",
    ),
    Fault(
        "rows are refused by the model's logits: by those that rules made",
        "sampling/sampler.py", "    errors = dict.fromkeys(_not_finite(largest), _DAMAGED)\n",
        "    errors = {b: _DAMAGED for b in _not_finite(largest) if rows[b].rules is None}\n", "sampling",
    ),
    Fault(
        "each end token may end every beam: only one of them",
        "requests/beams.py", "max(2, 1 + len(self.ends))", "2", "requests/test_beams.py -k transformers",
    ),
    Fault(
        "a character is shown when it is whole: a U+FFFD that was written is held",
        "checkpoint/tokenizer.py", " and not self._ends_in_replacement()", "", "checkpoint/test_text_stream.py",
    ),
    Fault(
        "an answer keeps its first space: the prompt is not read",
        "checkpoint/tokenizer.py", "            self.push(token)\n", "            pass\n",
        "checkpoint/test_text_stream.py",
    ),
    Fault(
        "no tensor is dropped in silence: leftovers are taken",
        "checkpoint/weights.py", "    source.refuse_leftovers()\n", "", "checkpoint/test_weights.py -k silence",
    ),
    Fault(
        "two fields of a rope that differ are refused: the new one holds",
        "checkpoint/config.py", "    if not holds or theta != base", "    if theta != base",
        "checkpoint/test_config.py -k two_fields",
    ),
    Fault(
        "a body that is too large never reaches the routes: its parts are joined",
        "serve/gate.py", "        if size > most:\n", "        if size > most + 1:\n",
        "serve/test_gate.py -k too_large",
    ),
    Fault(
        "without a key no body takes a place: only those under /v1",
        "serve/gate.py", 'scope["method"] == "POST" or scope["path"]', 'scope["path"]',
        "serve/test_gate.py -k without_a_key",
    ),
    Fault(
        "a request has one length: both are taken",
        "serve/gate.py", '"content-length" in headers and "transfer', '"length" in headers and "transfer',
        "serve/test_gate.py -k two_lengths",
    ),
    Fault(
        "the only request of a tenant gets in: not if others fill the server",
        "serve/gate.py", " or (shares is not None and shares.has_none(tenant))", "",
        "serve/test_keys.py -k the_only_request",
    ),
    Fault(
        "a priority orders the requests of one tenant: those of all",
        "serve/shares.py",
        "return priority if self._shares.shares_priorities else level", "return priority",
        "serve/test_keys.py -k behind_the_first_of_others",
    ),
    Fault(
        "an unknown field at any depth is refused: dropped in silence",
        "serve/bodies.py", "                if field is None:\n                    raise",
        '                if field is None and "prompt" not in fields:\n                    continue\n'
        "                if field is None:\n                    raise",
        "serve/test_bodies.py -k unknown_field",
    ),
    Fault(
        "the first mistake of a body ends its reading: all mistakes of a list are told",
        "serve/bodies.py", "Field(fail_fast=True), Tag(LIST)", "Tag(LIST)",
        "serve/test_bodies.py -k first_mistake",
    ),
    Fault(
        "a chat has all tokens that fit in chunks: as if a step had no chunks",
        "serve/app.py", "engine.cache, engine.scheduler.limits.chunk", "engine.cache, 2048",
        "serve/test_service.py -k under_a_window",
    ),
    Fault(
        "a stream that is closed gives its frames back: its requests go on",
        "serve/streaming.py", "    owner._orders.put(box)\n", "    owner._orders.put(None)\n",
        "serve/test_streaming.py -k gives_its_frames_back",
    ),
    Fault(
        "a prompt that is scored is computed whole: it takes the pages that are known",
        "requests/sequence.py", "None if request.is_scored else len(request.prompt_logprobs) - 1", "None",
        "step/test_scores.py -k takes_no_pages",
    ),
    Fault(
        "a token is scored once: again, after an interrupt",
        "requests/scores.py", "max(begin, len(request.prompt_logprobs) - 1)", "begin",
        "step/test_scores.py -k interrupted",
    ),
    Fault(
        "a graph gives the logits that were asked for: those of all its tokens",
        "model/runner.py", "            if len(logits_of) == len(logits):\n", "            if True:\n",
        "step/test_scores.py -k graphs",
    ),
    Fault(
        "prompts of other salts share no pages: they do",
        "step/scheduler.py", "salt=request.salt, most=", "most=",
        "step/test_scores.py -k salts",
    ),
    Fault(
        "a token and its entry among the likeliest have one log-probability: they differ in the last digits",
        "sampling/sampler.py", "((token, z - log_sum) for", "((token, round(z - log_sum, 6)) for",
        "step/test_scores.py -k alternatives",
    ),
    Fault(
        "the largest context chooses the frequencies of longrope: the short ones serve all",
        "checkpoint/config.py", "is_long=longest > original", "is_long=False",
        "checkpoint/test_config.py -k longrope",
    ),
    Fault(
        "stored KV names the set of its frequencies: it does not",
        "step/engine.py", "{window} {sinks} {decoder.config.rope_set}", "{window} {sinks} ",
        "model/test_longrope.py -k not_found",
    ),
)  # fmt: skip
