"""Pages of a pool on a GPU, on a stand-in for CUDA: copies run on a stream of their own, behind the owner's fence.

A stand-in stream keeps what was launched on it, and runs that only when somebody waits for it. So a copy that does not
wait for the work before it reads or writes bytes that are not there yet, as on a GPU.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv.tiers import DiskTier, HostTier, Job, Key, Op, PoolView, Result, host
from pagedkv.tiers.shared.tier import SharedTier
from pagedkv.tiers.slots import SlotTier
from tests.tiers.stores import MemoryClient

FRAMES, SIZE = 8, 4096
KEYS = [Key(bytes([at]) * 32) for at in range(FRAMES)]


class Stream:
    """Work in order, none of it done before somebody waits."""

    def __init__(self, device: object = None) -> None:
        self.work, self.num_done, self.turn = list[Callable[[], object]](), 0, threading.RLock()

    def launch(self, call: Callable[[], object]) -> None:
        self.work.append(call)

    def run_to(self, number: int) -> None:
        with self.turn:
            while self.num_done < number:
                self.num_done += 1
                self.work[self.num_done - 1]()

    def wait_event(self, event: Event) -> None:
        self.launch(lambda: event.stream.run_to(event.number))

    def synchronize(self) -> None:
        self.run_to(len(self.work))


class Event:
    """A point in the work of a stream."""

    def record(self, stream: Stream) -> None:
        self.stream, self.number = stream, len(stream.work)


class Cuda:
    """The part of torch.cuda that tiers call."""

    def __init__(self) -> None:
        self.owner, self.here, self.streams = Stream(), threading.local(), list[Stream]()

    def new_stream(self, device: object) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    def current_stream(self, device: object = None) -> Stream:
        current: Stream = getattr(self.here, "stream", self.owner)
        return current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.here.stream = self.current_stream(), stream
        yield
        self.here.stream = before


class OnGpu(torch.Tensor):
    """A tensor whose copies are launched on the current stream."""

    cuda: Cuda

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            assert kwargs == {"non_blocking": True}
            target, source = (each.as_subclass(torch.Tensor) for each in args[:2])
            cls.cuda.current_stream().launch(partial(target.copy_, source))
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)


class Pool:
    """A pool on the stand-in, and what its owner does. bytes: what the GPU's memory holds now."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.bytes = cuda, torch.zeros(FRAMES, SIZE, dtype=torch.uint8)
        self.generations, self.published = np.zeros(FRAMES, np.uint32), np.ones(FRAMES, np.uint8)
        self.view = PoolView(self.bytes.as_subclass(OnGpu), lambda: (self.generations, self.published))

    def compute(self, frame: int, value: int) -> None:
        """Launch a kernel that writes to a frame."""
        self.cuda.owner.launch(lambda: self.bytes[frame].fill_(value))


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    cuda = Cuda()
    for name, stand_in in (
        ("Stream", cuda.new_stream), ("Event", Event), ("current_stream", cuda.current_stream), ("stream", cuda.stream),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(OnGpu, "cuda", cuda, raising=False)
    return Pool(cuda)


TIERS: dict[str, Callable[[Path], SlotTier]] = {
    "host": lambda folder: HostTier("1MiB"),
    "disk": lambda folder: DiskTier(folder, "1MiB"),
    "shared": lambda folder: SharedTier(MemoryClient({}), "1MiB", key=None),
}


@pytest.fixture(params=list(TIERS))
def tier(request: pytest.FixtureRequest, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlotTier:
    def pinned(num_bytes: int, *, is_pinned: bool) -> torch.Tensor:
        assert is_pinned
        return torch.zeros(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(host, "_allocate", pinned)
    made = TIERS[request.param](tmp_path)
    made.register(pool.view, bytes(32))
    return made


def ended(tier: SlotTier, job: Job, count: int) -> list[Result]:
    results, until = list[Result](), time.monotonic() + 20
    while len(results) < count:
        results += [result for result in tier.poll() if result.job == job.number]
        assert time.monotonic() < until
    return results


def stored(tier: SlotTier, frames: list[int]) -> list[str]:
    """Store frames, and return why each was not kept."""
    job = tier.submit(Op.STORE, [KEYS[frame] for frame in frames], frames)
    return [result.why for result in ended(tier, job, len(frames))]


def test_a_store_reads_what_was_launched_before_it_and_a_load_brings_that_back(tier: SlotTier, pool: Pool) -> None:
    for frame in range(4):
        pool.compute(frame, 10 + frame)
    assert pool.bytes.sum() == 0  # nothing has run
    assert stored(tier, [0, 1, 2, 3]) == [""] * 4
    job = tier.submit(Op.LOAD, KEYS[:4], [7, 6, 5, 4])
    assert all(result.ok for result in ended(tier, job, 4))
    assert pool.bytes[[7, 6, 5, 4], 0].tolist() == [10, 11, 12, 13]
    assert (pool.bytes[4:] == pool.bytes[4:, :1]).all()
    tier.close()


def test_copies_run_beside_the_owner_and_wait_for_nothing_that_came_later(tier: SlotTier, pool: Pool) -> None:
    pool.compute(0, 1)
    event = pool.view.fence()
    pool.compute(1, 1)  # launched after the submit, say
    into = torch.zeros(1, SIZE, dtype=torch.uint8)
    pool.view.read(np.array([0]), into, np.array([0]), event)
    assert (into == 1).all()
    assert (pool.bytes[1, 0], pool.cuda.owner.num_done) == (0, 1)
    assert stored(tier, [0]) == [""]
    assert pool.cuda.owner not in pool.cuda.streams
    assert all(stream.num_done == len(stream.work) > 0 for stream in pool.cuda.streams)
    tier.close()


def test_without_a_fence_a_copy_would_read_too_early(pool: Pool) -> None:
    pool.compute(0, 1)
    into = torch.full((1, SIZE), 9, dtype=torch.uint8)
    pool.view.read(np.array([0]), into, np.array([0]))
    assert (into == 0).all()  # so the tests above would see it


def test_a_load_overwrites_no_frame_that_launched_work_still_reads(tier: SlotTier, pool: Pool) -> None:
    pool.compute(0, 5)
    assert stored(tier, [0]) == [""]
    pool.compute(3, 77)
    seen = list[int]()
    pool.cuda.owner.launch(lambda: seen.append(int(pool.bytes[3, 0])))  # a kernel that reads the frame before its reuse
    job = tier.submit(Op.LOAD, KEYS[:1], [3])
    assert ended(tier, job, 1)[0].ok
    assert (seen, int(pool.bytes[3, 0])) == ([77], 5)
    tier.close()


def test_a_frame_that_is_taken_again_while_it_is_copied_is_not_kept(tier: SlotTier, pool: Pool) -> None:
    pool.compute(0, 5)

    def take_again() -> None:
        pool.generations[0] += 1  # the owner, while the copy waits for its fence
        pool.bytes[0].fill_(6)

    pool.cuda.owner.launch(take_again)
    assert stored(tier, [0]) == ["changed"]
    assert not tier.lookup(KEYS[:1]).any()
    tier.close()


def test_each_thread_has_one_stream(pool: Pool) -> None:
    into = torch.zeros(1, SIZE, dtype=torch.uint8)
    frames = rows = np.array([0])
    for _ in range(3):
        pool.view.read(frames, into, rows)
    other = threading.Thread(target=pool.view.read, args=(frames, into, rows))
    other.start()
    other.join()
    assert len(pool.cuda.streams) == 2
