"""Seeded faults of pagedkv/cli; tests/mutants.py says what a fault is, and how to run this table."""

from __future__ import annotations

from tests.mutants import Fault

FOLDER = "pagedkv/cli"
FAULTS = (
    Fault(
        "a message has a content: a misspelt one is an empty text",
        "prompts.py", '    content = value.get("content")\n',
        '    content = value.get("content", "")\n', "test_refusals.py -k costs_no_other",
    ),
    Fault(
        "options of a line come before those of the command: behind them",
        "generate.py", "{**other, **prompt.options}", "{**prompt.options, **other}",
        "test_generate.py -k grammar_of_a_line",
    ),
    Fault(
        "errors name options: they name Python",
        "options.py", "raise InvalidRequest(_in_options(str(error))) from None", "raise",
        "test_refusals.py -k max-tokens",
    ),
    Fault(
        "an error is one line that a terminal can show: control characters go out",
        "complaints.py", "c if c.isprintable() else", "c if c != chr(10) else",
        "test_refusals.py -k names_the_option",
    ),
    Fault(
        "a turn that fails leaves the history as it was: its message stays",
        "conversation.py", "        asked = [*self._messages, {",
        "        self._messages = asked = [*self._messages, {",
        "test_conversation.py -k leaves_the_history",
    ),
)  # fmt: skip
