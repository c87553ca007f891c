"""The tests of the command line and of the server can fail: they catch each of these faults, which their history had.

A fault replaces a text that occurs exactly once in a file. If a line is rewritten, its fault is seeded in the new line.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any, NamedTuple

import pytest

TESTS = Path(__file__).parents[1]


class Fault(NamedTuple):
    """`old` replaced by `new` in a module. law: how the fault breaks it. proof: tests that catch it."""

    law: str
    module: str
    old: str
    new: str
    proof: str


FAULTS = (
    Fault(
        "a body that is too large never reaches the routes: its parts are joined",
        "pagedkv.engine.serve.gate", "        if size > most:\n", "        if size > most + 1:\n",
        "engine/serve/test_gate.py -k too_large",
    ),
    Fault(
        "without a key no body takes a place: only those under /v1",
        "pagedkv.engine.serve.gate", 'scope["method"] == "POST" or scope["path"]', 'scope["path"]',
        "engine/serve/test_gate.py -k without_a_key",
    ),
    Fault(
        "a request has one length: both are taken",
        "pagedkv.engine.serve.gate", '"content-length" in headers and "transfer', '"length" in headers and "transfer',
        "engine/serve/test_gate.py -k two_lengths",
    ),
    Fault(
        "the only request of a tenant gets in: not if others fill the server",
        "pagedkv.engine.serve.gate", " or (shares is not None and shares.has_none(tenant))", "",
        "engine/serve/test_keys.py -k the_only_request",
    ),
    Fault(
        "a priority orders the requests of one tenant: those of all",
        "pagedkv.engine.serve.shares",
        "return priority if self._shares.shares_priorities else level", "return priority",
        "engine/serve/test_keys.py -k behind_the_first_of_others",
    ),
    Fault(
        "an unknown field at any depth is refused: dropped in silence",
        "pagedkv.engine.serve.bodies", "                if field is None:\n                    raise",
        '                if field is None and "prompt" not in fields:\n                    continue\n'
        "                if field is None:\n                    raise",
        "engine/serve/test_bodies.py -k unknown_field",
    ),
    Fault(
        "the first mistake of a body ends its reading: all mistakes of a list are told",
        "pagedkv.engine.serve.bodies", "Field(fail_fast=True), Tag(LIST)", "Tag(LIST)",
        "engine/serve/test_bodies.py -k first_mistake",
    ),
    Fault(
        "a chat has all tokens that fit in chunks: as if a step had no chunks",
        "pagedkv.engine.serve.app", "engine.cache, engine.scheduler.limits.chunk", "engine.cache, 2048",
        "engine/serve/test_service.py -k under_a_window",
    ),
    Fault(
        "a stream that is closed gives its frames back: its requests go on",
        "pagedkv.engine.serve.streaming", "    owner._orders.put(box)\n", "    owner._orders.put(None)\n",
        "engine/serve/test_streaming.py -k gives_its_frames_back",
    ),
    Fault(
        "a message has a content: a misspelt one is an empty text",
        "pagedkv.cli.prompts", '    content = value.get("content")\n',
        '    content = value.get("content", "")\n', "cli/test_refusals.py -k costs_no_other",
    ),
    Fault(
        "options of a line come before those of the command: behind them",
        "pagedkv.cli.generate", "{**other, **prompt.options}", "{**prompt.options, **other}",
        "cli/test_shaping.py -k grammar_of_a_line",
    ),
    Fault(
        "errors name options: they name Python",
        "pagedkv.cli.options", "raise InvalidRequest(in_options(str(error))) from None", "raise",
        "cli/test_refusals.py -k max-tokens",
    ),
    Fault(
        "an error is one line that a terminal can show: control characters go out",
        "pagedkv.cli.complaints", "c if c.isprintable() else", "c if c != chr(10) else",
        "cli/test_refusals.py -k names_the_option",
    ),
    Fault(
        "a turn that fails leaves the history as it was: its message stays",
        "pagedkv.cli.conversation", "        asked = [*self._messages, {",
        "        self._messages = asked = [*self._messages, {",
        "cli/test_conversation.py -k leaves_the_history",
    ),
)  # fmt: skip
QUICK = ("errors name",)


def path_of(fault: Fault) -> Path:
    return TESTS.parent.joinpath(*fault.module.split(".")).with_suffix(".py")


def seeded(fault: Fault) -> str:
    text = path_of(fault).read_text(encoding="utf-8")
    found = text.count(fault.old)
    assert found == 1, f"{fault.law}: {fault.old!r} is {found} times in {fault.module}; seed it in the present line"
    return text.replace(fault.old, fault.new)


class Seeding(MetaPathFinder):
    """Import one module with its fault."""

    def __init__(self, fault: Fault) -> None:
        self.name, self.text = fault.module, seeded(fault)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.name or (spec := PathFinder.find_spec(name, path)) is None:
            return None
        text = self.text

        class Loader(SourceFileLoader):
            def get_code(self, fullname: str) -> Any:
                return compile(text, self.path, "exec")

        spec.loader = Loader(name, str(spec.origin))
        return spec


def run(number: int) -> int:
    """Run the proof of a fault in this process, with the fault. Returns: the status of pytest"""
    sys.meta_path.insert(0, Seeding(FAULTS[number]))
    proof, *options = FAULTS[number].proof.split()
    return int(pytest.main([str(TESTS / proof), *options, "-qx", "-p", "no:cacheprovider", "-p", "no:xdist"]))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.law)
def test_each_fault_can_be_seeded(fault: Fault) -> None:
    assert compile(seeded(fault), fault.module, "exec")


@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, marks=[] if f.law.startswith(QUICK) else pytest.mark.slow, id=f.law) for f in FAULTS],
)
def test_each_fault_is_caught(fault: Fault) -> None:
    program = f"import sys; from tests.cli.test_mutations import run; sys.exit(run({FAULTS.index(fault)}))"
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=TESTS.parent, capture_output=True, text=True, timeout=600
    )
    assert found.returncode == pytest.ExitCode.TESTS_FAILED, found.stdout[-2000:] + found.stderr[-2000:]
