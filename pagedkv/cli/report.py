"""The report about a run: one JSON object for a program, one table for a person. Reads the engine, changes nothing."""

from __future__ import annotations

import json
from math import isfinite
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table

if TYPE_CHECKING:
    from pagedkv.cli.prompts import Prompt
    from pagedkv.engine.requests.request import Completion, Request
    from pagedkv.engine.step.engine import Engine


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
    guess, spent, request = engine.speculation, completion.latency, completion.request
    phases = {"queue": spent.queue_s, "prefill": spent.prefill_s, "decode": spent.decode_s}
    shares = {} if guess is None else {"acceptance": guess.acceptance, "tokens_per_pass": guess.tokens_per_pass}
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        **({"logprobs": _logprobs(completion)} if completion.logprobs else {}),
        **({"error": completion.error} if completion.error else {}),
        **(
            {"score": round(completion.score, 6)} if request.params.num_beams > 1 and isfinite(completion.score) else {}
        ),
        "usage": {
            "prompt_tokens": len(request.prompt_ids),
            "completion_tokens": len(completion.token_ids),
            "cached_tokens": completion.cached_tokens,
        },
        "ttft_ms": _ms(completion.ttft_s),
        "latency_ms": {name: _ms(seconds) for name, seconds in phases.items()},
        "percentiles_ms": _percentiles(engine),
        "tokens_per_s": round(completion.tokens_per_s, 3),
        "frames_peak": engine.cache.stats().peak_mapped,
        "waste": round(engine.meter.waste, 6),
        "sharing": round(engine.meter.saved, 6),
        "kernels": engine.cache.kernel.name,
        **{name: round(share, 6) for name, share in shares.items()},
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _percentiles(engine: Engine) -> dict[str, dict[str, float]]:
    """Return p50, p90 and p99 of the latencies that users feel, in milliseconds."""
    found = engine.meter.times.percentiles()
    return {name: {of: _ms(getattr(found[name], of)) for of in ("p50", "p90", "p99")} for name in FELT}


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
    outputs = [completion for request in requests for completion in request.completions]
    stats, spec, frame_bytes = engine.cache.stats(), engine.cache.spec, engine.cache.frame_bytes
    asked, made = sum(len(request.prompt_ids) for request in requests), sum(len(each.token_ids) for each in outputs)
    lines = {
        "prompt": f"{asked:,} tokens" + (f" in {len(requests):,} prompts" if len(requests) > 1 else ""),
        "output": f"{made:,} tokens" + (f" in {len(outputs):,} samples" if len(outputs) > len(requests) else ""),
        **(_latencies(engine) if len(requests) > 1 else {"first token": f"after {_first_token_ms(outputs):,.0f} ms"}),
        "speed": _speed(requests, outputs),
        "frames at peak": f"{stats.peak_mapped:,} of {stats.num_frames:,}, each of {spec.block_size} tokens",
        "bytes at peak": f"{size(stats.peak_mapped * frame_bytes)} of {size(stats.num_frames * frame_bytes)}",
        "prefix hits": f"{stats.tokens_matched:,} of {stats.tokens_asked:,} tokens looked for ({stats.hit_rate:.0%})",
        "waste": f"{engine.meter.waste:.1%} of allocated slots held no token",
        "kernel": f"{engine.cache.kernel.name}, {spec.stored_dtype}, {engine.cache.device}",
    }
    if engine.meter.saved >= 0.005:
        lines["sharing"] = f"{engine.meter.saved:.0%} of the sequences' tokens lie in frames of other sequences"
    if (guess := engine.speculation) is not None:
        accepted = f"{guess.num_accepted:,} of {guess.num_drafts:,} drafts came true ({guess.acceptance:.0%})"
        lines["speculation"] = f"{accepted}, {guess.tokens_per_pass:.2f} tokens in a pass"
    if engine.scheduler.preemptions:
        lines["preemptions"] = f"{engine.scheduler.preemptions:,}"
    return grid(lines)


def grid(lines: dict[str, Any]) -> Table:
    """Lay out names and values in two columns."""
    shown = Table.grid(padding=(0, 2))
    shown.add_column(no_wrap=True, style="dim")
    shown.add_column(overflow="fold")
    for name, value in lines.items():
        shown.add_row(name, value)
    return shown


def _first_token_ms(outputs: list[Completion]) -> float:
    return median(completion.ttft_s * 1e3 for completion in outputs)


def _latencies(engine: Engine) -> dict[str, str]:
    """Return the percentiles of many prompts, all of which were submitted at once."""
    found = _percentiles(engine)
    return {
        FELT[name]: " ".join(f"{value:>7,.{1 if value < 100 else 0}f}" for value in of.values()) + " ms (p50, p90, p99)"
        for name, of in found.items()
    }


def _speed(requests: list[Request], outputs: list[Completion]) -> str:
    """Return the tokens per second: for one prompt, those after the first token; for many, over the whole run."""
    last, tokens = max(each.last_token_at for each in outputs), sum(len(each.token_ids) for each in outputs)
    if len(requests) > 1:
        return f"{tokens / (last - min(request.submitted_at for request in requests)):,.0f} tokens/s in all"
    followed, elapsed = tokens - len(outputs), last - min(each.first_token_at for each in outputs)
    if not followed or elapsed <= 0:
        return "– (one token has no speed)"
    return f"{followed / elapsed:,.0f} tokens/s after the first"
