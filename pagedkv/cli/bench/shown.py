"""The output of a benchmark, as options: rows in a file, a list of objects, a picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from pagedkv.cli.options import option
from pagedkv.errors import InvalidRequest

JSON: Final = option("", "Print a list of objects, no more.", "--json")
RECORD: Final = option("FILE", "Append the rows there, not to bench/results of a checkout.")


@dataclass(frozen=True)
class Shown:
    """The size of a run, and its output."""

    record: Annotated[Path | None, RECORD] = None
    as_json: Annotated[bool, JSON] = False
    quick: Annotated[bool, option("", "The cases that show most, in a few minutes.", "--quick")] = False
    plot: Annotated[Path | None, option("FILE", "Draw the rows of this run as FILE.svg.")] = None

    def __post_init__(self) -> None:
        for name, path in (("--record", self.record), ("--plot", self.plot)):
            if path and not path.parent.is_dir():
                raise InvalidRequest(f"{name} is {path}, and there is no folder {path.parent}; name another file")
        if self.plot and self.plot.suffix != ".svg":
            raise InvalidRequest(f"--plot is {self.plot}; charts are SVG: give a name that ends in .svg")
