"""The commands `pagedkv bench ...` and their options. --help is quick: commands import their modules late.

Ctrl-C unwinds a benchmark, so that its peers end and its temporary files go; a second Ctrl-C ends the process at once.
Rows that were complete are kept. The exit status tells whether the run could be made, not whether it was fast;
`compare` alone returns 1, for a ratio that fell.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer

AGAIN: Final = 0.05
"""Seconds until a dropped interrupt is raised again."""
_CELLS: Final = "What is measured"


def _several(help_text: str, name: str = "NAME", **more: Any) -> Any:
    """Return an option that may be given several times and chooses what is measured."""
    return typer.Option(metavar=name, help=f"{help_text}; again for more.", rich_help_panel=_CELLS, **more)


Quick = Annotated[bool, typer.Option("--quick", help="The cases that show most, in a few minutes.")]
JsonList = Annotated[bool, typer.Option("--json", help="Print a list of objects, no more.")]
Record = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Append the rows there, not to bench/results of a checkout.")
]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the rows of this run: FILE.svg or FILE.png.")]
Turns = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Each goes through all variants: 5, or 2 with --quick.")
]
Shapes = Annotated[list[str] | None, _several("B sequences of N tokens", "BxN")]
Dtypes = Annotated[list[str] | None, _several("float32, bfloat16, float16")]
KvDtypes = Annotated[list[str] | None, _several("fp8_e4m3, fp8_e5m2, int8, int4")]
Heads = Annotated[list[str] | None, _several("Query and kv heads", "H/K")]
HeadDims = Annotated[list[int] | None, _several("Of K and V", "N", min=1)]
BlockSizes = Annotated[list[int] | None, _several("Tokens in a frame", "N", min=1)]
Contexts = Annotated[list[int] | None, _several("Tokens of a sequence", "N", min=1)]
Batches = Annotated[list[int] | None, _several("Sequences", "N", min=1)]
Threads = Annotated[list[int] | None, _several("As is: 1, and 2 where there are", "N", min=1, max=1024)]
Kernels = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Our kernels to compare; by default all that run there.")
]
Device = Annotated[str, typer.Option(metavar="NAME", help="cpu; or cuda, in cells of its own.")]

benchmarks: Final = typer.Typer(add_completion=False)


@benchmarks.callback(invoke_without_command=True)
def bench(context: typer.Context) -> None:
    """Microbenchmarks of this machine. Compared variants take turns within one run."""
    if context.invoked_subcommand is None:
        print(context.get_help())
    elif signal.getsignal(signal.SIGINT) not in (signal.default_int_handler, signal.SIG_IGN):
        unwind_at_interrupt()


def unwind_at_interrupt() -> None:
    """Let Ctrl-C raise KeyboardInterrupt, and raise it again if C code that calls Python, as numba's, drops it."""
    signal.signal(signal.SIGINT, _unwind)
    sys.unraisablehook = _interrupt_again


def _unwind(*_: Any) -> None:
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    if any(map(_is_half_imported, ("numpy", "torch"))):
        os._exit(130)
    raise KeyboardInterrupt


def _is_half_imported(name: str) -> bool:
    """Return whether an import of a package is under way. A benchmark has begun nothing by then that must be unwound.

    C++ code of torch imports numpy, drops what that raises, and goes on with half of it; or it ends the process.
    """
    return bool(getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False))


def _interrupt_again(dropped: sys.UnraisableHookArgs) -> None:
    if not isinstance(dropped.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(dropped)
        return
    signal.signal(signal.SIGINT, _unwind)
    again = threading.Timer(AGAIN, signal.pthread_kill, [threading.get_ident(), signal.SIGINT])
    again.daemon = True
    again.start()


@benchmarks.command("all")
def bench_all(
    full: Annotated[
        bool, typer.Option("--full/--quick", help="Everything, two hours; or the cases that show most.")
    ] = False,
    only: Annotated[list[str] | None, typer.Option(metavar="NAME", help="This benchmark; again for more.")] = None,
    as_json: JsonList = False,
    record: Record = None,
) -> int:
    """Every benchmark that can run here, one after the other."""
    from pagedkv.cli.bench.run import every

    return every(only or [], is_quick=not full, as_json=as_json, keep=record)


@benchmarks.command("manager")
def bench_manager(
    rounds: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Each goes through all cases: 50, or 5 with --quick.")
    ] = None,
    quick: Quick = False,
    case: Annotated[list[str] | None, _several("Only cases with it in their names", "TEXT")] = None,
    peers_python: Annotated[list[Path] | None, _several("One that has vLLM, SGLang or nano-vllm", "PYTHON")] = None,
    scaling: Annotated[bool, typer.Option("--scaling", help="Instead: a step against pool size and context.")] = False,
    as_json: JsonList = False,
    record: Record = None,
    plot: Plot = None,
) -> None:
    """Cost of the memory manager, and of vLLM's, SGLang's and nano-vllm's if installed. A slow result is no error."""
    from pagedkv.bench.manager import runner  # numba
    from pagedkv.bench.manager import scaling as sizes
    from pagedkv.cli.bench.run import Shown, run

    rounds, shown = rounds or (5 if quick else 50), Shown(as_json, record, plot)
    pythons, cases = [str(path) for path in peers_python or []], runner.chosen(case or [])
    rows = sizes.measure if scaling else partial(runner.measure, pythons=pythons, cases=cases)
    run("manager", lambda report: rows(rounds, report), shown)


