"""A conversation: each turn computes only what is new, Ctrl-C ends a reply, Ctrl-D the conversation; at a real pty."""

from __future__ import annotations

import builtins
import json
import os
import pty
import re
import select
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from pagedkv.cli import conversation
from pagedkv.engine.checkpoint import BUNDLED
from tests.records import num_tokens_of

from . import hostile

ROOT = Path(__file__).parents[2]
QUESTIONS = ("Where is the lamp of Mira?", "Where does Otto live?", "What is Ghent known for?", "Who is Otto?")
ANSWERS = (
    "Mira keeps a red lamp in the cellar.",
    "Otto lives in Ghent.",
    "Ghent is famous for its lace.",
    "Otto is a baker from Ghent.",
)


@pytest.fixture
def talk(command, monkeypatch):
    """Return a function that types lines, or raises them, in a conversation."""

    def run(lines, *argv):
        rest = iter(lines)

        def typed(prompt=""):
            line = next(rest, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr(builtins, "input", typed)
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        return command("generate", "--chat", *argv)

    return run


def turns(err: str) -> list[tuple[int, ...]]:
    """The numbers of the lines about turns: computed, found, written."""
    found = re.findall(r"([\d,]+) tokens computed, ([\d,]+) found, ([\d,]+) written", err)
    return [tuple(int(number.replace(",", "")) for number in numbers) for numbers in found]


def test_replies_are_those_to_the_whole_history(talk, command, tmp_path):
    status, out, err = talk(QUESTIONS)
    assert (status, out.splitlines()) == (0, list(ANSWERS))
    assert err.count("\n> ") + err.startswith("> ") >= len(QUESTIONS)
    messages = [{"role": "system", "content": conversation.DEMO_PAGE}]
    for question, answer in zip(QUESTIONS, ANSWERS, strict=True):
        messages.append({"role": "user", "content": question})
        (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": messages}))
        alone = json.loads(command("generate", "--prompt-file", tmp_path / "talk.jsonl", "--json").out.splitlines()[0])
        assert alone["text"] == answer
        messages.append({"role": "assistant", "content": answer})


@pytest.mark.parametrize("block_size", [1, 16])
def test_a_turn_computes_only_what_is_new(talk, block_size):
    counts = turns(talk(QUESTIONS, "--block-size", block_size).err)
    assert len(counts) == len(QUESTIONS)
    known = 0
    for (computed, found, written), question in zip(counts, QUESTIONS, strict=True):
        assert found == known // block_size * block_size
        if known:
            assert computed == num_tokens_of(question) + known - found
        known = computed + found + written - 1  # the KV of the last token is never computed


def test_reset_forgets_all_but_the_system_message(talk):
    lines = ("Mira has a blue hat in the attic.", "/reset", "Where is the hat of Mira?")
    assert talk(lines[:1] + lines[2:]).out.splitlines()[-1] == "Mira keeps a blue hat in the attic."
    _, out, err = talk(lines)
    assert out.splitlines()[-1] == "I do not know."
    assert "the conversation is empty" in err
    assert turns(err)[-1][1] == (1 + num_tokens_of(conversation.DEMO_PAGE)) // 16 * 16  # <s> and the page


def test_a_system_message_takes_the_place_of_the_page(talk):
    _, out, err = talk(["Where does Otto live?"], "--system", "Otto lives in Bruges.")
    assert out == "Otto lives in Bruges.\n"
    assert "Mira" not in err


def test_commands_and_empty_lines_are_no_messages(talk):
    _, out, err = talk(
        ["", "  ", "/help", "/", "/reset", KeyboardInterrupt(), UnicodeDecodeError("utf-8", b"", 0, 1, "bad")]
    )
    assert out == ""
    assert err.count(conversation.HELP.split(",")[0]) == 3  # at the beginning, too
    assert "pagedkv: error: the line is not text: bad; type it again\n" in err
    assert turns(err) == []


def test_a_turn_that_fails_leaves_the_history_as_it_was(talk):
    lines = ("lamp " * 400, "\ud800", QUESTIONS[0])
    status, out, err = talk(lines, "--num-frames", 24, "--max-tokens", 16)
    assert (status, out) == (0, ANSWERS[0] + "\n")
    complaints = [line for line in err.splitlines() if "pagedkv: error: " in line]
    assert len(complaints) == 2
    assert "the pool has 24" in complaints[0]
    assert complaints[0].endswith("; /reset forgets the conversation")
    assert "half of a surrogate pair" in complaints[1]


def test_the_end_of_a_long_reply_is_explained(talk):
    assert "4 written; at its --max-tokens" in talk(QUESTIONS[:1], "--max-tokens", 4).err


def test_a_request_that_fails_is_a_line_and_no_end(talk, tmp_path):
    folder = shutil.copytree(BUNDLED, tmp_path / "checkpoint")
    hostile.poisoned(folder)
    status, _, err = talk(QUESTIONS[:1], "--model", folder)
    assert status == 0
    assert "pagedkv: error: the logits hold NaN" in err


def test_a_second_ctrl_c_in_one_step_goes_to_the_handler_before():
    ended = []
    before = signal.signal(signal.SIGINT, lambda *_: ended.append(True))
    with conversation._CtrlC() as ctrl_c:
        os.kill(os.getpid(), signal.SIGINT)
        assert (ctrl_c.came, ended) == (True, [])
        os.kill(os.getpid(), signal.SIGINT)
        assert ended
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("options", [("--json",), ("--num-samples", 2)])
def test_a_conversation_has_one_reply_and_no_json(talk, options):
    status, out, err = talk([], *options)
    assert (status, out) == (2, "")
    assert err == "pagedkv: error: a conversation has one reply and no --json; give a prompt, or a .jsonl\n"


def test_a_checkpoint_without_a_template_is_refused_before_the_first_prompt(talk, tmp_path):
    folder = shutil.copytree(BUNDLED, tmp_path / "checkpoint")
    hostile.edit("tokenizer_config.json", chat_template=None)(folder)
    status, out, err = talk(["a"], "--model", folder)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "has no chat template" in err


class Terminal:
    """A process at a pty: text is expected and typed."""

    def __init__(self, *argv: str) -> None:
        self.shown = b""
        self.pid, self.fd = pty.fork()
        if not self.pid:
            os.chdir(ROOT)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.execv(sys.executable, [sys.executable, "-m", "pagedkv", *argv])

    def expect(self, text: str, seconds: float = 180) -> None:
        """Wait until `text` is shown, and forget all up to its end."""
        deadline = time.monotonic() + seconds
        while text.encode() not in self.shown:
            assert time.monotonic() < deadline, f"no {text!r} in {self.shown!r}"
            if select.select([self.fd], [], [], 1)[0]:
                self.shown += os.read(self.fd, 4096)
        self.shown = self.shown.partition(text.encode())[2]

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def end(self) -> int:
        """Wait for the end of the process and return its status."""
        with suppress(OSError):  # the other side is closed
            while select.select([self.fd], [], [], 60)[0]:
                self.shown += os.read(self.fd, 4096)
        _, status = os.waitpid(self.pid, 0)
        os.close(self.fd)
        assert b"Traceback" not in self.shown
        return os.waitstatus_to_exitcode(status)


def test_a_user_talks_stops_a_reply_and_leaves():
    terminal = Terminal("generate", "--chat", "--ignore-eos", "--max-tokens", "6000")
    terminal.expect("\r\n> ")
    terminal.type(f"{QUESTIONS[0]}\n")
    terminal.expect(ANSWERS[0])
    terminal.type("\x03")
    terminal.expect("written; stopped")
    terminal.expect("> ")
    terminal.type("half a li")
    terminal.expect("half a li")
    time.sleep(0.3)  # readline misses a signal that comes just before it waits for a key, until the next key
    terminal.type("\x03")
    terminal.expect("\r\n> ")
    terminal.type(f"{QUESTIONS[1]}\n")
    terminal.expect(ANSWERS[1])
    terminal.type("\x03")
    terminal.expect("written; stopped")
    terminal.expect("> ")
    terminal.type("\x04")
    assert terminal.end() == 0


def test_ctrl_c_before_the_first_prompt_is_status_130():
    terminal = Terminal("generate", "--chat")
    terminal.expect("loading")
    terminal.type("\x03")
    assert terminal.end() == 130
    assert terminal.shown.endswith(b"\r\x1b[K\x1b[?25h"), "the line is cleared and the cursor shown"
