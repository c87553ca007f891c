"""`pagedkv fit`: the figures of a model or of numbers, as tables and as JSON, and refused arguments."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import suppress

import pytest

from pagedkv.engine.checkpoint import BUNDLED

from . import hostile

TEXTBOOK = ("--layers", 80, "--kv-heads", 64, "--head-dim", 128, "--dtype", "float16", "--context", 100_000)


@pytest.fixture
def fit(command):
    """Return a function that runs `pagedkv fit --json` and returns the object."""

    def run(*argv):
        status, out, err = command("fit", "--json", *argv)
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
    found = fit(*TEXTBOOK)
    assert (found["bytes_per_token"], found["context_bytes"]) == (2_621_440, 262_144_000_000)
    assert (found["weight_bytes"], found["gpus"]) == (None, [])
    shown = command("fit", *TEXTBOOK).out
    assert re.search(r"^a token +2\.62 MB", shown, re.M)
    assert re.search(r"^100,000 tokens +262 GB in 6,250 frames", shown, re.M)


def test_each_number_of_gpus_that_shares_the_heads_has_a_row(fit):
    rows = fit(*TEXTBOOK, "--memory", "80GB", "--gpus", 8, "--bandwidth", "3.35TB/s", "--weights", "16GB")["gpus"]
    assert [row["gpus"] for row in rows] == [1, 2, 4, 8]
    eight = rows[-1]
    assert (eight["weight_bytes"], eight["bytes_per_token"]) == (2_000_000_000, 2_621_440 // 8)
    assert eight["num_frames"] == 78 * 10**9 // (2 * 2_621_440)
    assert eight["longest_context"] == 16 * eight["num_frames"]
    assert eight["sequences"] == eight["num_frames"] // 6250 == 2
    of_one = 3.35e12 / (2e9 + 100_000 * 2_621_440 / 8)
    assert eight["tokens_per_s_of_one"] == pytest.approx(of_one, abs=1e-3)
    assert eight["tokens_per_s_of_all"] == pytest.approx(2 * 3.35e12 / (2e9 + 2 * 32_768_000_000), abs=1e-3)
    assert (rows[0]["sequences"], rows[0]["tokens_per_s_of_one"]) == (0, None)


def test_tables_show_the_figures_of_the_object(command, fit):
    options = (*TEXTBOOK, "--memory", "80GB", "--gpus", 8, "--bandwidth", "3.35TB")
    found, shown = fit(*options), command("fit", *options).out
    for row in found["gpus"]:
        cells = [f"{row[name]:,}" for name in ("gpus", "num_frames", "longest_context", "sequences")]
        assert re.search(" .*".join(cells), shown)
    assert "weights         unknown, counted as none; give --weights SIZE" in shown


def test_a_folder_its_config_and_the_default_are_one_model(fit, config):
    folder = config()
    asked = ("--memory", "1GB")
    found = [fit(*asked), *(fit(*asked, "--model", path) for path in (folder, folder / "config.json"))]
    for each in found:
        each.pop("model")
    assert found[0] == found[1] == found[2]
    assert (found[0]["context"], found[0]["gpus"][0]["longest_context"]) == (8192, 8192)
    assert found[0]["weight_bytes"] == 9_225_216


def test_windows_are_counted_in_layer_groups(fit, command, config):
    folder = config(model_type="gemma2", sliding_window=1024)
    found = fit("--model", folder)
    assert found["windows"] == [[None, 2], [1024, 2]]
    assert found["context_frames"] == 8192 // 16 + (1023 + 2048) // 16 + 2
    assert fit("--model", folder, "--prefill-chunk", 1)["context_frames"] == 8192 // 16 + 1024 // 16 + 1
    assert fit("--model", folder, "--prefill-chunk", 4096) == found  # a step has 2,048 tokens
    assert "layer groups  2 of no window, 2 of window 1,024" in command("fit", "--model", folder).out
    windows = ("--layers", 4, "--kv-heads", 2, "--head-dim", 8, "--window", 64, "--memory", "1GB")
    assert fit(*windows)["gpus"][0]["longest_context"] is None
    assert "no limit" in command("fit", *windows).out


def test_options_change_the_figures(fit):
    plain = fit("--memory", "1GB")
    assert fit("--dtype", "float32")["bytes_per_token"] == 2 * plain["bytes_per_token"]
    assert fit("--kv-dtype", "int8")["bytes_per_token"] == plain["bytes_per_token"] // 2 + 4 * 2 * 2 * 4
    assert (
        fit("--weights", "int8")["weight_bytes"] < plain["weight_bytes"] == fit("--weights", 9_225_216)["weight_bytes"]
    )
    assert fit("--block-size", 24)["frame_bytes"] == 24 * 4096
    latents = fit("--layers", 61, "--kv-heads", 1, "--head-dim", 576, "--head-dim-v", 512, "--value-in-key")
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


def test_a_name_is_looked_up_in_the_cache_of_the_hub(fit, command, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--owner--name"
    shutil.copytree(BUNDLED, folder / "snapshots/abc")
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text("abc")
    assert fit("--model", "owner/name")["weight_bytes"] == 9_225_216
    question = "Otto lives in Ghent. Where does Otto live?"
    assert command("generate", "--model", "owner/name", "--prompt", question).out == "Otto lives in Ghent.\n"


def test_the_memory_is_shown_as_it_was_understood(command, fit):
    """24 without a unit is 24 bytes, in which nothing fits."""
    assert re.search(r"^memory +24 bytes of a GPU *$", command("fit", "--memory", "24").out, re.M)
    assert fit("--memory", "24GB")["memory_bytes"] == 24_000_000_000
    assert fit()["memory_bytes"] is None
