"""The speed of a transfer between two processes by the size of a frame, beside the bare transport in the same turns.

    ours    RemotePrefill here, PrefillServer in a child: wants, checksums, offers, credits, verified loads
    bare    the same frames between the same two processes, posted by the transport's own calls with nothing between

The child has every page from the start, so nothing is computed. Neither side has a manager: each frame holds its page
at all times. Both processes and the threads of the transport share the cores, so only the clock and memory disturb a
turn.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from operator import truediv
from typing import Any, Final

import torch

from pagedkv.bench.clock import compare, in_turn, ratios
from pagedkv.bench.tiers.speed import MOVED, OURS, SIZES, pool_of, unswitched
from pagedkv.tiers.pool_view import PoolView
from pagedkv.tiers.tier import Key, Op
from pagedkv.tiers.transfer import DistributedLink, Link, NixlLink, PrefillServer, RemotePrefill
from pagedkv.tiers.transfer.server import AT_ONCE

Row = dict[str, Any]
LINKS: Final[dict[str, Callable[[str], Link]]] = {"gloo": DistributedLink, "nixl": NixlLink}
MODULE: Final = "pagedkv.bench.tiers.transfer"
BARE: Final = "bare transport"
MUST: Final = 0.8
"""The share of the bare transport that is promised, from 1 MiB a frame on: each frame costs a time of its own."""
WINDOW: Final = 64 << 20
FINGERPRINT: Final = bytes(32)


def rows(repetitions: int, sizes: tuple[int, ...] = SIZES, moved: int = MOVED) -> Iterator[Row]:
    """Yield the rows of each transport that is installed, and of each size."""
    for size in sizes:
        yield from rows_of("gloo", size, repetitions, moved)
    for size in sizes if find_spec("nixl") else ():
        yield from _rows_elsewhere("nixl", size, repetitions, moved)


def _rows_elsewhere(kind: str, size: int, repetitions: int, moved: int) -> Iterator[Row]:
    """Yield the rows of a transport that are measured in a child: a library of NIXL 1.5.1 crashes when it ends."""
    command = [sys.executable, "-m", MODULE, "rows", kind, *map(str, (size, repetitions, moved))]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if not ended.stdout.endswith("\n"):
        raise RuntimeError(f"the transfer by {kind} ended without figures")
    yield from json.loads(ended.stdout.splitlines()[-1])


def rows_of(kind: str, size: int, repetitions: int, moved: int) -> Iterator[Row]:
    num_frames = max(1, moved // size)
    with _two_sides(kind, size, num_frames) as (ours, bare):
        steps = {OURS[True]: unswitched(lambda: ours), BARE: unswitched(lambda: bare)}
        timings = in_turn(steps, repetitions)
    for variant, timing in timings.items():
        row: Row = {"case": "transfer", "frame": size, "tier": kind, "variant": variant, "unit": "GB/s"}
        row |= timing.fields(lambda seconds: num_frames * size / seconds / 1e9)
        if variant != BARE:
            row |= {
                "of_bare": compare(timings[BARE], timing, truediv),
                "ratios": ratios(timings[BARE], timing, truediv),
            }
            row["must"] = MUST if size >= 1 << 20 else None
        yield row


@contextmanager
def _two_sides(kind: str, size: int, num_frames: int) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """Yield two calls that move all frames from a child to this process: by tiers, and bare."""
    ports = _free_port(), _free_port()
    command = [sys.executable, "-m", MODULE, "serve", kind, *map(str, (size, num_frames, *ports))]
    child = subprocess.Popen(command, stdin=subprocess.PIPE)
    remote = RemotePrefill(LINKS[kind](_address(ports[0])), window=WINDOW)
    pool = pool_of(size, num_frames)
    bare = Bare(LINKS[kind](_address(ports[1])), pool.frames)
    try:
        remote.register(pool, FINGERPRINT)
        bare.open(listens=False)
        bare.place = int(bare.link.receive())
        assert remote.wait(60), "the prefill side does not come"
        yield Loads(remote, pool).run, bare.read
    finally:
        bare.link.close()
        remote.close()
        child.kill()
        child.wait()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _address(port: int) -> str:
    return f"127.0.0.1:{port}"


def _keys(num_frames: int) -> list[Key]:
    return [Key(number.to_bytes(32, "little")) for number in range(num_frames)]


@dataclass
class Loads:
    """Loads of all frames through the tier."""

    remote: RemotePrefill
    pool: PoolView

    def run(self) -> None:
        num_frames = len(self.pool.frames)
        self.remote.submit(Op.LOAD, _keys(num_frames), range(num_frames))
        failed = 0
        while self.remote.num_pending:
            time.sleep(0.0005)
            failed += sum(not result.ok for result in self.remote.poll())
        assert not failed, f"{failed} of {num_frames} pages did not arrive"


@dataclass
class Bare:
    """All frames over a link of its own, as many at a time as the window of the tier lets be under way."""

    link: Link
    frames: torch.Tensor
    place: int = 0  # of the first frame on the other side

    def open(self, *, listens: bool) -> None:
        until = time.monotonic() + 60
        while True:
            try:
                self.link.open(self.frames, listens=listens, timeout=10.0)
                break
            except OSError:
                assert time.monotonic() < until, "the other side of the bare link does not come"
                time.sleep(0.05)

    def _in_windows(self, begin: Callable[[range], object], end: Callable[[int], object]) -> None:
        """Begin frames, as many together as the tier, and end them in turn so that a window of them is under way."""
        num_frames, size = self.frames.shape
        together, most, under_way = max(1, AT_ONCE // size), max(1, WINDOW // size), deque[int]()
        for first in range(0, num_frames, together):
            numbers = range(first, min(first + together, num_frames))
            while under_way and len(under_way) + len(numbers) > most:
                end(under_way.popleft())
            begin(numbers)
            under_way.extend(numbers)
        for number in under_way:
            end(number)

    def read(self) -> None:
        """Read all frames."""
        self.link.send(b"go", 60.0)
        self.link.receive()  # a transport may make progress in this call only
        size = self.frames.shape[1]
        self._in_windows(
            lambda numbers: self.link.read_all([(n, self.place + n * size, self.frames[n]) for n in numbers]),
            lambda number: self.link.finish(number, 60.0),
        )

    def serve(self) -> None:
        """Offer all frames each time that the other side asks, until it is gone."""
        self.link.send(str(self.frames.data_ptr()).encode(), 60.0)
        while self.link.receive():
            self.link.send(b"on", 60.0)
            self._in_windows(
                lambda numbers: [self.link.offer(number, self.frames[number]) for number in numbers],
                lambda number: self.link.settle(number, 60.0),
            )


def serve(kind: str, size: int, num_frames: int, ports: tuple[int, int]) -> None:
    """Be the prefill side, until the other side is gone."""
    server = PrefillServer(LINKS[kind](_address(ports[0])), window=WINDOW)
    pool = pool_of(size, num_frames)
    server.register(pool, FINGERPRINT)
    server.submit(Op.STORE, _keys(num_frames), range(num_frames))
    bare = Bare(LINKS[kind](_address(ports[1])), pool.frames)
    bare.open(listens=True)
    try:
        bare.serve()
    except (OSError, RuntimeError):
        server.close()


if __name__ == "__main__":
    mode, kind, *rest = sys.argv[1:]
    numbers = list(map(int, rest))
    if mode == "rows":
        print(json.dumps(list(rows_of(kind, numbers[0], numbers[1], numbers[2]))), flush=True)
        os._exit(0)
    serve(kind, numbers[0], numbers[1], (numbers[2], numbers[3]))
