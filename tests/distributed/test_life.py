"""The life of a group: torchrun runs the command, rank 0 alone prints, and no death leaves another rank waiting."""

from __future__ import annotations

import json
import os
import pty
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pagedkv.cli import app
from pagedkv.distributed import launch, watch
from pagedkv.distributed.ranks import Ranks
from pagedkv.errors import InvalidRequest, RankLost
from tests.tiers.stores import free_port

from . import jobs
from .processes import PAGEDKV, RANK, ROOT, Group, started

DEADLINE_S = 3
PROMPT = "Otto lives in Ghent. Where does Otto live?"
LONG = ["--prompt", PROMPT, "--max-tokens", "100000", "--ignore-eos", "--window", "64"]


STAGES = {
    "they start": (False, 1, 4),
    "they load": (False, 4, 8),
    "rank 0 begins to print": (True, 0, 0.1),
    "they generate": (True, 0, 3),
}
"""Whether the first letter is awaited, and seconds from then or from the start."""


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that gives this process the variables of torchrun. local: its number on its machine"""

    def give(rank: int, size: int = 2, local: int | None = None) -> None:
        local = rank if local is None else local
        values = {"TORCHELASTIC_RUN_ID": "x", "RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": size}
        values |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return give


REFUSED: dict[str, tuple[list[str], str]] = {
    "tiers": (["generate", "--tier", "host:1MiB"], "a tier fills the pool of one process only"),
    "tree drafts": (["generate", "--speculate", "prompt-tree"], "the branches of a tree are moved in the pool of one"),
    "one GPU for all": (["generate", "--device", "cuda:1"], "then each rank takes the GPU of its number"),
    "no GPU": (["generate", "--device", "cuda"], "torch finds 0 GPUs here"),
    "serve": (["serve"], "pagedkv serve runs in one process, and torchrun started 2"),
    "no folder": (["generate", "--model", "/nowhere"], "/nowhere"),
    "bad options": (["generate", "--no-such-option"], "--no-such-option"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_each_rank_refuses_by_itself_and_rank_0_says_it(
    case: str, as_rank: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is loaded, and before the ranks meet."""
    argv, said = REFUSED[case]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for rank in range(2):
        as_rank(rank)
        monkeypatch.setattr(sys, "stdout", sys.stdout)  # a follower replaces it
        assert app.invoke(argv) == app.BAD_INPUT
        err = capsys.readouterr().err
        assert (said in err, err.count("\n")) == ((True, 1) if rank == 0 else (False, 0))


