"""`pagedkv why`: two prompts side by side."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def why(command, tmp_path):
    """Return a function that compares two texts, and returns the lines of `pagedkv why`."""

    def run(*texts, options=()):
        files = [tmp_path / name for name in ("first", "second")]
        for file, text in zip(files, texts, strict=True):
            file.write_text(text)
        status, out, err = command("why", *files, *options)
        assert (status, err) == (0, "")
        return out.splitlines()

    return run


def test_the_first_difference_is_shown_with_its_place(why):
    lines = why("The lamp of Mira is in the cellar.", "The boat of Mira is in the cellar.", options=("--block-size", 1))
    assert lines[0] == "The prompts have 10 and 10 tokens. They differ at token 2."
    assert lines[1].startswith("2 tokens of the first are of use to the second")
    assert "'lamp of Mira" in lines[2]
    assert "'boat of Mira" in lines[3]


def test_equal_prompts_and_a_longer_one(why):
    text = "The lamp of Mira is in the cellar."
    assert why(text, text) == ["The prompts are equal, 10 tokens."]
    assert "is the beginning of the longer one" in why(text, f"{text} Where is the lamp of Mira?")[0]


def test_recorded_requests_are_read_as_the_server_reads_them(why):
    pytest.importorskip("fastapi", reason="fastapi is not installed: pip install 'pagedkv[serve]'")
    chats = [
        json.dumps({"messages": [{"role": "user", "content": f"The {what} of Mira"}]}) for what in ("lamp", "boat")
    ]
    assert "They differ at token" in why(*chats)[0]
    ids = [json.dumps({"prompt": prompt}) for prompt in ([1, 2, 3], [1, 2, 4])]
    assert why(*ids, options=("--block-size", 2))[0].endswith("They differ at token 2.")
