"""The same over NIXL, in processes of its own: a library in the wheel of NIXL 1.5.1 crashes when a process ends."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from pagedkv.errors import InvalidRequest
from pagedkv.model.prefills import servers_at
from pagedkv.sampling.params import SamplingParams
from pagedkv.tiers.from_text import tiers_of
from pagedkv.tiers.transfer import DistributedLink, NixlLink, link_at
from pagedkv.tiers.transfer.nixl import runs_of
from tests.records import DEMO_ANSWER
from tests.tiers.stores import free_port

from .engines import DECODE, ROOT, Process, lone_engine, prefill_process

LAWS = """
import os, sys, time
from pagedkv.tiers.transfer import NixlLink
from tests.distributed.transfer.sides import Sides

with Sides(num_frames=48, link=NixlLink) as sides, sides.serving(chunk=16):
    assert sides.run(list(range(41))) == 40
    sides.decode.cache.resize(64)
    sides.run([6, *range(41)])  # finds that the registered memory is gone, and connects again
    time.sleep(1.0)
    assert sides.remote.wait(20)
    assert sides.run([7, *range(41)]) == 40
    assert sides.run_at_random(int(sys.argv[1]), 40) > 0
print("all held", flush=True)
os._exit(0)
"""

IDLE = """
import os, time
from pagedkv.tiers.transfer import NixlLink
from tests.distributed.transfer.sides import Sides

with Sides(num_frames=48, link=NixlLink) as sides:
    before = time.process_time()
    time.sleep(2.0)
    print((time.process_time() - before) / 2.0, flush=True)  # of a core, for both sides
    os._exit(0)
