"""The commands `pagedkv bench ...` and their options, by subject. --help is quick: commands import their modules late.

The exit status tells whether the run could be made, not whether it was fast; `compare` alone returns 1, for a ratio
that fell.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, get_args

import typer

from pagedkv.cli.bench.shown import JSON, RECORD, Shown
from pagedkv.cli.options import Floats, Numbers, Stores, Texts, command, group, option
from pagedkv.errors import InvalidRequest

Paths = list[Path] | None


def _several(metavar: str, words: str, *names: str, **limits: Any) -> Any:
    """Return an option that may be given several times and chooses what is measured."""
    return option(metavar, f"{words}; again for more.", *names, panel="Cells", **limits)


@dataclass(frozen=True)
class _Axes:
    """The axes of a grid of cells; without one, the grid is that of the benchmark. Then threads and kernels."""

    dtype: Annotated[Texts, _several("NAME", "float32, bfloat16, float16")] = None
    kv: Annotated[Texts, _several("NAME", "fp8_e4m3, fp8_e5m2, int8, k8v4, k5v4")] = None
    heads: Annotated[Texts, _several("H/K", "Query and kv heads")] = None
    head_dim: Annotated[Numbers, _several("N", "Elements of K and V", min=1)] = None
    block_size: Annotated[Numbers, _several("N", "Tokens in a frame", min=1)] = None
    context: Annotated[Numbers, _several("N", "Tokens of a sequence", min=1)] = None
    batch: Annotated[Numbers, _several("N", "Sequences", min=1)] = None
    threads: Annotated[Numbers, _several("N", "Default: 1, and 2 where there are", min=1, max=1024)] = None
    kernels: Annotated[Texts, option("NAME", "Our kernels to compare; by default all that run there.")] = None

    def given(self) -> dict[str, list[Any]]:
        """Return the values of each axis that has some. Raises: InvalidRequest"""
        from pagedkv.kernels.registry import KERNELS

        known = {"dtype": get_args(Floats), "kv": get_args(Stores), "kernels": [kernel.name for kernel in KERNELS]}
        for name, allowed in known.items():
            if unknown := [value for value in getattr(self, name) or () if value not in allowed]:
                raise InvalidRequest(f"--{name} is {unknown[0]!r}; give one of {', '.join(allowed)}")
        return {name: values for name, values in vars(self).items() if values and name not in ("threads", "kernels")}


@dataclass(frozen=True)
class _Hosting:
    """A benchmark in which models take steps."""

    turns: Annotated[int | None, option("N", "Turns of all variants: 5, or 2 with --quick.", min=1)] = None
    shape: Annotated[Texts, _several("BxN", "B sequences of N tokens")] = None


@dataclass(frozen=True)
class _Engines:
    peers_python: Annotated[Paths, _several("PYTHON", "One that has OpenVINO GenAI or llama.cpp")] = None


@dataclass(frozen=True)
class _Every:
    full: Annotated[bool, option("", "Everything, two hours; or the cases that show most.", "--full/--quick")] = False
    record: Annotated[Path | None, RECORD] = None

    def __post_init__(self) -> None:
        Shown(self.record)


@dataclass(frozen=True)
class _Managing:
    rounds: Annotated[int | None, option("N", "Rounds of all cases: 50, or 5 with --quick.", min=1)] = None
    case: Annotated[Texts, _several("TEXT", "Only cases with it in their names")] = None
    peers_python: Annotated[Paths, _several("PYTHON", "One that has vLLM, SGLang or nano-vllm")] = None
    scaling: Annotated[bool, option("", "Instead: a step against pool size and context.", "--scaling")] = False


@dataclass(frozen=True)
class _Attending:
    """Cells of attention, and how often they are measured."""

    full: Annotated[bool, option("", "The whole grid, half an hour; else two minutes.", "--full")] = False
    kind: Annotated[Texts, _several("KIND", "Only decode, prefill, write or call")] = None
    repetitions: Annotated[int, option("N", "Repetitions of each variant; variants take turns.", min=1)] = 15
    vllm_python: Annotated[Path | None, option("PATH", "The Python of an environment with vLLM.")] = None

    def __post_init__(self) -> None:
        if self.vllm_python and not os.access(self.vllm_python, os.X_OK):
            raise InvalidRequest(f"--vllm-python is {self.vllm_python}, which is no program; give a Python with vLLM")


@dataclass(frozen=True)
class _Dividing:
    """Requests, and ways to divide the memory among them."""

    trace: Annotated[
        Path | None,
        option("FILE", 'Serve it, too; on each line {"input_length": 6758, "output_length": 500}, as Mooncake has.'),
    ] = None
    workload: Annotated[Texts, _several("NAME", "Only this one")] = None
    allocator: Annotated[Texts, _several("TEXT", "Only those with it in their names")] = None


@dataclass(frozen=True)
class _Keeping:
    """Traces, and rules of keeping recurrent states."""

    trace: Annotated[Texts, _several("NAME", "agent or chat")] = None
    rule: Annotated[Texts, _several("TEXT", "Only those with it in their names")] = None


@dataclass(frozen=True)
class _Moving:
    case: Annotated[Texts, _several("NAME", "ceiling, decode, write_kv, gather_kv, copy_frames, linear or delta")] = (
        None
    )
    turns: Annotated[int | None, option("N", "Turns of all operations of a case: 15, or 7 with --quick.", min=1)] = None


@dataclass(frozen=True)
class _Tiering:
    part: Annotated[Texts, _several("NAME", "speed, first-token; all if none")] = None
    frame: Annotated[Numbers, _several("N", "KiB of a frame, for speed", min=4, max=1 << 18)] = None
    context: Annotated[Numbers, _several("N", "Tokens of the prompt of first-token", min=64, max=40_000)] = None
    folder: Annotated[Path | None, option("DIR", "Where the disk tier lies; default: with temporary files.")] = None


@dataclass(frozen=True, kw_only=True)
class _Comparing:
    first: Annotated[Path, typer.Argument(metavar="FIRST", help="A file of rows, as bench/results has them.")]
    second: Annotated[Path, typer.Argument(metavar="SECOND", help="Another one.")]
    relative: Annotated[bool, option("", "By ratios to bounds and peers of their own run.", "--relative")] = False
    tolerance: Annotated[float, option("X", "Below 1 - X, a ratio has fallen.", min=0, max=1)] = 0.05
    as_json: Annotated[bool, JSON] = False


@dataclass(frozen=True, kw_only=True)
class _Reporting:
    page: Annotated[Path, option("FILE", "The page to write.")] = Path("docs/explanation/speed.md")


benchmarks: Final = group()


@benchmarks.callback(invoke_without_command=True)
def _bench(context: typer.Context) -> None:
    """Microbenchmarks of this machine. Compared variants take turns within one run."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def _command(example: str) -> Any:
    """Return a decorator that adds a command with the options of its dataclasses. example: the words after `bench`"""
    return command(benchmarks, f"pagedkv bench {example}", example.split()[0])


