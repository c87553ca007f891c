"""The commands and their options, and how they end. No work: a command imports what it needs when it runs, so that --help is quick.

    0    done
    1    whoever read stdout went away
    2    bad input: one line on stderr, "pagedkv: error: ...", whatever file or option it came from
    130  Ctrl-C

A traceback is a bug of ours.
"""

from __future__ import annotations

import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, Final, cast

import typer

from pagedkv import __version__, debug
from pagedkv.cli import prompts
from pagedkv.errors import InvalidRequest, PagedKVError

app: Final = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)

benchmarks: Final = typer.Typer(add_completion=False)
app.add_typer(benchmarks, name="bench")

ShellError: Final = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[2])
"""ClickException, the root of what typer raises at bad options. Newer typers bring a click of their own, in which it has no public name."""

_MEMORY: Final = "The KV cache"
_SAMPLING: Final = "Sampling"
_CELLS: Final = "What is measured"


@app.callback(invoke_without_command=True)
def pagedkv(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Paged virtual memory for the KV cache of language models."""
    if version:
        print(f"pagedkv {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def generate(
    dash: Annotated[
        str | None, typer.Argument(metavar="[-]", help="Read the prompt from stdin, as is done for a pipe.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="The prompt.")] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help='A text, or with the ending .jsonl many prompts: {"prompt": "..."} on each line.'
        ),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A Hugging Face folder; without, the bundled checkpoint.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Of output, at most.")] = 128,
    num_samples: Annotated[int, typer.Option(metavar="N", help="Outputs for each prompt; they share its frames.")] = 1,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a user's message: put it into the checkpoint's chat template.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object (a line for each prompt of a .jsonl), no more.")
    ] = False,
    temperature: Annotated[float, typer.Option(metavar="T", help="0 is greedy.", rich_help_panel=_SAMPLING)] = 0.0,
    top_k: Annotated[
        int, typer.Option(metavar="N", help="From the N likeliest; 0 is off.", rich_help_panel=_SAMPLING)
    ] = 0,
    top_p: Annotated[
        float, typer.Option(metavar="P", help="From the likeliest that hold P; 1 is off.", rich_help_panel=_SAMPLING)
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option(metavar="P", help="None below P times the likeliest; 0 is off.", rich_help_panel=_SAMPLING)
    ] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(metavar="R", help="1 is off.", rich_help_panel=_SAMPLING)] = 1.0,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="The same seed, the same text.", rich_help_panel=_SAMPLING)
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Where to end; may be given several times.", rich_help_panel=_SAMPLING),
    ] = None,
    block_size: Annotated[int, typer.Option(metavar="N", help="Tokens in a frame.", rich_help_panel=_MEMORY)] = 16,
    num_frames: Annotated[
        int | None, typer.Option(metavar="N", help="Frames in the pool.", rich_help_panel=_MEMORY)
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Or its size, such as 2GiB.", rich_help_panel=_MEMORY)
    ] = None,
    kernels: Annotated[
        str, typer.Option(metavar="NAME", help="One that `pagedkv doctor` lists.", rich_help_panel=_MEMORY)
    ] = "auto",
    dtype: Annotated[
        str | None, typer.Option(metavar="NAME", help="float32, bfloat16, float16.", rich_help_panel=_MEMORY)
    ] = None,
) -> None:
    """Text from a prompt, streamed as it is made. Without a prompt, the bundled checkpoint answers a question."""
    if num_frames is not None and memory is not None:
        raise InvalidRequest("--num-frames and --memory both say how large the pool is; give one of them")
    source = prompts.read(prompt, prompt_file, dash)
    from pagedkv.cli.generate import Job, run  # torch

    sampling: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
    }
    sampling |= {"repetition_penalty": repetition_penalty, "seed": seed, "stop": stop or ()}
    pool = {"block_size": block_size, "num_frames": num_frames, "memory": memory, "kernels": kernels, "dtype": dtype}
    run(Job(source, model, sampling, pool, num_samples, chat, as_json))


@app.command()
def doctor() -> None:
    """Which kernels can run here and why the others cannot, and what this machine has."""
    from pagedkv.cli.doctor import run  # torch

    run()


@app.command("replay")
def replay_trace(
    trace: Annotated[
        Path,
        typer.Argument(metavar="TRACE", help='On each line a request: {"hash_ids": [0, 1]}, 512 prompt tokens an id.'),
    ],
    num_frames: Annotated[
        list[int] | None, typer.Option(metavar="N", help="Frames of 512 tokens; again for more pools.")
    ] = None,
    memory: Annotated[
        list[str] | None, typer.Option(metavar="SIZE", help="Instead: pools of that size, such as 40GiB.")
    ] = None,
    bytes_per_token: Annotated[
        int, typer.Option(metavar="N", help="For --memory; as is, Llama 3.1 8B in bfloat16.")
    ] = 131072,
    policy: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="lru, 2q, lfu, cost, priority, belady, estimate, all.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects, no more.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw hit rate against pool size.")] = None,
) -> None:
    """Prefix hit rates of eviction policies over a trace of requests; without a size, of a pool that holds everything."""
    if num_frames and memory:
        raise InvalidRequest("--num-frames and --memory both say how large the pools are; give one of them")
    from pagedkv.cli.replay import frames_in, run  # numba

    sizes = num_frames or [frames_in(text, bytes_per_token) for text in memory or ()]
    run(trace, sizes, policy or ["lru"], as_json=as_json, plot=plot)


@benchmarks.callback(invoke_without_command=True)
def bench(context: typer.Context) -> None:
    """Microbenchmarks of this machine; what is compared runs in turn, in one run."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@benchmarks.command("manager")
def bench_manager(
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Each goes through all cases in turn.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects, no more.")] = False,
    peers_python: Annotated[
        list[Path] | None,
        typer.Option(metavar="PYTHON", help="One that has vLLM, SGLang or nano-vllm; may be given several times."),
    ] = None,
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Append the rows there, not to bench/results of a checkout.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Instead: a step against pool size and context length, drawn there."),
    ] = None,
) -> None:
    """What the memory manager costs beside those of vLLM, SGLang and nano-vllm, where they are. Slow is no failure: the status is 0."""
    from pagedkv.cli.bench import manager, scaling  # numba

    if plot:
        return scaling(rounds, plot, as_json=as_json, keep=record)
    return manager(rounds, peers_python or (), as_json=as_json, keep=record)