"""


def test_without_the_package_a_link_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(InvalidRequest, match="pip install --no-deps nixl nixl-cu12"):
        NixlLink("127.0.0.1:7000")


def test_rows_that_follow_one_another_on_both_sides_are_read_as_one_run() -> None:
    rows = torch.empty(6, 64, dtype=torch.uint8)
    at = rows.data_ptr()
    places = {0: 640, 1: 704, 2: 768, 4: 832, 5: 1000}  # row: place there
    runs = runs_of([(number, place, rows[row]) for number, (row, place) in enumerate(places.items())])
    assert runs == [(at, 640, 192), (at + 4 * 64, 832, 64), (at + 5 * 64, 1000, 64)]


class OneCall:
    """An agent of NIXL that runs one call at a time. `during` is called while it reads."""

    def __init__(self, during: Callable[[], object]) -> None:
        self.during, self.is_used, self.calls = during, False, list[str]()

    def initialize_xfer(self, *_: object) -> str:
        return "handle"

    def transfer(self, handle: str) -> str:
        self.is_used = True
        self.during()
        self.is_used = False
        self.calls.append("transfer")
        return "DONE"

    def send_notif(self, peer: str, message: bytes) -> None:
        assert not self.is_used, "the speaker would wait for the reads"
        self.calls.append(message.decode())

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: self.calls.append(name)


def test_a_message_does_not_wait_for_reads_and_the_end_of_a_read_needs_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", SimpleNamespace(_api=None))
    link, row = NixlLink("127.0.0.1:7000"), torch.empty(64, dtype=torch.uint8)

    def speak() -> None:
        speaker = threading.Thread(target=link.send, args=(b"credits", 1.0), daemon=True)
        speaker.start()
        speaker.join(20)
        assert not speaker.is_alive()

    link._agent = agent = OneCall(speak)
    link.read_all([(5, 0, row)])
    assert [call for call in agent.calls if call != "get_xfer_descs"] == ["transfer", "release_xfer_handle", "credits"]
    agent.calls.clear()
    link.finish(5, 1.0)
    assert agent.calls == []


def test_an_address_names_its_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(link_at("[::1]:7000"), DistributedLink)
    assert isinstance(link_at("nixl:7000"), DistributedLink)  # a machine of this name
    monkeypatch.setitem(sys.modules, "nixl", None)
    for tiers in (lambda: tiers_of(["prefill:nixl:127.0.0.1:7000"]), lambda: servers_at(["nixl:127.0.0.1:7000"])):
        with pytest.raises(InvalidRequest, match="pip install --no-deps nixl nixl-cu12"):
            tiers()


@pytest.mark.slow
def test_a_link_by_nixl_that_waits_takes_no_core() -> None:
    pytest.importorskip("nixl", reason="no NIXL: pip install --no-deps nixl nixl-cu12")
    ended = subprocess.run(
        [sys.executable, "-c", IDLE], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout) < 0.5


@pytest.mark.slow
def test_the_command_prefills_over_nixl() -> None:
    pytest.importorskip("nixl", reason="no NIXL: pip install --no-deps nixl nixl-cu12")
    address, command = f"nixl:127.0.0.1:{free_port()}", [sys.executable, "-m", "pagedkv"]
    with subprocess.Popen(
        [*command, "prefill", "--listen", address], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as there:
        assert there.stderr is not None
        assert any(line.startswith("computing prompts") for line in iter(there.stderr.readline, ""))
        asked = [*command, "generate", "--json", "--tier", f"prefill:{address}"]
        found = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        there.send_signal(signal.SIGTERM)
        assert there.wait(30) == 0
    assert found.returncode == 0, found.stderr
    answer = json.loads(found.stdout)
    assert (answer["text"], answer["usage"]["cached_tokens"]) == (DEMO_ANSWER, 288)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_the_laws_of_a_transfer_hold_over_nixl(seed: int) -> None:
    pytest.importorskip("nixl", reason="no NIXL: pip install --no-deps nixl nixl-cu12")
    ended = subprocess.run(
        [sys.executable, "-c", LAWS, str(seed)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.stdout == "all held\n", ended.stderr
    assert ended.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_two_engines_over_nixl_give_the_tokens_of_one(seed: int) -> None:
    """With seed 0 the prefill process lives; with the others it is killed at a random moment."""
    pytest.importorskip("nixl", reason="no NIXL: pip install --no-deps nixl nixl-cu12")
    draw = random.Random(seed)
    prompts = [draw.choices(range(10, 600), k=400 + i) for i in range(4)]
    alone = lone_engine().generate(prompts, SamplingParams(max_tokens=8))
    address = f"127.0.0.1:{free_port()}"
    there = prefill_process(address, slow=0.01 if seed else 0.0, link="NixlLink")
    here = Process(DECODE, address, link="NixlLink")
    here.tell(json.dumps(prompts))
    if seed:
        time.sleep(draw.uniform(0.0, 0.4))
        there.kill()
    assert json.loads(here.line()) == [request.completions[0].token_ids for request in alone]
    assert here.process.wait(20) == 0
    if not seed:
        assert there.end() == [0, sum((len(prompt) - 1) // 16 for prompt in prompts)]


@pytest.mark.slow
def test_a_prefill_process_goes_on_when_decode_processes_are_killed_over_nixl() -> None:
    pytest.importorskip("nixl", reason="no NIXL: pip install --no-deps nixl nixl-cu12")
    draw, address = random.Random(3), f"127.0.0.1:{free_port()}"
    prompts = [draw.choices(range(10, 600), k=300 + i) for i in range(3)]
    there = prefill_process(address, slow=0.01, link="NixlLink")
    for _ in range(3):
        other = Process(DECODE, address, link="NixlLink")
        other.tell(json.dumps([draw.choices(range(10, 600), k=400) for _ in range(6)]))
        time.sleep(draw.uniform(0.0, 0.4))
        other.kill()
    last = Process(DECODE, address, link="NixlLink")
    last.tell(json.dumps(prompts))
    alone = lone_engine().generate(prompts, SamplingParams(max_tokens=8))
    assert json.loads(last.line()) == [request.completions[0].token_ids for request in alone]
    assert last.process.wait(20) == 0
    assert there.end()[0] == 0  # no frame is held
