"""`--top`: the map tells the state and the owner of each frame, in ASCII, and the terminal is whole afterwards."""

from __future__ import annotations

import io
import json
import os
import re
import signal

import numpy as np
import pytest
from rich.console import Console

from pagedkv.cli.top import CACHED, FREE, OWNED, SHARED, FrameMap, Picture, Top
from pagedkv.model.engine import Engine, Limits
from pagedkv.sampling.params import SamplingParams

from .test_conversation import Terminal

PAGE = "Mira keeps a red lamp in the cellar. Otto lives in Ghent and works as a baker. Ghent has ten bridges."
LONG = SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, seed=1)


@pytest.fixture
def engine() -> Engine:
    return Engine.load(num_frames=32, block_size=4, limits=Limits(max_sequences=4))


def drawn(engine: Engine, width: int = 100, height: int = 30, **options: object) -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO(), force_terminal=True, **options)
    console.print(Top(console, engine).rendered(width, height))
    return console.file.getvalue().splitlines()


def counts(engine: Engine) -> dict[str, int]:
    kinds = FrameMap(engine).picture().kinds
    named = {"free": kinds == FREE, "cached": kinds == CACHED, "shared": kinds == SHARED, "owned": kinds >= OWNED}
    return {name: int(mask.sum()) for name, mask in named.items()}


def test_each_frame_is_shown_in_its_state(engine: Engine) -> None:
    assert counts(engine) == {"free": 32, "cached": 0, "shared": 0, "owned": 0}
    request = engine.submit(PAGE, LONG, num_samples=2)
    for _ in range(3):
        engine.step()
    now, told = engine.cache.stats(), counts(engine)
    prompt = len(request.prompt_ids)
    assert told["shared"] == prompt // 4
    assert told["owned"] == now.mapped - prompt // 4 > 0
    engine.run()
    cached = engine.cache.stats().cached
    assert counts(engine) == {"free": 32 - cached, "cached": cached, "shared": 0, "owned": 0}
    assert cached > 0


def test_a_sequence_keeps_its_letter_and_a_gone_one_gives_it_back(engine: Engine) -> None:
    frames = FrameMap(engine)
    first, second = engine.submit(PAGE, LONG), engine.submit(PAGE[::-1], LONG)
    engine.step()

    def letters() -> dict[object, int]:
        return {sequence.completion.request: letter for sequence, letter in frames.picture().owners.items()}

    assert letters() == {first: 0, second: 1}
    engine.cancel(first)
    assert letters() == {second: 1}
    third = engine.submit(PAGE, LONG)
    engine.step()
    assert letters() == {second: 1, third: 0}


def test_a_cell_of_many_frames_shows_what_most_of_them_are() -> None:
    kinds = np.array([FREE, FREE, OWNED, OWNED + 5, OWNED + 5, OWNED + 5, CACHED, FREE, CACHED, SHARED])
    picture = Picture(kinds, {}, {})
    assert picture.cells(10).tolist() == kinds.tolist()
    assert picture.cells(4).tolist() == [FREE, OWNED + 5, CACHED, SHARED]
    assert len(picture.cells(3)) == 3


@pytest.mark.parametrize(("width", "height"), [(100, 30), (20, 9), (7, 3)])
def test_a_picture_is_ascii_and_fits_the_terminal(engine: Engine, width: int, height: int) -> None:
    engine.submit(PAGE, LONG, tenant="é".encode())
    engine.submit(PAGE, LONG, tenant=b"\xff")
    engine.step()
    lines = drawn(engine, width, height, no_color=True, color_system=None)
    assert all(len(line) <= width for line in lines)
    assert len(lines) < height
    assert "".join(lines).isascii()
    assert "\x1b" not in "".join(lines)
    if width == 100:
        assert re.search(r"^a[ab.:#]+", "\n".join(lines), re.M)
        assert "2 running, 0 waiting" in lines[1]


def test_several_tenants_have_a_colour_each(engine: Engine) -> None:
    for tenant in (b"acme", b"acme", b"globex"):
        engine.submit(PAGE, LONG, tenant=tenant)
    engine.step()
    engine.step()  # the second prompt waits for the pages of the first
    picture = FrameMap(engine).picture()
    styles = [picture.style(OWNED + letter) for letter in range(3)]
    assert styles[0] == styles[1] != styles[2]
    assert "'globex'" in drawn(engine)[-1]


def test_without_a_terminal_it_is_one_line_before_any_work(command, monkeypatch) -> None:
    monkeypatch.setattr(Engine, "load", lambda *_, **options: pytest.fail("the engine was loaded"))
    status, out, err = command("generate", "--top")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("pagedkv: error: --top draws on the terminal of stderr, and there is none")


def test_at_a_terminal_the_map_comes_first_and_the_answers_last(tmp_path) -> None:
    path = tmp_path / "two.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{PAGE} Where does {name} live?"}) for name in ("Otto", "Mira")))
    terminal = Terminal("generate", "--top", "--prompt-file", str(path))
    terminal.expect("pool  ")
    terminal.expect("letters: sequences")
    terminal.expect("2 finished")
    terminal.expect("\x1b[?25h")  # the cursor is shown again
    terminal.expect("Otto lives in Ghent.")
    assert terminal.end() == 0


def test_ctrl_c_leaves_a_whole_terminal() -> None:
    terminal = Terminal("generate", "--top", "--ignore-eos", "--max-tokens", "6000")
    terminal.expect("1 running")
    terminal.type("\x03")
    assert terminal.end() == 130
    assert terminal.shown.rstrip().endswith(b"\x1b[?25h")


def test_sigterm_leaves_a_whole_terminal() -> None:
    terminal = Terminal("generate", "--top", "--ignore-eos", "--max-tokens", "6000")
    terminal.expect("1 running")
    os.kill(terminal.pid, signal.SIGTERM)
    assert terminal.end() == -signal.SIGTERM
    assert terminal.shown.rstrip().endswith(b"\x1b[?25h")
