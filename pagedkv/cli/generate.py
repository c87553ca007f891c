"""`pagedkv generate`: load, submit, step, show. Generated text goes to stdout, the report about the run to stderr.

one prompt      text, streamed; further samples follow, each under a heading            then a table on stderr
a .jsonl        a block of text for each prompt, in input order, and a progress bar     then a table on stderr
--json          one object, or one object per line                                      only errors of lines on stderr

A prompt of a .jsonl that cannot be used, or whose request ends with an error, is a line on stderr and costs no other.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from pagedkv.checkpoint.tokenizer import Tokenizer
from pagedkv.cli import report
from pagedkv.cli.complaints import complain
from pagedkv.cli.inputs.prompts import Prompt, Source, Templating
from pagedkv.cli.inputs.shaping import Biases, with_ids
from pagedkv.errors import CheckpointError, InvalidRequest
from pagedkv.model.engine import Engine
from pagedkv.model.request import Completion, Request
from pagedkv.model.scheduler import Limits
from pagedkv.sampling.params import GRAMMARS, SamplingParams


@dataclass(frozen=True)
class Arguments:
    """The arguments of one run. sampling: fields of SamplingParams. loading: options of Engine.load.

    biases: logit_bias, some of it by the texts of tokens.
    """

    source: Source
    templating: Templating
    model: Path | None
    sampling: dict[str, Any]
    biases: Biases
    loading: dict[str, Any]
    limits: dict[str, Any]
    num_samples: int
    tenant: str
    as_json: bool

    @property
    def tenant_name(self) -> bytes:
        """The tenant as the engine names it."""
        return self.tenant.encode("utf-8", "surrogateescape")


@dataclass
class Entry:
    """One prompt and its progress: parameters, then request, or the error that ended it."""

    prompt: Prompt
    params: SamplingParams | None = None
    request: Request | None = None
    error: str = ""

    @contextmanager
    def guarded(self, *, many: bool) -> Iterator[None]:
        """Keep a refusal, with the name of the line, as the error if there are many prompts; else raise it."""
        try:
            yield
        except (InvalidRequest, CheckpointError) as error:
            if not many:
                raise
            self.error = f"{self.prompt.where}: {error}"


def run(args: Arguments, screen: Console) -> int:
    """Generate and print all outputs of a run; the report goes to `screen`.

    Returns: 1 if some lines of a .jsonl failed, 0 if none did.
    Raises: PagedKVError; for bad input, before anything is printed. Of a .jsonl, only if no line can be used
    """
    printer = None if args.source.many or args.as_json else SamplePrinter(args.num_samples)
    tasks, engine = _submitted(args, screen, printer)
    with engine:
        return _run(args, screen, tasks, engine, printer)


def _run(args: Arguments, screen: Console, tasks: list[Entry], engine: Engine, printer: SamplePrinter | None) -> int:
    """Step until all requests have ended, and print their outputs. Returns: the status"""
    if args.source.demo and not args.as_json:
        screen.print(Text(args.source.prompts[0].text, style="dim"), soft_wrap=not screen.is_terminal)
        screen.print()
    if printer:
        printer.begin()
    waiting = sum(bool(task.request) for task in tasks) * args.num_samples
    shown = args.source.many and screen.is_terminal
    bar = ProgressBar(screen, waiting, shown=shown)
    with bar:
        for task in tasks:
            while task.request and not task.request.finished:
                bar.advance(engine.step())
            _show(task, engine, bar, args)
    done = [task.request for task in tasks if task.request and not task.error]
    if done and not args.as_json:
        if printer:
            screen.print()  # a block of text ends with a blank line anyway
        screen.print(report.table(done, engine))
    return int(any(task.error for task in tasks))


def _show(task: Entry, engine: Engine, bar: ProgressBar, args: Arguments) -> None:
    """Print the result of one prompt; an error of many goes to stderr too.

    Raises: InvalidRequest if the only request ended with an error: its checkpoint may hold weights that are no numbers
    """
    errors = [completion.error for completion in task.request.completions if completion.error] if task.request else []
    with task.guarded(many=args.source.many):
        if errors and not args.source.many:
            raise InvalidRequest(f"{task.prompt.where}: {errors[0]}")
        if errors:
            raise InvalidRequest(errors[0])
    if args.as_json and task.request:
        bar.print(report.as_json(task.request, engine, task.prompt))
    elif args.as_json:
        bar.print(report.error_as_json(task.prompt, task.error))
    elif args.source.many and task.request and not task.error:
        bar.print(_block(task.request, task.prompt))
    if task.error:
        bar.print(task.error, complain)


def _submitted(args: Arguments, screen: Console, printer: SamplePrinter | None) -> tuple[list[Entry], Engine]:
    """Load an engine and submit all prompts to it.

    Raises: PagedKVError for a mistake in the options, in the only prompt, or in all of many prompts
    """
    tasks, many = [Entry(prompt, error=prompt.error) for prompt in args.source.prompts], args.source.many
    if args.sampling["logprobs"] is not None and not args.as_json:
        raise InvalidRequest("--logprobs are keys of the JSON; give --json too")
    SamplingParams(**args.sampling)  # the options of the command line are not the fault of a line
    for task in tasks:
        if not task.error:
            with task.guarded(many=many):
                task.params = _params(task.prompt, args.sampling)
    _require_one(tasks)
    engine = load(args, screen)
    bias = with_ids(args.biases, engine.tokenizer)
    for task in tasks:
        if task.params is not None:
            with task.guarded(many=many):
                if bias and "logit_bias" not in task.prompt.options:
                    task.params = replace(task.params, logit_bias=bias)
                messages = args.templating.messages(task.prompt)
                ids = (
                    token_ids(messages, args.templating, engine.tokenizer)
                    if messages
                    else engine.tokenizer.encode(task.prompt.text)
                )
                task.request = engine.submit(
                    ids, task.params, num_samples=args.num_samples, on_text=printer, tenant=args.tenant_name
                )
    _require_one(tasks)
    return tasks, engine


def _require_one(tasks: list[Entry]) -> None:
    """Raise InvalidRequest, with the first error, if each prompt has one."""
    if all(task.error for task in tasks):
        raise InvalidRequest(tasks[0].error)


def load(args: Arguments, screen: Console) -> Engine:
    """Load the engine of a run, under a spinner if `screen` is a terminal."""
    with screen.status("loading", spinner="line") if screen.is_terminal else nullcontext():
        loading = {**args.loading, "device": device(args.loading["device"])}
        return Engine.load(args.model, limits=Limits(**args.limits), **loading)


def token_ids(messages: list[dict[str, Any]], templating: Templating, tokenizer: Tokenizer) -> list[int]:
    """Encode messages, after the system message of the command line, by the checkpoint's chat template."""
    text = tokenizer.render_chat(templating.with_system(messages), **templating.variables)
    return tokenizer.encode(text, special_tokens=False)