@benchmarks.command("attention")
def bench_attention(
    full: Annotated[
        bool, typer.Option("--full/--quick", help="The whole grid, half an hour; or every promise once.")
    ] = False,
    kind: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND", help="Only decode, prefill, write or call.", rich_help_panel=_CELLS),
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="float32, bfloat16, float16.", rich_help_panel=_CELLS)
    ] = None,
    kv: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="fp8_e4m3, fp8_e5m2, int8, int4.", rich_help_panel=_CELLS)
    ] = None,
    heads: Annotated[
        list[str] | None, typer.Option(metavar="H/K", help="Query and kv heads.", rich_help_panel=_CELLS)
    ] = None,
    head_dim: Annotated[list[int] | None, typer.Option(metavar="N", help="Of K and V.", rich_help_panel=_CELLS)] = None,
    block_size: Annotated[
        list[int] | None, typer.Option(metavar="N", help="Tokens in a frame.", rich_help_panel=_CELLS)
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option(metavar="N", help="Tokens of a sequence.", rich_help_panel=_CELLS)
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(metavar="N", help="Sequences.", rich_help_panel=_CELLS)] = None,
    threads: Annotated[
        list[int] | None, typer.Option(metavar="N", help="As is: 1, and 2 where there are.", rich_help_panel=_CELLS)
    ] = None,
    part: Annotated[
        str, typer.Option(metavar="I/N", help="Of the grid cut into N, only part I.", rich_help_panel=_CELLS)
    ] = "1/1",
    kernels: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Ours to compare; all that run on a CPU.")
    ] = None,
    repetitions: Annotated[int, typer.Option(metavar="N", min=1, help="Of each, in turn.")] = 15,
    vllm_python: Annotated[
        Path | None, typer.Option(metavar="PATH", help="The Python of an environment with vLLM.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a list of objects on stdout; the tables go to stderr.")
    ] = False,
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Append the rows there, not to bench/results of a checkout.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the roofline; of a GPU, shares of the ceiling.")
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="cpu; or cuda: decode on a GPU, in cells of its own.")
    ] = "cpu",
) -> None:
    """Our kernels, torch SDPA and vLLM against the speed of memory. An axis that is given makes a grid of its own."""
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"{device!r} is neither cpu nor cuda", param_hint="--device")
    axes = {
        "dtype": dtype,
        "kv": kv,
        "heads": heads,
        "head_dim": head_dim,
        "block_size": block_size,
        "context": context,
        "batch": batch,
    }
    if device == "cuda":
        elsewhere = axes | {
            "kind": kind,
            "threads": threads,
            "part": part != "1/1",
            "vllm_python": vllm_python,
            "json": as_json,
        }
        if given := [f"--{name.replace('_', '-')}" for name, value in elsewhere.items() if value]:
            raise typer.BadParameter(
                f"the cells of a GPU are its own: leave out {', '.join(given)}", param_hint="--device"
            )
        from pagedkv.bench.gpu import attention

        names = kernels or ["triton", "cuda", "cuda-bulk", "cuda-pieces"]
        attention.run(attention.Asked(names, repetitions, not full, out=(record,) if record else (), plot=plot))
        return
    from pagedkv.bench.attention.runner import Asked  # torch
    from pagedkv.cli.bench_attention import Choice, Shown, run

    choice = Choice(full, kind or [], {name: values or [] for name, values in axes.items()}, threads or [], part)
    asked = Asked(tuple(kernels or ("cpu", "numba", "reference")), repetitions, vllm_python)
    run(choice, asked, Shown(as_json, record, plot))


def main(argv: list[str] | None = None) -> None:
    """Run `pagedkv` with `argv` (None: this process's arguments), and exit as the head of this file says."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a locale that lacks a character is no reason to stop
    try:
        _check_environment()
        status = app(argv, prog_name="pagedkv", standalone_mode=False) or 0
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    except ShellError as why:
        status = _complain(why.format_message())
    except PagedKVError as why:
        status = _complain(str(why))
    sys.exit(status)


def _check_environment() -> None:
    try:
        debug.level()
    except ValueError as why:
        raise InvalidRequest(str(why)) from None


def _complain(text: str) -> int:
    """One line, whatever `text` has: a list of reasons is joined by semicolons."""
    first, *rest = (line.strip() for line in text.splitlines() if line.strip())
    print("pagedkv: error:", " ".join([first, "; ".join(rest)]).strip(), file=sys.stderr)
    return 2
