"""`make gpu` with fake stages and without a GPU: the archive, the summary, the status, each way a stage can end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))  # as Python does that runs a script

from on_gpu import archive, clocks, stages, tree  # noqa: E402
from on_gpu.stages import FIRST, LATER, SANITIZE, Stage  # noqa: E402
from scripts import gpu  # noqa: E402


def stage(name: str, code: str, seconds: float = 20, **more: Any) -> Stage:
    return Stage(name, ("-c", code, "{out}"), seconds, **{"needs": ()} | more)


GOOD_ENVIRONMENT = stage("environment", "print('= a GPU')")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function that runs `main` with these stages only, and returns its status and the archive's contents."""
    monkeypatch.setattr(tree, "copy", lambda root, target: target.mkdir())

    def run(
        *first: Stage,
        later: tuple[Stage, ...] = (),
        options: tuple[str, ...] = (),
        environment: Stage = GOOD_ENVIRONMENT,
    ) -> tuple[int, dict[str, bytes], str]:
        monkeypatch.setattr(gpu, "FIRST", (environment, *first))
        monkeypatch.setattr(gpu, "LATER", later)
        status = gpu.main(["--out", str(tmp_path / "out"), *options])
        return status, contents(tmp_path / "out" / gpu.ARCHIVE), (tmp_path / "out" / gpu.SUMMARY).read_text()

    return run


def contents(file: Path) -> dict[str, bytes]:
    with tarfile.open(file) as held:
        members = {member.name: held.extractfile(member) for member in held.getmembers()}
        return {name: file.read() for name, file in members.items() if file}


def test_a_stage_that_fails_hangs_or_is_killed_does_not_stop_the_others(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).wait()"
    monkeypatch.setenv("PAGEDKV_DEBUG", "3")
    began = time.monotonic()
    status, files, summary = fake(
        stage("broken", "print('so far'); raise SystemExit(3)"),
        stage("hangs", f"import subprocess, sys; print('began', flush=True); {sleep}", 5),
        stage("killed", "import os, signal; print('half', flush=True); os.kill(os.getpid(), signal.SIGKILL)"),
        stage("tool", "", needs=("program:no-such-tool-anywhere",)),
        stage("module", "", needs=("no_such_module",)),
        stage("empty", "print('7 skipped in 1 s')"),
        stage("good", "import os; print('= fine', sorted(set(os.environ) & {'TRITON_INTERPRET', 'PAGEDKV_DEBUG'}))"),
    )
    assert time.monotonic() - began < 30, "the worker of the stage that hung was not ended"
    assert status == 1
    lines = re.sub(r"(FAILED|passed|out of time), \d+ s", r"\1, N s", summary).splitlines()
    for text in (
        "broken: FAILED, N s: status 3: so far",
        "killed: FAILED, N s: killed by SIGKILL: half",
        "tool: not run, 0 s: needs no-such-tool-anywhere, which is not on the PATH",
        "module: not run, 0 s: needs the module no_such_module, which this Python lacks",
        "good: passed, N s",
        "  fine []",
    ):
        assert text in lines, summary
    assert "hangs: out of time, N s: after 5 s; began" in lines
    assert any(line.startswith("empty: FAILED") and "nothing ran" in line for line in lines)
    assert files["hangs.log"].startswith(b"began\n")
    assert files["hangs.log"].endswith(b"KeyboardInterrupt\n")
    assert files["broken.log"] == b"so far\n"
    assert files[gpu.SUMMARY].decode() == summary


TESTS = """
import pytest, time
@pytest.mark.gpu
@pytest.mark.parametrize("case", ["heads=4/2 window=(7, 3)", "b"])
def test_wrong(case): raise ValueError("the cause")
@pytest.mark.gpu
def test_other(): assert 1 + 1 == 3
@pytest.mark.gpu
def test_endless(): time.sleep(60)
"""


@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_stage_of_tests_that_is_out_of_time_tells_the_reasons_of_failures(
    apart: bool, fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_slow.py").write_text(TESTS)
    monkeypatch.setattr(stages, "JOBS", "1")
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(tree, "digest", lambda root: "0")
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a job of a shell
    try:
        began = time.monotonic()
        tests = stages._pytest("laws", 20, str(tmp_path / "test_slow.py"), apart=apart)._replace(needs=("pytest",))
        status, files, summary = fake(tests)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, ignored)
    assert status == 1
    assert time.monotonic() - began < 20 + gpu.GRACE + 5
    assert "laws: out of time" in summary
    lines = summary.splitlines()
    (cause,) = [line for line in lines if "the cause" in line]
    assert cause == "  2 x ValueError: the cause: test_slow.py::test_wrong[heads=4/2 window=(7, 3)]"
    assert "  1 x assert (1 + 1) == 3: test_slow.py::test_other" in lines, summary
    assert b"3 failed" in files["laws.log"]


