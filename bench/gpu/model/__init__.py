"""A model of one scheduler of an H200: from machine code to a predicted time and its limit, without a GPU.

    pipes.py      which pipe an instruction takes, for how many cycles, and which registers it waits for
    scheduler.py  the cycles that some warps need for a tile when they share a scheduler; memory costs no time
    counts.py     the steady tile of each kernel, counted in SASS and kept in counts.json
    predict.py    counts and a cell -> microseconds, share of the memory ceiling, and the limit
    table.py      predictions beside measured rows

`python -m pagedkv.bench.gpu.model` prints the table. docs/explanation/gpu-predictions.md explains the arithmetic.
"""
