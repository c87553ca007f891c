"""The report about a run: one JSON object for a program, one table for a person. Reads the engine, changes nothing."""

from __future__ import annotations

import json
from math import isfinite
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table

if TYPE_CHECKING:
    from pagedkv.cli.inputs.prompts import Prompt
    from pagedkv.model.engine import Engine
    from pagedkv.model.request import Completion, Request
    from pagedkv.model.ways.speculation import Speculation


FELT: Final = {"queue": "queue", "first_token": "first token", "between_tokens": "next token", "total": "whole output"}
"""name in Times: name in the table."""


def size(num_bytes: float) -> str:
    """Format a number of bytes for a person, in the units that --memory takes."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


def as_json(request: Request, engine: Engine, prompt: Prompt) -> str:
    """Format the sample of a request as one line of JSON; several samples as a list under "samples"."""
    found = [_sample(completion, engine) for completion in request.completions]
    return json.dumps({**_line_of(prompt), **({"samples": found} if len(found) > 1 else found[0])})


def error_as_json(prompt: Prompt, error: str) -> str:
    """Format the error of a prompt that has no request as one line of JSON."""
    return json.dumps({**_line_of(prompt), "error": error})


def _line_of(prompt: Prompt) -> dict[str, Any]:
    """Return the number and the id of the line that a prompt is from; {} if there is no line."""
    return {"line": prompt.line, "id": prompt.id} if prompt.line else {}


def _sample(completion: Completion, engine: Engine) -> dict[str, Any]:
    """Return the fields of one sample.

    frames_peak, waste, sharing and percentiles_ms are figures of the whole run so far: samples share frames. With
    speculation, acceptance and tokens_per_pass are figures of the whole run, too.
    """
    guess, spent, params = engine.speculation, completion.latency, completion.request.params
    usage = {
        "prompt_tokens": len(completion.request.prompt_ids),
        "completion_tokens": len(completion.token_ids),
        "cached_tokens": completion.cached_tokens,
    }
    phases = {"queue": spent.queue_s, "prefill": spent.prefill_s, "decode": spent.decode_s}
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        **({"logprobs": _logprobs(completion)} if completion.logprobs else {}),
        **({"error": completion.error} if completion.error else {}),
        **({"score": round(completion.score, 6)} if params.num_beams > 1 and isfinite(completion.score) else {}),
        "usage": usage,
        "ttft_ms": _ms(completion.ttft_s),
        "latency_ms": {name: _ms(seconds) for name, seconds in phases.items()},
        "percentiles_ms": _percentiles(engine),
        "tokens_per_s": round(completion.tokens_per_s, 3),
        "frames_peak": engine.cache.stats().peak_mapped,
        "waste": round(engine.meter.waste, 6),
        "sharing": round(engine.meter.saved, 6),
        "kernels": engine.cache.kernel.name,
        **({} if guess is None else _shares(guess)),
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _percentiles(engine: Engine) -> dict[str, dict[str, float]]:
    """Return p50, p90 and p99 of the latencies that users feel, in milliseconds."""
    found = engine.meter.times.percentiles()
    return {name: {of: _ms(getattr(found[name], of)) for of in ("p50", "p90", "p99")} for name in FELT}


def _shares(speculation: Speculation) -> dict[str, float]:
    return {"acceptance": round(speculation.acceptance, 6), "tokens_per_pass": round(speculation.tokens_per_pass, 6)}


def _logprobs(completion: Completion) -> list[dict[str, Any]]:
    """Return the log-probabilities of each token and of its alternatives; null for a token of probability 0."""
    return [
        {
            "logprob": round(found.logprob, 6) if isfinite(found.logprob) else None,
            "top": [[token, round(logprob, 6)] for token, logprob in found.top],
        }
        for found in completion.logprobs
    ]


def table(requests: list[Request], engine: Engine) -> Table:
    """Tabulate time, speed, memory and kernel of a run."""
    completions = [completion for request in requests for completion in request.completions]
    stats, spec, frame_bytes = engine.cache.stats(), engine.cache.spec, engine.cache.frame_bytes
    lines = {
        "prompt": _prompts(requests),
        "output": _output(requests),
        **(_latencies(engine) if len(requests) > 1 else {"first token": _first_token(completions)}),
        "speed": _speed(requests),
        "frames at peak": f"{stats.peak_mapped:,} of {stats.num_frames:,}, each of {spec.block_size} tokens",
        "bytes at peak": f"{size(stats.peak_mapped * frame_bytes)} of {size(stats.num_frames * frame_bytes)}",
        "prefix hits": f"{stats.tokens_matched:,} of {stats.tokens_asked:,} tokens looked for ({stats.hit_rate:.0%})",
        "waste": f"{engine.meter.waste:.1%} of allocated slots held no token",
        "kernel": f"{engine.cache.kernel.name}, {spec.stored_dtype}, {engine.cache.device}",
    }
    if engine.meter.saved >= 0.005:
        lines["sharing"] = f"{engine.meter.saved:.0%} of the sequences' tokens lie in frames of other sequences"
    if engine.speculation is not None:
        lines["speculation"] = _speculation(engine.speculation)
    if engine.scheduler.preemptions:
        lines["preemptions"] = f"{engine.scheduler.preemptions:,}"
    shown = Table.grid(padding=(0, 2))
    shown.add_column(style="dim", no_wrap=True)
    shown.add_column()
    for name, value in lines.items():
        shown.add_row(name, value)
    return shown


def _prompts(requests: list[Request]) -> str:
    tokens = f"{sum(len(request.prompt_ids) for request in requests):,} tokens"
    return f"{tokens} in {len(requests):,} prompts" if len(requests) > 1 else tokens


def _output(requests: list[Request]) -> str:
    completions = [completion for request in requests for completion in request.completions]
    tokens = f"{sum(len(completion.token_ids) for completion in completions):,} tokens"
    return f"{tokens} in {len(completions):,} samples" if len(completions) > len(requests) else tokens


def _speculation(of: Speculation) -> str:
    accepted = f"{of.num_accepted:,} of {of.num_drafts:,} drafts came true ({of.acceptance:.0%})"
    return f"{accepted}, {of.tokens_per_pass:.2f} tokens in a pass"


def _first_token(completions: list[Completion]) -> str:
    """Return the median and the largest time from submission to the first token of the samples of a prompt."""
    waits_ms = [completion.ttft_s * 1e3 for completion in completions]
    middle, largest = f"{median(waits_ms):,.0f} ms", f"{max(waits_ms):,.0f} ms"
    return f"after {middle}" if middle == largest else f"after {middle} (median), {largest} (last)"


def _latencies(engine: Engine) -> dict[str, str]:
    """Return the percentiles of many prompts, all of which were submitted at once."""
    found = _percentiles(engine)
    return {
        FELT[name]: " ".join(f"{value:>7,.{1 if value < 100 else 0}f}" for value in of.values()) + " ms (p50, p90, p99)"
        for name, of in found.items()
    }


def _speed(requests: list[Request]) -> str:
    """Return the tokens per second: for one prompt, those after the first token; for many, over the whole run."""
    completions = [completion for request in requests for completion in request.completions]
    last = max(c.last_token_at for c in completions)
    tokens = sum(len(c.token_ids) for c in completions)
    if len(requests) > 1:
        return f"{tokens / (last - min(request.submitted_at for request in requests)):,.0f} tokens/s in all"
    followed, elapsed = tokens - len(completions), last - min(c.first_token_at for c in completions)
    if not followed or elapsed <= 0:
        return "– (one token has no speed)"
    return f"{followed / elapsed:,.0f} tokens/s after the first"
