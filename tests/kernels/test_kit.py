"""The kit that judges other backends: it finds planted faults, each kind in its column, and its reference is right."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import pagedkv
from pagedkv.conformance.__main__ import _main
from pagedkv.conformance.cases import Case, _computed, _features
from tests.kernels.oracle import oracle

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

START = Case(q_lens=(1, 4, 3, 5), kv_lens=(40, 4, 70, 33))
COLUMNS = ("right", "wrong", "reads unused", "refused")


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Return the exit status of the kit for some functions, and the row with a name."""

    def run(name: str, **functions: Any) -> tuple[int, dict[str, Any]]:
        monkeypatch.setitem(sys.modules, "kernels_to_judge", SimpleNamespace(**functions))
        file = tmp_path / "rows.json"
        status = _main(["kernels_to_judge", "--only", f"{name}: ", "--json", str(file)])
        return status, next(row for row in json.loads(file.read_text()) if row["row"] == name)

    return run


def attend(*args: Any, **options: Any) -> Any:
    return pagedkv.paged_attention(*args, return_lse=True, backend="reference", **options)


def reads_every_slot(q: Any, layer: Any, batch: Any) -> Any:
    return attend(q, layer, batch)[0] + 0 * layer.v.sum()


def forgets_the_window(*args: Any, window: Any = None) -> Any:
    return attend(*args)


def forgets_the_scale(*args: Any) -> Any:
    return attend(*args, scale=1.0)


def gives_lse_in_bits(*args: Any) -> Any:
    out, lse = attend(*args)
    return out, lse / np.log(2)


def takes_no_window(q: Any, layer: Any, batch: Any) -> Any:
    return attend(q, layer, batch)


def has_no_kernel(*args: Any, **options: Any) -> Any:
    raise NotImplementedError("no such kernel")


@pytest.mark.parametrize(
    ("function", "row", "column"),
    [
        (reads_every_slot, "chunk", "reads unused"),
        (forgets_the_window, "window", "wrong"),
        (forgets_the_scale, "prefill", "wrong"),
        (gives_lse_in_bits, "prefill", "wrong"),
        (takes_no_window, "window", "refused"),
        (has_no_kernel, "sinks", "refused"),
        (attend, "holes", "right"),
    ],
)
def test_a_fault_is_counted_in_its_column(judged: Any, capsys: Any, function: Any, row: str, column: str) -> None:
    status, found = judged(row, paged_attention=function)
    if function is forgets_the_window:  # 1024 hides nothing
        assert found.pop("right") == 1
    assert [name for name in COLUMNS if found.get(name)] == [column]
    assert status == (column in ("wrong", "reads unused"))
    assert (f"--only '{row}: " in capsys.readouterr().out) == (column != "right")


def zeroes_keys_after_use(q: Any, layer: Any, batch: Any) -> Any:
    found = attend(q, layer, batch)
    layer.k.view(torch.uint8).zero_()
    return found


def gives_too_many_rows(*args: Any) -> Any:
    return attend(*args)[0].repeat(2, 1, 1)


def gives_float64(*args: Any) -> Any:
    return attend(*args)[0].double()


def gives_lse_by_head(*args: Any) -> Any:
    out, lse = attend(*args)
    return out, lse.T


def says_nothing(*args: Any) -> Any:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("function", "printed"),
    [
        (zeroes_keys_after_use, "wrong: paged_attention changed layer.k"),
        (gives_too_many_rows, r"wrong: out is \[288, 4, 64\]; it must be \[144, 4, 64\]"),
        (gives_float64, "wrong: out is torch.float64; it must be torch.float32"),
        (gives_lse_by_head, r"wrong: lse is \[4, 144\]; it must be \[144, 4\]"),
        (says_nothing, "refused: NotImplementedError"),
    ],
)
def test_a_verdict_says_what_is_not_right(judged: Any, capsys: Any, function: Any, printed: str) -> None:
    judged("prefill", paged_attention=function)
    assert re.search(printed, capsys.readouterr().out)


