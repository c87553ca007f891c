"""`pagedkv prefill` computes the prompts of `--tier prefill:HOST:PORT`; without it the text is the same."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pagedkv.checkpoint.records import DEMO_ANSWER
from pagedkv.cli import generate
from tests.tiers.stores import free_port

ROOT = Path(__file__).parents[2]
PAGES_OF_THE_DEMO = 18


def answered(command, *argv):
    """Run the demo, which must give its answer. Return the tokens of the prompt that were found, and stderr."""
    status, out, err = command("generate", "--json", *argv)
    found = json.loads(out)
    assert (status, found["text"]) == (0, DEMO_ANSWER)
    return found["usage"]["cached_tokens"], err


@pytest.mark.parametrize("options", [(), ("--window", "512", "--sinks", "4")], ids=["plain", "window"])
def test_a_prefill_process_computes_the_prompt_of_another_until_it_is_ended(command, monkeypatch, options):
    monkeypatch.setattr(generate, "PREFILL_S", 60.0)
    address = f"127.0.0.1:{free_port()}"
    with subprocess.Popen(
        [sys.executable, "-m", "pagedkv", "prefill", "--listen", address, *options],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as there:  # fmt: skip
        assert there.stderr is not None
        lines = iter(there.stderr.readline, "")
        assert any(line == f"computing prompts for {address}; Ctrl-C ends it\n" for line in lines)
        tiers = ("--tier", "host:1MiB", "--tier", f"prefill:{address}")
        assert answered(command, *tiers, *options) == (16 * PAGES_OF_THE_DEMO, "")
        there.send_signal(signal.SIGTERM)
        out, err = there.communicate(timeout=30)
    assert (there.returncode, out) == (0, "")
    assert err.endswith(f"290 tokens computed, {PAGES_OF_THE_DEMO} pages sent\n")


def test_without_a_prefill_process_the_prompt_is_computed_here(command, monkeypatch):
    monkeypatch.setattr(generate, "PREFILL_S", 0.1)
    tokens, err = answered(command, "--tier", f"prefill:127.0.0.1:{free_port()}")
    assert (tokens, err) == (0, "pagedkv: no prefill process within 0.1 s; prompts are computed here\n")


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ((), "--listen"),
        (("--listen", "x"), "address is 'x'; give HOST:PORT"),
        (("--listen", "203.0.113.9:7000"), "cannot listen on 203.0.113.9:7000: Cannot assign requested address"),
        (("--listen", "no such host:7000"), "cannot listen on no such host:7000"),
        (("--listen", "127.0.0.1:7000", "--memory", "1GiB", "--num-frames", 4), "give one of them"),
        (("--listen", "127.0.0.1:7000", "--model", "/nowhere"), "/nowhere"),
    ],
)
def test_bad_input_is_one_line(command, argv, complaint):
    status, out, err = command("prefill", *argv)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert complaint in err


def test_an_address_in_use_is_one_line(command):
    with socket.create_server(("127.0.0.1", 0)) as other:
        status, _, err = command("prefill", "--listen", f"127.0.0.1:{other.getsockname()[1]}")
    assert status == 2
    assert "; give another --listen\n" in err


def test_a_tier_that_computes_prompts_needs_an_address(command):
    for text, complaint in (("prefill", "prefill:HOST:PORT"), ("prefill:x", "give HOST:PORT")):
        status, _, err = command("generate", "--tier", text)
        assert (status, complaint in err) == (2, True)
