"""The options of `pagedkv bench ...`, as annotated types: metavar and help text. Defaults stand in `commands.py`.

A bare name serves all benchmarks; the others begin with their command's subject: Manager, Cell (of `bench attention`).
No imports beyond typer, because --help must be quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

_CELLS: Final = "What is measured"

Quick = Annotated[bool, typer.Option("--quick", help="The cases that show most, in a few minutes.")]
JsonList = Annotated[bool, typer.Option("--json", help="Print a list of objects, no more.")]
Record = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Append the rows there, not to bench/results of a checkout.")
]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the rows of this run: FILE.svg.")]

# bench all

Only = Annotated[list[str] | None, typer.Option(metavar="NAME", help="This benchmark; may be given several times.")]
Full = Annotated[bool, typer.Option("--full/--quick", help="Everything, two hours; or the cases that show most.")]

# bench manager

ManagerRounds = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Each goes through all cases in turn: 50, or 5 with --quick.")
]
ManagerCases = Annotated[
    list[str] | None,
    typer.Option(
        "--case", metavar="TEXT", help="Only cases with it in their names; again for more.", rich_help_panel=_CELLS
    ),
]
ManagerPeers = Annotated[
    list[Path] | None,
    typer.Option(metavar="PYTHON", help="One that has vLLM, SGLang or nano-vllm; may be given several times."),
]
ManagerScaling = Annotated[
    bool,
    typer.Option("--scaling", help="Instead: a step against pool size and context length.", rich_help_panel=_CELLS),
]

# bench generate, bench transformers, bench vllm

Turns = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Each goes through all variants: 5, or 2 with --quick.")
]
Shapes = Annotated[
    list[str] | None,
    typer.Option("--shape", metavar="BxN", help="B sequences of N tokens; again for more.", rich_help_panel=_CELLS),
]
GeneratePeers = Annotated[
    list[Path] | None,
    typer.Option(metavar="PYTHON", help="One that has OpenVINO GenAI or llama.cpp; may be given several times."),
]

# bench attention: the cells of the grid


CellsFull = Annotated[bool, typer.Option("--full/--quick", help="The whole grid, half an hour; or every promise once.")]
CellKinds = Annotated[
    list[str] | None,
    typer.Option(metavar="KIND", help="Only decode, prefill, write or call.", rich_help_panel=_CELLS),
]
CellDtypes = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="float32, bfloat16, float16.", rich_help_panel=_CELLS)
]
CellKvDtypes = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="fp8_e4m3, fp8_e5m2, int8, int4.", rich_help_panel=_CELLS)
]
CellHeads = Annotated[list[str] | None, typer.Option(metavar="H/K", help="Query and kv heads.", rich_help_panel=_CELLS)]
CellHeadDims = Annotated[list[int] | None, typer.Option(metavar="N", min=1, help="Of K and V.", rich_help_panel=_CELLS)]
CellBlockSizes = Annotated[
    list[int] | None, typer.Option(metavar="N", min=1, help="Tokens in a frame.", rich_help_panel=_CELLS)
]
CellContexts = Annotated[
    list[int] | None, typer.Option(metavar="N", min=1, help="Tokens of a sequence.", rich_help_panel=_CELLS)
]
CellBatches = Annotated[list[int] | None, typer.Option(metavar="N", min=1, help="Sequences.", rich_help_panel=_CELLS)]
CellThreads = Annotated[
    list[int] | None,
    typer.Option(metavar="N", min=1, max=1024, help="As is: 1, and 2 where there are.", rich_help_panel=_CELLS),
]
CellsPart = Annotated[
    str, typer.Option(metavar="I/N", help="Of the grid cut into N, only part I.", rich_help_panel=_CELLS)
]

# bench attention: how to measure and show them

AttentionKernels = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Our kernels to compare; by default all that run on a CPU.")
]
AttentionRepetitions = Annotated[
    int, typer.Option(metavar="N", min=1, help="Repetitions of each variant; variants take turns.")
]
AttentionVllm = Annotated[Path | None, typer.Option(metavar="PATH", help="The Python of an environment with vLLM.")]
AttentionPlot = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Draw the roofline; of a GPU, shares of the ceiling.")
]
AttentionDevice = Annotated[
    str, typer.Option(metavar="NAME", help="cpu; or cuda: decode on a GPU, in cells of its own.")
]

# bench tiers

TiersParts = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="speed, first-token, beside, transfer; again; all if none."),
]
TiersFrames = Annotated[
    list[int] | None,
    typer.Option(
        metavar="N",
        min=4,
        max=1 << 18,
        help="KiB of a frame, for speed and transfer; again.",
        rich_help_panel=_CELLS,
    ),
]
TiersTransfer = Annotated[bool, typer.Option("--transfer", help="The part transfer: between two processes.")]
TiersContexts = Annotated[
    list[int] | None,
    typer.Option(
        metavar="N", min=64, max=40_000, help="Tokens of the prompt of first-token; again for more.",
        rich_help_panel=_CELLS,
    ),
]  # fmt: skip
TiersFolder = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Where the disk tier lies; as is, with temp files.")
]

# bench fragmentation

FragmentationTrace = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help='Serve it, too; on each line {"input_length": 6758, "output_length": 500}, as Mooncake has.',
    ),
]
FragmentationWorkloads = Annotated[
    list[str] | None,
    typer.Option("--workload", metavar="NAME", help="Only this one; again for more.", rich_help_panel=_CELLS),
]
FragmentationAllocators = Annotated[
    list[str] | None,
    typer.Option(
        "--allocator", metavar="TEXT", help="Only those with it in their names; again for more.", rich_help_panel=_CELLS
    ),
]

# bench bandwidth

BandwidthCases = Annotated[
    list[str] | None,
    typer.Option(
        "--case",
        metavar="NAME",
        help="ceiling, decode, write_kv, gather_kv, copy_frames, linear or swap; again for more.",
        rich_help_panel=_CELLS,
    ),
]
BandwidthTurns = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Each goes through all operations of a case: 15, or 7 with --quick."),
]
BandwidthDevice = Annotated[
    str, typer.Option(metavar="NAME", help="cpu; or cuda: a GPU's memory, and swaps with the host.")
]

# bench report

ReportOut = Annotated[Path, typer.Option(metavar="FILE", help="The HTML file.")]
ReportResults = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Rows to report, in place of bench/results of a checkout.")
]
ReportCharts = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Write the charts there, too: NAME.svg for each benchmark.")
]

# bench compare

CompareFirst = Annotated[Path, typer.Argument(metavar="FIRST", help="A file of rows, as bench/results has them.")]
CompareSecond = Annotated[Path, typer.Argument(metavar="SECOND", help="Another one.")]
CompareRelative = Annotated[
    bool, typer.Option("--relative", help="By ratios to bounds and peers of their own run, for two machines.")
]
CompareTolerance = Annotated[float, typer.Option(metavar="X", min=0, max=1, help="Below 1 - X, a ratio has fallen.")]
