"""An interrupt inside of the cache's own bookkeeping leaves a cache whose next call is right."""

from __future__ import annotations

import contextlib

import numpy as np
import torch

from pagedkv.cache.mirror import DeviceMirror
from tests.interrupts import Interrupter, count_instructions


def test_page_tables_that_did_not_reach_the_device_are_sent_again() -> None:
    host = np.arange(32, dtype=np.int32).reshape(4, 8)
    rows, pages = np.array([0, 2], np.int32), np.array([5, 3], np.int32)
    for at in range(1, count_instructions(lambda: DeviceMirror(torch.device("cpu")).update(host, rows, pages)) + 1):
        mirror = DeviceMirror(torch.device("cpu"))
        with contextlib.suppress(KeyboardInterrupt):
            Interrupter(at).run(lambda mirror=mirror: mirror.update(host, rows, pages))
        table, _ = mirror.update(host, rows, pages)
        for row, count in zip(rows, pages, strict=True):
            assert table[row, :count].tolist() == host[row, :count].tolist(), f"instruction {at}"
