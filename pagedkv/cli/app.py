"""The commands of `pagedkv` and their exit statuses. --help is quick: commands import their modules late.

    0    done
    1    a line of a .jsonl failed, the others are done
    2    bad input: one line on stderr, "pagedkv: error: ...", for any file or option
    130  Ctrl-C

A traceback means a bug in pagedkv. `pagedkv/__main__.py` has the statuses of a process whose stdout fails.
"""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper
from typing import Annotated, Final, cast

import typer

from pagedkv import __version__, debug
from pagedkv.cli import options, prompts
from pagedkv.cli.bench.commands import benchmarks
from pagedkv.cli.complaints import complain
from pagedkv.cli.options import command
from pagedkv.errors import InvalidRequest, PagedKVError

app: Final = options.group(pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]})

BAD_INPUT: Final = 2

ShellError: Final = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[2])
"""ClickException, the base class of the errors that typer raises for bad options. Newer versions of typer bundle click
without a public name for this class."""


@app.callback(invoke_without_command=True)
def _pagedkv(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Paged virtual memory for the KV cache of language models."""
    if version:
        print(f"pagedkv {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


@command(app, 'pagedkv generate --model Qwen/Qwen3-0.6B --chat --prompt "Why is the sky blue?"')
def _generate(prompting: options.Prompting, sampling: options.Sampling, loading: options.Loading) -> int:
    """Text from a prompt, streamed as it is made. Without a prompt, the bundled checkpoint answers a question."""
    params = sampling.params()
    if sampling.logprobs is not None and not prompting.as_json:
        raise InvalidRequest("--logprobs are keys of the JSON; give --json too")
    source, templating = prompts.read(prompting)
    loading.check()
    from pagedkv.cli.compiling import announced  # numba

    with announced(quiet=prompting.as_json) as screen:
        from pagedkv.cli import conversation  # torch, while another process compiles
        from pagedkv.cli.generate import Job, run

        job = Job(source, templating, params, prompting, loading, screen)
        return conversation.hold(job) if source.talk else run(job)


@command(app, "pagedkv serve --model DIR --port 8000")
def _serve(serving: options.Serving, loading: options.Loading) -> int:
    """Serve a model over HTTP as OpenAI's API does: completions, chat, models; and /metrics, /health."""
    from pagedkv.cli.serve import run

    return run(serving, loading)


@command(app, "pagedkv fit --model DIR --memory 72GB --bandwidth 3.35TB/s")
def _fit(fitting: options.Fitting, geometry: options.Geometry, stored: options.Stored) -> None:
    """Bytes of KV, contexts and sequences that fit into memory, and the speed that memory allows."""
    from pagedkv.cli.fit import run

    run(fitting, geometry, stored)


@command(app, "pagedkv kv-quality --model DIR --plot kinds.svg")
def _kv_quality(measuring: options.Measuring) -> None:
    """Measure what each kind of stored KV costs a model on a text: KL divergence, perplexity, bytes, speed."""
    from pagedkv.cli.kv_quality import run  # torch

    run(measuring)


@command(app, "pagedkv why yesterday.json today.json --model DIR")
def _why(comparing: options.Comparing) -> None:
    """Compare two prompts, and show the first token that differs: why the second was not found in the cache."""
    from pagedkv.cli.why import run  # tokenizers

    run(comparing)


@command(app, "pagedkv doctor")
def _doctor() -> None:
    """Show which kernels can run here and why the others cannot, and what this machine has."""
    from pagedkv.cli.doctor import run  # torch

    run()


@command(app, "pagedkv warm")
def _warm() -> None:
    """Compile everything that is compiled at first use (about a minute, once), for an image or before a server."""
    from pagedkv.cli.warm import run  # torch

    run()


@command(app, "pagedkv replay trace.jsonl --memory 40GiB --policy all")
def _replay(replaying: options.Replaying) -> None:
    """Prefix hit rates of eviction policies over a trace of requests; without a size, of an unbounded pool."""
    if replaying.num_frames and replaying.memory:
        raise InvalidRequest("--num-frames and --memory both set the sizes of the pools; give one of them")
    from pagedkv.cli.replay import run  # numba

    run(replaying)


app.add_typer(benchmarks, name="bench")


def main(argv: list[str] | None = None) -> None:
    """Run `pagedkv` with `argv` (None: this process's arguments) and exit with a status listed in the file head."""
    sys.exit(invoke(argv))


def invoke(argv: list[str] | None = None) -> int:
    """Run `pagedkv` with `argv` (None: this process's arguments) and return a status listed in the file head."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a locale without some character must not stop the run
    try:
        _check_environment()
        return app(argv, prog_name="pagedkv", standalone_mode=False) or 0
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except (ShellError, PagedKVError) as error:
        complain(error.format_message() if isinstance(error, ShellError) else str(error))
        return BAD_INPUT


def _check_environment() -> None:
    """Raise InvalidRequest for a bad PAGEDKV_DEBUG, PAGEDKV_NUM_THREADS or NUMBA_NUM_THREADS."""
    debug.level()
    debug.forced_num_threads()
    try:
        threads = int(os.environ.get("NUMBA_NUM_THREADS", 1))
    except ValueError:  # then numba takes its default
        return
    if threads < 1:
        raise InvalidRequest(f"NUMBA_NUM_THREADS is {threads}; set it to a number of threads from 1 on, or unset it")
