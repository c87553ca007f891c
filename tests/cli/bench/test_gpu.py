"""`pagedkv bench attention --device cuda` without a GPU fails with a remedy."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from pagedkv.bench.gpu import attention
from pagedkv.cli.app import main


@pytest.mark.parametrize(
    ("device", "text"), [("cuda", "torch finds no GPU on this machine"), ("tpu", "'tpu' is neither cpu nor cuda")]
)
def test_a_device_that_is_not_there_is_refused_with_the_remedy(
    device: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit) as ended:
        main(["bench", "attention", "--device", device])
    assert ended.value.code
    assert text in capsys.readouterr().err


def test_an_axis_that_gpu_cells_lack_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "attention", "--device", "cuda", "--head-dim", "64", "--batch", "2"])
    assert ended.value.code
    err = capsys.readouterr().err
    assert "leave out --head-dim, --batch" in " ".join(err.replace("│", " ").split())


def test_json_is_one_list_and_the_lines_go_to_stderr(command, monkeypatch, tmp_path):
    row = {"case": str(attention.BASE), "who": "triton", "us": 50.0, "GB_per_s": 4000.0, "of_ceiling": 0.9}
    row["cell"] = dataclasses.asdict(attention.BASE)
    monkeypatch.setattr(attention, "require_gpu", lambda: None)
    monkeypatch.setattr(attention, "provenance", lambda: {"gpu": "a GPU"})
    monkeypatch.setattr(attention, "QUICK", ((attention.BASE,),))
    monkeypatch.setattr(attention, "measure", lambda *_, **__: [dict(row)])
    monkeypatch.setattr(attention, "draw", lambda *_: None)
    options = ("--device", "cuda", "--json", "--record", tmp_path / "rows.jsonl")
    status, out, err = command("bench", "attention", *options)
    assert status == 0, err
    assert json.loads(out) == [row | {"gpu": "a GPU"}]
    assert "of the ceiling" in err
