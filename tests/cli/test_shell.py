"""The real thing, in a process of its own: entry points, stdin, pipes, and what --help may cost."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import typer.main

from pagedkv import __version__
from pagedkv.cli.app import app
from pagedkv.kernels import registry
from pagedkv.model.records import DEMO_ANSWER

ROOT = Path(__file__).parents[2]
PAGEDKV = (sys.executable, "-m", "pagedkv")


def shell(*argv, **options):
    return subprocess.run([*PAGEDKV, *argv], cwd=ROOT, capture_output=True, text=True, timeout=120, **options)


def test_the_command_answers_the_demo():
    run = shell("generate", stdin=subprocess.DEVNULL)
    assert (run.returncode, run.stdout) == (0, DEMO_ANSWER + "\n")
    assert "tokens/s" in run.stderr


def test_a_pipe_is_read_and_so_is_a_dash():
    piped = shell("generate", "--json", input="Otto lives in Ghent. Where does Otto live?\n")
    assert json.loads(piped.stdout)["text"] == "Otto lives in Ghent."
    empty = shell("generate", "-", input="\n")
    assert (empty.returncode, empty.stdout) == (2, "")
    assert empty.stderr == "pagedkv: error: the prompt on stdin is empty; give at least one character\n"


def test_a_reader_that_goes_away_is_no_drama():
    with subprocess.Popen(
        [*PAGEDKV, "generate", "--json"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout
        assert run.stderr
        run.stdout.close()
        assert run.stderr.read() == ""
    assert run.returncode == 1


def test_help_loads_no_torch():
    asked = "import sys\nfrom pagedkv.cli.app import main\ntry: main(['generate', '--help'])\nexcept SystemExit: print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", asked], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "--num-samples" in run.stdout
    assert not {"torch", "numba", "numpy"} & set(run.stdout.splitlines()[-1].split())


def test_the_project_names_the_entry_point():
    assert 'pagedkv = "pagedkv.cli.app:main"' in (ROOT / "pyproject.toml").read_text()


def test_without_a_command_there_is_help(command):
    assert "generate" in command().out
    assert command("--version") == (0, f"pagedkv {__version__}\n", "")


def test_the_manual_has_every_option_and_no_other():
    generate = typer.main.get_command(app).commands["generate"]
    there = {name for parameter in generate.params for name in parameter.opts if name.startswith("--")} - {"--help"}
    page = (ROOT / "docs/reference/command-line.md").read_text()
    section = page.split("## Options of generate")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(--[\w-]+)", section, re.M)
    assert sorted(rows) == sorted(there)


# --- doctor ---------------------------------------------------------------------------------------------------------------------------


def test_doctor_says_which_kernels_can_run_and_why_not(command, monkeypatch):
    picky = registry.Kernel("picky", None, "pagedkv.kernels.reference", lambda case: ["it needs a moon", "it is day"])
    monkeypatch.setattr(registry, "KERNELS", (picky, *registry.KERNELS))
    status, out, err = command("doctor")
    assert (status, err) == (0, "")
    assert re.search(r"picky +cannot: it needs a moon; it is day", out)
    assert re.search(r"reference +can run", out)
    assert all(kernel.name in out for kernel in registry.KERNELS)


def test_doctor_says_what_is_here(command, monkeypatch):
    import numpy
    import torch

    monkeypatch.setenv("PAGEDKV_DEBUG", "2")
    out = command("doctor").out
    facts = dict(re.findall(r"^  (\w[\w:-]*(?: \w+)?) {2,}(.*?) *$", out, re.M))
    assert facts["torch"] == torch.__version__
    assert facts["numpy"] == numpy.__version__
    assert facts["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert "debug level 2" in facts["pagedkv"]
    assert f"{torch.get_num_threads()} of torch" in facts["threads"]
    assert {"extension", "triton", "cpu", "memory", "huge pages"} <= set(facts)
