"""`pagedkv generate`: load, submit, step, show. Generated text goes to stdout, the report about the run to stderr.

one prompt      text, streamed; further samples follow, each under a heading            then a table on stderr
a .jsonl        a block of text for each prompt, in input order, and a progress bar     then a table on stderr
--json          one object; of a .jsonl one for each line, and one of the run           only errors of lines on stderr

A prompt of a .jsonl that cannot be used, or whose request ends with an error, is a line on stderr and costs no other.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.text import Text

from pagedkv.cli import report
from pagedkv.cli.complaints import complain
from pagedkv.cli.options import Loading, Prompting, naming_options
from pagedkv.cli.prompts import Prompt, Source, Templating
from pagedkv.engine.requests.limits import Limits
from pagedkv.engine.requests.request import Completion, Request
from pagedkv.engine.sampling.params import GRAMMARS, SamplingParams
from pagedkv.engine.step.engine import Engine
from pagedkv.errors import CheckpointError, InvalidRequest, KernelUnavailable


@dataclass(frozen=True)
class Job:
    """One run. screen: stderr, where reports go."""

    source: Source
    templating: Templating
    params: SamplingParams
    output: Prompting
    loading: Loading
    screen: Console

    def token_ids(self, messages: list[dict[str, Any]], engine: Engine) -> list[int]:
        """Encode messages, after the system message of the command line, by the checkpoint's chat template."""
        templating, tokenizer = self.templating, engine.tokenizer
        text = tokenizer.render_chat(templating.with_system(messages), **templating.variables)
        return tokenizer.encode(text, special_tokens=False)


@dataclass
class _Entry:
    """One prompt and its progress: parameters, then request, or the error that ended it."""

    prompt: Prompt
    params: SamplingParams | None = None
    request: Request | None = None
    error: str = ""

    @contextmanager
    def guarded(self, *, many: bool) -> Iterator[None]:
        """Keep a refusal, with the name of the line, as the error if there are many prompts; else raise it."""
        try:
            with nullcontext() if many else naming_options():
                yield
        except (InvalidRequest, CheckpointError) as error:
            if not many:
                raise
            self.error = f"{self.prompt.where}: {error}"


def run(job: Job) -> int:
    """Generate and print all outputs of a run; the report goes to `screen`.

    Returns: 1 if some lines of a .jsonl failed, 0 if none did.
    Raises: PagedKVError; for bad input, before anything is printed. Of a .jsonl, only if no line can be used
    """
    screen, num_samples, as_json = job.screen, job.output.num_samples, job.output.as_json
    printer = None if job.source.many or as_json else _SamplePrinter(num_samples)
    logging.getLogger("pagedkv.tiers.level").setLevel(logging.ERROR)  # a warning would break the text; see the end
    tasks, engine = _submitted(job, printer)
    with engine:
        if job.source.demo and not as_json:
            screen.print(Text(job.source.prompts[0].text, style="dim"), soft_wrap=not screen.is_terminal)
            screen.print()
        if printer:
            printer.begin()
        total = sum(bool(task.request) for task in tasks) * num_samples
        with _progress_bar(screen, total, shown=job.source.many and screen.is_terminal) as bar:
            for task in tasks:
                while task.request and not task.request.finished:
                    bar.advance(bar.task_ids[0], len(engine.step()))
                _show(task, engine, bar, job)
        done = [task.request for task in tasks if task.request and not task.error]
        if printer:
            printer.end(done[0])
            screen.print()  # a block of text ends with a blank line anyway
        if done and not as_json:
            screen.print(report.table(done, engine, is_bundled=job.loading.model is None))
        if done and as_json and job.source.many:
            print(json.dumps(report.of_run(engine)), flush=True)
        for name, stats in engine.cache.tiers.stats().items():
            if stats.failed:
                text = f"the {name} tier failed for {stats.failed:,} pages: it is down or full"
                print("pagedkv: warning:", text, file=sys.stderr)
    return int(any(task.error for task in tasks))


def _show(task: _Entry, engine: Engine, bar: Progress, job: Job) -> None:
    """Print the result of one prompt; an error of many goes to stderr too.

    Raises: InvalidRequest if the only request ended with an error: its checkpoint may hold weights that are no numbers
    """
    errors = [completion.error for completion in task.request.completions if completion.error] if task.request else []
    with task.guarded(many=job.source.many):
        if errors:
            raise InvalidRequest(errors[0] if job.source.many else f"{task.prompt.where}: {errors[0]}")
    if job.output.as_json:
        found = report.of_request(task.request) if task.request else {"error": task.error}
        of_line = {"line": task.prompt.line, "id": task.prompt.id}
        _print_under(bar, json.dumps(of_line | found if job.source.many else found | report.of_run(engine)))
    elif job.source.many and task.request and not task.error:
        _print_under(bar, _block(task.request, task.prompt))
    if task.error:
        _print_under(bar, task.error, complain)


