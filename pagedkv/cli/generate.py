"""`pagedkv generate`: load, submit, step, show. Generated text goes to stdout, the report about the run to stderr.

one prompt      text, streamed; further samples follow, each under a heading            then a table on stderr
a .jsonl        a block of text for each prompt, in input order, and a progress bar     then a table on stderr
--json          one object, or one object per line                                      nothing on stderr
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from pagedkv.cli import report
from pagedkv.cli.prompts import Prompt, Source
from pagedkv.errors import InvalidRequest
from pagedkv.model.engine import Engine
from pagedkv.model.request import Completion, Request
from pagedkv.model.sampling.params import SamplingParams


@dataclass(frozen=True)
class Job:
    """The arguments of one run. sampling: fields of SamplingParams. loading: options of Engine.load."""

    source: Source
    model: Path | None
    sampling: dict[str, Any]
    loading: dict[str, Any]
    num_samples: int
    chat: bool
    as_json: bool


def run(job: Job, screen: Console) -> None:
    """Generate and print all outputs of `job`; the report goes to `screen`.

    Raises: PagedKVError; for bad input, before anything is printed.
    """
    live = None if job.source.many or job.as_json else Live(job.num_samples)
    with screen.status("loading", spinner="line") if screen.is_terminal else nullcontext():
        requests, engine = _submitted(job, live)
    if job.source.demo and not job.as_json:
        screen.print(Text(job.source.prompts[0].text, style="dim"), soft_wrap=not screen.is_terminal)
        screen.print()
    if live:
        live.begin()
    with Bar(screen, len(requests) * job.num_samples, shown=job.source.many and screen.is_terminal) as bar:
        for request, prompt in zip(requests, job.source.prompts, strict=True):
            while not request.finished:
                bar.advance(engine.step())
            if not live:
                bar.print(report.as_json(request, engine) if job.as_json else _block(request, prompt))
    _require_success(requests, job.source)
    if not job.as_json:
        if live:
            screen.print()  # a block of text ends with a blank line anyway
        screen.print(report.table(requests, engine))


def _require_success(requests: list[Request], source: Source) -> None:
    """Raise InvalidRequest if a request ended with an error: its checkpoint may hold weights that are no numbers."""
    for request, prompt in zip(requests, source.prompts, strict=True):
        for completion in request.completions:
            if completion.error:
                raise InvalidRequest(f"{prompt.where}: {completion.error}")


def _submitted(job: Job, live: Live | None) -> tuple[list[Request], Engine]:
    """Load an engine and submit all prompts to it. Raises: PagedKVError for any mistake in the input"""
    params = [_params(prompt, job.sampling) for prompt in job.source.prompts]
    engine = Engine.load(job.model, **job.loading)
    requests = []
    for prompt, prompt_params in zip(job.source.prompts, params, strict=True):
        with _blaming(prompt, job.source):
            text = engine.tokenizer.render_chat([{"role": "user", "content": prompt.text}]) if job.chat else prompt.text
            ids = engine.tokenizer.encode(text, special_tokens=not job.chat)
            requests.append(engine.submit(ids, prompt_params, num_samples=job.num_samples, on_text=live))
    return requests, engine


def _params(prompt: Prompt, sampling: dict[str, Any]) -> SamplingParams:
    """Combine the options of the command line with those of the prompt's own line, which take precedence.

    Raises: InvalidRequest, which names the line, for an unknown or bad option
    """
    allowed = {field.name for field in fields(SamplingParams)}
    unknown = sorted(set(prompt.options) - allowed)
    if unknown:
        raise InvalidRequest(
            f'{prompt.where} has {", ".join(unknown)}; beside "prompt" it may have {", ".join(sorted(allowed))}'
        )
    for name in ("stop", "stop_ids"):
        if not isinstance(prompt.options.get(name, ""), (str, list)):
            raise InvalidRequest(f"{prompt.where}: {name} is {prompt.options[name]!r}; it must be a list")
    try:
        return SamplingParams(**{**sampling, **prompt.options})
    except InvalidRequest as error:
        raise InvalidRequest(f"{prompt.where}: {error}" if prompt.options else str(error)) from None


@contextmanager
def _blaming(prompt: Prompt, source: Source) -> Iterator[None]:
    """Add the line of the prompt to an InvalidRequest about one of many prompts."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(f"{prompt.where}: {error}" if source.many else str(error)) from None


class Live:
    """A listener that prints the samples of one request to stdout, one sample after another.

    When the turn of a sample begins, the text that it has so far is printed; then each new piece at once.
    """

    def __init__(self, num_samples: int) -> None:
        self.num_samples: int = num_samples
        self.turn: int = 0
        self.shown: int = 0

    def begin(self) -> None:
        """Print the heading of the sample whose turn it is, if there are several samples."""
        if self.num_samples > 1:
            blank = "\n" if self.turn else ""
            sys.stdout.write(f"{blank}==> sample {self.turn + 1} of {self.num_samples} <==\n")

    def __call__(self, completion: Completion, _: str) -> None:
        """Print the new text of the sample whose turn it is; at its end, go on to the next sample."""
        while self.turn < self.num_samples:
            sample = completion.request.completions[self.turn]
            sys.stdout.write(sample.text[self.shown :])
            self.shown = len(sample.text)
            if not sample.finish_reason:
                break
            sys.stdout.write("" if sample.text.endswith("\n") else "\n")
            self.turn, self.shown = self.turn + 1, 0
            if self.turn < self.num_samples:
                self.begin()
        sys.stdout.flush()


def _block(request: Request, prompt: Prompt) -> str:
    """Return the samples of one of many prompts as text, each under a heading and followed by a blank line."""
    several = len(request.completions) > 1
    headings = [
        f"{prompt.where}, sample {c.index + 1} of {len(request.completions)}" if several else prompt.where
        for c in request.completions
    ]
    return "\n".join(
        f"==> {heading} <==\n{c.text.removesuffix(chr(10))}\n"
        for heading, c in zip(headings, request.completions, strict=True)
    )


class Bar:
    """A progress bar on stderr, if shown, and a printer of results to stdout that keeps the two apart."""

    def __init__(self, screen: Console, total: int, *, shown: bool) -> None:
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]} tokens"), TimeRemainingColumn())
        # redirect_stdout would send printed results to stderr, even if stdout is a file.
        self._progress = (
            Progress(*columns, console=screen, transient=True, redirect_stdout=False, redirect_stderr=False)
            if shown
            else None
        )
        self._task = self._progress.add_task("", total=total, tokens=0) if self._progress else TaskID(0)
        self._tokens = 0

    def __enter__(self) -> Bar:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress:
            self._progress.stop()

    def advance(self, finished: list[Completion]) -> None:
        """Count the completions that finished."""
        self._tokens += sum(len(completion.token_ids) for completion in finished)
        if self._progress:
            self._progress.update(self._task, advance=len(finished), tokens=self._tokens)

    def print(self, text: str) -> None:
        """Print a result to stdout; meanwhile the bar is off the terminal."""
        if self._progress:
            self._progress.stop()
        print(text, flush=True)
        if self._progress:
            self._progress.start()
