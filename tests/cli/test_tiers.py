"""`--tier`: prompts come back from host memory or a disk with the same text."""

from __future__ import annotations

import errno
import json
import os
from unittest.mock import Mock

import pytest

from tests.records import DEMO_ANSWER

PAGES_OF_THE_DEMO = 18
"""Whole pages of its prompt, of 16 tokens each."""


def generated(command, *argv, warning=""):
    """Run the demo, which must give its answer, and return how many tokens of the prompt were found."""
    status, out, err = command("generate", "--json", *argv)
    found = json.loads(out)
    assert (status, err[: len(warning) or None], found["text"]) == (0, warning, DEMO_ANSWER)
    return found["usage"]["cached_tokens"]


def test_a_folder_serves_the_next_process_and_a_key_keeps_others_out(command, tmp_path, monkeypatch):
    folder = ("--tier", "host:1MiB", "--tier", f"disk:64MiB:{tmp_path / 'new' / 'folder'}")
    assert [generated(command, *folder) for _ in range(2)] == [0, 16 * PAGES_OF_THE_DEMO]
    monkeypatch.setenv("PAGEDKV_TIER_KEY", "a secret of 16 bytes")
    assert [generated(command, *folder) for _ in range(2)] == [0, 16 * PAGES_OF_THE_DEMO]


def test_a_disk_that_runs_full_costs_its_pages_and_no_text(command, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwrite", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    warning = "pagedkv: warning: the disk tier failed for "
    assert generated(command, "--tier", f"disk:64MiB:{tmp_path}", warning=warning) == 0
    monkeypatch.undo()
    assert generated(command, "--tier", f"disk:64MiB:{tmp_path}") == 0


def test_a_store_that_is_down_is_one_warning_on_stderr(command):
    pytest.importorskip("redis", reason="redis is not installed: pip install 'pagedkv[redis]'")
    warning = "pagedkv: warning: the redis tier failed for "
    assert generated(command, "--tier", "redis:64MiB:redis://127.0.0.1:1", warning=warning) == 0
