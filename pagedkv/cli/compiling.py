"""The lines on stderr that say what is compiled at the first use on a machine, for how long, and where it is kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from numba.core import event
from rich.console import Console
from rich.text import Text

import pagedkv.core
from pagedkv.core.warm import begin_warm_up
from pagedkv.machine_code import folder_for

MANAGER: Final = "pagedkv.core"

PACKAGES: Final = {
    MANAGER: "the memory manager for this machine takes about half a minute",
    "pagedkv.kernels.numba": "the numba kernels for this machine takes about 10 s",
}
"""The packages whose functions numba compiles."""


class _Announcer(event.Listener):  # type: ignore[misc]
    """Prints a line when numba begins to compile a package, once for each package."""

    def __init__(self, screen: Console) -> None:
        self._screen, self._unsaid = screen, dict(PACKAGES)

    def announce(self, package: str, note: str = "") -> None:
        line = f"pagedkv: compiling {self._unsaid.pop(package)}{note}; {place()}"
        self._screen.print(Text(line), soft_wrap=True)

    def on_start(self, event: Any) -> None:
        module = event.data["dispatcher"].py_func.__module__
        for package in [package for package in self._unsaid if module.startswith(package)]:
            self.announce(package)

    def on_end(self, event: Any) -> None:
        pass


@contextmanager
def announced(*, quiet: bool) -> Iterator[Console]:
    """Begin to compile what a step calls, and say on stderr what is compiled here or by other processes, unless quiet.

    Yields: the console of stderr
    """
    screen = Console(stderr=True, highlight=False)
    announcer = _Announcer(screen)
    if begin_warm_up(uncompiled=True) and not quiet:
        announcer.announce(MANAGER, "; steps run uncompiled meanwhile")
    if quiet:
        yield screen
    else:
        with event.install_listener("numba:compile", announcer):
            yield screen


def place() -> str:
    """Return where compiled functions are kept, as a sentence."""
    folder = folder_for(Path(pagedkv.core.__file__).parent)
    if folder is None:
        return "no folder can be written: each process compiles in memory; set PAGEDKV_CACHE_DIR to a folder"
    return f"compiled functions are kept in {folder.parent}"
