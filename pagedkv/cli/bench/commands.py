"""The commands `pagedkv bench ...` and their defaults. --help is quick: commands import their modules late.

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
from functools import partial
from pathlib import Path
from typing import Any, Final

import typer

from pagedkv.cli.bench import options

AGAIN: Final = 0.05
"""Seconds until a dropped interrupt is raised again."""

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
    full: options.Full = False,
    only: options.Only = None,
    as_json: options.JsonList = False,
    record: options.Record = None,
) -> int:
    """Every benchmark that can run here, one after the other, and one table at the end."""
    from pagedkv.cli.bench.every import run

    return run(only or [], is_quick=not full, as_json=as_json, keep=record)


@benchmarks.command("manager")
def bench_manager(
    rounds: options.ManagerRounds = None,
    quick: options.Quick = False,
    case: options.ManagerCases = None,
    as_json: options.JsonList = False,
    peers_python: options.ManagerPeers = None,
    record: options.Record = None,
    plot: options.Plot = None,
    scaling: options.ManagerScaling = False,
) -> None:
    """Cost of the memory manager, and of vLLM's, SGLang's and nano-vllm's if installed. A slow result is no error."""
    from pagedkv.cli.bench import manager  # numba
    from pagedkv.cli.bench.run import Shown

    rounds = rounds or (5 if quick else 50)
    shown = Shown(as_json, record, plot)
    if scaling:
        return manager.scaling(rounds, shown)
    return manager.run(rounds, case or [], peers_python or [], shown)


def _host(name: str, words: str) -> None:
    """Add the command of a benchmark in which models take steps. words: its help"""

    @benchmarks.command(name, help=words)
    def bench_host(
        turns: options.Turns = None,
        quick: options.Quick = False,
        shape: options.Shapes = None,
        as_json: options.JsonList = False,
        record: options.Record = None,
        plot: options.Plot = None,
    ) -> None:
        from pagedkv.cli.bench.run import Shown, host

        host(name, turns, shape or [], Shown(as_json, record, plot), is_quick=quick)


@benchmarks.command("generate")
def bench_generate(
    turns: options.Turns = None,
    quick: options.Quick = False,
    shape: options.Shapes = None,
    peers_python: options.GeneratePeers = None,
    as_json: options.JsonList = False,
    record: options.Record = None,
    plot: options.Plot = None,
) -> None:
    """Steps of the reference engine against the speed of memory, other engines beside it. Minutes, 12 GiB."""
    from pagedkv.cli.bench.run import Shown, host

    more: dict[str, Any] = {"pythons": [str(path) for path in peers_python or []]}
    if quick:
        from pagedkv.bench.generate.models import quick_config

        more["config"] = quick_config()
    host("generate", turns, shape or [], Shown(as_json, record, plot), is_quick=quick, **more)


_host(
    "transformers",
    "model.generate of transformers with its caches and with pages. It takes minutes, and 6 GiB without --quick.",
)
_host(
    "vllm",
    "A decode step and a prefill of vLLM on a CPU, with its attention and with ours, in one engine. Minutes, 6 GiB.",
)


@benchmarks.command("attention")
def bench_attention(
    full: options.CellsFull = False,
    kind: options.CellKinds = None,
    dtype: options.CellDtypes = None,
    kv: options.CellKvDtypes = None,
    heads: options.CellHeads = None,
    head_dim: options.CellHeadDims = None,
    block_size: options.CellBlockSizes = None,
    context: options.CellContexts = None,
    batch: options.CellBatches = None,
    threads: options.CellThreads = None,
    part: options.CellsPart = "1/1",
    kernels: options.AttentionKernels = None,
    repetitions: options.AttentionRepetitions = 15,
    vllm_python: options.AttentionVllm = None,
    as_json: options.JsonList = False,
    record: options.Record = None,
    plot: options.AttentionPlot = None,
    device: options.AttentionDevice = "cpu",
) -> None:
    """Our kernels, torch SDPA and vLLM against the speed of memory. An axis that is given makes a grid of its own."""
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"{device!r} is neither cpu nor cuda", param_hint="--device")
    axes = {"dtype": dtype, "kv": kv, "heads": heads, "head_dim": head_dim}
    axes |= {"block_size": block_size, "context": context, "batch": batch}
    if device == "cuda":
        cpu_only: dict[str, object] = {**axes, "kind": kind, "threads": threads, "part": part != "1/1"}
        cpu_only |= {"vllm_python": vllm_python}
        if given := [f"--{name.replace('_', '-')}" for name, value in cpu_only.items() if value]:
            raise typer.BadParameter(
                f"the cells of a GPU are its own: leave out {', '.join(given)}", param_hint="--device"
            )
        from pagedkv.bench.gpu import attention

        names = kernels or ["triton", "cuda"]
        attention.run(
            attention.Asked(names, repetitions, not full, out=(record,) if record else (), plot=plot, as_json=as_json)
        )
        return
    from pagedkv.bench.attention.runner import Asked  # torch
    from pagedkv.cli.bench.attention import Choice, run
    from pagedkv.cli.bench.run import Shown

    choice = Choice(full, kind or [], {name: values or [] for name, values in axes.items()}, threads or [], part)
    asked = Asked(tuple(kernels or ("cpu", "numba", "reference")), repetitions, vllm_python)
    run(choice, asked, Shown(as_json, record, plot))