@benchmarks.command("generate")
def bench_generate(
    turns: Turns = None,
    quick: Quick = False,
    shape: Shapes = None,
    peers_python: Annotated[list[Path] | None, _several("One that has OpenVINO GenAI or llama.cpp", "PYTHON")] = None,
    as_json: JsonList = False,
    record: Record = None,
    plot: Plot = None,
) -> None:
    """Steps of the reference engine against the speed of memory, other engines beside it. Minutes, 12 GiB."""
    from pagedkv.cli.bench.run import Shown, host

    more: dict[str, Any] = {"pythons": [str(path) for path in peers_python or []]}
    if quick:
        from pagedkv.bench.generate.models import quick_config

        more["config"] = quick_config()
    host("generate", turns, shape or [], Shown(as_json, record, plot), is_quick=quick, **more)


def _host(name: str, words: str) -> None:
    """Add the command of a benchmark in which models take steps. words: its help"""

    @benchmarks.command(name, help=words)
    def bench_host(
        turns: Turns = None,
        quick: Quick = False,
        shape: Shapes = None,
        as_json: JsonList = False,
        record: Record = None,
        plot: Plot = None,
    ) -> None:
        from pagedkv.cli.bench.run import Shown, host

        host(name, turns, shape or [], Shown(as_json, record, plot), is_quick=quick)


_host("transformers", "model.generate of transformers with its caches and with pages. Minutes, 6 GiB without --quick.")
_host("vllm", "A decode step and a prefill of vLLM on a CPU, with its parts and with ours. Minutes, 6 GiB.")


@benchmarks.command("attention")
def bench_attention(
    full: Annotated[bool, typer.Option("--full/--quick", help="The whole grid, half an hour; or two minutes.")] = False,
    kind: Annotated[list[str] | None, _several("Only decode, prefill, write or call", "KIND")] = None,
    dtype: Dtypes = None,
    kv: KvDtypes = None,
    heads: Heads = None,
    head_dim: HeadDims = None,
    block_size: BlockSizes = None,
    context: Contexts = None,
    batch: Batches = None,
    threads: Threads = None,
    kernels: Kernels = None,
    repetitions: Annotated[int, typer.Option(metavar="N", min=1, help="Of each variant; variants take turns.")] = 15,
    vllm_python: Annotated[
        Path | None, typer.Option(metavar="PATH", help="The Python of an environment with vLLM.")
    ] = None,
    device: Device = "cpu",
    as_json: JsonList = False,
    record: Record = None,
    plot: Plot = None,
) -> None:
    """Our kernels, torch SDPA and vLLM against the speed of memory. An axis that is given makes a grid of its own."""
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"{device!r} is neither cpu nor cuda", param_hint="--device")
    axes = {"dtype": dtype, "kv": kv, "heads": heads, "head_dim": head_dim}
    axes |= {"block_size": block_size, "context": context, "batch": batch}
    if device == "cuda":
        cpu_only: dict[str, object] = {**axes, "kind": kind, "threads": threads}
        cpu_only |= {"vllm_python": vllm_python, "plot": plot}
        if given := [f"--{name.replace('_', '-')}" for name, value in cpu_only.items() if value]:
            raise typer.BadParameter(
                f"the cells of a GPU are its own: leave out {', '.join(given)}", param_hint="--device"
            )
        from pagedkv.bench.gpu import attention

        names = kernels or ["triton", "cuda"]
        attention.run(names, repetitions, quick=not full, out=record, as_json=as_json)
        return
    from pagedkv.bench.attention import runner  # torch
    from pagedkv.cli.bench.cells import chosen
    from pagedkv.cli.bench.run import Shown, run

    cells = chosen({name: values or [] for name, values in axes.items()}, kind or [], threads or [], is_full=full)
    asked = runner.Asked(tuple(kernels or ("cpu", "numba", "reference")), repetitions, vllm_python)
    run("attention", lambda report: runner.measure(cells, asked, report), Shown(as_json, record, plot))


