"""The compiler, seen from the shell: the line that the library logs at the first use on a machine, or none."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from pagedkv import machine_code
from pagedkv.core.warm import begin_warm_up


@contextmanager
def announced(*, quiet: bool) -> Iterator[Console]:
    """Begin to compile what a step calls. The library logs what is compiled to stderr, unless quiet.

    Yields: the console of stderr
    """
    logging.getLogger(machine_code.__name__).setLevel(logging.ERROR if quiet else logging.WARNING)
    begin_warm_up()
    yield Console(stderr=True, highlight=False)
