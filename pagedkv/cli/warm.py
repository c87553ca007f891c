"""`pagedkv warm`: compile everything that is compiled at first use, for an image or before a server listens."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import torch
from numba.core import event
from rich.console import Console
from rich.text import Text

import pagedkv.core
from pagedkv import KVSpec, PagedKVCache, paged_attention, write_kv
from pagedkv.core.warm import warm_up
from pagedkv.machine_code import folder_for


def run() -> None:
    """Compile the functions of core and the numba kernels, and print how long each took and where the code is kept."""
    console = Console(highlight=False)
    for name, compile_all in (("memory manager", warm_up), ("numba kernels", _warm_numba)):
        console.print(f"{name:16}{_seconds(compile_all):6.1f} s")
    console.print(place())


PARTS: Final = {
    "pagedkv.core": "the memory manager for this machine takes about 15 s",
    "pagedkv.kernels.numba": "the numba kernels for this machine takes about 10 s",
}
"""The packages whose functions numba compiles."""


class _Announcer(event.Listener):  # type: ignore[misc]
    """Prints a line when numba begins to compile a package, once for each package."""

    def __init__(self, screen: Console) -> None:
        self._screen, self._parts = screen, dict(PARTS)

    def on_start(self, event: Any) -> None:
        module = event.data["dispatcher"].py_func.__module__
        for package in [package for package in self._parts if module.startswith(package)]:
            line = f"pagedkv: compiling {self._parts.pop(package)}; {place()}"
            self._screen.print(Text(line), soft_wrap=True)

    def on_end(self, event: Any) -> None:
        pass


def announced(screen: Console) -> AbstractContextManager[None]:
    """Return a context that prints a line on `screen` when numba begins to compile a package."""
    manager: AbstractContextManager[None] = event.install_listener("numba:compile", _Announcer(screen))
    return manager


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _warm_numba() -> None:
    cache = PagedKVCache(KVSpec(1, 1, 8, block_size=2, dtype="float32"), num_frames=2)
    space = cache.open()
    batch, k = cache.plan([space], [2]), torch.zeros(2, 1, 8)
    write_kv(k, k, cache[0], batch, backend="numba")
    paged_attention(k, cache[0], batch, backend="numba")
    cache.abort(batch)
    space.release()


def place() -> str:
    """Return where compiled functions are kept, as a sentence."""
    folder = folder_for(Path(pagedkv.core.__file__).parent)
    if folder is None:
        return "no folder can be written: each process compiles in memory; set PAGEDKV_CACHE_DIR to a folder"
    return f"compiled functions are kept in {folder.parent}"
