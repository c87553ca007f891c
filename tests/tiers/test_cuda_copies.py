"""Pages of a pool on a GPU, on a stand-in for CUDA: copies run on their own stream, behind the owner's fence.

A stand-in stream keeps what was launched on it, and runs that only when somebody waits for it. So a copy that does not
wait for the work before it reads or writes bytes that are not there yet, as on a GPU.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv.tiers import HostTier, Key, Op, PoolView, host

FRAMES, SIZE = 8, 4096
KEYS = [Key(bytes([at]) * 32) for at in range(FRAMES)]


class Stream:
    """Work in order, none of it done before somebody waits."""

    def __init__(self, device: object = None) -> None:
        self.work, self.num_done, self.turn = list[Callable[[], object]](), 0, threading.RLock()

    def run_to(self, number: int) -> None:
        with self.turn:
            while self.num_done < number:
                self.num_done += 1
                self.work[self.num_done - 1]()

    def wait_event(self, event: Event) -> None:
        self.work.append(lambda: event.stream.run_to(event.number))

    def synchronize(self) -> None:
        self.run_to(len(self.work))


class Event:
    """A point in the work of a stream."""

    def record(self, stream: Stream) -> None:
        self.stream, self.number = stream, len(stream.work)


OWNER, HERE = Stream(), threading.local()


def current_stream(device: object = None) -> Stream:
    current: Stream = getattr(HERE, "stream", OWNER)
    return current


@contextlib.contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    before, HERE.stream = current_stream(), stream
    yield
    HERE.stream = before


class OnGpu(torch.Tensor):
    """A tensor whose copies are launched on the current stream."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            target, source = (each.as_subclass(torch.Tensor) for each in args[:2])
            current_stream().work.append(partial(target.copy_, source))
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)


class Pool:
    """A pool on the stand-in, and a host tier under it. bytes: what the GPU's memory holds now."""

    def __init__(self) -> None:
        self.bytes = torch.zeros(FRAMES, SIZE, dtype=torch.uint8)
        self.generations, self.published = np.zeros(FRAMES, np.uint32), np.ones(FRAMES, np.uint8)
        self.tier = HostTier("1MiB")
        view = PoolView(self.bytes.as_subclass(OnGpu), lambda: (self.generations, self.published))
        self.tier.register(view, bytes(32))

    def compute(self, frame: int, value: int) -> None:
        """Launch a kernel that writes to a frame."""
        OWNER.work.append(lambda: self.bytes[frame].fill_(value))

    def move(self, op: Op, keys: list[Key], frames: list[int]) -> list[str]:
        """Store or load frames, and return why each was not."""
        job, whys, until = self.tier.submit(op, keys, frames), list[str](), time.monotonic() + 300
        while len(whys) < len(frames):
            whys += [result.why for result in self.tier.poll() if result.job == job.number]
            assert time.monotonic() < until
        return whys


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    stand_ins = {"Stream": Stream, "Event": Event, "current_stream": current_stream, "stream": on_stream}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(host, "_allocate", lambda size, *, is_pinned: torch.zeros(size, dtype=torch.uint8))
    made = Pool()
    yield made
    made.tier.close()


def test_a_store_reads_what_was_launched_before_it_and_a_load_brings_that_back(pool: Pool) -> None:
    for frame in range(4):
        pool.compute(frame, 10 + frame)
    assert pool.bytes.sum() == 0  # nothing has run
    assert pool.move(Op.STORE, KEYS[:4], [0, 1, 2, 3]) == [""] * 4
    assert pool.move(Op.LOAD, KEYS[:4], [7, 6, 5, 4]) == [""] * 4
    assert pool.bytes[[7, 6, 5, 4], 0].tolist() == [10, 11, 12, 13]
    assert (pool.bytes[4:] == pool.bytes[4:, :1]).all()


def test_a_load_overwrites_no_frame_that_launched_work_still_reads(pool: Pool) -> None:
    pool.compute(0, 5)
    assert pool.move(Op.STORE, KEYS[:1], [0]) == [""]
    pool.compute(3, 77)
    seen = list[int]()
    OWNER.work.append(lambda: seen.append(int(pool.bytes[3, 0])))  # a kernel that reads the frame before its reuse
    assert pool.move(Op.LOAD, KEYS[:1], [3]) == [""]
    assert (seen, int(pool.bytes[3, 0])) == ([77], 5)


def test_a_frame_that_is_taken_again_while_it_is_copied_is_not_kept(pool: Pool) -> None:
    pool.compute(0, 5)

    def take_again() -> None:
        pool.generations[0] += 1  # the owner, while the copy waits for its fence
        pool.bytes[0].fill_(6)

    OWNER.work.append(take_again)
    assert pool.move(Op.STORE, KEYS[:1], [0]) == ["changed"]
    assert not pool.tier.lookup(KEYS[:1]).any()
