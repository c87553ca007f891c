"""Hostile checkpoints, chat templates and prompt files: each gives one line on stderr and status 2, within seconds."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pagedkv.engine.checkpoint import BUNDLED

from . import hostile

ROOT = Path(__file__).parents[2]
SECONDS = 90
"""The limit of one case; all but those that take a template's whole time end in less than a second."""

OPTIONS = ("--prompt", "Where is the lamp of Mira?", "--num-frames", "64")


@pytest.fixture(autouse=True)
def _alarm():
    """Fail a test that hangs."""
    old = signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"no end after {SECONDS} s"))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, old)


@pytest.fixture
def checkpoint(tmp_path):
    return shutil.copytree(BUNDLED, tmp_path / "checkpoint")


def assert_is_one_line(status, err, words):
    assert status == 2
    assert err.startswith("pagedkv: error: ")
    assert (err.count("\n"), err[-1]) == (1, "\n")
    assert err[:-1].isprintable()
    assert len(err) < 5000
    assert words in err


@pytest.mark.parametrize("name", hostile.CHECKPOINTS)
def test_a_hostile_checkpoint_is_one_line_and_status_2(name, checkpoint, command):
    edit, words = hostile.CHECKPOINTS[name]
    edit(checkpoint)
    outcome = command("generate", "--model", checkpoint, *OPTIONS)
    assert_is_one_line(outcome.status, outcome.err, words)


@pytest.mark.parametrize("name", hostile.TEMPLATES)
def test_a_hostile_template_is_one_line_and_status_2(name, checkpoint, command):
    template, words = hostile.TEMPLATES[name]
    hostile.edit("tokenizer_config.json", chat_template=template)(checkpoint)
    outcome = command("generate", "--model", checkpoint, "--chat", *OPTIONS)
    assert_is_one_line(outcome.status, outcome.err, words)


@pytest.mark.parametrize("name", hostile.PROMPTS)
def test_a_hostile_prompt_file_is_one_line_and_status_2(name, tmp_path, command):
    content, words = hostile.PROMPTS[name]
    (tmp_path / "prompts.jsonl").write_bytes(content)
    outcome = command("generate", "--prompt-file", tmp_path / "prompts.jsonl", "--num-frames", "64")
    assert_is_one_line(outcome.status, outcome.err, words)


SLOW = ["config is nested", "layers", "index names nothing"]


@pytest.mark.parametrize(
    "name", ["config is a pipe", "weights are NaN", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_the_command_itself_refuses_in_one_line(name, checkpoint):
    edit, words = hostile.CHECKPOINTS[name]
    edit(checkpoint)
    signal.setitimer(signal.ITIMER_REAL, 0)  # the import of torch has no limit here
    command = [sys.executable, "-m", "pagedkv", "generate", "--model", str(checkpoint), *OPTIONS]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert_is_one_line(run.returncode, run.stderr, words)
