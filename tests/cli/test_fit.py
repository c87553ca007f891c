"""`pagedkv fit`: the figures of a model or of numbers, as tables and as JSON, and refused arguments."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import suppress

import pytest

from pagedkv.cli import machine
from pagedkv.engine.checkpoint import BUNDLED

from . import hostile

TEXTBOOK = ("--layers", 80, "--kv-heads", 64, "--head-dim", 128, "--dtype", "float16", "--context", 100_000)


@pytest.fixture
def fit(command):
    """Return a function that runs `pagedkv fit --json` and returns the object."""

    def run(*argv):
        memory = () if "--memory" in argv else ("--memory", "1GB")  # else this machine's would be measured
        status, out, err = command("fit", "--json", *argv, *memory)
        assert (status, err) == (0, "")
        return json.loads(out)

    return run


@pytest.fixture
def config(tmp_path):
    """Return a function that writes a folder with a changed config.json of the bundled checkpoint, and no weights."""

    def write(**changes):
        values = json.loads((BUNDLED / "config.json").read_text()) | changes
        (tmp_path / "config.json").write_text(json.dumps(values))
        return tmp_path

    return write


def test_the_textbook_case_comes_out(command, fit):
    asked = (*TEXTBOOK, "--memory", "1600GB", "--weights", "16GB", "--bandwidth", "3.35TB/s")
    found, shown = fit(*asked), command("fit", *asked).out
    assert (found["bytes_per_token"], found["context_bytes"]) == (2_621_440, 262_144_000_000)
    assert found["num_frames"] == 1584 * 10**9 // found["frame_bytes"]
    assert found["longest_context"] == 16 * found["num_frames"]
    assert found["sequences"] == found["num_frames"] // 6250 == 6
    for count, which in ((1, "one"), (6, "all")):
        bound = count * 3.35e12 / (16e9 + count * 262_144_000_000)
        assert found[f"tokens_per_s_of_{which}"] == pytest.approx(bound, abs=1e-3)
    lines = (
        r"a token +2\.621 MB \(2,621,440 bytes\)",
        r"100,000 tokens +262\.1 GB in 6,250 frames",
        r"memory +1\.6 TB, read at 3\.35 TB/s",
        r"longest context +604,240 tokens",
        r"at once +6 sequences of 100,000 tokens, in 37,765 frames",
        r"speed +at most 12\.0 tokens/s of one sequence, 12\.7 of 6",
    )
    for line in lines:
        assert re.search(rf"^{line} *$", shown, re.M), shown


def test_without_options_the_memory_is_that_of_this_machine_and_its_speed_is_measured(command, fit):
    found = json.loads(command("fit", "--json").out)
    assert 0 < found["memory_bytes"] < 2**50
    assert 10**8 < found["memory_bytes_per_s"] < 10**14
    assert fit("--memory", "1GB")["memory_bytes_per_s"] is None
    shown = command("fit", "--memory", "24").out  # 24 bytes, in which nothing fits
    assert re.search(r"^memory +24 bytes *$", shown, re.M)
    assert "speed" not in shown
    assert "give --bandwidth SIZE" in command("fit", "--memory", "1GB").out
    assert "unknown, counted as none; give --weights SIZE" in command("fit", *TEXTBOOK, "--memory", "1GB").out


def test_weights_that_fill_the_memory_are_named(command):
    out = command("fit", *TEXTBOOK, "--memory", "10GB", "--weights", "16GB").out
    assert "none: the weights alone fill the memory; give more --memory" in " ".join(out.split())


def test_without_memory_nothing_is_measured_and_what_linux_can_drop_is_free(command, monkeypatch):
    texts = {"/proc/meminfo": "MemTotal: 4 kB\nMemAvailable: 3 kB", "/sys/fs/cgroup/memory.stat": "inactive_file 500"}
    texts |= {"/sys/fs/cgroup/memory.max": "2048", "/sys/fs/cgroup/memory.current": "2000"}
    monkeypatch.setattr(machine, "_text", lambda path: texts.get(path, ""))
    assert machine.memory() == (548, 2048)
    found = json.loads(command("fit", "--json").out)
    assert (found["memory_bytes"], found["memory_bytes_per_s"], found["sequences"]) == (548, None, 0)
    texts.clear()
    assert "memory           0 bytes free on this machine" in command("fit").out
    texts["/proc/meminfo"] = "MemAvailable: 8192 kB"
    monkeypatch.delattr("os.sched_getaffinity")  # as on macOS
    assert json.loads(command("fit", "--json").out)["memory_bytes_per_s"] > 0


def test_a_folder_its_config_and_the_default_are_one_model(fit, config):
    folder = config()
    found = [fit(), *(fit("--model", path) for path in (folder, folder / "config.json"))]
    for each in found:
        each.pop("model")
    assert found[0] == found[1] == found[2]
    assert (found[0]["context"], found[0]["longest_context"]) == (8192, 8192)
    assert found[0]["weight_bytes"] == 9_225_216


def test_windows_are_counted_in_layer_groups(fit, command, config):
    folder = config(model_type="gemma2", sliding_window=1024)
    found = fit("--model", folder)
    assert found["windows"] == [[None, 2], [1024, 2]]
    assert found["context_frames"] == 8192 // 16 + (1023 + 2048) // 16 + 2
    assert fit("--model", folder, "--prefill-chunk", 1)["context_frames"] == 8192 // 16 + 1024 // 16 + 1
    assert fit("--model", folder, "--prefill-chunk", 4096) == found  # a step has 2,048 tokens
    assert (
        "layer groups     2 of no window, 2 of window 1,024" in command("fit", "--model", folder, "--memory", "1GB").out
    )
    windows = ("--layers", 4, "--kv-heads", 2, "--head-dim", 8, "--window", 64)
    assert fit(*windows)["longest_context"] is None
    assert "no limit" in command("fit", *windows, "--memory", "1GB").out


def test_options_change_the_figures(fit):
    plain = fit()
    assert fit("--dtype", "float32")["bytes_per_token"] == 2 * plain["bytes_per_token"]
    for kind, share in (("int8", 1 / 2), ("k8v4", 3 / 8), ("k5v4", 9 / 32)):
        assert fit("--kv-dtype", kind)["bytes_per_token"] == plain["bytes_per_token"] * share + 4 * 2 * 2 * 2
    assert (
        fit("--weights", "int8")["weight_bytes"] < plain["weight_bytes"] == fit("--weights", 9_225_216)["weight_bytes"]
    )
    assert fit("--block-size", 24)["frame_bytes"] == 24 * 4096
    latents = fit("--layers", 61, "--kv-heads", 1, "--head-dim", 576, "--value-in-key")
    assert latents["bytes_per_token"] == 61 * 576 * 2


def test_quantised_weights_need_their_size(command, fit, config):
    folder = config(quantization_config={"quant_method": "awq"})
    err = command("fit", "--model", folder).err
    assert "the weights are quantised (quantization_config); give their bytes, such as --weights 40GB" in err
    assert fit("--model", folder, "--weights", "5MB")["weight_bytes"] == 5_000_000


@pytest.mark.parametrize("changes", [{"model_type": "deepseek_v3"}, {"num_hidden_layers": 10**9}, {"head_dim": 7}])
def test_a_config_that_is_not_understood_is_refused_with_a_way_out(command, config, changes):
    status, out, err = command("fit", "--model", config(**changes))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "; or give numbers: --layers, --kv-heads and --head-dim" in err


@pytest.mark.parametrize("name", hostile.CHECKPOINTS)
def test_a_hostile_checkpoint_gives_figures_or_one_line(command, tmp_path, name):
    folder = shutil.copytree(BUNDLED, tmp_path / "checkpoint", ignore=shutil.ignore_patterns("*.safetensors", "*.svg"))
    with suppress(FileNotFoundError):  # an edit of the weights, which `fit` does not read
        hostile.CHECKPOINTS[name][0](folder)
    status, out, err = command("fit", "--model", folder, "--memory", "80GB", "--bandwidth", "1TB", "--json")
    assert (status, out, err.count("\n"), err[:15]) == (2, "", 1, "pagedkv: error:") or (status, err) == (0, "")
    if status == 0:
        shown = command("fit", "--model", folder, "--memory", "80GB", "--bandwidth", "1TB")
        assert (shown.status, shown.err) == (0, "")
        assert json.loads(out)["weight_bytes"] > 0
