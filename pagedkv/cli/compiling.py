"""The compiler and the gate of KV kinds, seen from the shell: the lines that the library logs at first use, or none."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from pagedkv import kv_gate, machine_code
from pagedkv.core.warm import begin_warm_up


@contextmanager
def announced(*, quiet: bool) -> Iterator[Console]:
    """Begin to compile what a step calls. The library logs what is compiled and measured to stderr, unless quiet.

    Yields: the console of stderr
    """
    for module in (machine_code, kv_gate):
        logging.getLogger(module.__name__).setLevel(logging.ERROR if quiet else logging.WARNING)
    begin_warm_up()
    yield Console(stderr=True, highlight=False)
