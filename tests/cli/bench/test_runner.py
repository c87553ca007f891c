"""The runner of all benchmarks: rows that survive, missing peers, little memory, folders that cannot be written to."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console

from pagedkv.bench import memory, progress, record
from pagedkv.cli.bench import every, run

BENCH = (sys.executable, "-m", "pagedkv", "bench")
SMALL = ("attention", "--kernels", "reference", "--kind", "decode", "--batch", "1", "--context", "64", "--threads", "1")
ROW = {"bench": "manager", "case": "decode step, 1,024 sequences", "unit": "us", "machine": "a machine", "commit": "c"}


def test_rows_name_a_commit_and_whether_files_differ_from_it():
    assert record.results() is not None
    assert len(record.commit().removesuffix("-dirty")) >= 7
    assert record.provenance()["versions"]["numpy"]


def test_a_row_names_its_command_without_the_folders_of_the_machine(monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["/opt/python", "/opt/bin/pagedkv", "bench", "attention"])
    monkeypatch.setattr(sys, "argv", ["pagedkv", "bench", "attention", "--vllm-python", "/home/me/v/bin/python"])
    assert record.command() == "pagedkv bench attention --vllm-python python"
    monkeypatch.setattr(sys, "orig_argv", ["/opt/python3", "-m", "pagedkv.bench.attention.calls"])
    assert record.command() == "python3 -m pagedkv.bench.attention.calls"


def test_an_installed_package_keeps_rows_only_where_it_is_told(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(record, "HERE", tmp_path)
    monkeypatch.setattr(record, "_noted", set())
    assert record.results() is None
    assert record.commit().startswith("pagedkv ")
    record.append([{"a": 1}], None, "manager")
    assert "--record" in capsys.readouterr().err


def test_a_checkout_that_cannot_be_written_to_costs_the_rows_not_the_run(monkeypatch, tmp_path, capsys):
    (tmp_path / "results").mkdir()
    (tmp_path / "results/manager.jsonl").mkdir()  # a file that cannot be opened, for root as well
    monkeypatch.setattr(record, "HERE", tmp_path)
    monkeypatch.setattr(record, "_noted", set())
    for _ in range(2):
        record.append([{"a": 1}], None, "manager")
    assert capsys.readouterr().err.count("these rows are not kept") == 1


def test_a_file_that_was_asked_for_and_cannot_be_written_to_is_an_error(command, tmp_path):
    status, _, err = command("bench", *SMALL, "--repetitions", 1, "--record", tmp_path)  # a folder
    assert status == 2
    assert "--record FILE names another file" in err


@pytest.mark.parametrize("option", ["--record", "--plot"])
def test_a_file_in_a_folder_that_is_not_there_is_refused_before_anything_is_measured(
    option, command, tmp_path, monkeypatch
):
    monkeypatch.setattr("pagedkv.bench.attention.runner.measure", lambda *_: pytest.fail("measured"))
    path = tmp_path / "no/file.svg"
    status, _, err = command("bench", *SMALL, option, path)
    words = f"{option} is {path}, and there is no folder {path.parent}; name another file"
    assert (status, words in err) == (2, True)
    if option == "--record":
        monkeypatch.setattr(every, "_measured", lambda *_: pytest.fail("measured"))
        status, _, err = command("bench", "all", option, path)
        assert (status, words in err) == (2, True)


@pytest.mark.parametrize(("name", "size"), [("attention", ["--full"]), ("manager", [])])
def test_a_full_run_is_the_whole_grid(name, size, monkeypatch):
    started = []

    class Ended:
        returncode = 0

        def __init__(self, command: list[str], **_: object) -> None:
            started.append(command[3:])

        def __enter__(self) -> Ended:
            return self

        def __exit__(self, *_: object) -> None: ...

        def communicate(self) -> tuple[str, None]:
            return "[]", None

    monkeypatch.setattr(subprocess, "Popen", Ended)
    assert every._measured(name, is_quick=False, keep=None) == (0, [])
    assert every._measured(name, is_quick=True, keep=None) == (0, [])
    assert started == [["bench", name, "--json", *size], ["bench", name, "--json", "--quick"]]


def test_memory_is_that_of_the_container(monkeypatch, tmp_path):
    whole = memory.available()
    (tmp_path / "memory.max").write_text(f"{2 << 30}\n")
    monkeypatch.setattr(memory, "CGROUPS", (str(tmp_path / "memory.max"),))
    assert memory.available() == min(whole, 2 << 30)
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available() > 0


def test_a_benchmark_that_does_not_fit_or_lacks_its_host_is_left_out_in_one_line(monkeypatch, command):
    monkeypatch.setattr(run, "available", lambda: 2 << 30)
    monkeypatch.setattr(run, "find_spec", lambda name: None if name == "vllm" else "there")
    measured = []

    def measure(name: str, **_: object) -> tuple[int, list[dict[str, object]]]:
        measured.append(name)
        return (0, [ROW | {"who": "pagedkv", "median": 54.0}]) if name == "manager" else (3, [])

    monkeypatch.setattr(every, "_measured", measure)
    status, out, _ = command("bench", "all")
    assert (status, measured) == (1, ["manager", "attention", "fragmentation", "bandwidth"])  # three failed
    lines = " ".join(out.split())
    assert "generate: left out: it needs 6 GiB of memory, and 2.0 GiB are free" in lines
    assert "not measured: vllm: vllm is not installed; run it in an environment with vLLM" in lines
    assert "not measured: attention: its process ended with status 3" in lines
    assert "54 µs" in lines
    assert command("bench", "all", "--only", "tears").status == 2
    status, _, err = command("bench", "generate")
    assert (status, "bench generate: it needs 12 GiB of memory, and 2.0 GiB are free" in err) == (2, True)


@pytest.mark.parametrize(("is_slow", "needed"), [(False, "2,930"), (True, "977")])
def test_a_shape_that_no_memory_holds_is_one_line(command, tmp_path, monkeypatch, is_slow, needed):
    pytest.importorskip("transformers")
    from pagedkv.bench.transformers import runner

    monkeypatch.setattr(runner, "is_slow_in_torch", lambda dtype: is_slow)
    status, _, err = command("bench", "transformers", "--shape", "64x1000000", "--record", tmp_path / "rows")
    assert (status, f"--shape: they need {needed} GiB of memory, and " in err) == (2, True)


def test_a_bar_is_drawn_on_a_terminal_only_between_steps(monkeypatch, capsys):
    assert list(progress.track([1, 2], "turns")) == [1, 2]
    monkeypatch.setattr(progress, "INTERVAL", -1.0)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "Console", lambda **_: Console(stderr=True, force_terminal=True))
    pairs = [(outer, inner) for outer in progress.track("ab", "outer") for inner in progress.track([1, 2], "inner")]
    assert len(pairs) == 4
    drawn = capsys.readouterr().err
    steps = progress.track(["a step of 15 seconds"], "prefill")
    next(steps)
    assert "prefill" in capsys.readouterr().err  # before the step, not after it
    steps.close()
    assert "outer" in drawn
    assert "inner" in drawn
    assert not progress._shown


@pytest.fixture
def child():
    """Return a function that starts a benchmark. A benchmark that outlives the test is killed."""
    with contextlib.ExitStack() as running:

        def start(*options: str, **more: object) -> subprocess.Popen[str]:
            run = subprocess.Popen(
                [*BENCH, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more
            )
            running.enter_context(run)
            running.callback(run.kill)
            return run

        yield start


def test_ctrl_c_leaves_whole_rows_and_status_130(child, tmp_path):
    """The first group of cells is measured, then one of the long groups behind it is interrupted."""
    kept, contexts = tmp_path / "rows.jsonl", [64, *range(100000, 100006)]
    options = [word for context in contexts[1:] for word in ("--context", str(context))]
    run = child(*SMALL, *options, "--repetitions", "50", "--record", str(kept))
    deadline = time.monotonic() + 60
    while run.poll() is None and not (kept.exists() and kept.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 130, err
    assert "Traceback" not in err
    rows = [json.loads(line)["cell"]["context"] for line in kept.read_text().splitlines()]
    assert rows == contexts[: len(rows)]
    assert 1 <= len(rows) < len(contexts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["manager", "attention", "fragmentation", "bandwidth", "generate", "transformers", "vllm", "tiers", "all"]
)
def test_ctrl_c_ends_every_benchmark_with_status_130_and_whole_rows(child, name, tmp_path):
    """A few seconds are enough to import torch; no benchmark ends so soon."""
    if why := run.why_not(name, is_quick=False):
        pytest.skip(why)
    kept = tmp_path / "rows.jsonl"
    process = child(name, "--record", str(kept), cwd="/proc")
    time.sleep(8)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert all(json.loads(line) for line in (kept.read_text().splitlines() if kept.exists() else ()))


def with_two_gib() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, 2 << 30))


@pytest.mark.slow
@pytest.mark.many_steps
@pytest.mark.parametrize(
    "options",
    [
        ("manager", "--quick", "--rounds", "1"),
        ("bandwidth", "--quick", "--turns", "1", "--threads", "1"),
        ("fragmentation", "--quick", "--workload", "drafts"),
    ],
    ids=lambda options: options[0],
)
def test_every_benchmark_runs_in_two_gib(child, options, tmp_path):
    run = child(*options, "--record", str(tmp_path / "rows"), cwd="/proc", preexec_fn=with_two_gib)
    _, err = run.communicate(timeout=300)
    assert run.returncode == 0, err


def test_two_gib_and_a_working_directory_that_cannot_be_written_to_are_enough(child, tmp_path):
    options = (*SMALL, "--repetitions", "1", "--json", "--record", str(tmp_path / "rows"))
    run = child(*options, cwd="/proc", preexec_fn=with_two_gib)
    out, err = run.communicate(timeout=120)
    assert run.returncode == 0, err
    (row,) = json.loads(out)
    assert row["results"]["reference"]["us"] > 0
