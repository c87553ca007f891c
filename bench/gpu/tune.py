"""Find the fastest sizes of the Triton and CUDA kernels on this GPU: `python -m pagedkv.bench.gpu.tune [--apply]`.

Search    One field after the other; the other fields keep their best values so far. The candidates of a field take
          turns. So a kernel and a size of stored heads need tens of compilations, not hundreds.
Judged    Decode by the geometric mean over a large batch and a single sequence, prefill by one chunk. A candidate that
          does not compile, or needs too much shared memory, is left out.
Output    FOLDER/tuning.json, after each size, under this architecture's name; with --apply also the table beside the
          Triton kernels. FOLDER/gpu-tune.jsonl for both; CUDA's constants have no table (constants.py).

This file alone searches: a serving step reads the table. `--reasoned` needs no GPU: it writes the values of the rule
for each architecture that was not measured.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import torch

from pagedkv import PagedBatch, paged_attention
from pagedkv.bench.attention.cells import Cell
from pagedkv.bench.gpu import constants, timing
from pagedkv.bench.gpu.attention import BASE, ours
from pagedkv.bench.gpu.pool import GpuPool
from pagedkv.bench.gpu.timing import Step, in_turn
from pagedkv.kernels import quant
from pagedkv.kernels.triton import tuning

AXES: Final[dict[str, dict[str, tuple[int, ...]]]] = {
    "decode": {
        "N": (32, 64, 128),
        "stages": (2, 3, 4, 5),
        "programs": (1, 2, 3, 4, 8),
        "num_warps": (1, 2, 4, 8),
        "one_launch": (False, True),
    },
    "prefill": {"M": (64, 128), "N": (32, 64, 128), "num_warps": (4, 8), "stages": (2, 3)},
}
CELLS: Final = tuple(
    replace(BASE, **changes)
    for changes in (
        {},
        {"kv": "fp8_e4m3"},
        {"head_dim": 64},
        {"head_dim": 256, "batch": 16},
        {"kv": "int8"},
        {"kv": "int4"},
    )
)
ALONE: Final[dict[str, Any]] = {"batch": 1, "context": 8192}
"""Changes to a cell that make it the single sequence by which decode is judged, beside the large batch."""

REASONED: Final = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")
SIZES: Final = (
    (256, 64),
    (512, 128),
    (1024, 256),
    (256, 128),
    (128, 64),
    (128, 128),
    (512, 64),
    (1024, 128),
    (2176, 576),
    (1088, 576),
    (544, 576),
)
"""(bytes of a head of K and V, elements of the wider of the two).

In order: bfloat16 of 64, 128 and 256; fp8 and int4; float32; MLA in bfloat16, fp8 and int4.
"""

RULE: Final = "rule"


def prefill_steps(backend: str, pool: GpuPool, tokens: int = 2048) -> list[Step]:
    """Return steps that attend from one chunk of `tokens` new tokens at the end of one sequence."""
    cell = pool.cell
    q = torch.randn(tokens, cell.heads, cell.head_dim, device=pool.device).to(quant.DTYPES[cell.dtype])
    step = pool.batches()[0]
    lens, starts = step.seq_lens[:1], torch.tensor([0, tokens], dtype=torch.int32, device=pool.device)
    batch = PagedBatch(step.block_table[:1], lens, starts, max_seqlen_q=tokens, max_seqlen_k=cell.context)
    return [lambda: paged_attention(q, pool.layer, batch, backend=backend)] * 4


@contextmanager
def table(entries: dict[str, Any]) -> Iterator[None]:
    """Make the kernels read the table `entries` in place of tuning.json."""
    real = tuning._table
    tuning._table = lambda: entries  # type: ignore[assignment]
    tuning.tuning.cache_clear()
    try:
        yield
    finally:
        tuning._table = real
        tuning.tuning.cache_clear()


def with_table(entries: dict[str, Any], steps: list[Step]) -> list[Step]:
    """Return `steps`, the first of which also makes the kernels read the table `entries`.

    One call is enough: the steps of a variant run, and are captured, one after the other.
    """

    def first() -> None:
        tuning._table = lambda: entries  # type: ignore[assignment]
        tuning.tuning.cache_clear()
        steps[0]()

    return [first, *steps[1:]]


Apply = Callable[[dict[str, int], list[Step]], list[Step]]
"""A function that returns steps which use the given fields."""


def best(
    axes: dict[str, tuple[int, ...]], apply: Apply, groups: list[list[Step]]
) -> tuple[dict[str, int], float, float]:
    """Return the fastest fields, their microseconds (geometric mean over `groups`), and those of the code's rule."""
    chosen: dict[str, int] = {}
    by_rule = now = math.inf
    for name, values in axes.items():
        candidates = [chosen, *({**chosen, name: value} for value in values)]
        variants = {(json.dumps(one), i): apply(one, steps) for one in candidates for i, steps in enumerate(groups)}
        with table({}), constants.own():
            times, _ = in_turn(variants, repetitions=7)
        means = {
            text: math.prod(times[text, i] for i in range(len(groups))) ** (1 / len(groups))
            for text in dict.fromkeys(text for text, _ in variants)
            if all((text, i) in times for i in range(len(groups)))
        }
        by_rule = min(by_rule, means.get("{}", math.inf))
        if means and min(means.values()) < 0.99 * means.get(json.dumps(chosen), math.inf):  # a smaller gain is noise
            chosen = json.loads(min(means, key=means.__getitem__))
        now = means.get(json.dumps(chosen), now)
    return chosen, now, by_rule


