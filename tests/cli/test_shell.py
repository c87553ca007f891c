"""Entry points, --help and the manual, `doctor`, `warm` and `replay`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from pagedkv import __version__
from pagedkv.cli.app import app
from pagedkv.core import warm
from pagedkv.core.compiled import MACHINE_CODE
from pagedkv.kernels import registry

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["generate", "serve", "fit", "doctor", "warm", "replay", "bench manager", "bench"])
def test_help_shows_no_value_of_a_flag_and_ends_with_an_example(command, name):
    status, out, err = command(*name.split(), "--help")
    assert (status, err) == (0, "")
    assert "<bool>" not in out
    assert re.search(rf"Example: pagedkv {name}[^│╰]*$", out) or name.startswith("bench")


def test_help_loads_no_torch():
    script = "import sys; from pagedkv.cli.app import invoke; invoke(['generate', '--help']); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "--num-samples" in run.stdout
    assert not {"torch", "numba", "numpy"} & set(run.stdout.splitlines()[-1].split())


def test_without_a_command_help_is_printed(command):
    assert "generate" in command().out
    assert command("--version") == (0, f"pagedkv {__version__}\n", "")


@pytest.mark.parametrize(("name", "heading"), [("generate", "## Options of generate"), ("fit", "## pagedkv fit")])
def test_the_manual_has_every_option_and_no_other(name, heading):
    command = typer.main.get_command(app).commands[name]
    options = {name for parameter in command.params for name in parameter.opts if name.startswith("--")} - {"--help"}
    page = (ROOT / "docs/reference/command-line.md").read_text()
    section = page.split(heading)[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(--[\w-]+)", section, re.M)
    assert sorted(rows) == sorted(options)


def test_doctor_lists_kernels_and_the_objections_to_them(command, monkeypatch):
    picky = registry.Kernel(
        "picky", None, "pagedkv.kernels.reference", lambda case: ["needs another CPU", "needs float16"]
    )
    monkeypatch.setattr(registry, "KERNELS", (picky, *registry.KERNELS))
    status, out, err = command("doctor")
    assert (status, err) == (0, "")
    assert re.search(r"picky +cannot: needs another CPU; needs float16", out)
    assert re.search(r"reference +can run", out)
    assert all(kernel.name in out for kernel in registry.KERNELS)


def test_doctor_lists_facts_about_the_machine(command, monkeypatch):
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


def test_warm_compiles_everything_and_says_where(command, monkeypatch):
    out = command("warm").out
    assert re.search(
        r"memory manager +\d+\.\d s\nframe pool +\d+\.\d s\nstates +\d+\.\d s\nnumba kernels +\d+\.\d s\n", out
    )
    assert "compiled functions are kept in" in out
    monkeypatch.setattr(MACHINE_CODE, "folder", None)
    out = warm.place()
    assert "no folder can be written: each process compiles in memory; set PAGEDKV_CACHE_DIR" in out


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps({"hash_ids": ids}) for ids in ([0, 1], [2, 3], [0, 1, 4], [2, 3, 5])))
    return path


def test_json_is_a_list_with_a_row_for_each_size_and_policy(command, trace):
    status, out, err = command(
        "replay", trace, "--json", "--num-frames", 6, "--num-frames", 3, "--policy", "lru", "--policy", "belady"
    )
    assert (status, err) == (0, "")
    rows = json.loads(out)
    assert [(row["num_frames"], row["policy"], row["hit_rate"]) for row in rows] == [
        (3, "lru", 0.1),
        (3, "belady", 0.3),
        (6, "lru", 0.4),
        (6, "belady", 0.4),
    ]
    assert rows[-1]["hit_rate_last_half"] == 4 / 6


def test_without_a_size_the_pool_holds_everything(command, trace):
    assert json.loads(command("replay", trace, "--json").out)[0]["num_frames"] == 6


def test_memory_is_counted_in_blocks_of_512_tokens(command, trace):
    (row,) = json.loads(command("replay", trace, "--json", "--memory", "3MiB", "--bytes-per-token", 1024).out)
    assert row["num_frames"] == 6


def test_the_table_names_every_policy(command, trace):
    status, out, _ = command("replay", trace, "--policy", "all", "--num-frames", 10**12)
    assert status == 0
    for name in ("lru", "2q", "lfu", "cost", "belady", "0.400"):
        assert name in out


def test_a_tier_is_a_number_of_frames_or_a_multiple_of_the_pool(command, trace):
    for tier in ("6", "3x"):
        (row,) = json.loads(command("replay", trace, "--json", "--num-frames", 2, "--tier", tier).out)
        assert (row["tier_frames"], row["hit_rate"]) == (6, 0.4)
        assert row["loaded"] == 4
    assert "below" in command("replay", trace, "--num-frames", 2, "--tier", "3x").out
