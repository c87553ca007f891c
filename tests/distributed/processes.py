"""Groups of processes as torchrun starts them, without its agent: rank 0 has the store, and nothing ends the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.tiers.stores import free_port

ROOT = Path(__file__).parents[2]
RANK = [sys.executable, "-m", "tests.distributed.rank"]
PAGEDKV = [sys.executable, "-m", "pagedkv"]


def started(size: int, command: list[str], **variables: str) -> list[subprocess.Popen[str]]:
    """Start a command on each of `size` ranks, with pipes."""
    common = {"TORCHELASTIC_RUN_ID": "test", "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    return [
        subprocess.Popen(
            command,
            cwd=ROOT,
            text=True,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(size)
    ]


class Group:
    """Processes that answer jobs (rank.py)."""

    def __init__(self, size: int, **variables: str) -> None:
        self.ranks = started(size, RANK, **variables)
        for rank in range(size):
            assert self._line(rank) == "ready"

    @property
    def lives(self) -> bool:
        return all(process.poll() is None for process in self.ranks)

    def answer(self, job: dict[str, Any]) -> dict[str, Any]:
        """Return the results of rank 0."""
        self.ask(job)
        results = [json.loads(self._line(rank)) for rank in range(len(self.ranks))]
        return results[0]

    def ask(self, job: dict[str, Any]) -> None:
        for process in self.ranks:
            assert process.stdin is not None
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()

    def _line(self, rank: int) -> str:
        stdout, stderr = self.ranks[rank].stdout, self.ranks[rank].stderr
        assert stdout is not None
        assert stderr is not None
        line = stdout.readline().strip()
        assert line, f"rank {rank} ended: {stderr.read()[-3000:]}"
        return line

    def end(self) -> list[int]:
        """Let the processes end. Returns: their statuses"""
        for process in self.ranks:
            assert process.stdin is not None
            if process.poll() is None:
                process.stdin.write("\n")
                process.stdin.close()
        statuses = [process.wait(60) for process in self.ranks]
        for process in self.ranks:
            for stream in (process.stdout, process.stderr):
                assert stream is not None
                stream.close()
        return statuses
