"""Run all microbenchmarks, one after the other, each with its defaults: `python -m pagedkv.bench`."""

from __future__ import annotations

import subprocess
import sys

for command in (
    ["-m", "pagedkv", "bench", "manager"],
    ["-m", "pagedkv", "bench", "attention"],
    ["-m", "pagedkv.bench.attention.calls"],
    ["-m", "pagedkv.bench.gpu.launch"],
):
    print(f"\n{' '.join(command)}", flush=True)
    subprocess.run([sys.executable, *command], check=True)