@benchmarks.command("fragmentation")
def bench_fragmentation(
    quick: options.Quick = False,
    trace: options.FragmentationTrace = None,
    workload: options.FragmentationWorkloads = None,
    allocator: options.FragmentationAllocators = None,
    as_json: options.JsonList = False,
    record: options.Record = None,
    plot: options.Plot = None,
) -> None:
    """Share of the KV memory that holds tokens: our manager, and eight other ways to divide it. Minutes."""
    from pagedkv.bench.fragmentation import runner  # numba
    from pagedkv.cli.bench.run import Shown, run

    asked = {"is_quick": quick, "trace": trace, "only": workload or [], "variants": allocator or []}
    run("fragmentation", partial(runner.measure, **asked), Shown(as_json, record, plot))


@benchmarks.command("bandwidth")
def bench_bandwidth(
    quick: options.Quick = False,
    case: options.BandwidthCases = None,
    dtype: options.CellDtypes = None,
    kv: options.CellKvDtypes = None,
    heads: options.CellHeads = None,
    head_dim: options.CellHeadDims = None,
    block_size: options.CellBlockSizes = None,
    context: options.CellContexts = None,
    batch: options.CellBatches = None,
    threads: options.CellThreads = None,
    kernels: options.AttentionKernels = None,
    turns: options.BandwidthTurns = None,
    device: options.BandwidthDevice = "cpu",
    as_json: options.JsonList = False,
    record: options.Record = None,
    plot: options.Plot = None,
) -> None:
    """The speed of memory by access pattern, and how near to it each operation on the cache comes. Minutes."""
    from pagedkv.bench.bandwidth.runner import KERNELS, Asked  # torch
    from pagedkv.cli.bench.bandwidth import measured
    from pagedkv.cli.bench.run import Shown

    axes: dict[str, Sequence[Any]] = {"dtype": dtype or [], "kv": kv or [], "heads": heads or []}
    axes |= {"head_dim": head_dim or [], "block_size": block_size or [], "context": context or [], "batch": batch or []}
    named = {"cases": tuple(case or ()), "threads": tuple(threads or ()), "kernels": tuple(kernels or KERNELS)}
    asked = Asked(is_quick=quick, turns=turns, device=device, **named)
    measured(asked, axes, Shown(as_json, record, plot))


@benchmarks.command("tiers")
def bench_tiers(
    quick: options.Quick = False,
    part: options.TiersParts = None,
    transfer: options.TiersTransfer = False,
    frame: options.TiersFrames = None,
    context: options.TiersContexts = None,
    folder: options.TiersFolder = None,
    as_json: options.JsonList = False,
    record: options.Record = None,
    plot: options.Plot = None,
) -> None:
    """Speed of host memory, disk and transfers, first tokens by the place of the prefix. Minutes, 6 GiB."""
    from pagedkv.bench.tiers import runner  # torch
    from pagedkv.cli.bench.run import Shown, run

    sizes, contexts = tuple(kib << 10 for kib in frame or ()), tuple(context or ())
    asked = runner.Asked(quick, folder, (*(part or ()), *(["transfer"] if transfer else [])), sizes, contexts)
    run("tiers", partial(runner.measure, asked=asked), Shown(as_json, record, plot))


@benchmarks.command("report")
def bench_report(
    out: options.ReportOut = Path("bench-report.html"),
    results: options.ReportResults = None,
    charts: options.ReportCharts = None,
) -> None:
    """All kept rows as one HTML file that needs no network: headlines, charts, tables, commands."""
    from pagedkv.cli.bench.report import run

    run(out, results, charts)


@benchmarks.command("compare")
def bench_compare(
    first: options.CompareFirst,
    second: options.CompareSecond,
    relative: options.CompareRelative = False,
    tolerance: options.CompareTolerance = 0.05,
    as_json: options.JsonList = False,
) -> int:
    """Two files of rows, cell by cell. Status 1 if a figure of ours fell by more than the noise."""
    from pagedkv.cli.bench.compare import run

    return run(first, second, is_relative=relative, tolerance=tolerance, as_json=as_json)