def zeroes_what_lies_between_frames(k: Any, v: Any, layer: Any, slots: Any) -> None:
    held = layer.k.clone()
    pagedkv.write_kv(k, v, layer, slots)
    if not held.is_contiguous():
        stored = layer.k.clone()
        torch.empty(0, dtype=torch.uint8).set_(layer.k.untyped_storage()).zero_()
        layer.k.copy_(stored)


def writes_nothing_to_the_last(k: Any, v: Any, layer: Any, slots: Any) -> None:
    pagedkv.write_kv(k[:-1], v[:-1], layer, slots[:-1])


def writes_where_the_slot_is_negative(k: Any, v: Any, layer: Any, slots: Any) -> None:
    layer.k[slots // layer.k.shape[1], slots % layer.k.shape[1]] = k
    layer.v[slots // layer.v.shape[1], slots % layer.v.shape[1]] = v


@pytest.mark.parametrize(
    ("function", "wrong"),
    [
        (writes_nothing_to_the_last, 6),
        (writes_where_the_slot_is_negative, 6),
        (zeroes_what_lies_between_frames, 6),
        (pagedkv.write_kv, 0),
    ],
)
def test_a_store_that_differs_in_a_byte_is_wrong(judged: Any, function: Any, wrong: int) -> None:
    """The last token of every second case is padding; a store that skips it is right there."""
    status, found = judged("write", write_kv=function, refuses=lambda case: "")
    assert (found["wrong"], found["right"], status) == (wrong, 12 - wrong, wrong > 0)


def test_a_module_says_with_which_case_a_row_begins(judged: Any) -> None:
    asked = []
    status, _ = judged("ALiBi", paged_attention=attend, refuses=asked.append, START={"dtype": "bfloat16"})
    assert asked == [replace(START, dtype="bfloat16", alibi=True)]
    assert status == 0


def test_kernels_of_this_package_are_right_in_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert _main(["pagedkv"]) == 0
    rows = [line.split()[-5:-1] for line in capsys.readouterr().out.splitlines()[1:]]
    assert len(rows) == len(_features(START))
    assert all(counts[1:] == ["0", "0", "0"] for counts in rows)


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (["pagedkv", "--only", "no such row"], "no case has 'no such row'"),
        (["no_such_module"], "No module named 'no_such_module'"),
        (["json"], "json has neither paged_attention nor write_kv"),
        (["pagedkv", "--json", "no/such/folder"], "No such file or directory"),
        (["wrong_start"], "START of wrong_start: "),
    ],
)
def test_wrong_words_are_refused_before_a_case_runs(
    words: list[str], printed: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wrong_start", SimpleNamespace(START={"page_size": 32}, write_kv=None))
    with pytest.raises(SystemExit):
        _main(words)
    assert printed in capsys.readouterr().err


def test_the_text_of_a_case_selects_it_alone(capsys: Any) -> None:
    _main(["pagedkv", "--only", "block size: block_size=1"])
    assert capsys.readouterr().out.splitlines()[1].split()[2:4] == ["1", "0"]


@pytest.mark.parametrize("row", [name for name in _features(START) if not name.startswith("write")])
def test_what_the_kit_holds_right_is_what_the_oracle_says(row: str) -> None:
    for case in _features(START)[row]:
        built, rows = case.build(), sum(case.q_lens)
        for found, right in zip(_computed(built, torch.float64), oracle(built), strict=True):
            assert np.allclose(found[:rows], right[:rows], rtol=0, atol=1e-12)


@pytest.mark.parametrize("only", ["dtype", pytest.param("", marks=pytest.mark.slow)])
@pytest.mark.parametrize("module", ["kernels_of_torch", "kernels_of_flash_attn"])
def test_the_examples_are_right_where_they_serve(module: str, only: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _main([f"examples.{module}", "--only", only]) == 0
    assert "refused: " in capsys.readouterr().out
