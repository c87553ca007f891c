"""The report about a run: one JSON object for a program, one table for a person. Reads the engine, changes nothing."""

from __future__ import annotations

from math import isfinite
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from pagedkv.engine.requests.request import Completion, Request
    from pagedkv.engine.step.engine import Engine


_FELT: Final = {"queue": "queue", "first_token": "first token", "between_tokens": "next token", "total": "whole output"}
"""name in Times: name in the table."""

_LEAST_FOR_SPEED: Final = 32
"""Tokens of output below which the table has no speed: that of a few tokens is noise."""
_LEAST_FOR_WASTE: Final = 256
"""Tokens below which it has no waste: a part of one frame says nothing about a pool."""

_BUNDLED: Final = "the bundled one: it answers about records as in the demo only"


def size(num_bytes: float, base: int = 1024) -> str:
    """Format bytes for a person, in powers of 1024, as --memory takes them, or of 1000, as data sheets have them."""
    *units, last = ("bytes", "KiB", "MiB", "GiB", "TiB") if base == 1024 else ("bytes", "kB", "MB", "GB", "TB")
    for unit in units:
        if num_bytes < base:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= base
    return f"{num_bytes:,.4g} {last}"


def of_request(request: Request) -> dict[str, Any]:
    """Return the keys of the JSON of a request: those of its sample, or a list of several under "samples"."""
    found = [_sample(completion) for completion in request.completions]
    return {"samples": found} if len(found) > 1 else found[0]


def _sample(completion: Completion) -> dict[str, Any]:
    spent, request = completion.latency, completion.request
    phases = {"queue": spent.queue_s, "prefill": spent.prefill_s, "decode": spent.decode_s}
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
        "tokens_per_s": round(completion.tokens_per_s, 3),
    }


def of_run(engine: Engine) -> dict[str, Any]:
    """Return the figures of the whole run under "run". They belong to no single sample: samples share frames."""
    guess = engine.speculation
    shares = {} if guess is None else {"acceptance": guess.acceptance, "tokens_per_pass": guess.tokens_per_pass}
    shares = {"waste": engine.meter.waste, "sharing": engine.meter.saved} | shares
    found = {
        "percentiles_ms": _percentiles(engine),
        "frames_peak": engine.cache.stats().peak_mapped,
        **{name: round(share, 6) for name, share in shares.items()},
        "kernels": engine.cache.kernel.name,
    }
    return {"run": found}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _percentiles(engine: Engine) -> dict[str, dict[str, float]]:
    """Return p50, p90 and p99 of the latencies that users feel, in milliseconds."""
    found = engine.meter.times.percentiles()
    return {name: {of: _ms(getattr(found[name], of)) for of in ("p50", "p90", "p99")} for name in _FELT}


def _logprobs(completion: Completion) -> list[dict[str, Any]]:
    """Return the log-probabilities of each token and of its alternatives; null for a token of probability 0."""
    return [
        {
            "logprob": round(found.logprob, 6) if isfinite(found.logprob) else None,
            "top": [[token, round(logprob, 6)] for token, logprob in found.top],
        }
        for found in completion.logprobs
    ]


def table(requests: list[Request], engine: Engine, *, is_bundled: bool) -> Table:
    """Tabulate time, speed, memory and kernel of a run. is_bundled: the checkpoint is that of the package"""
    outputs = [completion for request in requests for completion in request.completions]
    stats, spec, frame_bytes = engine.cache.stats(), engine.cache.spec, engine.cache.frame_bytes
    asked, made = sum(len(request.prompt_ids) for request in requests), sum(len(each.token_ids) for each in outputs)
    lines: dict[str, Any] = {
        "prompt": f"{asked:,} tokens" + (f" in {len(requests):,} prompts" if len(requests) > 1 else ""),
        "output": f"{made:,} tokens" + (f" in {len(outputs):,} samples" if len(outputs) > len(requests) else ""),
        **(
            _latencies(engine)
            if len(requests) > 1
            else {"first token": f"after {median(each.ttft_s for each in outputs) * 1e3:,.0f} ms"}
        ),
        **_speed(requests, outputs),
        "frames at peak": f"{stats.peak_mapped:,} of {stats.num_frames:,}, each of {spec.block_size} tokens",
        "bytes at peak": f"{size(stats.peak_mapped * frame_bytes)} of {size(stats.num_frames * frame_bytes)}",
        "prefix hits": f"{stats.tokens_matched:,} of {stats.tokens_asked:,} tokens looked for ({stats.hit_rate:.0%})",
    }
    if asked + made >= _LEAST_FOR_WASTE:
        lines["waste"] = f"{engine.meter.waste:.1%} of the slots in frames: last frames are partly empty"
    lines["kernel"] = f"{engine.cache.kernel.name}, {spec.stored_dtype}, {engine.cache.device}"
    if engine.meter.saved >= 0.005:
        lines["sharing"] = f"{engine.meter.saved:.0%} of the sequences' tokens lie in frames of other sequences"
    if (guess := engine.speculation) is not None:
        accepted = f"{guess.num_accepted:,} of {guess.num_drafts:,} drafts came true ({guess.acceptance:.0%})"
        lines["speculation"] = f"{accepted}, {guess.tokens_per_pass:.2f} tokens in a pass"
    if engine.scheduler.preemptions:
        lines["preemptions"] = f"{engine.scheduler.preemptions:,}"
    if is_bundled:
        lines["model"] = Text(_BUNDLED, style="dim")
    return grid(lines)


def grid(lines: dict[str, Any]) -> Table:
    """Lay out names and values in two columns."""
    shown = Table.grid(padding=(0, 2))
    shown.add_column(no_wrap=True, style="dim")
    shown.add_column(overflow="fold")
    for name, value in lines.items():
        shown.add_row(name, value)
    return shown


def _latencies(engine: Engine) -> dict[str, str]:
    """Return the percentiles of many prompts, all of which were submitted at once."""
    found = _percentiles(engine)
    return {
        _FELT[name]: " ".join(f"{value:>7,.{1 if value < 100 else 0}f}" for value in of.values())
        + " ms (p50, p90, p99)"
        for name, of in found.items()
    }


def _speed(requests: list[Request], outputs: list[Completion]) -> dict[str, str]:
    """Return the tokens per second: for one prompt, those after the first token; for many, over the whole run."""
    last, tokens = max(each.last_token_at for each in outputs), sum(len(each.token_ids) for each in outputs)
    began, which = min(request.submitted_at for request in requests), "in all"
    if len(requests) == 1:
        began, which, tokens = min(each.first_token_at for each in outputs), "after the first", tokens - len(outputs)
    return {"speed": f"{tokens / (last - began):,.0f} tokens/s {which}"} if tokens >= _LEAST_FOR_SPEED else {}
