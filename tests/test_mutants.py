"""The tests can fail: each fault of the tables (see mutants.py) is caught by the tests that it names."""

from __future__ import annotations

import pytest

from tests.mutants import ROOT, WINGS, Fault, path_of, prove, seeded, table

QUICK = "errors name options: they name Python"  # one that runs in each run of the tests
FAULTS = [(wing, number, fault) for wing in WINGS for number, fault in enumerate(table(wing).FAULTS)]


def test_the_laws_differ() -> None:
    assert len({(wing, fault.law) for wing, _, fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("wing", WINGS)
def test_every_fault_can_still_be_seeded(wing: str) -> None:
    for fault in table(wing).FAULTS:
        assert compile(seeded(wing, fault), path_of(wing, fault), "exec")
        path, _, name = fault.proof.split()[0].partition("::")
        proof = ROOT / "tests" / wing / path
        assert proof.exists(), fault.proof
        assert not name or f"def {name}(" in proof.read_text(encoding="utf-8"), fault.proof


@pytest.mark.parametrize(
    ("wing", "number", "fault"),
    [
        pytest.param(*fault, marks=[] if fault[2].law == QUICK else pytest.mark.slow, id=f"{fault[0]}: {fault[2].law}")
        for fault in FAULTS
    ],
)
def test_a_seeded_fault_is_caught(wing: str, number: int, fault: Fault) -> None:
    run = prove(wing, number, fault.proof)
    if run.returncode == 0 and "skipped" in run.stdout:
        pytest.skip("the proof needs a package that is not installed")
    # 0: every test passed; 2 and more: no test ran
    assert run.returncode == 1, f"not caught, or not even run:\n{run.stdout[-3000:]}"
    assert not [x for x in ("SyntaxError", "NameError", "IndentationError") if x in run.stdout], run.stdout[-3000:]


@pytest.mark.slow
def test_without_a_fault_the_proofs_of_core_pass() -> None:
    """With the settings of the plugin: without numba, and with other examples than in the usual run."""
    for proof in sorted({fault.proof for fault in table("core").FAULTS}):
        run = prove("core", None, proof)
        assert run.returncode == 0, run.stdout[-3000:]
