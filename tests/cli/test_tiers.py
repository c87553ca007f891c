"""`--tier`: prompts come back from host memory or a disk with the same text; bad input is one line and status 2."""

from __future__ import annotations

import errno
import json
import os

import pytest

from tests.records import DEMO_ANSWER

PAGES_OF_THE_DEMO = 18
"""Whole pages of its prompt, of 16 tokens each."""


@pytest.fixture
def refused(command):
    """Return a function that runs `pagedkv` with a bad tier and returns the error message."""

    def run(tier, *argv, subcommand="generate"):
        status, out, err = command(subcommand, *argv, "--tier", tier)
        assert (status, out) == (2, "")
        assert err.startswith("pagedkv: error: ")
        assert (err.count("\n"), err[-1]) == (1, "\n")
        return err.removeprefix("pagedkv: error: ")

    return run


def generated(command, *argv):
    """Run the demo, which must give its answer, and return how many tokens of the prompt were found."""
    status, out, err = command("generate", "--json", *argv)
    found = json.loads(out)
    assert (status, err, found["text"]) == (0, "", DEMO_ANSWER)
    return found["usage"]["cached_tokens"]


def test_the_text_over_a_host_tier_is_the_same(command):
    assert generated(command, "--tier", "host:64MiB") == 0


def test_a_folder_serves_the_next_process_and_a_key_keeps_others_out(command, tmp_path, monkeypatch):
    folder = ("--tier", "host:1MiB", "--tier", f"disk:64MiB:{tmp_path / 'new' / 'folder'}")
    assert [generated(command, *folder) for _ in range(2)] == [0, 16 * PAGES_OF_THE_DEMO]
    monkeypatch.setenv("PAGEDKV_TIER_KEY", "a secret of 16 bytes")
    assert [generated(command, *folder) for _ in range(2)] == [0, 16 * PAGES_OF_THE_DEMO]


def test_a_disk_that_runs_full_costs_its_pages_and_no_text(command, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    assert generated(command, "--tier", f"disk:64MiB:{tmp_path}") == 0
    monkeypatch.undo()
    assert generated(command, "--tier", f"disk:64MiB:{tmp_path}") == 0


@pytest.mark.parametrize(
    ("tier", "complaint"),
    {
        "host": "a tier is 'host'",
        "tape:1GiB": "a tier is 'tape:1GiB'; give host:SIZE, disk:SIZE",
        "host:1GiB:here": "a tier is 'host:1GiB:here'",
        "disk:1GiB": "a tier is 'disk:1GiB'",
        "host:lots": "'lots' is not an amount of memory",
        "host:-1GiB": "not an amount of memory",
        "host:1KiB": "has 1024 bytes and a frame needs",
        "host:1024TiB": "the memory of this machine",
        "disk:lots:FOLDER": "'lots' is not an amount of memory",
        "disk:1KiB:FOLDER": "has 1024 bytes and a frame needs",
        "disk:1024TiB:FOLDER": "pages, and a tier holds fewer than 2147483648",
        "disk:64MiB:FOLDER/file/in": "cannot be used: FOLDER/file/in: Not a directory",
        "disk:64MiB:/proc/pagedkv": "cannot be used: /proc/pagedkv: No such file or directory",
    }.items(),
)
def test_a_tier_that_cannot_be_made_is_a_line(refused, tier, complaint, tmp_path):
    (tmp_path / "file").write_text("")
    said = refused(tier.replace("FOLDER", str(tmp_path)))
    assert complaint.replace("FOLDER", str(tmp_path)) in said


def test_a_folder_without_the_right_to_write_is_a_line(refused, tmp_path):
    (tmp_path / "mine").mkdir(0o500)
    if os.access(tmp_path / "mine", os.W_OK):
        pytest.skip("this user may write everywhere")
    assert "Permission denied; give a folder of its own" in refused(f"disk:64MiB:{tmp_path / 'mine'}")


@pytest.mark.skipif(not os.access("/proc", os.W_OK), reason="this user may not write there, and is told so")
def test_a_folder_in_which_no_file_can_be_made_is_not_taken_for_a_busy_one(refused):
    assert refused("disk:1GiB:/proc") == (
        "a tier of disk:1GiB:/proc cannot be used: /proc: no file can be made in this folder; "
        "give a folder of its own, on a disk with room\n"
    )


def test_a_disk_that_is_full_at_the_start_is_a_line(refused, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    said = refused(f"disk:64MiB:{tmp_path}")
    assert f"a tier of disk:64MiB:{tmp_path} cannot be used: No space left on device; give a folder" in said
    monkeypatch.undo()
    assert sorted(path.suffix for path in tmp_path.iterdir() if path.suffix == ".json") == []


def test_a_short_key_is_a_line(refused, tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEDKV_TIER_KEY", "short")
    assert "key is not 16 to 64 bytes" in refused(f"disk:64MiB:{tmp_path}")


def test_serve_refuses_a_bad_tier_before_it_listens(refused):
    assert "'lots' is not an amount of memory" in refused("host:lots", "--port", 1, subcommand="serve")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("much",), "such as 8x"),
        (("-1",), "such as 8x"),
        (("8y",), "such as 8x"),
        (("1.5x",), "such as 8x"),
        (("8x", "--policy", "belady"), "know no tier"),
    ],
)
def test_a_bad_tier_of_a_replay_is_a_line(refused, options, complaint, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"hash_ids": [0, 1]}))
    assert complaint in refused(options[0], trace, *options[1:], subcommand="replay")
