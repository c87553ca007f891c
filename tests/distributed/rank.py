"""A rank as a process: it reads a job from each line of stdin, and writes a line of results. An empty line ends it."""

from __future__ import annotations

import json
import sys

import torch

from pagedkv.distributed import launch
from pagedkv.distributed.ranks import Ranks

from . import jobs

if __name__ == "__main__":
    torch.set_num_threads(1)
    place = launch.place()
    assert place is not None
    with Ranks(place) as ranks:
        print("ready", flush=True)
        for line in iter(sys.stdin.readline, "\n"):
            job = json.loads(line)
            result = jobs.followed(ranks, job) if ranks.rank else jobs.led(ranks, job)
            print(json.dumps(result), flush=True)