def device(name: str) -> str:
    """Return the name of a device. Raises: InvalidRequest for one that torch does not know or this machine lacks"""
    found = re.fullmatch(r"cpu|cuda(?::([0-9]{1,3}))?", name)
    count = torch.cuda.device_count() if name != "cpu" else 0
    if not found or (name != "cpu" and int(found[1] or 0) >= count):
        raise InvalidRequest(f"--device is {name!r}; give cpu, or cuda:N of the {count} GPUs that torch finds here")
    return name


def _params(prompt: Prompt, sampling: dict[str, Any]) -> SamplingParams:
    """Combine the options of the command line with those of the prompt's own line, which take precedence.

    Raises: InvalidRequest for an unknown or bad option
    """
    allowed = sorted({field.name for field in fields(SamplingParams)} - {"logits_processor"})
    unknown = sorted(set(prompt.options) - set(allowed))
    if unknown:
        close = get_close_matches(unknown[0], allowed, 1)
        guess = f" (did you mean {close[0]}?)" if close else ""
        raise InvalidRequest(
            f'it has {", ".join(unknown)}{guess}; beside "prompt" or "messages" and "id" it may have '
            f"{', '.join(allowed)}"
        )
    for name in ("stop", "stop_ids"):
        if not isinstance(prompt.options.get(name, ""), (str, list)):
            raise InvalidRequest(f"{name} is {prompt.options[name]!r}; it must be a list")
    if any(prompt.options.get(name) is not None for name in GRAMMARS):
        sampling = {name: value for name, value in sampling.items() if name not in GRAMMARS}
    return SamplingParams(**{**sampling, **prompt.options})


class SamplePrinter:
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


class ProgressBar:
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

    def __enter__(self) -> ProgressBar:
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

    def print(self, text: str, show: Callable[[str], None] = lambda text: print(text, flush=True)) -> None:
        """Print a result to stdout, or by `show`; meanwhile the bar is off the terminal."""
        if self._progress:
            self._progress.stop()
        show(text)
        if self._progress:
            self._progress.start()
