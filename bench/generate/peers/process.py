"""Our side of the peers: which variants there are, and a worker process for each that can be loaded.

This side knows the protocol of worker.py. It never imports a peer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

from pagedkv.bench.clock import is_undisturbed, switches_below, together, track
from pagedkv.bench.worker_process import WorkerProcess
from pagedkv.errors import InvalidRequest
from pagedkv.kernels import cpu
from pagedkv.kernels.threads import num_threads

HERE: Final = Path(__file__).parent
WORKER: Final = HERE / "worker.py"
MOST_TOKENS: Final = 16_384
"""Tokens of context, in all sequences, up to which peers take turns: they compute it, which takes minutes beyond."""
WAIT: Final = 10
"""Seconds in which a worker whose stdin is closed must end."""


@dataclass(frozen=True)
class Variant:
    """A variant of another engine.

    steps:       the file with its class Engine.
    weights, kv: the dtypes of weights, K and V. kv_bits: bits of an element of K and V with its share of the scale.
    """

    name: str
    steps: Path
    weights: str
    kv: str
    kv_bits: float = 16

    @property
    def engine(self) -> str:
        """The name without what distinguishes variants of one engine."""
        return self.name.partition(",")[0]


VARIANTS: Final = (
    Variant("OpenVINO", HERE / "openvino_steps.py", "f16", "bf16"),
    Variant("OpenVINO, u8 KV", HERE / "openvino_steps.py", "f16", "u8", 8.5),
    Variant("llama.cpp", HERE / "llama_cpp_steps.py", "bf16", "f16"),
    Variant("llama.cpp, f16 weights", HERE / "llama_cpp_steps.py", "f16", "f16"),
)


class Lost(Exception):
    """The peer cannot do what was asked, or its process has ended; the message says why."""


@dataclass
class Size:
    """The room that workers must make: tokens of all sequences together, and sequences."""

    tokens: int
    sequences: int


class Peer:
    """A worker process that runs one variant on our instruction set.

    A folder of its environment with the name of the set, if there is one, has builds for the set (`make peers`).
    about: fields of its rows: the version, and the dtypes of weights, K and V.
    Raises: InvalidRequest if `python` cannot be started.
    """

    def __init__(self, variant: Variant, python: str) -> None:
        self.variant, self.about = variant, dict[str, Any]()
        environ = {"OMP_NUM_THREADS": str(num_threads()), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "0"}
        environ["PYTHONPATH"] = str(Path(python).absolute().parent.parent / cpu.isa())
        if cpu.isa() == "avx2":
            environ |= dict.fromkeys(("ONEDNN_MAX_CPU_ISA", "OV_CPU_MAX_ISA"), "AVX2")
        command = [python, str(WORKER), str(variant.steps)]
        try:
            self._worker = WorkerProcess("its process", command, environ, HERE)
        except OSError as why:
            raise InvalidRequest(f"{python} cannot be started: {why}; --peers-python is the path of a Python") from None

    def load(self, folder: Path, size: Size) -> None:
        """Load the checkpoint in `folder`. Raises: Lost"""
        asked = {"folder": str(folder), "isa": cpu.isa(), "threads": num_threads()}
        asked |= {"weights": self.variant.weights, "kv": self.variant.kv}
        self.about = self._ask("load", **asked, **vars(size))["about"]

    def open(self, batch: int, context: int, steps: int) -> None:
        """Fill the caches of `batch` sequences, after which `steps` steps follow in all. Raises: Lost"""
        if batch * context > MOST_TOKENS:
            raise Lost(f"it would compute {batch * context:,} tokens of context, which takes minutes")
        self._ask("open", batch=batch, context=context, steps=steps)

    def steps(self, count: int) -> tuple[float, bool]:
        """Time up to `count` steps; return the median of the clean ones, and whether half, or all together, are clean.

        Raises: Lost
        """

        def run() -> list[tuple[float, bool]]:
            taken = self._ask("run", steps=count)["steps"]
            return [(seconds, is_undisturbed(switches, seconds)) for seconds, switches in taken]

        return together(run, switches_below)

    def prefill(self, length: int) -> tuple[float, bool]:
        """Return the seconds to the first token of a prompt, and whether they were clean. Raises: Lost"""
        seconds, switches = self._ask("prefill", length=length)["taken"]
        return seconds, is_undisturbed(switches, seconds)

    def forget(self) -> None:
        """End the sequences. Raises: Lost"""
        self._ask("close")

    def _ask(self, do: str, **request: Any) -> dict[str, Any]:
        try:
            answer = self._worker.ask({"do": do} | request)
        except OSError as why:
            raise Lost(str(why)) from None
        if "why_not" in answer:
            raise Lost(answer["why_not"])
        return answer

    def close(self) -> None:
        """End the process; kill one that does not end within WAIT seconds."""
        self._worker.end(WAIT)


def size_of(shapes: Sequence[tuple[int, int]], steps: int) -> Size:
    """Return the room that peers must make: (sequences, tokens of context) of each shape, and `steps` steps more."""
    theirs = [shape for shape in shapes if prod(shape) <= MOST_TOKENS] or [(1, 1)]
    return Size(max(batch * (context + steps) for batch, context in theirs), max(batch for batch, _ in theirs))


@contextmanager
def opened(peers: Sequence[Peer], shape: tuple[int, int], steps: int) -> Iterator[dict[str, str]]:
    """Fill the caches of all peers for a shape, and end the sequences afterwards.

    Give the names of those that cannot take turns, and why; the caller adds those that cannot go on.
    """
    lost: dict[str, str] = {}
    for peer in track(peers, "caches of the peers"):
        try:
            peer.open(*shape, steps)
        except Lost as why:
            lost[peer.variant.name] = str(why)
    yield lost
    for peer in peers:
        with suppress(Lost):
            peer.forget()


@contextmanager
def started(folder: Path, pythons: Sequence[str], size: Size) -> Iterator[list[Peer]]:
    """Give the peers that could load the checkpoint in `folder`; say on stderr which could not, and end all.

    pythons: the interpreters in which to look for each engine, before this one.
    """
    with ExitStack() as stack:
        found, absent = list[Peer](), dict[str, None]()
        for variant in track(VARIANTS, "starting peers"):
            refusals: dict[str, None] = {}
            for python in dict.fromkeys([*pythons, sys.executable]):
                peer = Peer(variant, python)
                try:
                    peer.load(folder, size)
                except Lost as why:
                    refusals[str(why)] = None
                    peer.close()
                else:
                    found.append(stack.enter_context(closing(peer)))
                    break
            else:
                absent[f"{variant.engine} takes no turns: {'; '.join(refusals)}"] = None
        for line in absent:
            print(f"{line} (--peers-python names a Python that has it)", file=sys.stderr)
        yield found
