"""Chunks: vLLM's host memory over a tier of pagedkv, and copies between that memory and blocks on a CPU.

    blocks  ◀─ ChunkCopies ─▶  chunks in host memory, uint8 [chunks, bytes]  ◀─ TierUnderChunks ─▶  a tier, verified

A chunk is one or more blocks of one layer group, with all its layers. vLLM names it by the hash of its tokens and of
all tokens before, and pins it while it is read or written. The name in the tier covers the weights and the layout, too.

This file imports nothing of vLLM; offload.py binds it to vLLM's interfaces.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.tiers import Key, Level, Op, PoolView, Tier

Numbers = npt.NDArray[np.integer]

SKIPPED: Final = 5.0
"""Seconds for which a chunk that could not be loaded counts as missing, so that its request is computed instead."""
PAUSE: Final = 0.0005
"""Seconds between two looks at a tier that is waited for."""


class _Ended(NamedTuple):
    """The end of a job of vLLM.

    loaded: the keys whose bytes have arrived, in the order of `keys`. failed: whether any page met an error.
    """

    number: int
    keys: list[bytes]
    loaded: list[bytes]
    failed: bool
    num_bytes: int
    seconds: float


@dataclass
class _Job:
    op: Op
    number: int
    keys: list[bytes]
    waiting: dict[bytes, bytes]  # name: key of vLLM
    loaded: set[bytes] = field(default_factory=set)
    failed: bool = False
    began: float = field(default_factory=time.monotonic)


class TierUnderChunks:
    """A tier below `view` (uint8 [chunks, bytes]), whose chunks have names of vLLM. One thread calls it.

    facts: all that decides what the bytes of a chunk mean.
    """

    def __init__(self, view: memoryview, tier: Tier, facts: Mapping[str, Any]) -> None:
        frames = torch.from_numpy(np.asarray(view).view(np.uint8))
        pinned = np.zeros(len(frames), np.uint32), np.ones(len(frames), np.uint8)  # by vLLM, while a job is under way
        self._fingerprint = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()
        self._chunk_bytes = frames.shape[1]
        self._level, self._jobs, self._ended = Level(tier), dict[int, _Job](), list[_Ended]()
        self._skipped: dict[bytes, float] = {}  # names of chunks that could not be loaded, until when
        tier.register(PoolView(frames, lambda: pinned), self._fingerprint)

    def _name(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, digest_size=32, key=self._fingerprint).digest()

    def has(self, key: bytes) -> bool:
        """Return whether the tier seems to have a chunk."""
        name = self._name(key)
        if (until := self._skipped.get(name)) is not None:
            if time.monotonic() < until:
                return False
            del self._skipped[name]
        return bool(self._level.lookup([Key(name)])[0])

    def touch(self, keys: Iterable[bytes]) -> None:
        """Count a use of these chunks."""
        self._level.touch([Key(self._name(key)) for key in keys])

    def begin(self, op: Op, number: int, keys: Sequence[bytes], chunks: Iterable[int]) -> None:
        """Begin job `number` of vLLM: load or store chunks. A chunk stays pinned until `ended` names its job."""
        names = [self._name(key) for key in keys]
        made = _Job(op, number, list(keys), dict(zip(names, keys, strict=True)))
        job = self._level.submit(op, [Key(name) for name in names], [int(chunk) for chunk in chunks])
        if job is None:
            made.failed = True
            self._skip(made, names)
            self._end(made)
        else:
            self._jobs[job.number] = made

    def ended(self) -> list[_Ended]:
        """Return the jobs that have ended since the last call."""
        self._poll()
        ended, self._ended = self._ended, []
        return ended

    @property
    def num_pending(self) -> int:
        """Jobs that have not ended."""
        return len(self._jobs)

    def drain(self) -> None:
        """Wait until no job touches the host memory. Their ends are kept for `ended`."""
        while self._jobs:
            self._poll()
            time.sleep(PAUSE)

    def close(self) -> None:
        """Close the tier. A disk keeps its chunks."""
        self._level.tier.close()

    def _poll(self) -> None:
        for result in self._level.poll():
            job = self._jobs.get(result.job)
            key = None if job is None else job.waiting.pop(result.key.name, None)
            if job is None or key is None:
                continue
            if result.ok:
                job.loaded.add(key)
            else:
                job.failed |= result.why.startswith("failed")
                self._skip(job, [result.key.name])
            if not job.waiting:
                del self._jobs[result.job]
                self._end(job)

    def _end(self, job: _Job) -> None:
        seconds, num_bytes = time.monotonic() - job.began, len(job.loaded) * self._chunk_bytes
        loaded = [key for key in job.keys if key in job.loaded]
        self._ended.append(_Ended(job.number, job.keys, loaded, job.failed, num_bytes, seconds))

    def _skip(self, job: _Job, names: Iterable[bytes]) -> None:
        """Let chunks count as missing that could not be loaded: vLLM would ask for them again in each step."""
        if job.op is Op.STORE:
            return
        now = time.monotonic()
        self._skipped = {name: until for name, until in self._skipped.items() if until > now}
        self._skipped |= dict.fromkeys(names, now + SKIPPED)


class ChunkCopies:
    """Copies between blocks and chunks in host memory, on a CPU.

    blocks: for each tensor of vLLM int8 [blocks, bytes]. chunks: for each its place in host memory, int8 [chunks, n,
    bytes], where a chunk has n blocks. groups: for each layer group the (tensor, bytes) of its layers.
    """

    def __init__(
        self,
        blocks: Sequence[torch.Tensor],
        chunks: Sequence[torch.Tensor],
        groups: Sequence[Sequence[tuple[int, int]]],
    ) -> None:
        self._blocks, self._chunks, self._groups = list(blocks), list(chunks), list(groups)
        self._per_chunk: int = chunks[0].shape[1]

    def move(
        self, blocks: Numbers, chunks: Numbers, sizes: Sequence[int], first: Sequence[int], *, to_host: bool
    ) -> int:
        """Copy `blocks` to their places in `chunks`, or back. Return the bytes that were copied.

        sizes: blocks of each group, in order. first: the number of the first of them in its request: it decides where
            in its chunk it lies.
        """
        block, chunk, num_bytes = 0, 0, 0
        for layers, size, number in zip(self._groups, sizes, first, strict=True):
            if not size:
                continue
            places = number % self._per_chunk + np.arange(size)
            here = torch.from_numpy(blocks[block : block + size].astype(np.int64))
            rows = torch.from_numpy(chunks[chunk + places // self._per_chunk].astype(np.int64))
            parts = torch.from_numpy(places % self._per_chunk)
            for tensor, count in layers:
                on_device, in_host = self._blocks[tensor], self._chunks[tensor]
                if to_host:
                    in_host[rows, parts, :count] = on_device[here, :count]
                else:
                    on_device[here, :count] = in_host[rows, parts, :count]
                num_bytes += size * count
            block, chunk = block + size, chunk + int(places[-1]) // self._per_chunk + 1
        return num_bytes

    def close(self) -> None:
        """Drop the views of the memory."""
        self._blocks, self._chunks = [], []