def tune(kernel: str, cell: Cell, arch: str) -> tuple[str, dict[str, int], str]:
    """Return the size key, the fastest fields and the line to print, for the heads of `cell`."""
    pools = [GpuPool(cell), GpuPool(replace(cell, **ALONE))] if kernel == "decode" else [GpuPool(cell)]
    layer = pools[0].layer
    head_bytes = (layer.k.shape[3] + layer.v.shape[3]) * layer.k.element_size()
    key = tuning.size_key(head_bytes, cell.head_dim)
    groups = [ours("triton", pool) if kernel == "decode" else prefill_steps("triton", pool) for pool in pools]
    apply = lambda one, steps: with_table({arch: {kernel: {key: one}}}, steps)  # noqa: E731
    found, us, rule = best(AXES[kernel], apply, groups)
    return key, found, f"{arch} {kernel} {key}: {found or 'the rule'} {us:.1f} us, the rule {rule:.1f} us"


def tune_cuda(kernel: str, cell: Cell) -> dict[str, Any]:
    """Return a row: the fastest constants of the CUDA kernel for this cell, and the microseconds with the code's."""
    pools = [GpuPool(cell), GpuPool(replace(cell, **ALONE))] if kernel == "decode" else [GpuPool(cell)]
    groups = [ours("cuda", pool) if kernel == "decode" else prefill_steps("cuda", pool) for pool in pools]
    apply = lambda one, steps: constants.with_constants(kernel, one, steps)  # noqa: E731
    found, us, rule = best(constants.AXES[kernel], apply, groups)
    return {"kernel": kernel, "case": str(cell), "fields": found, "us": round(us, 2), "us_now": round(rule, 2)}


def search_cuda(out: Path, about: dict[str, Any]) -> None:
    """Search the constants of the CUDA kernels; print and keep a row for each cell."""
    for cell in CELLS:
        for kernel in constants.AXES:
            row = tune_cuda(kernel, cell)
            timing.keep([row | about], out, "tune")
            words = f"{row['fields'] or 'as it is'} {row['us']} us, as it is {row['us_now']} us"
            print(f"= cuda {kernel} {row['case']}: {words}", flush=True)
            torch.cuda.empty_cache()


def search_triton(whole: dict[str, Any], about: dict[str, Any], *paths: Path) -> None:
    """Search the table of the Triton kernels for this GPU; print and write it after each size."""
    on = tuning.target(torch.device("cuda"))
    entry = {"source": f"measured on {about['gpu']}, torch {torch.__version__}, {about['commit']}, {about['when']}"}
    whole[on.arch] = entry
    for cell in CELLS:
        for kernel in AXES:
            key, fields, line = tune(kernel, cell, on.arch)
            table_of = "decode_16" if kernel == "decode" else kernel  # these cells decode in tiles of 16 rows
            entry.setdefault(table_of, {})[key] = fields  # type: ignore[attr-defined]
            print(f"= {line}", flush=True)
            keep(whole, *paths)
            torch.cuda.empty_cache()


def reasoned() -> dict[str, Any]:
    """Return the rule's values as a table, for each architecture of REASONED."""
    whole: dict[str, Any] = {}
    for arch in REASONED:
        on = tuning.Target(arch, 0)
        whole[arch] = {"source": RULE} | {
            kernel: {tuning.size_key(*size): asdict(tuning._by_rule(kernel, on, *size)) for size in SIZES}
            for kernel in AXES
        }
    return whole


def keep(whole: dict[str, Any], *paths: Path) -> None:
    """Write the whole table to each of `paths`, a line for each size."""
    lines = [
        f' "{arch}": {{\n  "source": {json.dumps(entry["source"])}'
        + "".join(
            f',\n  "{kernel}": {{\n'
            + ",\n".join(f"   {json.dumps(size)}: {json.dumps(fields)}" for size, fields in sizes.items())
            + "\n  }"
            for kernel, sizes in entry.items()
            if kernel != "source"
        )
        + "\n }"
        for arch, entry in whole.items()
    ]
    for path in paths:
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    """Run the search from the command line."""
    parser = argparse.ArgumentParser(prog="pagedkv.bench.gpu.tune", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--kernels", nargs="+", choices=("triton", "cuda"), default=("triton", "cuda"))
    parser.add_argument("--apply", action="store_true", help="write the table beside the kernels, too")
    parser.add_argument(
        "--reasoned",
        action="store_true",
        help="no search: write the rule's values for each architecture that was not measured",
    )
    given = parser.parse_args(argv)
    home = Path(tuning.__file__).with_name("tuning.json")
    paths = (given.out / "tuning.json", *([home] if given.apply else []))
    whole: dict[str, Any] = json.loads(home.read_text())
    whole |= {arch: entry for arch, entry in reasoned().items() if whole.get(arch, {}).get("source", RULE) == RULE}
    if given.reasoned:
        return keep(whole, *paths)
    timing.require_gpu()
    about = timing.provenance()
    if "cuda" in given.kernels:
        search_cuda(given.out, about)
    if "triton" in given.kernels:
        search_triton(whole, about, *paths)


if __name__ == "__main__":
    main()
