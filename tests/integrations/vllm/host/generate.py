"""One engine of vLLM, in a process of its own: reads a job from stdin, and writes the tokens of its prompts to stdout.

job: {"options": of LLM, "prompts": lists of ids, "max_tokens": int, "logprobs": int or null, "rounds": int}
A job with "adapter", the folder of a LoRA, uses it for every second prompt.
A job with "warm", a prompt, computes it first.
A job with "hint", an action of kv_hints, gives it with the first prompt; from vLLM 0.33 on.
A job with "backend", the path of a class, gives it to vLLM as the backend CUSTOM.
A job with "embed" has embeddings instead of tokens: {"embeddings": [prompt][dim], "log": [...]}.
Writes {"tokens": [round][prompt][token], "seconds": [round], "hits": tokens found in the prefix cache, ...}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints goes to stderr
    job: dict[str, Any] = json.load(sys.stdin)
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if job.get("backend"):
        register_backend(AttentionBackendEnum.CUSTOM, job["backend"])
    engine = LLM(skip_tokenizer_init=not job.get("embed"), disable_log_stats=False, seed=0, **job["options"])
    if job.get("embed"):
        found = engine.embed([{"prompt_token_ids": ids} for ids in job["prompts"]], use_tqdm=False)
        json.dump({"embeddings": [result.outputs.embedding for result in found]}, out)
        out.flush()
        return
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=job["max_tokens"],
        ignore_eos=True,
        detokenize=False,
        prompt_logprobs=job.get("logprobs"),
    )
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    adapter = LoRARequest("adapter", 1, job["adapter"]) if job.get("adapter") else None
    adapters = [adapter if number % 2 else None for number in range(len(prompts))]
    tokens, hits, logprobs, seconds = [], [], [], []
    if job.get("hint"):
        from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

        hint = KvHintAction(action_id="1", action_version="1", **job["hint"])
        envelopes = [KvHintsEnvelope(protocol_version="1", message_id="1", actions=[hint])]
        add = engine.llm_engine.add_request
        engine.llm_engine.add_request = lambda *args, **kwargs: add(
            *args, **kwargs, kv_hints=envelopes.pop() if envelopes else None
        )
    if job.get("warm"):
        engine.generate([{"prompt_token_ids": job["warm"]}], sampling, use_tqdm=False)
    for _ in range(job.get("rounds", 1)):
        began = time.perf_counter()
        results = engine.generate(prompts, sampling, use_tqdm=False, lora_request=adapters)
        seconds.append(time.perf_counter() - began)
        tokens.append([list(result.outputs[0].token_ids) for result in results])
        hits.append([result.num_cached_tokens for result in results])
        if job.get("logprobs") is not None:
            logprobs.append(
                [
                    [next(iter(one.values())).logprob for one in (result.prompt_logprobs or []) if one]
                    for result in results
                ]
            )
    preempted = sum(
        metric.value
        for metric in engine.get_metrics()
        if metric.name == "vllm:num_preemptions" and hasattr(metric, "value")
    )
    custom = AttentionBackendEnum.CUSTOM
    backend = custom.get_path() if custom.is_overridden() else None
    written = {
        "backend": backend,
        "tokens": tokens,
        "hits": hits,
        "logprobs": logprobs,
        "seconds": seconds,
        "preempted": preempted,
    }
    json.dump(written, out)
    out.flush()


if __name__ == "__main__":
    main()
