"""The rows of `pagedkv bench tiers`.

store, load   GB/s of a tier by the size of a frame, and its share of the bare transfer (speed.py)
first token   seconds by the place where the prefix lies, and the share of computing it (first_token.py)
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

from pagedkv.bench.clock import track
from pagedkv.bench.generate.models import CONFIG, quick_config
from pagedkv.bench.tiers import first_token, speed
from pagedkv.errors import InvalidRequest

Row = dict[str, Any]
PARTS: Final = ("speed", "first-token")
QUICK_SIZES: Final = speed.SIZES[1::2]
QUICK_CONTEXT: Final = 1024
TURNS: Final = {"speed": 15, "first-token": 7}


@dataclass(frozen=True)
class Asked:
    """The choice of a run.

    is_quick: two sizes of frames, a prompt of 1,024 tokens instead of 4,096, fewer repetitions, and the model of
              `quick_config`.
    folder:   a folder of the file system for the disk tier; None for the system's folder of temporary files.
    parts:    names of PARTS; all if empty.
    sizes:    bytes of frames, for speed.
    contexts: tokens of prompts, for first-token.
    """

    is_quick: bool = False
    folder: Path | None = None
    parts: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raise InvalidRequest for what cannot be measured, before anything is."""
        if unknown := [name for name in self.parts if name not in PARTS]:
            raise InvalidRequest(f"--part {unknown[0]}: there is no such part; there are {', '.join(PARTS)}")
        if self.folder is not None and not self.folder.is_dir():
            raise InvalidRequest(f"--folder {self.folder} is no folder; give one on the disk that is to be measured")
        try:
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as why:
            folder = self.folder or tempfile.gettempdir()
            raise InvalidRequest(
                f"no file can be written to {folder}: {why.strerror}; --folder DIR names a folder on another disk"
            ) from None


def measure(report: Callable[[Row], None], asked: Asked) -> None:
    """Measure the parts, and hand each row to `report`."""
    sizes = asked.sizes or (QUICK_SIZES if asked.is_quick else speed.SIZES)
    contexts = asked.contexts or (QUICK_CONTEXT if asked.is_quick else first_token.CONTEXT,)
    config = quick_config() if asked.is_quick else CONFIG
    turns = {"speed": 5, "first-token": 2} if asked.is_quick else TURNS
    makers: dict[str, Callable[[], Iterable[Row]]] = {
        "speed": lambda: speed.rows(asked.folder, turns["speed"], sizes),
        "first-token": lambda: chain.from_iterable(
            first_token.rows(asked.folder, turns["first-token"], context, config) for context in contexts
        ),
    }
    for name in track(asked.parts or PARTS, "parts of tiers"):
        for row in makers[name]():
            report(row)
