"""`pagedkv replay`: the table, the JSON, and refused arguments."""

from __future__ import annotations

import json

import pytest


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