@_command("all --record rows.jsonl")
def _bench_all(asked: _Every) -> int:
    """Every benchmark that can run here, one after the other."""
    from pagedkv.cli.bench.run import every

    return every(is_quick=not asked.full, keep=asked.record)


@_command("manager --peers-python ~/vllm/bin/python")
def _bench_manager(asked: _Managing, shown: Shown) -> None:
    """Cost of the memory manager, and of vLLM's, SGLang's and nano-vllm's if installed. A slow result is no error."""
    from pagedkv.bench.manager import runner, scaling  # numba
    from pagedkv.cli.bench.run import run

    rounds = asked.rounds or (5 if shown.quick else 50)
    pythons, cases = [str(path) for path in asked.peers_python or []], runner.chosen(asked.case or [])
    rows = scaling.measure if asked.scaling else partial(runner.measure, pythons=pythons, cases=cases)
    run("manager", lambda report: rows(rounds, report), shown)


@_command("generate --quick --plot steps.svg")
def _bench_generate(asked: _Hosting, engines: _Engines, shown: Shown) -> None:
    """Steps of the reference engine against the speed of memory, other engines beside it. Minutes, 12 GiB."""
    from pagedkv.cli.bench.run import host

    more: dict[str, Any] = {"pythons": [str(path) for path in engines.peers_python or []]}
    if shown.quick:
        from pagedkv.bench.generate.models import quick_config

        more["config"] = quick_config()
    host("generate", asked.turns, asked.shape or [], shown, **more)


@_command("transformers --shape 1x2048")
def _bench_transformers(asked: _Hosting, shown: Shown) -> None:
    """model.generate of transformers with its caches and with pages. Minutes, 6 GiB without --quick."""
    from pagedkv.cli.bench.run import host

    host("transformers", asked.turns, asked.shape or [], shown)


@_command("vllm --turns 3")
def _bench_vllm(asked: _Hosting, shown: Shown) -> None:
    """A decode step and a prefill of vLLM on a CPU, with its parts and with ours. Minutes, 6 GiB."""
    from pagedkv.cli.bench.run import host

    host("vllm", asked.turns, asked.shape or [], shown)