@benchmarks.command("fragmentation")
def bench_fragmentation(
    quick: Quick = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='Serve it, too; on each line {"input_length": 6758, "output_length": 500}, as Mooncake has.',
        ),
    ] = None,
    workload: Annotated[list[str] | None, _several("Only this one")] = None,
    allocator: Annotated[list[str] | None, _several("Only those with it in their names", "TEXT")] = None,
    as_json: JsonList = False,
    record: Record = None,
    plot: Plot = None,
) -> None:
    """Share of the KV memory that holds tokens: our manager, and eight other ways to divide it. Minutes."""
    from pagedkv.bench.fragmentation import runner  # numba
    from pagedkv.cli.bench.run import Shown, run

    asked = {"is_quick": quick, "trace": trace, "only": workload or [], "variants": allocator or []}
    run("fragmentation", partial(runner.measure, **asked), Shown(as_json, record, plot))


@benchmarks.command("bandwidth")
def bench_bandwidth(
    quick: Quick = False,
    case: Annotated[
        list[str] | None, _several("ceiling, decode, write_kv, gather_kv, copy_frames, linear or swap")
    ] = None,
    dtype: Dtypes = None,
    kv: KvDtypes = None,
    heads: Heads = None,
    head_dim: HeadDims = None,
    block_size: BlockSizes = None,
    context: Contexts = None,
    batch: Batches = None,
    threads: Threads = None,
    kernels: Kernels = None,
    turns: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Of all operations of a case: 15, or 7 with --quick.")
    ] = None,
    device: Device = "cpu",
    as_json: JsonList = False,
    record: Record = None,
    plot: Plot = None,
) -> None:
    """The speed of memory by access pattern, and how near to it each operation on the cache comes. Minutes."""
    from pagedkv.bench.bandwidth.runner import KERNELS, Asked, measure  # torch
    from pagedkv.cli.bench.cells import chosen
    from pagedkv.cli.bench.run import Shown, run

    axes: dict[str, Sequence[Any]] = {"dtype": dtype or [], "kv": kv or [], "heads": heads or []}
    axes |= {"head_dim": head_dim or [], "block_size": block_size or [], "context": context or [], "batch": batch or []}
    named = {"cases": tuple(case or ()), "threads": tuple(threads or ()), "kernels": tuple(kernels or KERNELS)}
    asked = Asked(is_quick=quick, turns=turns, device=device, **named)
    if any(axes.values()):
        cells = chosen(axes, ["decode"], [1], is_full=False)
        asked = replace(asked, cells=tuple(cells), cases=asked.cases or ("decode",))
    file = "gpu-bandwidth" if device == "cuda" else None
    run("bandwidth", partial(measure, asked=asked), Shown(as_json, record, plot), file=file)


@benchmarks.command("tiers")
def bench_tiers(
    quick: Quick = False,
    part: Annotated[list[str] | None, _several("speed, first-token; all if none")] = None,
    frame: Annotated[list[int] | None, _several("KiB of a frame, for speed", "N", min=4, max=1 << 18)] = None,
    context: Annotated[
        list[int] | None, _several("Tokens of the prompt of first-token", "N", min=64, max=40_000)
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the disk tier lies; as is, with temp files.")
    ] = None,
    as_json: JsonList = False,
    record: Record = None,
    plot: Plot = None,
) -> None:
    """Speed of host memory and disk, first tokens by the place of the prefix. Minutes, 6 GiB."""
    from pagedkv.bench.tiers import runner  # torch
    from pagedkv.cli.bench.run import Shown, run

    sizes, contexts = tuple(kib << 10 for kib in frame or ()), tuple(context or ())
    asked = runner.Asked(quick, folder, tuple(part or ()), sizes, contexts)
    run("tiers", partial(runner.measure, asked=asked), Shown(as_json, record, plot))


@benchmarks.command("compare")
def bench_compare(
    first: Annotated[Path, typer.Argument(metavar="FIRST", help="A file of rows, as bench/results has them.")],
    second: Annotated[Path, typer.Argument(metavar="SECOND", help="Another one.")],
    relative: Annotated[
        bool, typer.Option("--relative", help="By ratios to bounds and peers of their own run, for two machines.")
    ] = False,
    tolerance: Annotated[
        float, typer.Option(metavar="X", min=0, max=1, help="Below 1 - X, a ratio has fallen.")
    ] = 0.05,
    as_json: JsonList = False,
) -> int:
    """Two files of rows, cell by cell. Status 1 if a figure of ours fell by more than the noise."""
    from pagedkv.bench.compare import compared, report
    from pagedkv.bench.record import read
    from pagedkv.errors import InvalidRequest

    changes = compared(read(first), read(second), is_relative=relative)
    if not changes:
        raise InvalidRequest(f"{first} and {second} have no figure in common; compare runs of the same benchmark")
    status: int = report(changes, tolerance, as_json=as_json)
    return status
