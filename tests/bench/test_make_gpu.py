"""`make gpu` without a GPU: fake stages that end in each way, the list of the real ones, and cases without pytest."""

from __future__ import annotations

import re
import struct
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))  # as Python does that runs a script

from on_gpu import stages, tree  # noqa: E402
from on_gpu.stages import CALLS, LATER, SANITIZE, Stage  # noqa: E402
from scripts import gpu, gpu_kit  # noqa: E402
from tests.cases import GRID, SMALL  # noqa: E402
from tests.kernels import by_hand  # noqa: E402

SLEEP = "import subprocess, sys; print('began', flush=True); "
SLEEP += "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).wait()"
GOOD = "import os, sys; print('= fine', {'PAGEDKV_DEBUG'} & {*os.environ}); open(f'{sys.argv[1]}/rows', 'w')"


def stage(name: str, code: str, seconds: float = 20, **more: Any) -> Stage:
    return Stage(name, ("-c", code, "{out}"), seconds, **{"needs": ()} | more)


def test_a_stage_that_fails_hangs_or_is_killed_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fakes = (
        stage("environment", "print('torch finds no GPU here'); raise SystemExit(1)"),
        stage("broken", "print('so far'); raise SystemExit(3)"),
        stage("hangs", SLEEP, 5),
        stage("killed", "import os, signal; print('half', flush=True); os.kill(os.getpid(), signal.SIGKILL)"),
        stage("gpu", "", needs=("gpu",)),
        stage("good", GOOD),
        stage("packed", "import packed", needs=("packed",), kit="good"),
        stage("lacks", "", needs=("packed",), kit="none"),
        stage("stops", "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"),
    )
    monkeypatch.setattr(tree, "copy", lambda root, target: target.mkdir())
    monkeypatch.setattr(gpu, "CALLS", {"call1": fakes})
    for module, name in ((gpu, "KIT"), (gpu_kit, "KIT"), (gpu_kit, "ROOT")):
        monkeypatch.setattr(module, name, tmp_path)
    gpu_kit.pack("good", iter([("packed/__init__.py", b"print('= unpacked')")]))
    monkeypatch.setenv("PAGEDKV_DEBUG", "3")
    began = time.monotonic()
    with pytest.raises(SystemExit, match="143"):  # a run that is killed leaves the stages before
        gpu.main(["--out", str(tmp_path)])
    assert time.monotonic() - began < 40, "the worker of the stage that hung was not ended"
    summary = (tmp_path / gpu.SUMMARY).read_text()
    lines = re.sub(r"(FAILED|passed|out of time), \d+ s", r"\1, N s", summary).splitlines()
    for text in (
        "broken: FAILED, N s: status 3: so far",
        "killed: FAILED, N s: killed by SIGKILL: half",
        "gpu: not run, 0 s: needs a GPU, and torch finds no GPU here",
        "good: passed, N s",
        "  unpacked",
        "lacks: not run, 0 s: needs the module packed, which this Python lacks; make gpu-kit packs it into none.tar.xz",
    ):
        assert text in lines, summary
    assert any(line.startswith("hangs: out of time, N s: after 5 s; ") for line in lines)
    with tarfile.open(tmp_path / gpu.ARCHIVE) as held:
        assert {"rows", "hangs.log", "good.log", gpu.SUMMARY} <= set(held.getnames())
        log = held.extractfile("good.log")
        assert log is not None
        assert log.read() == b"= fine set()\n", "the checks of a debugger would be measured"


def test_stages_fit_into_a_call_and_name_modules_files_and_options_that_exist() -> None:
    assert sum(stage.seconds for call in CALLS.values() for stage in call) + 3 * gpu.LAST <= 14 * 60
    assert {call[0].name for call in CALLS.values()} == {stages.ENVIRONMENT}
    assert max(stage.seconds for stage in LATER) + gpu.GRACE + CALLS["call1"][0].seconds + gpu.LAST <= 600
    every = {stage for group in (*CALLS.values(), LATER, SANITIZE) for stage in group}
    assert len({stage.name for stage in every}) == len(every)
    for each in every:
        assert each.arguments[0] == "-m"
        if each.arguments[1] == "pytest":
            assert "pytest" in each.needs
            assert all((ROOT / part).exists() for part in each.arguments if part.startswith("tests/"))
            continue
        path = ROOT / each.arguments[1].replace("pagedkv.bench", "bench").replace(".", "/")
        source = path.with_suffix(".py").read_text()
        for option in (part for part in each.arguments if part.startswith("--") and part != "--out"):
            assert f'"{option}"' in source, f"{path} takes no {option}"


def test_a_library_of_the_kit_keeps_the_device_code_of_one_architecture() -> None:
    def container(*archs: int) -> bytes:
        entries = b"".join(struct.pack("<HHIQ12xI32x", 2, 257, 64, 8, arch) + b"%08d" % arch for arch in archs)
        return gpu_kit.CONTAINER + struct.pack("<Q", len(entries)) + entries

    packed = container(90)
    empty = bytes(len(container(80, 90, 120)) - len(packed))
    thin = gpu_kit.thinned(b"host" + container(80, 90, 120) + b"host" + container(80) + b"host")
    assert thin == b"host" + packed + empty + b"host" + container(80).replace(b"00000080", bytes(8)) + b"host"


def test_cases_without_pytest_are_judged_as_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(by_hand, "SMALL", SMALL[:3])
    monkeypatch.setattr(by_hand, "GRID", GRID[:1])
    asked = ["by_hand", "--backend", "reference", "--device", "cpu", "--cases", "grid"]
    monkeypatch.setattr(sys, "argv", [*asked, "small", "--jobs", "2"])
    assert by_hand.main() == 0
    assert capsys.readouterr().out.splitlines()[-1] == "4 cases, 0 failed"
    monkeypatch.setattr(by_hand, "ratios", lambda *of: {"out": 0.5, "lse": float("nan")})
    monkeypatch.setattr(sys, "argv", asked)
    assert by_hand.main() == 1