def test_the_status_is_0_if_and_only_if_all_stages_passed(fake: Any) -> None:
    assert fake(stage("good", "print('fine')"))[0] == 0
    assert fake(stage("good", "print('fine')"), stage("bad", "raise SystemExit(1)"))[0] == 1
    assert fake(stage("good", "print('fine')"), stage("late", "", 30), options=("--minutes", "0.3"))[0] == 1


def test_without_a_gpu_stages_that_need_one_say_so_and_the_others_run(fake: Any) -> None:
    none = stage("environment", "print('torch finds no GPU here'); raise SystemExit(1)")
    status, _, summary = fake(stage("a", "print('= ran')"), stage("b", "", needs=("gpu",)), environment=none)
    assert status == 1
    assert "a: passed" in summary
    assert "b: not run, 0 s: needs a GPU, and torch finds no GPU here" in summary


def test_a_run_that_is_killed_leaves_the_stages_before_and_rest_continues_from_the_archive(
    fake: Any, tmp_path: Path
) -> None:
    ran = "import pathlib, sys; f = pathlib.Path(sys.argv[1]) / 'rows.jsonl'; f.open('a').write('row\\n'); print('ran')"
    seen = (
        f"import tarfile; print(tarfile.open({str(tmp_path / 'out' / gpu.ARCHIVE)!r}).extractfile('first.log').read())"
    )
    hung = stage("hung", "import os, signal; os.kill(os.getppid(), signal.SIGTERM); import time; time.sleep(60)")
    with pytest.raises(SystemExit):
        fake(stage("first", ran), stage("second", seen), hung, stage("third", ran))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    files = contents(tmp_path / "out" / gpu.ARCHIVE)
    assert files["rows.jsonl"] == b"row\n"
    assert files["second.log"] == b"b'ran\\n'\n", "the archive is complete after each stage"
    kept = tmp_path / "carried.tar.gz"
    (tmp_path / "out" / gpu.ARCHIVE).rename(kept)  # a fresh machine: $OUT is empty, the archive is carried
    status, files, summary = fake(
        stage("first", "raise SystemExit('it passed before')"),
        stage("hung", ran),
        later=(stage("third", ran),),
        options=("--rest", str(kept)),
    )
    assert status == 0, summary
    assert files["rows.jsonl"] == b"row\n" * 3, "rows of the earlier call, and of this one"
    assert [each["name"] for each in json.loads(files[gpu.STATE])] == [
        "environment",
        "first",
        "second",
        "hung",
        "third",
    ]
    assert "first: passed" in summary


def test_rest_without_an_archive_says_what_to_do_and_leaves_the_folder_alone(fake: Any, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.tar.gz"
    wrong.write_text("no archive")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / gpu.ARCHIVE).write_text("of yesterday")
    for options in (("--rest",), ("--rest", str(wrong))):
        with pytest.raises(SystemExit, match=r"(?s)is not the archive of an earlier call.*leave out --rest"):
            fake(options=options)
    assert (tmp_path / "out" / gpu.ARCHIVE).read_text() == "of yesterday"


def test_an_archive_that_is_full_leaves_out_the_largest_files_and_names_them(tmp_path: Path) -> None:
    folder, target = tmp_path / "results", tmp_path / "a.tar.gz"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "large.ncu-rep").write_bytes(os.urandom(300_000))
    (folder / "medium.ncu-rep").write_bytes(os.urandom(60_000))
    (folder / "rows.jsonl").write_text("row\n" * 50_000)  # compresses well
    (folder / "endless.log").write_bytes(b"first\n" + b"again and again\n" * 100_000 + b"last\n")
    assert archive.pack(folder, target, limit=100_000) == ["deep/large.ncu-rep"]
    assert target.stat().st_size <= 100_000
    files = contents(target)
    assert sorted(files) == ["endless.log", "medium.ncu-rep", "rows.jsonl"]
    assert files["endless.log"].startswith(b"first\n")
    assert files["endless.log"].endswith(b"last\n")
    assert len(files["endless.log"]) < archive.MOST_LOG + 100
    archive.unpack(target, tmp_path / "again")
    assert (tmp_path / "again" / "rows.jsonl").read_text() == "row\n" * 50_000
    with tarfile.open(target, "w:gz") as held:
        held.add(folder / "rows.jsonl", "../outside")
    with pytest.raises(tarfile.TarError, match=r"\.\./outside"):
        archive.unpack(target, tmp_path / "again")


def test_the_summary_is_one_screen_and_names_what_was_left_out(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "pack", lambda folder, target: ["huge.ncu-rep"])
    many = "for i in range(60): print('= line', i, 'x' * 300)"
    monkeypatch.setattr(sys.modules[__name__], "contents", lambda file: {})  # no archive is written here
    _, _, summary = fake(stage("talks", many), *(stage(f"s{i}", "print('= told')") for i in range(9)))
    lines = summary.splitlines()
    assert len(lines) <= gpu.SCREEN[0]
    assert max(map(len, lines)) <= gpu.SCREEN[1]
    assert "left out of the archive, which was full: huge.ncu-rep" in lines
    assert all(any(line.startswith(f"s{i}: passed") for line in lines) for i in range(9))
    assert any("more in its log" in line for line in lines)


