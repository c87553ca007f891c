"""The tests of the engine can fail: they catch each of these faults, which its history has had.

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

ROOT = Path(__file__).parents[2]


class Fault(NamedTuple):
    """`old` replaced by `new` in a module. law: how the fault breaks it. proof: tests of this folder that catch it."""

    law: str
    module: str
    old: str
    new: str
    proof: str


FAULTS = (
    Fault(
        "a draw that an interrupt lost is repeated: the generator goes on",
        "engine.requests.draws", "        member.rewind()\n", "        pass\n",
        "step/test_trust.py -k interrupted_anywhere",
    ),
    Fault(
        "each sample has its own generator: all have that of the first",
        "engine.requests.request", "params.generator(self.index)", "params.generator()",
        "step/test_engine.py -k one_generator",
    ),
    Fault(
        "no prompt finds the KV of a request that ended: it is published",
        "engine.step.outcome", "            if chunk.sequence.completion.finish_reason:\n", "            if False:\n",
        "step/test_trust.py -k usable_logits",
    ),
    Fault(
        "the first end of a completion holds: the last one does",
        "engine.requests.request", "self._ends[0]", "self._ends[-1]", "step/test_trust.py -k signal_handler",
    ),
    Fault(
        "a listener that is always interrupted does not stop its engine: it is told for ever",
        "engine.step.delivery", "            if is_end and completion.was_told and", "            if False and",
        "step/test_listeners.py",
    ),
    Fault(
        "the KV that others compute is waited for only if that pays: always",
        "engine.step.scheduler", "            if saved[leader] >= WORTH:\n", "            if True:\n",
        "step/test_scheduler.py",
    ),
    Fault(
        "a preempted sequence waits before those that came later: behind them",
        "engine.step.scheduler", "_place(self.waiting, sequence, is_older=True)", "_place(self.waiting, sequence)",
        "step/test_scheduler.py",
    ),
    Fault(
        "drafts preempt no sequence: they are not dropped first",
        "engine.step.scheduler", "                if any(chunk.drafts for chunk in chunks):",
        "                if False:",
        "drafts/test_speculation.py -k preempt_no",
    ),
    Fault(
        "rows are refused by the model's logits: by those that rules made",
        "engine.sampling.sampler", "    errors = dict.fromkeys(_not_finite(largest), _DAMAGED)\n",
        "    errors = {b: _DAMAGED for b in _not_finite(largest) if rows[b].rules is None}\n", "sampling",
    ),
    Fault(
        "each end token may end every beam: only one of them",
        "engine.requests.beams", "max(2, 1 + len(self.ends))", "2", "requests/test_beams.py -k transformers",
    ),
    Fault(
        "a character is shown when it is whole: a U+FFFD that was written is held",
        "engine.checkpoint.tokenizer", " and not self._ends_in_replacement()", "", "checkpoint/test_text_stream.py",
    ),
    Fault(
        "an answer keeps its first space: the prompt is not read",
        "engine.checkpoint.tokenizer", "            self.push(token)\n", "            pass\n",
        "checkpoint/test_text_stream.py",
    ),
    Fault(
        "no tensor is dropped in silence: leftovers are taken",
        "engine.checkpoint.weights", "    source.refuse_leftovers()\n", "", "checkpoint/test_weights.py -k silence",
    ),
    Fault(
        "two fields of a rope that differ are refused: the new one holds",
        "engine.checkpoint.config", "    if not holds or theta != base", "    if theta != base",
        "checkpoint/test_config.py -k two_fields",
    ),
)  # fmt: skip
QUICK = ("the first end", "two fields")


def path_of(fault: Fault) -> Path:
    return ROOT.joinpath("pagedkv", *fault.module.split(".")).with_suffix(".py")


def seeded(fault: Fault) -> str:
    text = path_of(fault).read_text(encoding="utf-8")
    found = text.count(fault.old)
    assert found == 1, f"{fault.law}: {fault.old!r} is {found} times in {fault.module}; seed it in the present line"
    return text.replace(fault.old, fault.new)


class Seeding(MetaPathFinder):
    """Import one module with its fault."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != f"pagedkv.{self.fault.module}":
            return None
        spec, fault = PathFinder.find_spec(name, path), self.fault

        class Loader(SourceFileLoader):
            def get_code(self, fullname: str) -> Any:
                return compile(seeded(fault), self.path, "exec")

        assert spec is not None
        spec.loader = Loader(name, str(path_of(fault)))
        return spec


def run(number: int) -> int:
    """Run the proof of a fault in this process, with the fault. Returns: the status of pytest"""
    fault = FAULTS[number]
    sys.meta_path.insert(0, Seeding(fault))
    proof, *options = fault.proof.split()
    return int(pytest.main([str(Path(__file__).parent / proof), *options, "-qx", "-p", "no:cacheprovider"]))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.law)
def test_each_fault_can_be_seeded(fault: Fault) -> None:
    assert seeded(fault)


@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, marks=[] if f.law.startswith(QUICK) else pytest.mark.slow, id=f.law) for f in FAULTS],
)
def test_each_fault_is_caught(fault: Fault) -> None:
    program = f"import sys; from tests.engine.test_mutations import run; sys.exit(run({FAULTS.index(fault)}))"
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert found.returncode == pytest.ExitCode.TESTS_FAILED, found.stdout[-2000:] + found.stderr[-2000:]
