"""The ranks of several machines take the interface on which they reach one another, whatever their names stand for."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pagedkv.distributed import interface
from pagedkv.distributed.interface import Way

from .processes import ROOT

SELF = Way("127.0.0.1", "127.0.1.1")
"""The way of a rank on the machine of rank 0, which takes its name for 127.0.1.1."""
NEAR = Way("10.0.0.2", "10.0.0.2")
"""The same, where the name stands for the true address."""
FAR = Way("10.0.0.3", "10.0.0.2")


@pytest.mark.parametrize(
    ("ways", "addresses"),
    [
        ([SELF, SELF], ["", ""]),
        ([SELF, FAR], ["10.0.0.2", "10.0.0.3"]),
        ([NEAR, FAR], ["10.0.0.2", "10.0.0.3"]),
        ([SELF, SELF, FAR, FAR], ["10.0.0.2", "10.0.0.2", "10.0.0.3", "10.0.0.3"]),
        ([NEAR, NEAR], ["10.0.0.2", "10.0.0.2"]),
        ([Way("::1", "::1"), Way("fd00::3", "fd00::2")], ["fd00::2", "fd00::3"]),
        ([Way("", ""), FAR], ["10.0.0.2", "10.0.0.3"]),
    ],
)
def test_each_rank_takes_the_address_at_which_others_reach_it(ways: list[Way], addresses: list[str]) -> None:
    assert [interface.address_of(rank, ways) for rank in range(len(ways))] == addresses


def test_an_interface_is_found_by_its_address() -> None:
    names = [name for _, name in socket.if_nameindex()]
    assert interface.interface_of("127.0.0.1") == next(name for name in names if name.startswith("lo"))
    assert [interface.interface_of(address) for address in ("192.0.2.1", "::1", "", "x")] == [""] * 4


class Store(dict[str, str]):
    def set(self, key: str, value: str) -> None:
        self[key] = value

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key].encode()


@pytest.mark.parametrize(("named", "taken"), [(None, "eth7"), ("eth1", "eth1")])
def test_an_interface_that_the_user_has_named_is_kept(
    named: str | None, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(interface.GLOO, "for the end of this test")
    monkeypatch.delenv(interface.GLOO)
    if named:
        monkeypatch.setenv(interface.GLOO, named)
    monkeypatch.setattr(interface, "interface_of", {"10.0.0.2": "eth7"}.get)
    monkeypatch.setattr(interface, "_way_to", lambda *_: SELF)
    interface.choose(Store({"way/1": json.dumps(FAR)}), 0, 2, "host", 29400)
    assert os.environ[interface.GLOO] == taken


def test_one_machine_leaves_the_choice_to_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(interface.GLOO, raising=False)
    interface.choose(Store({"way/1": json.dumps(SELF)}), 0, 2, "127.0.0.1", 29400)
    assert interface.GLOO not in os.environ


# --- two machines, as network namespaces ------------------------------------------------------------------------------

ADDRESSES = ("10.77.0.1", "10.77.0.2")
SIDE = """
import sys, time
from pagedkv.model import Engine, Limits, SamplingParams, serve_prefills
from pagedkv.tiers.transfer import DistributedLink, PrefillServer, RemotePrefill
kind = PrefillServer if sys.argv[1] == "0" else RemotePrefill
tier = kind(DistributedLink("10.77.0.1:7000"))
with Engine.load(tiers=[tier], num_frames=128, limits=Limits(prefill_chunk=64)) as engine:
    if kind is RemotePrefill:
        assert tier.wait(30)
        [request] = engine.generate([list(range(10, 500))], SamplingParams(max_tokens=2))
        print(request.completions[0].cached_tokens)
    else:
        until = time.monotonic() + 60
        while not tier.is_connected and time.monotonic() < until:
            time.sleep(0.05)
        serve_prefills(engine, [tier], until=lambda: not tier.is_connected)
"""


@pytest.fixture
def machines() -> Iterator[list[list[str]]]:
    """Give the beginnings of command lines that run on two machines, which take their own name for 127.0.0.1."""

    def ip(*arguments: str) -> int:
        return subprocess.run(["ip", *arguments], capture_output=True, check=False).returncode

    names = [f"pagedkv{os.getpid()}{end}" for end in "ab"]
    links = [f"pkv{os.getpid()}{end}"[-15:] for end in "ab"]
    try:
        try:
            failed = sum(ip("netns", "add", name) for name in names)
        except FileNotFoundError:
            pytest.skip("no program ip")
        failed += ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        if failed:
            pytest.skip("no right to make network namespaces")
        for name, link, address in zip(names, links, ADDRESSES, strict=True):
            assert not ip("link", "set", link, "netns", name)
            assert not ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            assert not ip("-n", name, "link", "set", link, "up")
            assert not ip("-n", name, "link", "set", "lo", "up")
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:
            ip("netns", "del", name)


def results(commands: list[list[str]]) -> list[tuple[int, str]]:
    """Return statuses and outputs of commands that run at the same time."""
    variables = {name: value for name, value in os.environ.items() if name != interface.GLOO}
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    processes = [
        subprocess.Popen(command, cwd=ROOT, text=True, env=variables | {"PYTHONPATH": str(ROOT)}, **pipes)
        for command in commands
    ]
    until = time.monotonic() + 120
    try:
        outputs = [process.communicate(timeout=until - time.monotonic())[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


@pytest.mark.slow
def test_ranks_on_two_machines_share_a_model(machines: list[list[str]]) -> None:
    start = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", ADDRESSES[0], "--master-port", "29400"]
    command = ["-m", "pagedkv", "generate", "--json", "--prompt", "Otto lives in Ghent. Where does Otto live?"]
    run = [sys.executable, "-m", "torch.distributed.run", *start]
    (first, said), (second, silence) = results(
        [[*machine, *run, "--node-rank", str(rank), *command] for rank, machine in enumerate(machines)]
    )
    assert (first, second, silence) == (0, 0, "")
    assert json.loads(said)["text"] == "Otto lives in Ghent."


@pytest.mark.slow
def test_a_prompt_is_computed_on_another_machine(machines: list[list[str]]) -> None:
    found = results([[*machine, sys.executable, "-c", SIDE, str(rank)] for rank, machine in enumerate(machines)])
    assert found == [(0, ""), (0, "480\n")]