def test_a_second_machine_says_why_it_refuses(
    as_rank: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder may lack what that of rank 0 has, and rank 0 does not know its reason before they have met."""
    for local, lines in ((0, 1), (1, 0)):
        as_rank(2 + local, size=4, local=local)
        monkeypatch.setattr(sys, "stdout", sys.stdout)  # a follower replaces it
        assert app.invoke(["generate", "--model", "/nowhere"]) == app.BAD_INPUT
        out, err = capsys.readouterr()
        assert ("/nowhere" in err, err.count("\n"), out) == (bool(lines), lines, "")


def test_uneven_ranks_are_refused_before_they_meet(
    as_rank: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    as_rank(0, size=3)
    assert app.invoke(["generate", "--prompt", "x"]) == app.BAD_INPUT
    said = capsys.readouterr().err
    assert "3 ranks cannot have equal shares of this model" in said
    assert "start a number of ranks that divides all its sizes: 1, 2\n" in said


def test_variables_of_other_launchers_start_no_group(as_rank: Callable[..., None], monkeypatch: Any) -> None:
    as_rank(1)
    assert launch.is_follower()
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert launch.place() is None
    as_rank(0, size=1)
    assert launch.place() is None
    as_rank(0)
    monkeypatch.setenv("MASTER_PORT", "")
    with pytest.raises(InvalidRequest, match="MASTER_PORT=;"):
        launch.place()


def test_a_rank_that_meets_no_other_says_where_and_what_to_do(monkeypatch: Any) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise RuntimeError("[c10d] The client socket has timed out after 5000ms.\nTrace: ...")

    monkeypatch.setattr("torch.distributed.TCPStore", refused)
    said = "rank 1 of 2 cannot meet the others at host-a:29400: The client socket has timed out after 5000ms; start "
    with pytest.raises(RankLost, match=said):
        Ranks(launch.Place(rank=1, size=2, local_rank=0, host="host-a", port=29400))


def ended(processes: list[subprocess.Popen[str]], within: float) -> list[tuple[int, str, str]]:
    """Return status, stdout and stderr of processes that must end within so many seconds."""
    end, results = time.monotonic() + within, []
    try:
        for process in processes:
            out, err = process.communicate(timeout=max(0.1, end - time.monotonic()))
            results.append((process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return results


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [["-m", "torch.distributed.run"], None], ids=["module", "torchrun"])
def test_torchrun_prints_what_one_process_prints(launcher: list[str] | None) -> None:
    start = [sys.executable, *launcher] if launcher else [str(Path(sys.executable).with_name("torchrun"))]
    command = ["-m", "pagedkv", "generate", "--dtype", "float32", "--json", "--prompt", PROMPT]
    ranked = [*start, "--nproc-per-node", "2", "--master-port", str(free_port()), *command]
    runs = [
        subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
        for argv in (ranked, [sys.executable, *command])
    ]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr
    together, alone = (json.loads(run.stdout) for run in runs)
    assert together["text"] == alone["text"] == "Otto lives in Ghent."


@pytest.mark.slow
def test_two_machines_print_the_text_once() -> None:
    """Two torchruns that meet, as on two machines: each starts one rank, and either may have rank 0."""
    meeting = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "test"]
    start = [sys.executable, "-m", "torch.distributed.run", *meeting, "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    pipes: dict[str, Any] = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE) | {"stdin": subprocess.DEVNULL}
    command = [*start, "-m", "pagedkv", "generate", "--json", "--prompt", PROMPT]
    results = ended([subprocess.Popen(command, cwd=ROOT, text=True, **pipes) for _ in range(2)], 120)
    assert [status for status, *_ in results] == [0, 0]
    (said,) = (out for _, out, _ in results if out)
    assert json.loads(said)["text"] == "Otto lives in Ghent."


@pytest.mark.slow
def test_torchrun_ends_when_a_rank_is_killed() -> None:
    """Under its agent the other ranks are ended by the agent, or by their own watch, whichever is quicker."""
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    command = [*start, "-m", "pagedkv", "generate", *LONG]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    agent = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)
    try:
        time.sleep(12)
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        assert agent.communicate(timeout=40)[1].count("Traceback") <= 1  # that of torchrun itself
        assert agent.returncode == 1
    finally:
        agent.kill()
        agent.communicate()
    assert not [pid for pid in children if Path(f"/proc/{pid}/cmdline").exists()]


@pytest.mark.slow
def test_ctrl_c_in_a_conversation_ends_all_ranks_at_once() -> None:
    """Ranks that went on would be killed by torchrun, which ends with them, half a minute later."""
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    master, slave = pty.openpty()
    pipes: dict[str, Any] = {"stdin": slave, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    agent = subprocess.Popen([*start, "-m", "pagedkv", "generate", "--chat"], cwd=ROOT, start_new_session=True, **pipes)
    shown = ""
    try:
        assert agent.stderr is not None
        while not shown.endswith("\n> ") and (letter := agent.stderr.read(1)):
            shown += letter
        assert "Ctrl-C or Ctrl-D ends it" in shown
        os.killpg(agent.pid, signal.SIGINT)
        assert agent.communicate(timeout=20)[1].count("Traceback") == 1  # that of torchrun itself
    finally:
        with suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)
        agent.communicate()
        os.close(master), os.close(slave)
    assert agent.returncode == 1


@pytest.mark.slow
def test_a_bad_prompt_ends_all_ranks_with_one_line() -> None:
    """Found by rank 0 alone, when the ranks have met."""
    results = ended(started(2, [*PAGEDKV, "generate", "--prompt="]), 60)
    assert [status for status, *_ in results] == [2, 2]
    assert results[0][2].startswith("pagedkv: error: ")
    assert [err.count("\n") for *_, err in results] == [1, 0]


@pytest.mark.slow
def test_weights_that_one_rank_lacks_end_all_ranks_with_one_line(folder: Callable[..., Path], tmp_path: Path) -> None:
    """Here the second rank has another folder, as on another machine."""
    made = folder("llama")
    (tmp_path / "config.json").write_text((made / "config.json").read_text())
    processes = started(2, RANK, PAGEDKV_RANK_TIMEOUT=str(DEADLINE_S))
    for process, where in zip(processes, (made, tmp_path), strict=True):
        job = {"folder": str(where), "prompts": [[1, 2, 3]], "loading": {"dtype": "float32", "num_frames": 20}}
        assert process.stdin is not None
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
    results = ended(processes, 30 + DEADLINE_S)
    assert all(status for status, *_ in results)
    assert f"{tmp_path} has neither model.safetensors" in results[0][2]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_dies_or_hangs_takes_the_other_along(stage: str, victim: int, kind: signal.Signals) -> None:
    """At a random moment: one line, another status than 0, and no hang.

    A rank that dies before it has met the other one has more time: it might still come.
    """
    generates, first, last = STAGES[stage]
    delay = random.uniform(first, last)
    processes = started(2, [*PAGEDKV, "generate", *LONG], PAGEDKV_RANK_TIMEOUT=str(DEADLINE_S))
    try:
        if generates:
            assert processes[0].stdout is not None
            assert processes[0].stdout.read(1)
        time.sleep(delay)
        os.kill(processes[victim].pid, kind)
        survivor = processes[1 - victim]
        _, err = survivor.communicate(timeout=DEADLINE_S * (1 if generates else watch.JOINING) + 10)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert survivor.returncode == watch.LOST, f"after {delay:.2f} s: {err}"
    lines = [line for line in err.splitlines() if line.startswith("pagedkv: error:")]
    assert len(lines) == 1
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_one_of_four_ranks_takes_all_others_along(victim: int, folder: Callable[..., Path]) -> None:
    group = Group(4, PAGEDKV_RANK_TIMEOUT=str(DEADLINE_S))
    job = jobs.job_of(folder("llama"), [[1, 2, 3]], params={"max_tokens": 100_000}, window=64)
    group.ask(job)
    time.sleep(5)
    assert group.lives
    group.ranks[victim].kill()
    results = ended([process for process in group.ranks if process is not group.ranks[victim]], DEADLINE_S + 10)
    group.ranks[victim].communicate()
    assert all(status for status, *_ in results)


@pytest.mark.slow
def test_followers_wait_for_as_long_as_rank_0_is_idle() -> None:
    """Longer than the deadline: rank 0 reads its prompt from a pipe, and the others watch it meanwhile."""
    processes = started(2, [*PAGEDKV, "generate", "-", "--json"], PAGEDKV_RANK_TIMEOUT="2")
    time.sleep(12)
    assert all(process.poll() is None for process in processes)
    assert processes[0].stdin is not None
    processes[0].stdin.write(PROMPT)
    results = ended(processes, 60)
    assert [status for status, *_ in results] == [0, 0]
    assert json.loads(results[0][1])["text"] == "Otto lives in Ghent."
    assert results[1][1:] == ("", "")
