"""A GPU: the ceilings of its memory, and frames that move between host and device.

    read, copy  of the device's memory; a copy counts the bytes read and the bytes written
    swap        frames at random places of a pool, to or from pinned memory of the host, one copy each; beside one copy
                of as many bytes

The host waits for the device before and after a timing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import torch

from pagedkv.bench.bandwidth.ceilings import Bound
from pagedkv.bench.bandwidth.subjects import Subject
from pagedkv.bench.clock import Step, on_this_cpu

POOL: Final = 4 << 30
"""Bytes of the pool: larger than the L2 cache of any GPU."""
FRAME: Final = 2 << 20
FRAMES: Final = 128
"""Frames of a swap: 256 MiB."""


def timer(run: Callable[[], object]) -> tuple[float, bool]:
    """Time `run` and the work that it launched."""
    torch.cuda.synchronize()

    def whole() -> None:
        run()
        torch.cuda.synchronize()

    return on_this_cpu(whole)


def measured(device: str = "cuda", size: int = POOL, frame: int = FRAME) -> tuple[list[Subject], dict[str, Bound]]:
    """Return the subjects on a device and their ceilings."""
    pool = torch.randint(0, 56, (size,), dtype=torch.uint8, device=device)
    half = size // 2
    copied: Step = lambda: lambda: pool[half:].copy_(pool[:half])  # noqa: E731
    bounds = {"copy": Bound("copy", 2 * half, copied)}
    found = [Subject("ceiling", {"pattern": "copy"}, 2 * half, "copy", {"memory": copied})]
    if device == "cuda":
        from pagedkv.bench.gpu.ceiling import read

        reading: Step = lambda: lambda: read(pool.view(torch.int64))  # noqa: E731
        bounds["read"] = Bound("read", size, reading)
        found.append(Subject("ceiling", {"pattern": "read"}, size, "read", {"memory": reading}))
    frames = pool.view(-1, frame)
    host = torch.zeros(min(FRAMES, len(frames)), frame, dtype=torch.uint8, pin_memory=device == "cuda")
    for subject, bound in _swaps(frames, host):
        found.append(subject)
        bounds[bound.name] = bound
    return found, bounds


def _swaps(frames: torch.Tensor, host: torch.Tensor) -> Iterator[tuple[Subject, Bound]]:
    """Yield a swap of frames in each direction, and one copy of as many bytes."""
    count, near = len(host), frames[: len(host)]

    def step(*, is_out: bool) -> Step:
        def prepare() -> Callable[[], object]:
            chosen = [frames[i] for i in torch.randperm(len(frames))[:count].tolist()]
            pairs = list(zip(host, chosen, strict=True) if is_out else zip(chosen, host, strict=True))
            return lambda: [to.copy_(source, non_blocking=True) for to, source in pairs]

        return prepare

    whole = {True: lambda: lambda: host.copy_(near), False: lambda: lambda: near.copy_(host)}
    for direction, is_out in (("to the host", True), ("to the device", False)):
        axes = {"direction": direction, "frame_KiB": frames.shape[1] >> 10}
        bound = Bound(f"one copy {direction}", host.nbytes, whole[is_out])
        yield Subject("swap", axes, host.nbytes, bound.name, {"frame by frame": step(is_out=is_out)}), bound