@_command("attention --context 4096 --kv int8 --threads 1")
def _bench_attention(asked: _Attending, axes: _Axes, shown: Shown) -> None:
    """Our kernels, torch SDPA and vLLM against the speed of memory. A given axis makes another grid. CPU only."""
    from pagedkv.bench.attention import runner  # torch
    from pagedkv.cli.bench.cells import chosen
    from pagedkv.cli.bench.run import run

    cells = chosen(axes.given(), asked.kind or [], axes.threads or [], is_full=asked.full and not shown.quick)
    kernels = tuple(axes.kernels or ("cpu", "numba", "reference"))
    choice = runner.Asked(kernels, asked.repetitions, asked.vllm_python)
    run("attention", lambda report: runner.measure(cells, choice, report), shown)


@_command("fragmentation --quick --workload sharegpt")
def _bench_fragmentation(asked: _Dividing, shown: Shown) -> None:
    """Share of the KV memory that holds tokens: our manager, and eight other ways to divide it. Minutes."""
    from pagedkv.bench.fragmentation import runner  # numba
    from pagedkv.cli.bench.run import run

    only, variants = asked.workload or [], asked.allocator or []
    choice = {"is_quick": shown.quick, "trace": asked.trace, "only": only, "variants": variants}
    run("fragmentation", partial(runner.measure, **choice), shown)


@_command("states --trace agent --plot states.svg")
def _bench_states(asked: _Keeping, shown: Shown) -> None:
    """Prompt tokens computed again where no recurrent state was kept: our manager, and the rules of other engines."""
    from pagedkv.bench.states import runner
    from pagedkv.cli.bench.run import run

    choice = {"is_quick": shown.quick, "only": asked.trace or [], "rules": asked.rule or []}
    run("states", partial(runner.measure, **choice), shown)


@_command("hints --quick")
def _bench_hints(shown: Shown) -> None:
    """Tokens that agents compute again while their tools run: LRU, `retain`, and an optimum that knows the future."""
    from pagedkv.bench.hints import runner
    from pagedkv.cli.bench.run import run

    run("hints", partial(runner.measure, is_quick=shown.quick), shown)


@_command("bandwidth --case decode --context 4096")
def _bench_bandwidth(asked: _Moving, axes: _Axes, shown: Shown) -> None:
    """The speed of memory by access pattern, and how near to it each operation on the cache comes. Minutes."""
    from pagedkv.bench.bandwidth.runner import KERNELS, Asked, measure  # torch
    from pagedkv.cli.bench.cells import chosen
    from pagedkv.cli.bench.run import run

    named = {"cases": tuple(asked.case or ()), "threads": tuple(axes.threads or ())}
    named["kernels"] = tuple(axes.kernels or KERNELS)
    choice = Asked(is_quick=shown.quick, turns=asked.turns, **named)
    if given := axes.given():
        cells = chosen(given, ["decode"], [1], is_full=False)
        choice = replace(choice, cells=tuple(cells), cases=choice.cases or ("decode",))
    run("bandwidth", partial(measure, asked=choice), shown)


@_command("tiers --part first-token --context 16384")
def _bench_tiers(asked: _Tiering, shown: Shown) -> None:
    """Speed of host memory and disk, first tokens by the place of the prefix. Minutes, 6 GiB."""
    from pagedkv.bench.tiers import runner  # torch
    from pagedkv.cli.bench.run import run

    sizes, contexts = tuple(kib << 10 for kib in asked.frame or ()), tuple(asked.context or ())
    choice = runner.Asked(shown.quick, asked.folder, tuple(asked.part or ()), sizes, contexts)
    run("tiers", partial(runner.measure, asked=choice), shown)


@_command("compare before.jsonl after.jsonl")
def _bench_compare(asked: _Comparing) -> int:
    """Two files of rows, cell by cell. Status 1 if a figure of ours fell by more than the noise."""
    from pagedkv.bench.compare import compared, report
    from pagedkv.bench.record import read

    changes = compared(read(asked.first), read(asked.second), is_relative=asked.relative)
    if not changes:
        raise InvalidRequest(f"{asked.first} and {asked.second} have no figure in common; compare like benchmarks")
    status: int = report(changes, asked.tolerance, as_json=asked.as_json)
    return status


@_command("report --page speed.md")
def _bench_report(asked: _Reporting) -> None:
    """Write the page of the newest rows in bench/results whose code is that of today. It measures nothing."""
    from pagedkv.bench.report import write

    print(f"{asked.page}: {write(asked.page)} figures")
