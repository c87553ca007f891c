"""A prefill engine in a process of its own, and a decode engine here, over one link."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pagedkv.model import Engine, Limits
from pagedkv.tiers.transfer import DistributedLink, RemotePrefill

ROOT = Path(__file__).parents[3]
FRAMES = 400
DTYPE = "float32"
"""The prompts are random, and the checkpoint has learnt nothing like them. In prompt 4 of seed 6, a relative change of
1e-5 in the embeddings moves a log-probability by 0.7. So in bfloat16 a token may depend on how prompts are cut into
chunks. In float32 that is rare.
"""

PREFILL = """
import json, os, sys, threading, time
from pagedkv.model import Engine, Limits, serve_prefills
from pagedkv.tiers.transfer import {link}, PrefillServer

address, slow = sys.argv[1], float(sys.argv[2])
server = PrefillServer({link}(address))
engine = Engine.load(tiers=[server], num_frames={frames}, dtype="{dtype}", limits=Limits(prefill_chunk=64))
step = engine.step
engine.step = lambda: (time.sleep(slow), step())[1]
print("ready", flush=True)
asked = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), asked.set()), daemon=True).start()
serve_prefills(engine, [server], until=asked.is_set)
print(json.dumps([engine.cache.stats().mapped, server.stats().stored]), flush=True)
engine.close()
if "{link}" == "NixlLink":
    os._exit(0)  # a library in the wheel of NIXL 1.5.1 crashes when a process ends
"""

DECODE = """
import json, os, sys
from pagedkv.model import Engine, SamplingParams
from pagedkv.tiers.transfer import {link}, RemotePrefill

remote = RemotePrefill({link}(sys.argv[1]))
engine = Engine.load(tiers=[remote], num_frames={frames}, dtype="{dtype}")
assert remote.wait(20)
print("ready", flush=True)
prompts = json.loads(sys.stdin.readline())
done = engine.generate(prompts, SamplingParams(max_tokens=8))
print(json.dumps([request.completions[0].token_ids for request in done]), flush=True)
engine.close()
if "{link}" == "NixlLink":
    os._exit(0)  # a library in the wheel of NIXL 1.5.1 crashes when a process ends
"""


class Process:
    """A side in a process of its own."""

    def __init__(self, source: str, *arguments: str, link: str = "DistributedLink") -> None:
        source = source.format(link=link, frames=FRAMES, dtype=DTYPE)
        self.process = subprocess.Popen(
            [sys.executable, "-c", source, *arguments],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def end(self) -> Any:
        """Let a prefill process end. Return the frames that it held at its end, and the pages that it sent."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        said = json.loads(self.line())
        assert self.process.wait(20) == 0
        return said

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def prefill_process(address: str, *, slow: float = 0.0, link: str = "DistributedLink") -> Process:
    """Start a prefill process. slow: seconds by which each of its steps is slower."""
    return Process(PREFILL, address, str(slow), link=link)


def decode_engine(address: str, **options: Any) -> tuple[Engine, RemotePrefill]:
    """Return an engine here whose prompts are computed there."""
    tier = RemotePrefill(DistributedLink(address), **options)
    return Engine.load(tiers=[tier], num_frames=FRAMES, dtype=DTYPE, limits=Limits(prefill_chunk=64)), tier


def lone_engine() -> Engine:
    """Return an engine that computes all by itself."""
    return Engine.load(num_frames=FRAMES, dtype=DTYPE)


def check_given_back(engine: Engine, seconds: float = 20.0) -> None:
    """Check that the engine holds no frame."""
    until = time.monotonic() + seconds
    while engine.cache.stats().mapped and time.monotonic() < until:
        engine.cache.tiers.pump()
    assert engine.cache.stats().mapped == 0
    engine.cache.check()
