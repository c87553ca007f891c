"""All microbenchmarks, one after the other, with the defaults of each: `python -m bench`, or one of them: `python -m bench.manager`."""

from __future__ import annotations

import subprocess
import sys

for runner in ("bench.manager", "bench.attention"):
    print(f"\n{runner}", flush=True)
    subprocess.run([sys.executable, "-m", runner], check=True)
