"""`make changed` selects the tests of an edit."""

import pytest

from tests.changed import OTHERS, select
from tests.test_architecture import ROOT


@pytest.mark.parametrize(
    ("edit", "selected", "left_out"),
    [
        ("pagedkv/engine/step/scheduler.py", "tests/engine/step/test_engine.py", "tests/kernels/test_checks.py"),
        ("pagedkv/kernels/checks.py", "tests/kernels/test_checks.py", "tests/core/test_laws.py"),
        ("triton_kernels/decode.py", "tests/kernels/triton", "tests/core/test_laws.py"),
        ("pagedkv/core/tables/__init__.py", "tests/core", "tests/kernels"),
        ("tests/cases.py", "tests/kernels/test_checks.py", "tests/core/test_laws.py"),
        (
            "tests/kernels/triton/addresses.py",
            "tests/kernels/triton/test_triton_compiled.py",
            "tests/core/test_laws.py",
        ),
        ("csrc/cpu/team.cpp", "tests/kernels", "tests/core"),
    ],
)
def test_an_edit_selects_the_tests_that_reach_it(edit, selected, left_out):
    assert (ROOT / edit).exists(), "an edited file that the tree has"
    found = select([edit])
    assert any(f"{test}/".startswith(f"{selected}/") for test in found)
    assert left_out not in found


def test_of_removed_files_the_layer_of_a_module_is_left():
    assert select(["pagedkv/core/removed.py", "tests/core/test_removed.py", "pagedkv/removed.py"]) == {"tests/core"}


def test_files_that_are_no_modules_have_tests():
    for prefix, tests in OTHERS.items():
        assert (ROOT / prefix).exists(), prefix
        assert all((ROOT / test).exists() for test in tests), tests
