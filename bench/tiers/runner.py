"""The rows of `pagedkv bench tiers`.

store, load              GB/s of a tier by the size of a frame, and its share of the bare transfer (speed.py)
first token              seconds by the place where the prefix lies, and the share of computing it (first_token.py)
decode beside transfers  ms of a step while a tier moves bytes (beside.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from pagedkv.bench.tiers import beside, first_token, speed
from pagedkv.errors import InvalidRequest

Row = dict[str, Any]
PARTS: Final = ("speed", "first-token", "beside")


def measure(report: Callable[[Row], None], *, is_quick: bool, folder: Path | None, only: Sequence[str] = ()) -> None:
    """Measure the parts, and hand each row to `report`.

    is_quick: two sizes of frames, a prompt of 1,024 tokens instead of 4,096, and fewer repetitions.
    folder: a folder of the file system for the disk tier; None for the system's folder of temporary files.
    Raises: InvalidRequest for an unknown part, or a folder that is none
    """
    if unknown := [name for name in only if name not in PARTS]:
        raise InvalidRequest(f"--part {unknown[0]}: there is no such part; there are {', '.join(PARTS)}")
    if folder is not None and not folder.is_dir():
        raise InvalidRequest(f"--folder {folder} is no folder; give one on the disk that is to be measured")
    makers: dict[str, Callable[[], Iterator[Row]]] = {
        "speed": lambda: speed.rows(folder, 5 if is_quick else 15, speed.SIZES[1::2] if is_quick else speed.SIZES),
        "first-token": lambda: first_token.rows(folder, 2 if is_quick else 7, 1024 if is_quick else 4096),
        "beside": lambda: beside.rows(2 if is_quick else 9),
    }
    for name in only or PARTS:
        for row in makers[name]():
            report(row)
