"""vLLM's CPU attention as a peer: a worker process in vLLM's own environment runs one repetition at a time.

This side knows the protocol of vllm_worker.py and the reasons why vLLM cannot run a cell. It never imports vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Final

from pagedkv.bench.attention.cells import Cell
from pagedkv.bench.clock import Elsewhere, Step
from pagedkv.bench.worker_process import WorkerProcess

WORKER: Final = Path(__file__).with_name("vllm_worker.py")
WAIT: Final = 30
"""Seconds in which a worker whose stdin is closed must end."""


class Vllm:
    """A worker process with `threads` threads.

    Raises: OSError if the interpreter cannot be started or has no vLLM.
    """

    def __init__(self, python: Path, threads: int) -> None:
        quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        # between its turns the worker's threads must sleep: spinning, they would disturb the kernels timed here
        environ = quiet | {"OMP_NUM_THREADS": str(threads), "KMP_BLOCKTIME": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        command = [str(python), str(WORKER)]
        self._worker = WorkerProcess("the vLLM worker", command, environ, WORKER.parent)
        self._worker.ask({"do": "close"})

    def step(self, cell: Cell) -> Step | str:
        """Return a step that runs one repetition of the cell in the worker; or the reason why the worker cannot."""
        if why := refusal(cell):
            return why
        answer = self._worker.ask({"do": "open", "cell": asdict(cell) | {"lens": cell.lens()}})
        if "why_not" in answer:
            return str(answer["why_not"])

        def run() -> Elsewhere:
            timing = self._worker.ask({"do": "run", "of": answer["ok"]})
            return Elsewhere(timing["seconds"], timing["clean"])

        def prepare() -> Callable[[], object]:
            return run

        return prepare

    def forget(self) -> None:
        """Free the worker's memory of all cells."""
        self._worker.ask({"do": "close"})

    def end(self) -> None:
        """End the worker process."""
        self._worker.end(WAIT)


def refusal(cell: Cell) -> str:
    """Return the reason why vLLM's CPU kernel cannot be compared on the cell; "" if it can."""
    if cell.kind == "call":
        return "its calls are not ours"
    if cell.kv not in ("", "fp8_e4m3"):
        return f"it has no {cell.kv} on a CPU"
    if cell.pages != "permuted":
        return "its pages are always permuted here"
    return ""