def test_the_first_stages_fit_into_nine_minutes_and_every_later_one_into_a_call() -> None:
    assert sum(stage.seconds for stage in FIRST) + gpu.LAST <= 9 * 60
    assert max(stage.seconds for stage in LATER) + gpu.GRACE + FIRST[0].seconds + gpu.LAST <= 600
    names = [stage.name for stage in (*FIRST, *LATER, *SANITIZE)]
    assert len(names) == len(set(names))
    assert names[0] == stages.ENVIRONMENT


def test_racecheck_alone_runs_one_team_of_several_warps() -> None:
    assert [stage.name for stage in SANITIZE if "--one-team" in stage.arguments] == ["sanitize-cuda-racecheck"]


def test_stages_name_modules_files_and_options_that_exist() -> None:
    for each in (*FIRST, *LATER, *SANITIZE):
        assert each.arguments[0] == "-m"
        if each.arguments[1] == "pytest":
            assert all((ROOT / part).exists() for part in each.arguments if part.startswith("tests/"))
            continue
        path = ROOT / each.arguments[1].replace("pagedkv.bench", "bench").replace(".", "/")
        source = (path / "table.py" if path.is_dir() else path.with_suffix(".py")).read_text()
        for option in (part for part in each.arguments if part.startswith("--") and part != "--out"):
            assert f'"{option}"' in source, f"{path} takes no {option}"


def test_every_test_for_a_gpu_belongs_to_a_stage() -> None:
    """The last stages take the folder of all tests of kernels, without what other stages run."""
    parts = [part for each in LATER if each.arguments[1] == "pytest" for part in each.arguments]
    ignored = {part.removeprefix("--ignore=") for part in parts if part.startswith("--ignore=")}
    assert "tests/kernels" in parts
    assert ignored
    assert ignored <= set(parts)


def test_the_copy_of_the_checkout_is_what_setup_installs(tmp_path: Path) -> None:
    elsewhere = dict(re.findall(r'"(pagedkv\.[\w.]+)": "([\w/]+)"', (ROOT / "setup.py").read_text()))
    for module, folder in elsewhere.items():
        if module != "pagedkv.kernels.cuda_sources":  # csrc is copied beside the package, as in a checkout
            assert tree.HOMES[folder] == module.replace(".", "/")
    tree.copy(ROOT, tmp_path)
    code = "from pagedkv.kernels.cuda import compiler; compiler.sources()\n"
    code += "from pagedkv.bench import record; print(record.__file__, record.commit())"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert run.stdout.startswith(str(tmp_path / "pagedkv" / "bench"))
    assert run.stdout.strip().endswith(tree.commit(ROOT)), "rows name the commit, not the version"
    assert not (tmp_path / "pagedkv" / "bench" / "results").exists()
    assert tree.commit(tmp_path) == f"kernels {tree.digest(tmp_path)}", "a machine that has the files alone"
    assert tree.digest(ROOT) == tree.digest(ROOT)
    assert tree.digest(ROOT) != tree.digest(tmp_path)


def test_clocks_and_power_of_a_stage_are_those_logged_while_it_ran(tmp_path: Path) -> None:
    log = tmp_path / "clocks.csv"
    log.write_text(
        "2026/11/24 04:00:01.000, 345, 3201, 80.5, 30, 0x0\n"
        "2026/11/24 04:00:03.000, 1755, 3201, 610.2, 55, 0x4\n"
        "2026/11/24 04:00:04.000, 1980, 3201, 655.0, 57, 0x0\n"
        "2026/11/24 04:00:05.000, [N/A], 3201, [N/A], 57, 0x0\n"
        "2026/11/24 04:0"
    )
    at = time.mktime((2026, 11, 24, 4, 0, 2, 0, 0, -1))
    assert clocks.during(log, at, at + 10) == "SM 1755-1980 MHz, median 1868; 655 W"
    assert clocks.during(log, at + 60, at + 70) == ""
    assert clocks.during(tmp_path / "none.csv", at, at + 10) == ""


def test_this_machine_leaves_an_archive_and_a_summary(tmp_path: Path) -> None:
    """The rehearsal: the real stages, as far as a machine without a GPU goes."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = [sys.executable, "scripts/gpu.py", "--out", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1, run.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [gpu.ARCHIVE, gpu.SUMMARY]
    summary = (tmp_path / gpu.SUMMARY).read_text()
    assert "environment: FAILED" in summary
    assert "prediction: passed" in summary
    assert summary.count("needs a GPU, and torch finds no GPU on this machine") == len(FIRST) - 2
    assert "environment.json" in contents(tmp_path / gpu.ARCHIVE)
