"""The pictures of the manual, from the rows in `results/`: `python -m pagedkv.bench.pictures` draws them all.

A picture has all runs on one kind of machine, old and disturbed ones too, and no run is chosen. It shows few cells; the
rows have the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pagedkv.bench.attention.cells import Cell
from pagedkv.bench.chart import write
from pagedkv.bench.plots import SPREAD, charts
from pagedkv.bench.record import HERE, Row

FOLDER: Final = HERE.parent / "docs/img/bench"
ZEN4: Final = "AMD EPYC (family 25, model 17), 2 CPUs"
ZEN5: Final = "AMD EPYC (family 26, model 2), 2 CPUs"


@dataclass(frozen=True)
class Picture:
    """A picture: its files of rows, its cells, and what these have in common.

    keep: field of a row → the values that are shown; a row without the field is shown
    """

    files: tuple[str, ...]
    keep: tuple[dict[str, tuple[Any, ...]], ...]
    common: str = ""
    machine: str = ZEN4

    def rows(self) -> Iterator[Row]:
        """Yield the rows of all runs on the machine, in the order of `keep`."""
        found = list[Row]()
        for file in self.files:
            for line in (HERE / "results" / f"{file}.jsonl").read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                found += _of_today(row) if row["machine"] == self.machine else ()
        for keep in self.keep:
            shown = [row for row in found if all(row.get(name, some[0]) in some for name, some in keep.items())]
            yield from sorted(
                shown, key=lambda row: [some.index(row.get(name, some[0])) for name, some in keep.items()]
            )


def _of_today(row: Row) -> list[Row]:
    """Return a row of before 29 November 2026 in the form of today."""
    if "results" in row:
        cell = Cell(**row["cell"])
        axes = {"bench": "attention", "case": cell.kind, "shape": str(cell).removeprefix(f"{cell.kind} ")}
        rest = {"unit": "us", "machine": row["machine"], "when": row["when"]}
        names = {"us": "median", "of_ceiling": "efficiency", "turns": "turns", "clean": "clean"}
        return [
            axes | {"variant": who} | rest | {new: one.get(old) for old, new in names.items()}
            for who, one in row["results"].items()
        ]
    if "who" in row:
        head = {"bench": "manager", "case": row["case"], "variant": row["who"]}
        return [head | {name: row[name] for name in row if name not in ("who", "limit", "runs")}]
    return [row] if "variant" in row else []


STEPS: Final = {"bench": ("generate",), "case": ("decode",)}
ENGINES: Final = {"variant": ("pagedkv", "StaticCache", "OpenVINO", "llama.cpp")}
MOVES: Final = {"threads": (2,), "variant": ("memory", "pagedkv", "torch")}
POOLS: Final = (1000, 10_000, 100_000, 1_000_000)
PICTURES: Final = {
    "manager": Picture(
        ("manager", "baseline-avx512_bf16"),
        (
            {"case": ("decode step, 1,024 sequences",), "variant": ("pagedkv", "lists of Python",
             "nano-vllm BlockManager", "vLLM KVCacheManager")},
            {"case": (*(f"step of 64 sequences, {n:,} frames, {state}"
                        for state in ("free", "all cached: each new page evicts one") for n in POOLS),
                      *(f"step of 64 sequences, {n:,} tokens of context" for n in (16, 128, 1024, 8192, 65_536)))},
        ),
        "all cached: each new page evicts one.",
    ),
    "attention": Picture(
        ("attention", "baseline-avx512_bf16"),
        ({"bench": ("attention",), "shape": tuple(
            f"4 x 4,096 {kind} block 16 32/8/128 2 thr"
            for kind in ("bfloat16", "float32", "bfloat16 kv fp8_e4m3", "bfloat16 kv int8")),
          "variant": ("cpu", "sdpa", "vllm")},),
        "4 × 4,096 tokens, 32/8 heads of 128, 2 threads. SDPA reads contiguous KV.",
    ),
    "fragmentation": Picture(
        ("fragmentation",),
        ({"case": ("useful",), "workload": ("sharegpt",), "variant": (
            "reserve the maximum", "reserve a power of two", "reserve the true length",
            "buddy, doubling", "DynamicCache", "virtual memory, 2 MiB", "pagedkv", "virtual memory, 64 KiB")},
         {"case": ("waste",), "workload": ("sharegpt",), "variant": ("pagedkv, blocks of 8", "pagedkv", *(
            f"pagedkv, blocks of {size}" for size in (32, 64, 128, 256)))}),
        "Lengths of ShareGPT. Diamond: vLLM paper 2023 (Kwon et al.). pagedkv alone has blocks of 16.",
    ),
    "bandwidth": Picture(
        ("bandwidth",),
        ({"case": ("ceiling",),
          "pattern": ("read", "read, random 32 KiB", "read, random 4 KiB", "copy"), **MOVES},
         {"case": ("decode",), "batch": (4,), "context": (4096,), "block_size": (16,), "heads": ("32/8",),
          "head_dim": (128,), "kv": ("bfloat16", "int8"), "dtype": ("bfloat16",), **MOVES},
         {"case": ("linear", "write_kv", "gather_kv", "copy_frames"), "operation": ("norm_gate_up",),
          "tokens": (1, 8, 2048), "kv": ("bfloat16",), "frame_KiB": (2048,), "order": ("random",), **MOVES}),
        "2 threads. decode: 4 × 4,096 tokens. linear: norm_gate_up of an 8B model.",
    ),
    "generate": Picture(
        ("generate", "2026-11-28-generate"),
        ({**STEPS, "batch": (1,), "context": (128, 2048, 8192), **ENGINES},
         {**STEPS, "batch": (8,), "context": (128, 2048), **ENGINES}),
        "StaticCache: transformers.",
    ),
    "states": Picture(
        ("states",),
        tuple({"case": (case,), "limit": ("no limit", "64 states", "16 states")} for case in ("agent", "chat")),
        "Prompt tokens a request computed beyond the least possible.",
    ),
    "hints": Picture(
        ("hints",),
        ({"case": ("agents",), "variant": ("LRU", "pagedkv, hints=0.1", "pagedkv, hints=0.5", "pagedkv, times 20 % off",
                                           "pagedkv", "optimum")},),
        "100 agents, tools of 1 to 60 s, a pool of half of their contexts.",
    ),
    "tiers": Picture(
        ("tiers", "2026-11-27-tiers-zen4"),
        ({"case": ("store", "load"), "frame": (1_835_008,), "tier": ("host", "disk"),
          "variant": ("pagedkv", "memcpy, one thread", "direct I/O, 2 threads")},
         {"case": ("first token",), "context": (4096,),
          "variant": ("computed", "pagedkv, pool", "pagedkv, host", "pagedkv, disk")}),
        "Frames of 1,792 KiB; a prompt of 4,096 tokens.",
    ),
    "transformers": Picture(
        ("transformers",),
        ({"case": ("decode", "prefill", "memory"), "batch": (1, 8), "context": (8192,),
          "variant": ("pages", "pages int8", "StaticCache", "DynamicCache")},),
        "Contexts and prompts of 8,192 tokens.", ZEN5,
    ),
}  # fmt: skip


def main(folder: Path = FOLDER) -> None:
    """Draw the pictures of the manual."""
    for name, picture in PICTURES.items():
        rows = list(picture.rows())
        days = sorted({row["when"][:10] for row in rows})
        span = " to ".join(dict.fromkeys((days[0], days[-1])))
        caption = f"{picture.common} {SPREAD} {picture.machine}; {span}."
        write(charts(name, rows), folder / f"{name}.svg", caption)


if __name__ == "__main__":
    main()
