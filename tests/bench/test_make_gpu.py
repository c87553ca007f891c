"""`make gpu` without a GPU: fake stages that end in each way, the list of the real ones, and a rehearsal of them."""

from __future__ import annotations

import re
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))  # as Python does that runs a script

from on_gpu import stages, tree  # noqa: E402
from on_gpu.stages import FIRST, LATER, SANITIZE, Stage  # noqa: E402
from scripts import gpu  # noqa: E402


def stage(name: str, code: str, seconds: float = 20, **more: Any) -> Stage:
    return Stage(name, ("-c", code, "{out}"), seconds, **{"needs": ()} | more)


def contents(file: Path) -> dict[str, bytes]:
    with tarfile.open(file) as held:
        members = {member.name: held.extractfile(member) for member in held.getmembers()}
        return {name: file.read() for name, file in members.items() if file}


def test_a_stage_that_fails_hangs_or_is_killed_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hangs = "import subprocess, sys; print('began', flush=True); "
    hangs += "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).wait()"
    good = "import os, sys; print('= fine', {'PAGEDKV_DEBUG'} & {*os.environ}); open(f'{sys.argv[1]}/rows', 'w')"
    fakes = (
        stage("environment", "print('torch finds no GPU here'); raise SystemExit(1)"),
        stage("broken", "print('so far'); raise SystemExit(3)"),
        stage("hangs", hangs, 5),
        stage("killed", "import os, signal; print('half', flush=True); os.kill(os.getpid(), signal.SIGKILL)"),
        stage("tool", "", needs=("program:no-such-tool-anywhere",)),
        stage("module", "", needs=("no_such_module",)),
        stage("gpu", "", needs=("gpu",)),
        stage("empty", "print('7 skipped in 1 s')"),
        stage("talks", "for i in range(60): print('= line', i, 'x' * 300)"),
        stage("good", good),
        stage("stops", "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"),
    )
    monkeypatch.setattr(tree, "copy", lambda root, target: target.mkdir())
    monkeypatch.setattr(gpu, "FIRST", fakes)
    monkeypatch.setenv("PAGEDKV_DEBUG", "3")
    began = time.monotonic()
    with pytest.raises(SystemExit, match="143"):  # a run that is killed leaves the stages before
        gpu.main(["--out", str(tmp_path)])
    assert time.monotonic() - began < 40, "the worker of the stage that hung was not ended"
    summary, files = (tmp_path / gpu.SUMMARY).read_text(), contents(tmp_path / gpu.ARCHIVE)
    lines = re.sub(r"(FAILED|passed|out of time), \d+ s", r"\1, N s", summary).splitlines()
    for text in (
        "broken: FAILED, N s: status 3: so far",
        "killed: FAILED, N s: killed by SIGKILL: half",
        "tool: not run, 0 s: needs no-such-tool-anywhere, which is not on the PATH",
        "module: not run, 0 s: needs the module no_such_module, which this Python lacks",
        "gpu: not run, 0 s: needs a GPU, and torch finds no GPU here",
        "empty: FAILED, N s: nothing ran: 7 skipped in 1 s",
        "talks: passed, N s",
        "  ... more in its log",
        "good: passed, N s",
    ):
        assert text in lines, summary
    assert any(line.startswith("hangs: out of time, N s: after 5 s; ") for line in lines)
    assert max(map(len, summary.splitlines())) == gpu.COLUMNS
    assert files["hangs.log"].startswith(b"began\n")
    assert files["good.log"] == b"= fine set()\n", "the checks of a debugger would be measured"
    assert "rows" in files
    assert files[gpu.SUMMARY].decode() == summary


def test_stages_fit_into_a_call_and_name_modules_files_and_options_that_exist() -> None:
    every = (*FIRST, *LATER, *SANITIZE)
    assert sum(stage.seconds for stage in FIRST) + gpu.LAST <= 9 * 60
    assert max(stage.seconds for stage in LATER) + gpu.GRACE + FIRST[0].seconds + gpu.LAST <= 600
    assert FIRST[0].name == stages.ENVIRONMENT
    assert len({stage.name for stage in every}) == len(every)
    assert [stage.name for stage in SANITIZE if "--one-team" in stage.arguments] == ["sanitize-cuda-racecheck"]
    for each in every:
        assert each.arguments[0] == "-m"
        if each.arguments[1] == "pytest":
            assert all((ROOT / part).exists() for part in each.arguments if part.startswith("tests/"))
            continue
        path = ROOT / each.arguments[1].replace("pagedkv.bench", "bench").replace(".", "/")
        source = path.with_suffix(".py").read_text()
        for option in (part for part in each.arguments if part.startswith("--") and part != "--out"):
            assert f'"{option}"' in source, f"{path} takes no {option}"
    # the last stages take the folder of all tests of kernels, without what other stages run
    parts = [part for each in LATER if each.arguments[1] == "pytest" for part in each.arguments]
    assert "tests/kernels" in parts
    assert {part.removeprefix("--ignore=") for part in parts if part.startswith("--ignore=")} <= {*parts}