def _submitted(job: Job, printer: _SamplePrinter | None) -> tuple[list[_Entry], Engine]:
    """Load an engine and submit all prompts to it.

    Raises: PagedKVError for a mistake in the only prompt, or in all of many prompts
    """
    tasks, many = [_Entry(prompt, error=prompt.error) for prompt in job.source.prompts], job.source.many
    for task in tasks:
        if not task.error:
            with task.guarded(many=many):
                task.params = _params_of(task.prompt, job.params)
    _require_one(tasks)
    engine = load(job.loading, job.screen)
    for task in tasks:
        if task.params is not None:
            with task.guarded(many=many):
                messages = job.templating.messages(task.prompt)
                ids = job.token_ids(messages, engine) if messages else engine.tokenizer.encode(task.prompt.text)
                task.request = engine.submit(ids, task.params, num_samples=job.output.num_samples, on_text=printer)
    _require_one(tasks)
    return tasks, engine


def _require_one(tasks: list[_Entry]) -> None:
    """Raise InvalidRequest, with the first error, if each prompt has one."""
    if all(task.error for task in tasks):
        raise InvalidRequest(tasks[0].error)


def load(loading: Loading, screen: Console, **more: Any) -> Engine:
    """Load an engine, under a spinner if `screen` is a terminal. more: limits, as a dict, and options of Engine.load"""
    if loading.device != "cpu":
        _, _, number = loading.device.partition(":")
        if int(number or 0) >= (count := torch.cuda.device_count()):
            other = "cpu or cuda:N" if count else "cpu"
            raise InvalidRequest(f"--device is {loading.device!r}; torch finds {count} GPUs here; give {other}")
    logging.getLogger("pagedkv.tiers").setLevel(logging.WARNING)  # such as a store that is down, also of a server
    limits = {"max_sequences": loading.max_sequences, "prefill_chunk": loading.prefill_chunk, **more.pop("limits", {})}
    with screen.status("loading", spinner="line") if screen.is_terminal else nullcontext(), naming_options():
        try:
            return Engine.load(loading.folder(), limits=Limits(**limits), **loading.of_engine(), **more)
        except KernelUnavailable as error:
            name, (why, *_) = next(iter(error.reasons.items()))  # of the kernel that was named: others are not asked
            given = "--kernels " if name == loading.kernels else "PAGEDKV_KERNELS="
            what = f"{given}{name} cannot serve on {loading.device}: {why}"
            raise InvalidRequest(f"{what}; give --kernels auto (`pagedkv doctor` has all reasons)") from None


def _params_of(prompt: Prompt, params: SamplingParams) -> SamplingParams:
    """Return the options of the command line with those of the prompt's own line, which take precedence.

    Raises: InvalidRequest for an unknown or bad option
    """
    if not prompt.options:
        return params
    allowed = sorted({field.name for field in fields(SamplingParams)} - {"logits_processor"})
    if unknown := sorted(set(prompt.options) - set(allowed)):
        close = get_close_matches(unknown[0], allowed, 1)
        guess = f" (did you mean {close[0]}?)" if close else ""
        raise InvalidRequest(
            f'it has {", ".join(unknown)}{guess}; besides "prompt" or "messages" and "id" it may have '
            f"{', '.join(allowed)}"
        )
    other = dict.fromkeys(GRAMMARS) if any(prompt.options.get(name) is not None for name in GRAMMARS) else {}
    return replace(params, **{**other, **prompt.options})


class _SamplePrinter:
    """A listener that prints the first sample of one request to stdout as it is made; `end` prints the others."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples: int = num_samples

    def begin(self, number: int = 1) -> None:
        """Print the heading of a sample, if there are several samples."""
        if self.num_samples > 1:
            sys.stdout.write(f"==> sample {number} of {self.num_samples} <==\n")

    def __call__(self, completion: Completion, piece: str) -> None:
        """Print new text."""
        if completion.index == 0:
            sys.stdout.write(piece)
            sys.stdout.flush()

    def end(self, request: Request) -> None:
        """Print the samples that were not printed as they were made."""
        for number, sample in enumerate(request.completions, 1):
            if number > 1:
                sys.stdout.write("\n")
                self.begin(number)
                sys.stdout.write(sample.text)
            sys.stdout.write("" if sample.text.endswith("\n") else "\n")
        sys.stdout.flush()


def _block(request: Request, prompt: Prompt) -> str:
    """Return the samples of one of many prompts as text, each under a heading and followed by a blank line."""
    count = len(request.completions)
    of_sample = [f", sample {c.index + 1} of {count}" if count > 1 else "" for c in request.completions]
    return "\n".join(
        f"==> {prompt.where}{which} <==\n{c.text.removesuffix(chr(10))}\n"
        for which, c in zip(of_sample, request.completions, strict=True)
    )


def _progress_bar(screen: Console, total: int, *, shown: bool) -> Progress:
    """Return a bar of completions."""
    columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    # redirect_stdout would send printed results to stderr, even if stdout is a file.
    bar = Progress(
        *columns, console=screen, transient=True, redirect_stdout=False, redirect_stderr=False, disable=not shown
    )
    bar.add_task("", total=total)
    return bar


def _print_under(bar: Progress, text: str, show: Callable[[str], None] = lambda text: print(text, flush=True)) -> None:
    """Print a result to stdout, or by `show`; meanwhile the bar is off the terminal."""
    bar.stop()
    show(text)
    bar.start()
